package job

import (
	"fmt"
	"syscall"
)

// A reservation holds a TCP port for a program of the job that will listen on it
// later, such as torch's store on MASTER_PORT. The socket is bound but does not
// listen. The kernel then does not assign the port to other programs, but a
// program that binds this port with SO_REUSEADDR, as Go and torch do, succeeds.
// Closing the port first would be a race with other programs.
type reservation struct {
	fd   int
	port int
}

func reservePort() (*reservation, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("cluster: reserve a port: %w", err)
	}
	r := &reservation{fd: fd}
	if err := r.bind(); err != nil {
		r.close()
		return nil, fmt.Errorf("cluster: reserve a port: %w", err)
	}
	return r, nil
}

func (r *reservation) bind() error {
	if err := syscall.SetsockoptInt(r.fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return err
	}
	if err := syscall.Bind(r.fd, &syscall.SockaddrInet4{}); err != nil {
		return err
	}
	sa, err := syscall.Getsockname(r.fd)
	if err != nil {
		return err
	}
	in, ok := sa.(*syscall.SockaddrInet4)
	if !ok {
		return fmt.Errorf("socket has an address of type %T", sa)
	}
	r.port = in.Port
	return nil
}

func (r *reservation) close() {
	if r != nil && r.fd >= 0 {
		syscall.Close(r.fd)
		r.fd = -1
	}
}
