package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/stream"
)

// Adopt returns n elements of device memory that other code has allocated, such
// as PyTorch, CuPy, or a C library in the same process, without copying it. The
// address must be a multiple of the size of T, and the memory that of the
// device of s. It may be adopted any number of times, also in parts that
// overlap.
//
// Operations that are enqueued on s from now on may use the memory. If work of others is
// still pending on it, order s after that work first: stream.External and stream.ExternalEvent
// wrap their streams and events.
//
// Close enqueues nothing and returns at once. When s and the streams of
// RecordStream have completed the operations that were enqueued until then,
// release is called once, on a goroutine of its own unless they had already
// completed. It is also called if a device is lost, and may be nil. Until then
// the memory must not be freed. If release gives the memory to work on another
// stream, no event is needed: the operations have completed.
//
// The statistics of the caching allocator do not count the memory; Ledger shows it as adopted
// memory. Slice.IPCHandle shares it with other processes only if cuMemAlloc allocated it.
//
// The driver is asked whether the whole range is memory of the device. It does not know which
// part of it an allocator of others has given to whom.
func Adopt[T Element](s *stream.Stream, ptr uint64, n int, release func()) (Slice[T], error) {
	const op = "memory: adopt"
	size := sizeOf[T]()
	if n < 0 || n > math.MaxInt/size {
		return Slice[T]{}, fmt.Errorf("%s %d elements of %s: the length is out of range", op, n, DTypeOf[T]())
	}
	if ptr%uint64(size) != 0 {
		return Slice[T]{}, fmt.Errorf("%s %d elements of %s at %#x: misaligned: want a multiple of %d", op, n, DTypeOf[T](), ptr, size)
	}
	b, err := adopt(s, ptr, n*size, release)
	if err != nil {
		return Slice[T]{}, fmt.Errorf("%s %d elements of %s at %#x: %w", op, n, DTypeOf[T](), ptr, err)
	}
	return Slice[T]{buf: b, n: n, root: true}, nil
}

func adopt(s *stream.Stream, ptr uint64, bytes int, release func()) (*Buffer, error) {
	const op = "memory: adopt"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return nil, err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "adopt it before the capture"); err != nil {
		return nil, err
	}
	if bytes > 0 {
		if err := belongs(s.Device(), ptr, uint64(bytes)); err != nil {
			return nil, err
		}
	}
	h, err := heapOf(s.Device())
	if err != nil {
		return nil, err
	}
	if !gpu.StreamOf(s).Retain() {
		return nil, gpu.CheckStream(op, s, nil)
	}
	b := newBuffer(s, bytes)
	b.ptr, b.heap, b.adopted = cudadrv.DevicePtr(ptr), h, true
	forget := h.adopted.add(ptr, uint64(bytes), h.dev)
	b.foreign = func() error {
		return behind(append([]*stream.Stream{s}, b.users...), func() {
			forget()
			if release != nil {
				release()
			}
		})
	}
	handle.Init(b, &b.in().Owner, handle.About{Kind: "adopted memory", On: s.Device(), Bytes: bytes})
	return b, nil
}

// belongs returns an error unless the driver knows the whole range as memory of the device.
func belongs(d *device.Device, ptr, bytes uint64) error {
	if ptr > math.MaxUint64-bytes {
		return fmt.Errorf("%d bytes: the range ends beyond the address space", bytes)
	}
	ask := func(a cudadrv.PointerAttribute) (v int32, err error) {
		err = gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
			v, r = drv.PointerGetAttribute(a, cudadrv.DevicePtr(ptr))
			return r
		})
		return v, err
	}
	kind, err := ask(cudadrv.PointerMemoryType)
	if errors.Is(err, device.ErrorInvalidValue) {
		return errors.New("the driver knows no memory at this address: was it freed, or is it memory of the host?")
	}
	if err != nil {
		return err
	}
	if kind != cudadrv.MemoryTypeDevice {
		return errors.New("it is page-locked memory of the host: use PinSlice")
	}
	on, err := ask(cudadrv.PointerDevice)
	if err != nil {
		return err
	}
	if own := gpu.DeviceOf(d).Ordinal(); int(on) != own {
		return fmt.Errorf("it is memory of device %d, the stream is of %s: use a stream of that device: %w", on, d, device.ErrorInvalidContext)
	}
	for at, end := ptr, ptr+bytes; at < end; { // mapped memory consists of several ranges
		var base cudadrv.DevicePtr
		var n uintptr
		err := gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
			base, n, r = drv.MemGetAddressRange(cudadrv.DevicePtr(at))
			return r
		})
		next := uint64(base) + uint64(n)
		if err != nil || next <= at {
			return fmt.Errorf("%d bytes: the memory ends after %d bytes: %w", bytes, at-ptr, errors.Join(err, device.ErrorInvalidValue))
		}
		at = next
	}
	return nil
}

// behind calls fn when the streams have completed the operations that are enqueued on them
// now: before it returns if they have, otherwise on another goroutine.
func behind(streams []*stream.Stream, fn func()) error {
	var pending []*stream.Event
	var errs []error
	for _, s := range streams {
		if s.Device().Err() != nil {
			continue // a lost device uses no memory
		}
		if idle, err := gpu.StreamOf(s).Query(); err == nil && idle {
			continue
		}
		e, err := s.Record(nil)
		if err == nil {
			pending = append(pending, e)
		} else if s.Device().Err() == nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 { // without an event nobody knows when the work ends, so fn is never called
		for _, e := range pending {
			errs = append(errs, e.Close())
		}
		return fmt.Errorf("memory: close: the memory is not released: %w", errors.Join(errs...))
	}
	if len(pending) == 0 {
		fn()
		return nil
	}
	go func() {
		for _, e := range pending {
			d := e.Device()
			_ = gpu.DeviceOf(d).Until(context.Background(), "memory.Adopt", e.Query) // an error: the device is lost
			_ = e.Close()
		}
		fn()
	}()
	return nil
}

// adoptions are the ranges of a device that are adopted. They may overlap.
type adoptions struct {
	mu   sync.Mutex
	open map[*span]bool // nil before the first
}

type span struct{ lo, hi uint64 }

// add counts a range until forget is called.
func (a *adoptions) add(ptr, bytes uint64, d *device.Device) (forget func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.open == nil {
		a.open = map[*span]bool{}
		inside.Account(d, a.use)
	}
	x := &span{ptr, ptr + bytes}
	a.open[x] = true
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.open, x)
	}
}

// use returns the bytes of all ranges; what several of them have counts once.
func (a *adoptions) use() (inside.Use, bool) {
	a.mu.Lock()
	list := slices.Collect(maps.Keys(a.open))
	a.mu.Unlock()
	slices.SortFunc(list, func(x, y *span) int { return cmp.Compare(x.lo, y.lo) })
	var bytes, end uint64
	for _, x := range list {
		if lo := max(x.lo, end); x.hi > lo {
			bytes += x.hi - lo
			end = x.hi
		}
	}
	return inside.Use{Owner: "adopted memory", Bytes: bytes}, true
}

// A CUDAIPCHandle is a CUipcMemHandle: a whole allocation of cuMemAlloc or cudaMalloc, for other
// processes of the host. PyTorch and CuPy have them, too.
type CUDAIPCHandle [64]byte

// CUDAIPCHandle returns the handle of the allocation that x is part of, and the bytes from its
// start to x (cuIpcGetMemHandle). It is for processes without Chorus; IPCHandle also orders the
// two processes and keeps the memory until the other one has closed it. Here the caller does
// both: the other process must use the memory only after the work on it has completed, and
// must have closed it before x is closed.
//
// The allocation is a segment of the caching allocator, so the other process can read more than
// x. Memory of mapped pages (expandable_segments) and of cudaMallocAsync has no such handle.
func (x Slice[T]) CUDAIPCHandle() (h CUDAIPCHandle, offset int, err error) {
	return cudaIPCHandle(x.AsBytes())
}

func cudaIPCHandle(x Slice[byte]) (h CUDAIPCHandle, offset int, err error) {
	const op = "memory: cuda ipc handle"
	if err := x.check(op); err != nil {
		return h, 0, err
	}
	if x.Bytes() == 0 {
		return h, 0, fmt.Errorf("%s: the slice is empty", op)
	}
	var base cudadrv.DevicePtr
	d := gpu.DeviceOf(x.Device())
	err = d.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		base, _, r = drv.MemGetAddressRange(x.raw())
		return r
	})
	if err == nil {
		err = d.Do(func(drv cudadrv.Driver) cudadrv.Result {
			raw, r := drv.IpcGetMemHandle(base)
			h = CUDAIPCHandle(raw)
			return r
		})
	}
	if err != nil {
		return CUDAIPCHandle{}, 0, fmt.Errorf("%s of %d bytes at %#x on %s: only memory of cuMemAlloc has one: %w", op, x.Bytes(), x.Ptr(), x.Device(), err)
	}
	return h, int(x.raw() - base), nil
}

// OpenCUDAIPC maps an allocation of another process, and returns n elements of T that begin
// some bytes behind its start (cuIpcOpenMemHandle). s is a stream of the GPU that has the
// memory. The caller orders the processes: what the other one has enqueued on the memory must have
// completed, or s must wait for an event of it (stream.OpenEvent).
//
// The handle is the CUipcMemHandle alone. PyTorch's storage._share_cuda_ returns it behind one
// byte for its kind, which is 'c', and CuPy's ipcGetMemHandle as it is.
//
// Close waits until s and the streams of RecordStream have completed their
// work. Handles of one allocation share a mapping, also with those of OpenIPC.
// A process cannot open a handle of its own.
func OpenCUDAIPC[T Element](s *stream.Stream, h CUDAIPCHandle, offset, n int) (Slice[T], error) {
	const op = "memory: open cuda ipc handle"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return Slice[T]{}, err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "open it before the capture"); err != nil {
		return Slice[T]{}, err
	}
	size := sizeOf[T]()
	switch {
	case n <= 0 || n > math.MaxInt/size || offset < 0:
		return Slice[T]{}, fmt.Errorf("%s: %d elements of %s from byte %d: out of range", op, n, DTypeOf[T](), offset)
	case offset%size != 0:
		return Slice[T]{}, fmt.Errorf("%s: %s from byte %d: misaligned: want a multiple of %d", op, DTypeOf[T](), offset, size)
	}
	x := ipcOf(s.Device())
	m, err := x.mapSegment(s.Device(), cudadrv.IpcMemHandle(h))
	if err != nil {
		return Slice[T]{}, fmt.Errorf("%s: %w", op, err)
	}
	if offset > int(m.bytes) || n*size > int(m.bytes)-offset {
		return Slice[T]{}, errors.Join(fmt.Errorf("%s: %d elements of %s from byte %d: the allocation has %d bytes", op, n, DTypeOf[T](), offset, m.bytes), x.exit(m))
	}
	if !gpu.StreamOf(s).Retain() {
		return Slice[T]{}, errors.Join(gpu.CheckStream(op, s, nil), x.exit(m))
	}
	b := newBuffer(s, n*size)
	b.ptr, b.imported, b.foreign = m.base+cudadrv.DevicePtr(offset), true, func() error { return x.exit(m) }
	handle.Init(b, &b.in().Owner, handle.About{Kind: "memory of another process", On: s.Device(), Bytes: n * size})
	return Slice[T]{buf: b, n: n, root: true}, nil
}

// mapSegment maps an allocation of another process, or shares the mapping that
// exists. exit undoes it.
func (x *ipc) mapSegment(dev *device.Device, h cudadrv.IpcMemHandle) (*ipcMapped, error) {
	key := ipcKey{dev: dev, segment: h}
	x.mapping.Lock()
	defer x.mapping.Unlock()
	m := x.mappings[key]
	if m == nil {
		m = &ipcMapped{key: key}
		if err := m.openSegment(); err != nil {
			return nil, err
		}
		x.mappings[key] = m
	}
	m.uses++
	return m, nil
}
