package job

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/safe"
)

// UserSocket returns the name of the Unix socket that processes of one user on
// one host use instead of addr, a loopback port. The socket is abstract: it has
// no file, is visible in the same network namespace as the loopback, and
// disappears with its process.
func UserSocket(job, addr string) string {
	_, port, _ := net.SplitHostPort(addr)
	sum := sha256.Sum256([]byte("chorus user socket 1\x00" + port + "\x00" + job))
	return fmt.Sprintf("@chorus-job-%d-%x", os.Geteuid(), sum[:tagBytes])
}

// networkOf returns the network of an address, as in package net.
func networkOf(addr string) string {
	if strings.HasPrefix(addr, "@") {
		return "unix"
	}
	return "tcp"
}

// knownPeer returns an error if the process at the other end of a Unix socket
// belongs to another user. A peer over TCP is authenticated by the handshake.
func knownPeer(c net.Conn) error {
	if u, ok := c.(*net.UnixConn); ok {
		return safe.CheckUser(u)
	}
	return nil
}

// ownerError returns an error if err is that of a Unix socket that accepts no connections and is known to be another user's.
func ownerError(addr string, err error) error {
	if networkOf(addr) != "unix" || !errors.Is(err, syscall.EAGAIN) {
		return nil
	}
	list, _ := safe.NamedListeners(addr) // without it, the owner is unknown
	for _, l := range list {
		if l.Name == addr && l.Owner == safe.AnotherUser {
			return &safe.UserError{UID: l.UID}
		}
	}
	return nil
}

// peerAddr describes the origin of a connection in messages.
func peerAddr(c net.Conn) string {
	if _, ok := rawConn(c).(*net.UnixConn); ok {
		return "a socket of this host"
	}
	return c.RemoteAddr().String()
}

// dialError adds likely causes if no process listens on this user's socket.
func dialError(addr string, err error) error {
	if networkOf(addr) == "unix" && errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w: rank 0 has not started yet, has a secret that this process lacks, or runs in another container or as another user: then set %s in all processes", err, env.SecretFile.Name)
	}
	return err
}
