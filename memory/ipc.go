package memory

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/stream"
)

// An IPCHandle identifies device memory for other processes of the same host and user.
// It is plain data that can be sent by any means, for example as JSON or gob. Only
// OpenIPC interprets its fields.
type IPCHandle struct {
	Device  string // UUID of the GPU
	DType   string // of the elements, as DType.String
	Bytes   int
	Offset  int    // bytes from the start of the mapped memory
	Segment []byte // CUipcMemHandle; empty if the memory is sent as file descriptors
	Event   []byte // CUipcEventHandle of the preceding operations; empty if they have completed
	PID     int    // of the process that owns the memory
	Socket  string // address of that process's server
	Export  uint64 // number of the memory at that server
	Token   []byte // secret that authorizes the opener
	//lint:ignore U1000 internal/mem finds the field by the method that it promotes
	ipcOption
}

//lint:ignore U1000 the field above is of this type
type ipcOption = mem.IPCOption

// IPCHandle returns a handle that OpenIPC of another process opens
// (torch.multiprocessing's reductions, cuIpcGetMemHandle). The operations that are
// already enqueued on x's stream come before the other process's operations. Work on
// other streams must have been ordered before that stream. On CUDA the host does not
// wait; with virtual devices it waits for the stream.
//
// The handle may be opened any number of times until x is closed. Close still returns
// at once, and the memory is freed when all processes that opened it have closed it or
// have ended. After Close the handle cannot be opened any more; use AwaitIPC to wait
// until the other processes have opened it. The other processes can read the whole
// segment of the allocator, so share memory only with processes that you trust.
//
// Memory of the backend cudaMallocAsync and memory that came from another process
// cannot be shared.
func (x Slice[T]) IPCHandle() (IPCHandle, error) {
	const op = "memory: ipc handle"
	if err := x.check(op); err != nil {
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

// AwaitIPC waits until handles of x's buffer have been opened n times in all. After it
// x can be closed without breaking processes that are about to open a handle. If ctx
// ends first it returns the cause.
func (x Slice[T]) AwaitIPC(ctx context.Context, n int) error {
	const op = "memory: await ipc"
	if err := x.check(op); err != nil {
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

// OpenIPC maps the memory of a handle that another process has sent, and returns it as
// a slice that is used in the order of s, a stream of the same GPU
// (cuIpcOpenMemHandle). Operations that are enqueued on s from now on come after the
// operations that the other process had enqueued when it made the handle. Several
// handles into one segment share one mapping. The call talks to the other process and
// fails if that process does not answer within ten seconds.
//
// Close waits until s and the streams of RecordStream have completed their work,
// because unmapped memory must not be in use, and then returns the memory to the other
// process. If that process ends earlier, the memory stays readable until Close.
func OpenIPC[T Element](s *stream.Stream, h IPCHandle) (Slice[T], error) {
	const op = "memory: open ipc handle"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return Slice[T]{}, err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "open it before the capture"); err != nil {
		return Slice[T]{}, err
	}
	if mem.OnPeer(&h) {
		h.Event = nil // events are of one GPU
		return openIPC[T](s, h, op)
	}
	uuid, err := gpu.DeviceOf(s.Device()).UUID()
	if err != nil {
		return Slice[T]{}, err
	}
	if h.Device != uuid {
		return Slice[T]{}, fmt.Errorf("%s: the memory is of the GPU %s, the stream of %s (%s): use a stream of that GPU", op, h.Device, s.Device(), uuid)
	}
	return openIPC[T](s, h, op)
}

// openIPC maps the memory of the handle for the device of s.
func openIPC[T Element](s *stream.Stream, h IPCHandle, op string) (Slice[T], error) {
	if want := DTypeOf[T]().String(); h.DType != want {
		return Slice[T]{}, fmt.Errorf("%s: its elements are %q, not %s", op, h.DType, want)
	}
	if err := h.check(sizeOf[T]()); err != nil {
		return Slice[T]{}, fmt.Errorf("%s: %w", op, err)
	}
	if !gpu.StreamOf(s).Retain() {
		return Slice[T]{}, gpu.CheckStream(op, s, nil)
	}
	b := newBuffer(s, h.Bytes)
	if err := ipcOf(s.Device()).openHandle(s, &h, b); err != nil {
		return Slice[T]{}, fmt.Errorf("%s of process %d: %w", op, h.PID, errors.Join(err, gpu.StreamOf(s).Release()))
	}
	handle.Init(b, &b.in().Owner, handle.About{Kind: "memory of another process", On: s.Device(), Bytes: h.Bytes})
	return Slice[T]{buf: b, n: h.Bytes / sizeOf[T](), root: true}, nil
}

// check validates a handle before Chorus contacts the other process.
func (h *IPCHandle) check(size int) error {
	switch {
	case h.Bytes <= 0 || h.Bytes%size != 0 || h.Offset < 0 || h.Socket == "" || len(h.Token) != tokenBytes:
		return errors.New("the handle is damaged")
	case len(h.Segment) != 0 && len(h.Segment) != 64 || len(h.Event) != 0 && len(h.Event) != 64:
		return errors.New("the handle is damaged")
	}
	return nil
}

// IPCCollect frees memory that this process has closed and that was shared with
// processes which have ended since (torch.cuda.ipc_collect). That also happens
// automatically, soon after a process ends; IPCCollect does it before it returns.
func IPCCollect(dev *device.Device) error {
	if dev == nil {
		return fmt.Errorf("memory: ipc collect: no device given")
	}
	if err := ipcOf(dev).collect(); err != nil {
		return fmt.Errorf("memory: ipc collect: %w", err)
	}
	return nil
}

// awaitUsers waits for the streams that used the buffer. It is needed for memory that
// cannot be freed in stream order. b.mu is held.
func (b *Buffer) awaitUsers() error {
	const op = "memory: close"
	if err := gpu.DeviceOf(b.Device()).Blocking(op); err != nil {
		return err
	}
	for _, s := range append([]*stream.Stream{b.in().Stream}, b.users...) {
		if err := syncBeside(s); err != nil && s.Device().Err() == nil { // a lost device no longer uses the memory
			return fmt.Errorf("%s: %w", op, err)
		}
	}
	return nil
}
