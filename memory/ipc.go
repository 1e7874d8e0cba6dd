package memory

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/stream"
)

// An IPCHandle names device memory to other processes of the host and user. It is
// plain data, to be sent by any means, as JSON or gob; its fields are for OpenIPC.
type IPCHandle struct {
	Device  string // UUID of the GPU
	DType   string // of the elements
	Bytes   int
	Offset  int    // bytes from the start of what is mapped
	Segment []byte // CUipcMemHandle; empty where the memory comes as file descriptors
	Event   []byte // CUipcEventHandle of what must come before; empty if all of it has
	PID     int    // of the process that has the memory
	Socket  string // at which that process is asked
	Export  uint64 // what it is asked for
	Token   []byte // that the asker knows the handle
}

// IPCHandle returns what OpenIPC of another process opens the memory by
// (torch.multiprocessing's reductions, cuIpcGetMemHandle). What is on x's stream
// by now comes before what the other does; work on other streams must have been
// ordered before that stream's. On CUDA the host does not wait; with virtual
// devices it waits for the stream.
//
// The handle may be opened any number of times, until x is closed. Close returns
// at once then too, and the memory is freed when all processes that have opened
// it have closed it or are gone. A handle that nobody has opened by the time of
// Close opens nothing any more: AwaitIPC waits for that. For other processes the
// whole segment of the allocator is visible, so share with those that you trust.
//
// Memory of the backend cudaMallocAsync cannot be shared, nor can memory that
// came from another process.
func (x Slice[T]) IPCHandle() (IPCHandle, error) {
	const op = "memory: ipc handle"
	if err := x.Check(op, nil); err != nil {
		return IPCHandle{}, err
	}
	if x.Bytes() == 0 {
		return IPCHandle{}, fmt.Errorf("%s: the slice is empty", op)
	}
	h, err := x.buf.share()
	if err != nil {
		return IPCHandle{}, fmt.Errorf("%s of %d bytes at %#x on %s: %w", op, x.Bytes(), x.Ptr(), x.Device(), err)
	}
	h.DType, h.Bytes = x.DType().String(), x.Bytes()
	h.Offset += int(x.off)
	return h, nil
}

// AwaitIPC waits until handles of x's buffer have been opened n times in all, so
// that x can be closed without taking them from those who are on their way to it.
// When ctx ends first it returns the cause.
func (x Slice[T]) AwaitIPC(ctx context.Context, n int) error {
	const op = "memory: await ipc"
	if err := x.Check(op, nil); err != nil {
		return err
	}
	if x.buf == nil {
		return fmt.Errorf("%s: a slice without memory", op)
	}
	x.buf.mu.Lock()
	e := x.buf.export
	x.buf.mu.Unlock()
	if e == nil {
		return fmt.Errorf("%s: the memory has no handle: call IPCHandle before", op)
	}
	if err := e.await(ctx, n); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// OpenIPC maps the memory of a handle that another process has sent, and returns
// it as a slice that is used in the order of s, a stream of the same GPU
// (cuIpcOpenMemHandle). What is on s from now on comes after what the other
// process had enqueued when it made the handle. Several handles into one segment
// share one mapping. The call talks to the other process and gives up when that
// does not answer for ten seconds.
//
// Close waits until s, and the streams of RecordStream, are past their work,
// because what is unmapped must not be in use; then it gives the memory back to
// the other process. When that process ends before, the memory stays readable
// until Close.
func OpenIPC[T Element](s *stream.Stream, h IPCHandle) (Slice[T], error) {
	const op = "memory: open ipc handle"
	if err := s.Check(op, nil); err != nil {
		return Slice[T]{}, err
	}
	if err := s.RefuseCapture(op, "open it before the capture"); err != nil {
		return Slice[T]{}, err
	}
	uuid, err := s.Device().UUID()
	if err != nil {
		return Slice[T]{}, err
	}
	if h.Device != uuid {
		return Slice[T]{}, fmt.Errorf("%s: the memory is of the GPU %s, the stream of %s (%s): use a stream of that GPU", op, h.Device, s.Device(), uuid)
	}
	return openIPC[T](s, h, op)
}

// OpenPeerIPC is OpenIPC for memory of any GPU that the device of s reaches, of which
// kernels on that device then use it: no context is made on the GPU that has the
// memory. What is on s waits for nothing: the other process has waited for what comes
// before. For Chorus's own packages.
func OpenPeerIPC[T Element](s *stream.Stream, h IPCHandle) (Slice[T], error) {
	const op = "memory: open ipc handle of a peer"
	if err := s.Check(op, nil); err != nil {
		return Slice[T]{}, err
	}
	if err := s.RefuseCapture(op, "open it before the capture"); err != nil {
		return Slice[T]{}, err
	}
	h.Event = nil // events are of one GPU
	return openIPC[T](s, h, op)
}

// openIPC maps the memory for the device of s.
func openIPC[T Element](s *stream.Stream, h IPCHandle, op string) (Slice[T], error) {
	if want := DTypeOf[T]().String(); h.DType != want {
		return Slice[T]{}, fmt.Errorf("%s: its elements are %q, not %s", op, h.DType, want)
	}
	if err := h.check(sizeOf[T]()); err != nil {
		return Slice[T]{}, fmt.Errorf("%s: %w", op, err)
	}
	if !s.Retain() {
		return Slice[T]{}, s.Check(op, nil)
	}
	b := &Buffer{stream: s, bytes: uintptr(h.Bytes)}
	if err := ipcOf(s.Device()).open(s, &h, b); err != nil {
		return Slice[T]{}, fmt.Errorf("%s of process %d: %w", op, h.PID, errors.Join(err, s.Release()))
	}
	handle.Init(b, &b.owner, handle.About{Kind: "memory of another process", On: s.Device(), Bytes: h.Bytes})
	return Slice[T]{buf: b, n: h.Bytes / sizeOf[T](), root: true}, nil
}

// check finds what is wrong with a handle before anybody is asked.
func (h *IPCHandle) check(size int) error {
	switch {
	case h.Bytes <= 0 || h.Bytes%size != 0 || h.Offset < 0 || h.Socket == "" || len(h.Token) != tokenBytes:
		return errors.New("the handle is damaged")
	case len(h.Segment) != 0 && len(h.Segment) != 64 || len(h.Event) != 0 && len(h.Event) != 64:
		return errors.New("the handle is damaged")
	}
	return nil
}

// IPCCollect frees what was shared with processes that are gone, and was closed
// here (torch.cuda.ipc_collect). That happens by itself soon after a process has
// ended; when IPCCollect returns, it has happened for all that have.
func IPCCollect(dev *device.Device) error {
	if dev == nil {
		return fmt.Errorf("memory: ipc collect: no device given")
	}
	if err := ipcOf(dev).collect(); err != nil {
		return fmt.Errorf("memory: ipc collect: %w", err)
	}
	return nil
}

// awaitUsers waits for the streams that used memory which cannot be given back in
// the order of a stream. b.mu is held.
func (b *Buffer) awaitUsers() error {
	const op = "memory: close"
	if err := b.Device().Blocking(op); err != nil {
		return err
	}
	for _, s := range append([]*stream.Stream{b.stream}, b.users...) {
		if err := settle(s); err != nil && s.Device().Err() == nil { // a lost device uses nothing
			return fmt.Errorf("%s: %w", op, err)
		}
	}
	return nil
}
