package cluster

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/sameuser"
)

// userSocket names the Unix socket that the processes of one user on one host use
// instead of addr, a port of the loopback. The socket is abstract: it has no file, is
// visible in the same network namespace as the loopback, and ends with its process.
func userSocket(job, addr string) string {
	_, port, _ := net.SplitHostPort(addr)
	sum := sha256.Sum256([]byte("chorus user socket 1\x00" + port + "\x00" + job))
	return fmt.Sprintf("@chorus-job-%d-%x", os.Geteuid(), sum[:tagBytes])
}

// networkOf returns the network of an address as package net names it.
func networkOf(addr string) string {
	if strings.HasPrefix(addr, "@") {
		return "unix"
	}
	return "tcp"
}

// knownPeer returns an error if the process at the other end of a Unix socket is not
// of this user. Over TCP the handshake finds out who the peer is.
func knownPeer(c net.Conn) error {
	if u, ok := c.(*net.UnixConn); ok {
		return sameuser.Check(u)
	}
	return nil
}

// peerAddr describes the origin of a connection in messages.
func peerAddr(c net.Conn) string {
	if _, ok := c.(*net.UnixConn); ok {
		return "a socket of this host"
	}
	return c.RemoteAddr().String()
}

// dialError adds the likely causes if no process listens at a socket of this user.
func dialError(addr string, err error) error {
	if networkOf(addr) == "unix" && errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w: rank 0 has not started yet, has a secret that this process lacks, or is in another container or of another user: then set %s in all processes", err, env.SecretFile.Name)
	}
	return err
}
