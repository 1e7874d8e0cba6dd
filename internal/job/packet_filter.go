package job

import (
	"encoding/binary"
	"net"

	"golang.org/x/sys/unix"
)

// udpHeader is the number of bytes before the data of a packet, as a socket's filter sees it.
const udpHeader = 8

// keepLabelled has the kernel drop the packets of a socket that do not begin with label, so
// that a flood of them neither wakes this process nor fills the socket's buffer.
func keepLabelled(c *net.UDPConn, label []byte) error { return setFilter(c, labelFilter(label)) }

// keepNone has the kernel drop all packets of a socket.
func keepNone(c *net.UDPConn) error {
	return setFilter(c, []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}})
}

// setFilter replaces the filter of a socket.
func setFilter(c *net.UDPConn, filter []unix.SockFilter) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	var set error
	err = raw.Control(func(fd uintptr) {
		set = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program)
	})
	if err != nil {
		return err
	}
	return set
}

// labelFilter is the program in the instructions of BPF: it compares the label in pieces of 4, 2
// and 1 bytes. A load beyond the end of a packet drops the packet.
func labelFilter(label []byte) []unix.SockFilter {
	const drop, keep = 0, 1<<32 - 1 // how many bytes of the packet remain
	var program []unix.SockFilter
	compare := func(at int, width uint16, value uint32) {
		program = append(program,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_ABS | width, K: uint32(udpHeader + at)},
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: value},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: drop})
	}
	at := 0
	for ; at+4 <= len(label); at += 4 {
		compare(at, unix.BPF_W, binary.BigEndian.Uint32(label[at:]))
	}
	if at+2 <= len(label) {
		compare(at, unix.BPF_H, uint32(binary.BigEndian.Uint16(label[at:])))
		at += 2
	}
	if at < len(label) {
		compare(at, unix.BPF_B, uint32(label[at]))
	}
	return append(program, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: keep})
}
