package gds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/stream"
)

const (
	mostChunk    = 4 << 20   // larger chunks are not faster
	leastChunk   = 512 << 10 // with smaller chunks the calls of the host dominate
	cacheBytes   = 128 << 20 // total size of the slots of all devices, so that they stay in the host's caches
	defaultDepth = 2         // one slot is filled while the other is copied
	minSlot      = 64 << 10
	minWindow    = 256 << 10
	gapBytes     = files.GapBytes
)

// A transfer is one call: workers move the pieces of a file window by window.
type transfer struct {
	f       *File
	op      string
	ctx     context.Context // ends with the caller's context, or at the first error
	stop    context.CancelCauseFunc
	dev     *device.Device
	ring    *ring
	pieces  []piece
	windows []window
	slot    int64 // bytes of each slot, at least the size of a window
	hooks   hooks
	writes  bool
	cu      *registration // of the file; nil if cuFile does not move it
	done    atomic.Int64  // bytes that have arrived

	next atomic.Int64
	over chan struct{} // closed when all windows are claimed

	mu    sync.Mutex
	err   error
	left  []window // that cuFile has refused
	short error    // why no more memory could be pinned
}

// transfer moves the pieces.
func (f *File) transfer(ctx context.Context, op string, s *stream.Stream, pieces []piece, h hooks, writes bool) error {
	t := &transfer{f: f, op: op, pieces: pieces, hooks: h, writes: writes}
	if err := t.check(ctx, s); err != nil {
		return f.fail(op, err)
	}
	t.pieces = slices.DeleteFunc(slices.Clone(pieces), func(p piece) bool { return p.Mem.Len() == 0 })
	if len(t.pieces) == 0 {
		return nil
	}
	threads := f.threads
	if threads == 0 {
		threads = defaultThreads(t.dev)
	}
	t.slot = min(f.slotFor(threads, h.Devices), floorPow2(t.ring.bound))
	t.windows = cut(t.pieces, windowSize(t.slot, bytesOf(pieces), threads))
	t.ctx, t.stop = context.WithCancelCause(ctx)
	defer t.stop(nil)
	if err := t.reach(s); err != nil {
		return t.whole(err)
	}
	t.engines(threads)
	return t.result()
}

// slotFor returns the slot size for the given number of threads per device.
func (f *File) slotFor(threads, devices int) int64 {
	if f.chunk != 0 {
		return f.chunk
	}
	each := floorPow2(cacheBytes / int64(max(devices, 1)*threads*f.depth))
	return min(max(each, leastChunk), mostChunk)
}

// engines runs workers for the windows: first with cuFile if it is used, then with the
// other engines for the remaining windows.
func (t *transfer) engines(threads int) {
	if t.cu = t.f.straight(t.dev); t.cu != nil {
		t.runWorkers(threads, (*worker).straight)
		t.windows = append(t.left, t.windows[min(t.next.Load(), int64(len(t.windows))):]...)
		t.next.Store(0)
	}
	switch {
	case len(t.windows) == 0 || t.ctx.Err() != nil:
	case t.writes:
		t.runWorkers(threads, (*worker).write)
	default:
		t.runWorkers(threads, (*worker).read)
	}
}

// leaveToOthers leaves a window to another engine.
func (t *transfer) leaveToOthers(w window) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.left = append(t.left, w)
}

// check validates the arguments.
func (t *transfer) check(ctx context.Context, s *stream.Stream) error {
	op := "gds: " + t.op
	if err := gpu.CheckStream(t.op, s, nil); err != nil {
		return err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "the host waits for the file: move it before the capture"); err != nil {
		return err
	}
	if err := gpu.StreamOf(s).RefuseWait(op); err != nil {
		return err
	}
	t.dev = s.Device()
	if err := gpu.DeviceOf(t.dev).Blocking(op); err != nil {
		return err
	}
	if err := checkPieces(t.op, t.dev, t.pieces); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var err error
	t.ring, err = ringOf(t.dev)
	return err
}

// windowSize returns a window size that gives each thread at least two windows, unless
// they would be very small.
func windowSize(slot, total int64, threads int) int64 {
	for slot > minWindow && total/slot < int64(2*threads) {
		slot /= 2
	}
	return slot
}

func floorPow2(n int64) int64 { return 1 << (bits.Len64(uint64(n)) - 1) }

// runWorkers runs workers until they have ended.
func (t *transfer) runWorkers(threads int, work func(*worker) error) {
	t.over = make(chan struct{})
	var wg sync.WaitGroup
	for range min(threads, len(t.windows)) {
		wg.Go(func() {
			w, err := newWorker(t)
			if err == nil {
				err = errors.Join(work(w), w.release())
			}
			t.note(err)
		})
	}
	wg.Wait()
}

// note records the first error of a worker and stops the others.
func (t *transfer) note(err error) {
	if err == nil || errors.Is(err, errNoMore) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = err
		t.stop(err)
	}
}

// lack records that no more memory can be pinned.
func (t *transfer) lack(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.short = err
}

// scarce returns why no more memory can be pinned, or nil.
func (t *transfer) scarce() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.short
}

// result returns the error of the call, after the workers have ended.
func (t *transfer) result() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.err
	if err == nil && t.done.Load() < bytesOf(t.pieces) {
		// The call was canceled between two engines, or no worker had a slot for the rest.
		err = cmp.Or(context.Cause(t.ctx), t.short)
	}
	if _, ok := errors.AsType[*Error](err); ok || err == nil {
		return err
	}
	return t.whole(err)
}

// whole returns an Error for the whole call.
func (t *transfer) whole(err error) error {
	return &Error{Op: t.op, Path: t.f.path, Offset: t.pieces[0].Off, Wanted: bytesOf(t.pieces), Got: t.done.Load(), Err: err}
}

// claim returns a window that no other worker has.
func (t *transfer) claim() (window, bool) {
	i := t.next.Add(1) - 1
	n := int64(len(t.windows))
	if i == n-1 {
		close(t.over)
	}
	if i >= n {
		return window{}, false
	}
	return t.windows[i], true
}

// reach waits until the stream has completed its operations. The host waits before it
// takes resources that other calls may need to complete these operations, and so that it
// enqueues nothing that could not run.
func (t *transfer) reach(s *stream.Stream) error {
	begin, err := s.Record(nil)
	if err != nil {
		return err
	}
	return errors.Join(begin.Sync(t.ctx), begin.Close())
}

// at returns an Error for a failure between two offsets; n bytes are done. The end of ctx
// did not happen at an offset, so it is returned unchanged.
func (t *transfer) at(e Engine, from, to int64, n int, err error) error {
	if t.ctx.Err() != nil && err == context.Cause(t.ctx) {
		return err
	}
	return &Error{Op: t.op, Path: t.f.path, Offset: from, Wanted: to - from, Got: int64(n), Engine: e, Err: err}
}

// tell reports bytes that have arrived.
func (t *transfer) tell(bytes int64) {
	t.done.Add(bytes)
	if t.hooks.Moved != nil {
		t.hooks.Moved(int(bytes))
	}
}

// allStarted reports that a worker has no window left to start.
func (t *transfer) allStarted() {
	if t.hooks.AllStarted != nil {
		t.hooks.AllStarted()
	}
}

// checkPieces returns an error unless the pieces are on the device, in file order, and do
// not overlap.
func checkPieces(op string, dev *device.Device, pieces []piece) error {
	last := int64(0)
	for i, p := range pieces {
		if err := inside.CheckBuffer(op, p.Mem.Buffer(), p.Mem.Len(), dev); err != nil {
			return err
		}
		if p.Off < 0 || p.End() < p.Off {
			return fmt.Errorf("%s: %d bytes at byte %d: no file has such bytes", op, p.Mem.Len(), p.Off)
		}
		if p.Off < last {
			return fmt.Errorf("%s: piece %d begins at byte %d, before byte %d where an earlier one ends: pieces are in the file's order and apart",
				op, i, p.Off, last)
		}
		last = p.End()
	}
	return nil
}

// bytesOf returns the total length of the pieces.
func bytesOf(pieces []piece) (n int64) {
	for _, p := range pieces {
		n += int64(p.Mem.Len())
	}
	return n
}

// A window is the part of a file that one slot holds, with the pieces that lie in it,
// completely or partly. It starts at a multiple of its size, which is a power of two, so
// that blocks aligned for O_DIRECT do not cross windows.
type window struct {
	off, end    int64
	first, last int // pieces[first:last]
}

// cut returns the windows of the given size that the pieces lie in.
func cut(pieces []piece, size int64) []window {
	var list []window
	for i, p := range pieces {
		for at := p.Off &^ (size - 1); at < p.End(); at += size {
			if n := len(list); n > 0 && list[n-1].off == at {
				list[n-1].last = i + 1
			} else {
				list = append(list, window{at, at + size, i, i + 1})
			}
		}
	}
	return list
}

// within returns the part of a piece that lies in the window.
func (w window) within(p piece) (from, to int64) { return max(p.Off, w.off), min(p.End(), w.end) }

// rangeOf returns the range of file bytes, beginning with piece i, that one
// system call moves, and the next piece after it. The range has pieces that are
// at most gap bytes apart.
func (w window) rangeOf(pieces []piece, i int, gap int64) (from, to int64, next int) {
	from, to = w.within(pieces[i])
	for i++; i < w.last && pieces[i].Off-to <= gap; i++ {
		_, to = w.within(pieces[i])
	}
	return from, to, i
}

// A part is a range that is contiguous in the file and in device memory.
type part struct {
	ptr   cudadrv.DevicePtr
	off   int64 // in the file
	bytes int64
}

// part returns the range, beginning with piece i, that one copy moves.
func (w window) part(pieces []piece, i int) (x part, next int) {
	p := pieces[i]
	from, to := w.within(p)
	x = part{cudadrv.DevicePtr(p.Mem.Ptr()) + cudadrv.DevicePtr(from-p.Off), from, to - from}
	for i++; i < w.last; i++ {
		q := pieces[i]
		if q.Off != p.End() || q.Mem.Buffer() != p.Mem.Buffer() || q.Mem.Offset() != p.Mem.Offset()+p.Mem.Len() {
			break
		}
		_, to = w.within(q)
		x.bytes, p = to-x.off, q
	}
	return x, i
}

// manyTries is how often in a row a system call may return a temporary error before that
// is an error.
const manyTries = 1000

// fill reads until p is full and returns the number of bytes. A short read is continued;
// at the end of the file the error is io.ErrUnexpectedEOF.
func (f *File) fill(ctx context.Context, fd int, p []byte, off int64) (n int, err error) {
	return f.whole(ctx, f.sys.Pread, fd, p, off, io.ErrUnexpectedEOF)
}

// empty writes all of p.
func (f *File) empty(ctx context.Context, fd int, p []byte, off int64) (n int, err error) {
	return f.whole(ctx, f.sys.Pwrite, fd, p, off, io.ErrShortWrite)
}

// whole calls move until all of p has been moved. none is the error if a call moves no
// bytes.
func (f *File) whole(ctx context.Context, move mover, fd int, p []byte, off int64, none error) (n int, err error) {
	for n < len(p) {
		m, err := f.once(ctx, move, fd, p[n:], off+int64(n))
		if err == nil && m == 0 {
			err = none
		}
		if err != nil {
			return n, err
		}
		if n += m; n < len(p) {
			f.count.continued.Add(1)
		}
	}
	return n, nil
}

// once calls move until the result is not a temporary error.
func (f *File) once(ctx context.Context, move mover, fd int, p []byte, off int64) (n int, err error) {
	for tries := 0; ; tries++ {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		n, err = move(fd, p, off)
		if err != unix.EINTR && err != unix.EAGAIN || tries >= manyTries {
			return max(n, 0), err
		}
		f.count.retried.Add(1)
		runtime.Gosched()
	}
}
