package memory

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// A Buffer is one allocation of device memory, without a type.
type Buffer struct {
	//lint:ignore U1000 internal/inside finds the field by the method that it promotes
	bufferRef
	ptr   cudadrv.DevicePtr
	bytes uintptr
	by    freer // the allocator of the memory; nil if the buffer is empty
	heap  *heap

	captured bool // allocated by a capture: the graph owns the memory

	imported bool         // from another process
	adopted  bool         // of Adopt: foreign may be called while work is pending
	foreign  func() error // releases memory that no allocator of Chorus owns; nil otherwise

	mu     sync.Mutex
	users  []*stream.Stream // the other streams that use the memory
	export *ipcExport       // set once the buffer has IPC handles
}

//lint:ignore U1000 the field above is of this type
type bufferRef = inside.BufferRef

// newBuffer returns a buffer that is freed behind the work of s, and whose
// owner is not armed yet.
func newBuffer(s *stream.Stream, bytes int) *Buffer {
	b := &Buffer{bytes: uintptr(bytes)}
	b.in().Stream = s
	return b
}

func (b *Buffer) in() *inside.Buffer { return inside.BufferOf(b) }

// Alloc returns stream-ordered device memory, like cudaMallocAsync: any work
// enqueued on s after Alloc returns may use it. If memory of that size was
// freed on s before, Alloc reuses it at once, without calling the driver and
// without waiting. Its contents are undefined, as with torch.empty. A size of
// zero allocates nothing.
//
// While s is captured into a graph the memory comes from the Pool of the capture
// and stays with the graph: every launch uses the same.
//
// If the device is out of memory, Alloc first returns all cached memory to the driver
// and tries again. If that fails too, the error is an *OutOfMemoryError.
func Alloc(s *stream.Stream, bytes int) (*Buffer, error) {
	l, err := streamCacheOf("memory: allocate", s)
	if err != nil {
		return nil, err
	}
	if !gpu.StreamOf(s).Retain() {
		return nil, gpu.CheckStream("memory: allocate", s, nil)
	}
	b := newBuffer(s, bytes)
	b.heap = l.heap
	g, err := l.alloc(bytes)
	if err != nil {
		return nil, errors.Join(err, gpu.StreamOf(s).Release())
	}
	b.ptr, b.by, b.captured = cudadrv.DevicePtr(g.addr), g.by, g.captured
	handle.Init(b, &b.in().Owner, handle.About{Kind: "buffer", On: s.Device(), Bytes: bytes, Frequent: true})
	return b, nil
}

// Bytes returns the size.
func (b *Buffer) Bytes() int { return int(b.bytes) }

// Device returns the device whose memory it is.
func (b *Buffer) Device() *device.Device { return b.in().Stream.Device() }

// RecordStream records that operations on s use the buffer, so that Close frees
// the memory only after the operations that are enqueued on s at the time of
// Close (torch.Tensor.record_stream). RecordStream itself enqueues nothing.
func (b *Buffer) RecordStream(s *stream.Stream) error {
	if s == nil || !gpu.StreamOf(s).Open() {
		return gpu.CheckStream("memory: record stream", s, nil)
	}
	if s == b.in().Stream {
		return nil
	}
	l, err := streamCacheOf("memory: record stream", s)
	if err != nil {
		return err
	}
	if !gpu.StreamOf(s).Retain() {
		return gpu.CheckStream("memory: record stream", s, nil)
	}
	used, err := b.addUser(s, l)
	if b.heap != nil {
		b.heap.releasePending()
	}
	if !used {
		err = errors.Join(err, gpu.StreamOf(s).Release())
	}
	return err
}

// addUser takes over one reference to the stream, unless the buffer already has one.
func (b *Buffer) addUser(s *stream.Stream, l *streamCache) (added bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.in().Owner.Closed() {
		return false, fmt.Errorf("memory: record stream: the buffer of %d bytes on %s: %w", b.Bytes(), b.Device(), device.ErrClosed)
	}
	if slices.Contains(b.users, s) {
		return false, nil
	}
	if b.by != nil {
		if err := b.by.RecordStream(uint64(b.ptr), l); err != nil {
			return false, b.heap.pointer("record stream", uint64(b.ptr), err)
		}
	}
	b.users = slices.DeleteFunc(b.users, func(u *stream.Stream) bool { // otherwise a long-lived buffer keeps all of them
		done := isDone(u)
		if done {
			_ = b.letGo(u) // a stream that cannot be destroyed does no harm
		}
		return done
	})
	b.users = append(b.users, s)
	return true, nil
}

// Close frees the memory once pending work has finished: after the operations
// that are already enqueued on that stream and on the streams of RecordStream.
// The host does not wait. Close is idempotent. While one of these streams is
// captured into a graph, Close returns a *device.CaptureError and the buffer
// stays open. Two buffers can be closed during a capture: memory that the
// capture itself allocated, which later allocations of the same capture then
// reuse, and an empty buffer. Memory that is registered with NCCL, as by
// RegisterWindow of package nccl, stays allocated until that is closed.
func (b *Buffer) Close() error {
	if b == nil || b.in().Owner.Closed() {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.captured && b.bytes > 0 {
		if err := b.refuseCapture(); err != nil {
			return err
		}
	}
	if b.foreign != nil {
		if err := b.awaitUsers(); err != nil {
			return err
		}
	}
	if !b.in().Owner.Close() || b.export.keep() || b.keep() {
		return nil
	}
	return b.giveBack()
}

// keep reports whether other objects, such as windows, hold the memory, which the last one then frees.
func (b *Buffer) keep() bool {
	locked := func(call func() error) func() error {
		return func() error {
			b.mu.Lock()
			defer b.mu.Unlock()
			return call()
		}
	}
	return b.in().Keep(locked(b.refuseCapture), locked(b.giveBack))
}

// giveBack frees the memory and releases the streams. b.mu is held.
func (b *Buffer) giveBack() error {
	var errs []error
	switch {
	case b.foreign != nil:
		errs = append(errs, b.foreign())
	case b.by != nil:
		if err := b.by.Free(uint64(b.ptr)); err != nil {
			errs = append(errs, b.heap.pointer("free", uint64(b.ptr), err))
		}
		b.heap.releasePending()
	}
	for _, s := range b.users {
		if err := b.letGo(s); err != nil {
			errs = append(errs, err)
		}
	}
	if err := b.letGo(b.in().Stream); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// letGo releases a stream.
func (b *Buffer) letGo(s *stream.Stream) error {
	if b.heap != nil && gpu.InCallback() {
		b.heap.retire(s) // the release may destroy the stream, which calls the driver
		return nil
	}
	return gpu.StreamOf(s).Release()
}

// refuseCapture returns an error while a stream that must pass before the memory is
// freed is being captured. b.mu is held.
func (b *Buffer) refuseCapture() error {
	const op, advice = "memory: free", "the graph may use the memory: close the buffer when the graph is closed"
	if err := gpu.StreamOf(b.in().Stream).RefuseCapture(op, advice); err != nil {
		return err
	}
	for _, u := range b.users {
		if err := gpu.StreamOf(u).RefuseCapture(op, advice); err != nil {
			return err
		}
	}
	return nil
}

// A Slice is n elements of T in device memory. It is a small value that refers
// to a Buffer; the zero Slice has no elements and no device.
type Slice[T Element] struct {
	buf  *Buffer
	off  uintptr // bytes from the start of buf
	n    int
	root bool // returned by Make: only this slice can be closed
}

// A Slice has the layout of its header: each constant overflows otherwise.
const (
	_ = -uint(unsafe.Sizeof(Slice[byte]{}) ^ unsafe.Sizeof(inside.SliceHeader{}))
	_ = -uint(unsafe.Offsetof(Slice[byte]{}.off) ^ unsafe.Offsetof(inside.SliceHeader{}.Offset))
	_ = -uint(unsafe.Offsetof(Slice[byte]{}.n) ^ unsafe.Offsetof(inside.SliceHeader{}.Len))
)

// Make allocates n stream-ordered elements on s, as Alloc does; like those of
// torch.empty, their contents are undefined.
func Make[T Element](s *stream.Stream, n int) (Slice[T], error) {
	size := sizeOf[T]()
	if n < 0 || n > math.MaxInt/size {
		return Slice[T]{}, fmt.Errorf("memory: make %d elements of %s: the length is out of range", n, DTypeOf[T]())
	}
	b, err := Alloc(s, n*size)
	if err != nil {
		return Slice[T]{}, err
	}
	return Slice[T]{buf: b, n: n, root: true}, nil
}

// MakeFrom is Make followed by CopyFrom.
func MakeFrom[T Element](s *stream.Stream, src []T) (Slice[T], error) {
	x, err := Make[T](s, len(src))
	if err != nil {
		return x, err
	}
	if err := x.CopyFrom(s, src); err != nil {
		_ = x.Close()
		return Slice[T]{}, err
	}
	return x, nil
}

// MakeFlat allocates one slice that has room for parts of the given lengths, and
// returns it with the parts in order (torch's flattened dense tensors). Each part
// starts at a multiple of 16 bytes.
func MakeFlat[T Element](s *stream.Stream, lens ...int) (flat Slice[T], parts []Slice[T], err error) {
	align := 16 / sizeOf[T]()
	total := 0
	at := make([]int, len(lens))
	for i, n := range lens {
		if n < 0 {
			return flat, nil, fmt.Errorf("memory: make part %d of %d elements: the length is negative", i, n)
		}
		if n > math.MaxInt/sizeOf[T]()-align-total {
			return flat, nil, fmt.Errorf("memory: make parts of %v elements: no memory has as many", lens)
		}
		at[i] = total
		total += (n + align - 1) / align * align
	}
	if flat, err = Make[T](s, total); err != nil {
		return flat, nil, err
	}
	for i, n := range lens {
		parts = append(parts, flat.Slice(at[i], at[i]+n))
	}
	return flat, parts, nil
}

// View returns n elements of T that start at a byte offset of b. The offset
// must be a multiple of the size of T.
func View[T Element](b *Buffer, byteOffset, n int) (Slice[T], error) {
	if err := checkView(b, byteOffset, n, sizeOf[T](), DTypeOf[T]()); err != nil {
		return Slice[T]{}, err
	}
	return Slice[T]{buf: b, off: uintptr(byteOffset), n: n}, nil
}

func checkView(b *Buffer, byteOffset, n, size int, t DType) error {
	switch {
	case b == nil:
		return fmt.Errorf("memory: view: no buffer given")
	case byteOffset < 0 || n < 0 || byteOffset > b.Bytes() || n > (b.Bytes()-byteOffset)/size:
		return fmt.Errorf("memory: view %d elements of %s at byte %d: the buffer has %d bytes", n, t, byteOffset, b.Bytes())
	case byteOffset%size != 0:
		return fmt.Errorf("memory: view %s at byte %d: misaligned: want a multiple of %d", t, byteOffset, size)
	}
	return nil
}

// Len returns the number of elements.
func (x Slice[T]) Len() int { return x.n }

// Bytes returns the number of bytes.
func (x Slice[T]) Bytes() int { return x.n * sizeOf[T]() }

// DType returns the element type as a value.
func (x Slice[T]) DType() DType { return DTypeOf[T]() }

// Device returns the device that holds the memory, or nil for the zero Slice.
func (x Slice[T]) Device() *device.Device {
	if x.buf == nil {
		return nil
	}
	return x.buf.Device()
}

// Buffer returns the allocation that x is part of.
func (x Slice[T]) Buffer() *Buffer { return x.buf }

// Offset returns the number of bytes from the start of Buffer.
func (x Slice[T]) Offset() int { return int(x.off) }

// Ptr returns the device address of the first element, for code that calls CUDA
// directly, or 0 for an empty allocation.
func (x Slice[T]) Ptr() uint64 { return uint64(x.raw()) }

func (x Slice[T]) raw() cudadrv.DevicePtr {
	if x.buf == nil || x.buf.ptr == 0 {
		return 0
	}
	return x.buf.ptr + cudadrv.DevicePtr(x.off)
}

// Slice returns the elements i to j-1, which share x's memory. Like a Go slice
// expression it panics if the bounds are out of range.
func (x Slice[T]) Slice(i, j int) Slice[T] {
	if i < 0 || j < i || j > x.n {
		panic(fmt.Sprintf("memory: slice bounds [%d:%d] out of range of %d elements", i, j, x.n))
	}
	return Slice[T]{buf: x.buf, off: x.off + uintptr(i*sizeOf[T]()), n: j - i}
}

// AsBytes returns the memory of x as bytes.
func (x Slice[T]) AsBytes() Slice[byte] { return Slice[byte]{buf: x.buf, off: x.off, n: x.Bytes()} }

// RecordStream tells that work on s uses the memory; see Buffer.RecordStream.
func (x Slice[T]) RecordStream(s *stream.Stream) error {
	if x.buf == nil {
		return nil
	}
	return x.buf.RecordStream(s)
}

// Close frees the memory, as Buffer.Close does. If Make did not return the
// slice, the error matches ErrView.
func (x Slice[T]) Close() error {
	if x.buf == nil {
		return nil
	}
	if !x.root {
		return fmt.Errorf("memory: close a part of a buffer on %s: %w", x.Device(), ErrView)
	}
	return x.buf.Close()
}

// check returns an error if x is closed.
func (x Slice[T]) check(op string) error { return inside.CheckBuffer(op, x.buf, x.n, nil) }

func sizeOf[T Element]() int {
	var z T
	return int(unsafe.Sizeof(z))
}

// AllocRaw is Alloc without a Buffer: it returns the address of at least that many
// bytes, rounded up to a multiple of 512, for operations that are enqueued on s from
// now on (torch.cuda.caching_allocator_alloc). If memory of that size was freed on s
// before, it neither calls the driver nor allocates Go memory. The caller frees it
// with FreeRaw and keeps s open until then. For 0 bytes it returns 0.
//
// It may be called by several goroutines, which do not wait for each other if
// they use different streams.
func AllocRaw(s *stream.Stream, bytes int) (ptr uint64, err error) {
	l, err := streamCacheOf("memory: allocate", s)
	if err != nil {
		return 0, err
	}
	if a := l.plain(); a != nil && bytes > 0 {
		if ptr, err = a.Alloc(uint64(bytes)); err != nil {
			return 0, l.heap.explain(bytes, err)
		}
		return ptr, nil
	}
	if !gpu.StreamOf(s).Retain() { // the following calls query the stream
		return 0, gpu.CheckStream("memory: allocate", s, nil)
	}
	g, err := l.alloc(bytes)
	return g.addr, errors.Join(err, gpu.StreamOf(s).Release())
}

// FreeRaw frees memory that AllocRaw has returned on a stream of the device,
// behind its pending work: operations already enqueued on it may still use the
// memory (torch.cuda.caching_allocator_delete). The host does not wait. FreeRaw
// of 0 does nothing. If the address is not allocated, the error is a
// *PointerError.
func FreeRaw(d *device.Device, ptr uint64) error {
	h, err := heapOf(d)
	if err != nil || ptr == 0 {
		return err
	}
	if err := h.free(ptr); err != nil {
		return h.pointer("free", ptr, err)
	}
	return nil
}

// RecordStreamRaw is Buffer.RecordStream for memory of AllocRaw. ptr may be any
// address within the memory, and s may be on another device.
func RecordStreamRaw(ptr uint64, s *stream.Stream) error {
	l, err := streamCacheOf("memory: record stream", s)
	if err != nil {
		return err
	}
	defer l.heap.releasePending()
	err = l.heap.owner(ptr).RecordStream(ptr, l)
	if err == nil {
		return nil
	}
	for _, h := range l.heap.others() {
		if h.owner(ptr).RecordStream(ptr, l) == nil {
			return nil
		}
	}
	return l.heap.pointer("record stream", ptr, err)
}

// others returns the heaps of the System's other devices.
func (h *heap) others() []*heap {
	all := gpu.DeviceOf(h.dev).System().Local(&heapsKey, func() any { return &heaps{} }).(*heaps)
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(all.list), func(o *heap) bool { return o == h })
}

// free frees an address through the engine that allocated it.
func (h *heap) free(ptr uint64) error {
	err := h.native.Free(ptr)
	h.releasePending()
	if err == nil {
		return nil
	}
	if o := h.owner(ptr); o != freer(h.native) {
		return o.Free(ptr)
	}
	return err
}

// ErrView is the error of Close on a slice that Make did not return.
var ErrView = errors.New("only the slice that Make returned can be closed")

// An OutOfMemoryError reports that a device could not allocate memory, even after all
// cached memory was returned to the driver. It matches device.ErrorOutOfMemory
// (torch.cuda.OutOfMemoryError). Sizes are in bytes.
type OutOfMemoryError struct {
	Device    string // such as "cuda:3"
	Requested uint64 // the size that the caller requested
	Wanted    uint64 // the size requested from the driver; 0 if no device has as much memory
	Free      uint64 // free memory of the device
	Total     uint64 // total memory of the device
	Allocated uint64 // memory that the program has allocated
	Private   uint64 // the part of Allocated that is in pools, such as the pools of graphs
	PoolFree  uint64 // memory that pools have reserved and not allocated
	Reserved  uint64 // memory that Chorus has reserved from the driver
	Largest   uint64 // the largest free block of the stream
	Fraction  float64
	Uses      []Use // of the device's memory, as Ledger returns them
	Err       error // the driver's error

	captured, own bool // as in alloc.NoMemoryError
}

func (e *OutOfMemoryError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "memory: out of memory on %s: tried to allocate %s", e.Device, formatSize(e.Requested))
	if e.Wanted == 0 && e.Requested >= absurd {
		fmt.Fprintf(&b, ", more than any device has: check the size")
		return b.String()
	}
	o := options.Load()
	if e.Wanted > e.Requested && (o == nil || !o.Expandable) {
		fmt.Fprintf(&b, ", for which the driver is asked for %s", formatSize(e.Wanted))
	}
	fmt.Fprintf(&b, "; %s of %s are free", formatSize(e.Free), formatSize(e.Total))
	if e.Reserved == 0 && e.Err != device.ErrorOutOfMemory {
		fmt.Fprintf(&b, ": %v", e.Err)
		return b.String()
	}
	if e.Fraction < 1 {
		fmt.Fprintf(&b, "; the process may use %s (%g of all)", formatSize(uint64(e.Fraction*float64(e.Total))), e.Fraction)
	}
	fmt.Fprintf(&b, "; %s are allocated", formatSize(e.Allocated))
	if e.Private > 0 {
		fmt.Fprintf(&b, ", %s of them in pools (graphs have some)", formatSize(e.Private))
	}
	fmt.Fprintf(&b, "; %s are reserved but not allocated, the largest block %s", formatSize(e.Reserved-min(e.Reserved, e.Allocated)), formatSize(e.Largest))
	switch {
	case e.own:
		b.WriteString(": the Allocator of the pool has no memory left")
	case e.Reserved <= e.Allocated || e.Reserved-e.Allocated < e.Requested:
	case e.Reserved-e.Allocated-min(e.PoolFree, e.Reserved-e.Allocated) < e.Requested:
		fmt.Fprintf(&b, ": %s of the free memory are in pools: close a pool, or allocate from it", formatSize(e.PoolFree))
	case o != nil && o.Expandable && e.captured:
		b.WriteString(": during a capture, free memory of expandable segments stays reserved: call EmptyCache before it")
	case o != nil && o.Expandable:
		b.WriteString(": the free memory is in fragments")
	default:
		b.WriteString(": the free memory is in fragments: set CHORUS_ALLOC_CONF=expandable_segments:True")
	}
	e.writeUses(&b)
	return b.String()
}

// writeUses names other uses of at least a hundredth of the device.
func (e *OutOfMemoryError) writeUses(b *strings.Builder) {
	before := "; memory outside of the allocator: "
	for _, x := range bySize(e.Uses) {
		if x.Bytes < e.Total/100 || x.Reserved {
			continue
		}
		fmt.Fprintf(b, "%s%s for %s", before, formatSize(x.Bytes), x.Owner)
		before = ", "
	}
}

// Unwrap returns the driver's error.
func (e *OutOfMemoryError) Unwrap() error { return e.Err }

// formatSize writes a number of bytes as torch does.
func formatSize(n uint64) string {
	for i, unit := range []string{"GiB", "MiB", "KiB"} {
		if limit := uint64(1) << (30 - 10*i); n > limit {
			return fmt.Sprintf("%.2f %s", float64(n)/float64(limit), unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// outOfMemory returns the error of an allocation outside of the caching allocator.
func outOfMemory(d *device.Device, bytes uintptr, cause error) error {
	free, total, _ := d.MemoryInfo() // if this fails too, the error reports zeros
	return &OutOfMemoryError{Device: d.String(), Requested: uint64(bytes), Wanted: uint64(bytes), Free: free, Total: total, Fraction: 1, Err: cause}
}

// because adds to err which object was closed, if that is the cause.
func (h *heap) because(err error) error {
	switch {
	case !errors.Is(err, alloc.ErrEnded) && !errors.Is(err, alloc.ErrClosed):
		return err
	case h.closed.Load():
		return fmt.Errorf("its System was closed: %w", device.ErrClosed)
	}
	return fmt.Errorf("%w: %w", err, device.ErrClosed)
}

// explain turns an error of an allocation into one of this package.
func (h *heap) explain(bytes int, err error) error {
	if !errors.Is(err, alloc.ErrNoMemory) {
		return fmt.Errorf("memory: allocate %d bytes on %s: %w", bytes, h.dev, h.because(err))
	}
	e := outOfMemory(h.dev, uintptr(bytes), device.ErrorOutOfMemory).(*OutOfMemoryError)
	if a, ok := errors.AsType[*alloc.NoMemoryError](err); ok {
		e.Wanted, e.Allocated, e.Private, e.PoolFree, e.Reserved, e.Largest = a.Wanted, a.Allocated, a.Private, a.PoolFree, a.Reserved, a.Largest
		e.captured, e.own = a.Captured, a.Own
		e.Fraction = h.native.Fraction()
	}
	if u, err := Ledger(h.dev); err == nil {
		e.Uses = u.Uses
	}
	return e
}

// A PointerError reports an address that is not allocated: it was freed before, or
// Chorus never allocated it.
type PointerError struct {
	Op        string
	Device    string
	Address   uint64
	Block     uint64 // start of the block that the address lies in, or 0
	Size      uint64 // of that block, in bytes
	Allocated Stack  // the last allocation, if RecordHistory has recorded it
	Freed     Stack  // the last free
	Err       error
}

func (e *PointerError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "memory: %s on %s: %v", e.Op, e.Device, e.Err)
	for _, s := range []struct {
		what  string
		stack Stack
	}{{"allocated", e.Allocated}, {"freed", e.Freed}} {
		if len(s.stack) > 0 {
			fmt.Fprintf(&b, "; it was %s at %s", s.what, s.stack)
		}
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *PointerError) Unwrap() error { return e.Err }

// pointer turns an error about an address into one of this package.
func (h *heap) pointer(op string, ptr uint64, err error) error {
	a, ok := errors.AsType[*alloc.PointerError](err)
	if !ok {
		return fmt.Errorf("memory: %s %#x on %s: %w", op, ptr, h.dev, h.because(err))
	}
	return &PointerError{Op: op, Device: h.dev.String(), Address: ptr, Block: a.Within, Size: a.Size,
		Allocated: stackOf(a.Stack), Freed: stackOf(a.Freed), Err: err}
}
