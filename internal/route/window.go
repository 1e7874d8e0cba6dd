package route

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// windowBytes is the maximum size of a rank's operand or result.
const windowBytes = 4 << 20

// A window is a rank's part of symmetric memory: first the operand, then the result of an
// operation.
type window struct {
	comm       *nccl.Communicator
	pool       *memory.Pool
	mem        memory.Slice[uint8]
	registered *nccl.Window
	order      gpu.Sequence // serializes the operations: the next one waits for the copy from the window
}

// openWindows registers a window of each local rank, if NCCL supports windows.
func (rs Routers) openWindows(ctx context.Context) error {
	open := func(ctx context.Context, r *Router) error { return r.openWindow(ctx) }
	return rs.openEach(ctx, "windows", open, func(r *Router) error {
		w := r.window
		r.window = nil
		return w.close()
	})
}

// openWindow registers the rank's window after all ranks have allocated the
// memory of their windows, because NCCL waits for all ranks, and returns when
// all windows are registered. After an error r keeps the memory until its
// communicator has ended, because the registration may still run.
func (r *Router) openWindow(ctx context.Context) error {
	w := &window{comm: r.comm}
	r.window = w
	_, err := collective.Agree(ctx, r.exchange, r.comm.Size(), true, r.withRankName(w.allocate(r.stream)))
	if err != nil {
		return err
	}
	if w.registered, err = r.comm.RegisterWindow(ctx, w.mem.Buffer(), w.mem.Len(), true); err != nil {
		return hideUnsupported(err)
	}
	_, err = collective.Agree(ctx, r.exchange, r.comm.Size(), true, nil)
	return err
}

// hideUnsupported hides that an error is ErrUnsupported. The other ranks may support the operation
// and already wait; openEach assumes that ErrUnsupported is the same on all ranks.
func hideUnsupported(err error) error {
	if errors.Is(err, errors.ErrUnsupported) {
		return errors.New(err.Error())
	}
	return err
}

// allocate allocates the memory, in its own pool.
func (w *window) allocate(s *stream.Stream) (err error) {
	if err := collective.Of(w.comm).NoWindows(); err != nil {
		return err
	}
	w.pool = memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
	return w.pool.Use(s, func() error {
		w.mem, err = memory.Make[uint8](s, 2*windowBytes)
		return err
	})
}

// withRankName is an error with the rank's name before it.
func (r *Router) withRankName(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("rank %d of %d (%s): %w", r.comm.Rank(), r.comm.Size(), r.comm.Device(), err)
}

// close frees the memory.
func (w *window) close() error {
	if w == nil {
		return nil
	}
	done := w.order.Close("comm: close a window", syncAll)
	return errors.Join(done, w.registered.Close(), w.mem.Close(), w.pool.Close())
}

// syncUnlessLost waits for a stream, and ignores the error of a lost device,
// which uses no memory.
func syncUnlessLost(s *gpu.Stream) error {
	err := s.Sync()
	if s.Device().Err() != nil {
		return nil
	}
	return err
}

// fits reports whether NCCL has a correct symmetric kernel for x and the window is large
// enough.
func (w *window) fits(x *collective.Op) bool {
	in, out := w.extents(x)
	return in > 0 && max(in, out) <= windowBytes && collective.Of(w.comm).Symmetric(x)
}

// extents returns how many bytes an operation reads and writes.
func (w *window) extents(x *collective.Op) (in, out int) {
	part := x.Bytes()
	switch x.Kind {
	case collective.AllGather:
		return part, part * w.comm.Size()
	case collective.ReduceScatter:
		return part * w.comm.Size(), part
	}
	return part, part
}

// copyIn copies the operand to the window, and puts the window's addresses for NCCL into the operation. After it
// returned no error, the window is reserved for this operation until copyOut.
func (w *window) copyIn(x *collective.Op) error {
	s := gpu.StreamOf(x.Stream)
	if err := s.Captured(&w.order); err != nil {
		return err
	}
	if err := w.order.Begin(s); err != nil {
		return err
	}
	in, _ := w.extents(x)
	if err := copyBytes(x.Stream, w.mem.Ptr(), uint64(x.Src.Ptr), in); err != nil {
		w.order.End()
		return err
	}
	x.Result = uint64(x.Dst.Ptr)
	x.Src.Ptr, x.Dst.Ptr = cudadrv.DevicePtr(w.mem.Ptr()), cudadrv.DevicePtr(w.mem.Ptr()+windowBytes)
	return nil
}

// copyOut copies the result from the window, if NCCL has taken the operation.
func (w *window) copyOut(x *collective.Op, taken bool) error {
	defer w.order.End()
	if !taken {
		return nil
	}
	_, out := w.extents(x)
	return copyBytes(x.Stream, x.Result, w.mem.Ptr()+windowBytes, out)
}

func copyBytes(s *stream.Stream, dst, src uint64, n int) error {
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoDAsync(cudadrv.DevicePtr(dst), cudadrv.DevicePtr(src), uintptr(n), gpu.StreamOf(s).Raw())
	})
}

// openEngines records whether all ranks are in this process and can access each other's memory.
func (rs Routers) openEngines() error {
	if len(rs) != rs[0].comm.Size() {
		return nil
	}
	for i := range rs {
		for j := range i {
			can, err := inside.Reach(rs[i].comm.Device(), rs[j].comm.Device())
			if err != nil || !can {
				return err
			}
		}
	}
	for _, r := range rs {
		r.engines = true
	}
	return nil
}

// copyBetweenRanks performs an all-gather or an all-to-all with copy engines. Each rank fetches
// its parts, from the next rank first, so that no two ranks fetch from the same rank at
// the same time. The streams meet before, so that all sources are ready, and after, so
// that no source changes before all ranks have fetched it.
func copyBetweenRanks(ss []*stream.Stream, xs []*collective.Op) error {
	if err := synchronize(ss); err != nil {
		return err
	}
	n, part := len(ss), xs[0].Bytes()
	for step := range n {
		for to := range n {
			from := (to + step) % n
			src, dst := uint64(xs[from].Src.Ptr), uint64(xs[to].Dst.Ptr)+uint64(from*part)
			if xs[0].Kind == collective.AllToAll {
				src += uint64(to * part)
			}
			if src == dst {
				continue // in place
			}
			if err := copyBytes(ss[to], dst, src, part); err != nil {
				return errors.Join(err, synchronize(ss)) // copies that are already enqueued use the other ranks' memory
			}
		}
	}
	return synchronize(ss)
}

// synchronize orders each stream after all others.
func synchronize(ss []*stream.Stream) error {
	if err := gpu.Join(ss[0], ss); err != nil {
		return err
	}
	return gpu.Fork(ss[0], ss)
}

// openKernels opens the Chorus kernels of the ranks, each with so much room, if the devices
// support the strategy.
func (rs Routers) openKernels(ctx context.Context, s Strategy, bytes int) error {
	open := func(ctx context.Context, r *Router) (err error) {
		c := r.comm
		r.kernels, err = fabric.Open(ctx, r.stream, c.Rank(), c.Size(), r.exchange, &fabric.Config{Bytes: bytes, Blocks: r.blocks})
		if err != nil {
			return err
		}
		if err = r.kernels.Supports(algorithms[s]); err != nil {
			slog.Warn("chorus: this machine does not support the strategy, so NCCL executes all collectives", "strategy", s.String(), "rank", c.Rank(), "error", err)
		}
		return err
	}
	return rs.openEach(ctx, "Chorus kernels", open, func(r *Router) error {
		own := r.kernels
		r.kernels = nil
		return own.Close()
	})
}

// pushedBytes is the size of the largest piece of an all-reduce by Pushed.
const pushedBytes = 64 << 20

// pushedLeast is the smallest size of an all-reduce by Pushed. Copies of less take more than twice as long as NCCL.
var pushedLeast = 1 << 20

// SetPushedBytes lets NCCL execute other sizes than those of Pushed, in tests.
func SetPushedBytes(least int) (restore func()) {
	old := pushedLeast
	pushedLeast = least
	return func() { pushedLeast = old }
}

// openPushed opens the ranks whose copy engines move the elements of all-reduces, if the devices support it.
func (rs Routers) openPushed(ctx context.Context) error {
	open := func(ctx context.Context, r *Router) (err error) {
		c := r.comm
		r.pushed, err = fabric.Open(ctx, r.stream, c.Rank(), c.Size(), r.exchange, &fabric.Config{Slot: pushedBytes / c.Size(), Pushes: true})
		return err
	}
	return rs.openEach(ctx, "all-reduces by copy engines", open, func(r *Router) error {
		own := r.pushed
		r.pushed = nil
		return own.Close()
	})
}

// Up to how many bytes Chorus kernels are used: of an all-reduce, and of one rank's part of
// the others. NCCL is not slower from about there on. With measured times the limit is
// MostBytes.
var (
	kernelBytes     = 4 << 20
	kernelPartBytes = 64 << 10
)

// MostBytes is the maximum size for measuring Chorus kernels, and for using them by measured
// times. It is also the size of the pieces in which they execute an all-reduce in rank order.
const MostBytes = 16 << 20

// SetKernelBytes lets NCCL take over from Chorus kernels at other sizes, in tests.
func SetKernelBytes(all, part int) (restore func()) {
	old := [2]int{kernelBytes, kernelPartBytes}
	kernelBytes, kernelPartBytes = all, part
	return func() { kernelBytes, kernelPartBytes = old[0], old[1] }
}

func kernelLimit(x *collective.Op) int {
	if x.Kind == collective.AllReduce {
		return kernelBytes
	}
	return kernelPartBytes
}

var algorithms = [NumStrategies]fabric.Algorithm{OneShot: fabric.OneShot, TwoShotPackets: fabric.TwoShotPackets, TwoShot: fabric.TwoShot, TwoShotLines: fabric.TwoShotLines, Pipelined: fabric.Pipelined, Pushed: fabric.Pushed}
