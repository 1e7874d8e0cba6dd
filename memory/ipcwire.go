package memory

import (
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/plain"
)

// Processes that share memory talk over a packet socket: one request, one answer. The
// owner of the memory identifies the other process by its connection. When the
// connection ends, all openings of that process end.

const (
	tokenBytes  = 16
	ipcPatience = 10 * time.Second
	ipcFarewell = time.Second
	// ipcPacket is the size of the packet buffer; every packet fits.
	ipcPacket = 4096
	// ipcFiles is the number of file descriptors in a packet; the system's limit is
	// 253.
	ipcFiles = 128
)

// An ipcRequest is a request of a process that opens memory.
type ipcRequest struct {
	Op     string // "open", "pages" or "close"
	Export uint64
	Token  []byte `json:",omitempty"` // for "open"
	From   int    `json:",omitempty"` // for "pages": the first wanted page
}

// An ipcAnswer is the answer to an ipcRequest. The answer to "pages" also carries
// files.
type ipcAnswer struct {
	Error string `json:",omitempty"`
	// Low and High are the bounds of the shared memory within the mapped memory.
	Low, High int `json:",omitempty"`
	// Pages and PageBytes describe memory that is sent as file descriptors.
	Pages     int `json:",omitempty"`
	PageBytes int `json:",omitempty"`
}

// fits reports whether the memory of the answer contains the memory of the handle. Another
// process has written both.
func (a *ipcAnswer) fits(h *IPCHandle) bool {
	switch {
	case a.Low < 0 || a.Pages < 0 || (a.Pages > 0) != (len(h.Segment) == 0):
		return false
	case a.Pages > 0 && (a.PageBytes <= 0 || a.Pages > math.MaxInt/a.PageBytes || a.High > a.Pages*a.PageBytes):
		return false
	}
	return a.Low <= h.Offset && h.Offset <= a.High && h.Bytes >= 0 && h.Bytes <= a.High-h.Offset
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

// receivePacket also returns the files, which the caller closes.
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
		plain.Record(v)
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

// hungUp reports whether the other process has closed the connection.
func hungUp(c *net.UnixConn) bool {
	gone := false
	err := control(c, func(fd int) error {
		list := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(list, 0)
		for err == unix.EINTR { // a signal of Go's scheduler interrupted the call
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
