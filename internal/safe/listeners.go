package safe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// An Owner says whose a socket is.
type Owner int

// Owners of sockets. Connections accept sockets of root, too: they count as those of this user.
const (
	UnknownOwner Owner = iota // the kernel does not say it
	ThisUser
	AnotherUser
)

// A NamedListener is an abstract Unix socket that accepts connections in this network namespace.
type NamedListener struct {
	Name  string // with an @ instead of its first byte, as in package net
	Owner Owner
	UID   int // of its owner if that is another user
}

// Constants of linux/unix_diag.h.
const (
	showName, showUID = 1 << 0, 1 << 6
	nameAttr, uidAttr = 0, 7 // uidAttr is of Linux 5.3 and newer
	diagRequestBytes  = 24
	diagMessageBytes  = 16
	tcpListen         = 10 // the state of all sockets that listen
)

// diagTime limits the wait for an answer of the kernel.
const diagTime = 5 * time.Second

// NamedListeners returns the abstract stream sockets whose names begin with prefix, which has an @ as its first byte. No connection is
// needed to know their owners, so that a socket that accepts none, or none of this process, is not taken for one of this user. Where the kernel has
// no interface for it, the owners are unknown, and a name may be that of a socket of another kind.
func NamedListeners(prefix string) ([]NamedListener, error) {
	list, err := diagListeners(prefix)
	if err == nil {
		return list, nil
	}
	text, also := os.ReadFile("/proc/net/unix")
	if also != nil {
		return nil, errors.Join(fmt.Errorf("list the sockets of this host: %w", err), also)
	}
	for _, name := range namesIn(string(text), prefix) {
		list = append(list, NamedListener{Name: name})
	}
	return list, nil
}

// namesIn returns the names in the text of /proc/net/unix that begin with prefix, once each. Other users choose names of abstract sockets, which
// the kernel prints as they are, with line ends: any line may be theirs.
func namesIn(text, prefix string) (names []string) {
	taken := map[string]bool{}
	for line := range strings.SplitSeq(text, "\n") {
		fields := strings.SplitN(line, " ", 8) // the first seven have no spaces beside them, except the inode
		if len(fields) < 8 {
			continue
		}
		if name := strings.TrimLeft(fields[7], " "); strings.HasPrefix(name, prefix) && !taken[name] {
			taken[name] = true
			names = append(names, name)
		}
	}
	return names
}

// diagListeners asks the kernel for the sockets that listen, by NETLINK_SOCK_DIAG.
func diagListeners(prefix string) (list []NamedListener, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(int64(diagTime))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return nil, err
	}
	q := make([]byte, unix.SizeofNlMsghdr+diagRequestBytes)
	binary.NativeEndian.PutUint32(q, uint32(len(q)))
	binary.NativeEndian.PutUint16(q[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(q[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	body := q[unix.SizeofNlMsghdr:]
	body[0] = unix.AF_UNIX
	binary.NativeEndian.PutUint32(body[4:], 1<<tcpListen)
	binary.NativeEndian.PutUint32(body[12:], showName|showUID)
	if err := unix.Sendto(fd, q, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	b := make([]byte, 64<<10) // the kernel writes at most 32 KiB at once
	for {
		n, from, err := unix.Recvfrom(fd, b, 0)
		switch k, ok := from.(*unix.SockaddrNetlink); {
		case err == unix.EINTR:
			continue
		case err != nil:
			return nil, err
		case !ok || k.Pid != 0:
			continue // not of the kernel
		}
		done, err := diagMessages(b[:n], prefix, &list)
		if done || err != nil {
			return list, err
		}
	}
}

// diagMessages adds the sockets in a part of the answer to list, and reports whether it is the last one.
func diagMessages(b []byte, prefix string, list *[]NamedListener) (done bool, err error) {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.SizeofNlMsghdr || n > len(b) {
			return false, unix.EBADMSG
		}
		body := b[unix.SizeofNlMsghdr:n]
		switch binary.NativeEndian.Uint16(b[4:]) {
		case unix.NLMSG_DONE:
			return true, nil
		case unix.NLMSG_ERROR:
			if len(body) < 4 {
				return false, unix.EBADMSG
			}
			return false, unix.Errno(-int32(binary.NativeEndian.Uint32(body)))
		case unix.SOCK_DIAG_BY_FAMILY:
			if l, ok := diagListener(body); ok && strings.HasPrefix(l.Name, prefix) {
				*list = append(*list, l)
			}
		}
		b = b[min(aligned(n), len(b)):]
	}
	return false, nil
}

// diagListener returns the abstract stream socket that a message describes.
func diagListener(b []byte) (l NamedListener, ok bool) {
	if len(b) < diagMessageBytes || b[1] != unix.SOCK_STREAM {
		return l, false
	}
	for b = b[diagMessageBytes:]; len(b) >= unix.SizeofRtAttr; {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return l, false
		}
		value := b[unix.SizeofRtAttr:n]
		switch kind := binary.NativeEndian.Uint16(b[2:]); {
		case kind == nameAttr && len(value) > 0 && value[0] == 0:
			l.Name, ok = "@"+string(value[1:]), true
		case kind == uidAttr && len(value) == 4:
			l.UID = int(binary.NativeEndian.Uint32(value))
			if l.Owner = AnotherUser; isThisUser(l.UID) {
				l.Owner = ThisUser
			}
		}
		b = b[min(aligned(n), len(b)):]
	}
	return l, ok
}

// aligned returns the space of a message or attribute of n bytes.
func aligned(n int) int { return (n + 3) &^ 3 }
