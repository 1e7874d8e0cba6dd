package memory

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Processes that share memory talk over a socket of packets: a request, then its
// answer. The connection is what the process that has the memory knows the other
// by: when it ends, all that the other had opened is given up.

const (
	tokenBytes  = 16
	ipcPatience = 10 * time.Second
	ipcFarewell = time.Second
	// ipcPacket is room for any packet.
	ipcPacket = 4096
	// ipcFiles is how many file descriptors go with a packet; the system's limit
	// is 253.
	ipcFiles = 128
)

// An ipcRequest is what the other process asks.
type ipcRequest struct {
	Op     string // "open", "pages" or "close"
	Export uint64
	Token  []byte `json:",omitempty"` // of open
	From   int    `json:",omitempty"` // of pages: the first that is wanted
}

// An ipcAnswer is what it is told. Files go with that to "pages".
type ipcAnswer struct {
	Error string `json:",omitempty"`
	// Low and High are where the shared memory lies in what is mapped.
	Low, High int `json:",omitempty"`
	// Pages and PageBytes are of memory that comes as file descriptors.
	Pages     int `json:",omitempty"`
	PageBytes int `json:",omitempty"`
}

func sendPacket(c *net.UnixConn, v any, files []int) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	_, _, err = c.WriteMsgUnix(text, rights, nil)
	return err
}

// receivePacket returns the files too, which the caller closes.
func receivePacket(c *net.UnixConn, v any) (files []int, err error) {
	text, rights := make([]byte, ipcPacket), make([]byte, unix.CmsgSpace(4*ipcFiles))
	n, m, flags, _, err := c.ReadMsgUnix(text, rights)
	if err != nil {
		return nil, err
	}
	if m > 0 {
		if files, err = filesIn(rights[:m]); err != nil {
			return nil, err
		}
	}
	switch {
	case n == 0:
		err = io.EOF
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("a packet was cut off")
	default:
		err = json.Unmarshal(text[:n], v)
	}
	if err != nil {
		closeFiles(files)
		return nil, err
	}
	return files, nil
}

func filesIn(rights []byte) (files []int, err error) {
	list, err := unix.ParseSocketControlMessage(rights)
	for i := range list {
		got, e := unix.ParseUnixRights(&list[i])
		files, err = append(files, got...), errors.Join(err, e)
	}
	if err != nil {
		closeFiles(files)
		return nil, err
	}
	return files, nil
}

func closeFiles(files []int) {
	for _, f := range files {
		_ = unix.Close(f)
	}
}

// hungUp reports whether the process at the other end is gone.
func hungUp(c *net.UnixConn) bool {
	gone := false
	err := control(c, func(fd int) error {
		list := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(list, 0)
		for err == unix.EINTR { // a signal of Go's scheduler says nothing about the other
			n, err = unix.Poll(list, 0)
		}
		gone = n > 0 && list[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
		return err
	})
	return gone || err != nil
}

func control(c syscall.Conn, fn func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = fn(int(fd)) }); err != nil {
		return err
	}
	return inner
}
