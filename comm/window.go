package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// windowBytes is how many bytes a rank's operation reads or writes at most.
const windowBytes = 4 << 20

// A window is a rank's part of symmetric memory: what operations read, and behind it
// what they write.
type window struct {
	comm       *nccl.Communicator
	pool       *memory.Pool
	mem        memory.Slice[uint8]
	registered *nccl.Window
	order      stream.Sequence // of the operations: the next one waits for the copy back
}

// openWindows registers a window of each local rank, where NCCL can.
func (g *Group) openWindows(ctx context.Context) error {
	open := func(ctx context.Context, m *member) error { return m.openWindow(ctx) }
	return g.openOn(ctx, "windows", open, func(m *member) error {
		w := m.ways.window
		m.ways.window = nil
		return w.close()
	})
}

// openWindow registers the rank's window when all ranks have the memory for theirs, since
// NCCL waits for all of them, and returns when all have. What is there before an error
// stays with m until its communicator, in which the registration may go on, has ended.
func (m *member) openWindow(ctx context.Context) error {
	w := &window{comm: m.comm}
	m.ways.window = w
	if err := fabric.Confer(ctx, m.ways.exchange, m.comm.Size(), m.named(w.allocate(m.stream))); err != nil {
		return err
	}
	var err error
	if w.registered, err = m.comm.RegisterWindow(ctx, w.mem.Buffer(), w.mem.Len(), true); err != nil {
		return missing(err)
	}
	return fabric.Confer(ctx, m.ways.exchange, m.comm.Size(), nil)
}

// missing makes an error of its own of something that the others, which wait by now, may
// have: openOn takes what is unsupported for the same on all ranks.
func missing(err error) error {
	if errors.Is(err, errors.ErrUnsupported) {
		return errors.New(err.Error())
	}
	return err
}

// allocate makes the memory, in a pool of its own.
func (w *window) allocate(s *stream.Stream) (err error) {
	if err := w.comm.NoWindows(); err != nil {
		return err
	}
	w.pool = memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
	return w.pool.Use(s, func() error {
		w.mem, err = memory.Make[uint8](s, 2*windowBytes)
		return err
	})
}

// named is an error with the rank's name before it.
func (m *member) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("rank %d of %d (%s): %w", m.comm.Rank(), m.comm.Size(), m.comm.Device(), err)
}

// close gives the memory back.
func (w *window) close() error {
	if w == nil {
		return nil
	}
	done := w.order.Close("comm: close a window", func(users []*stream.Stream) error {
		var errs []error
		for _, s := range users {
			errs = append(errs, settle(s))
		}
		return errors.Join(errs...)
	})
	return errors.Join(done, w.registered.Close(), w.mem.Close(), w.pool.Close())
}

// settle waits for a stream. A device that is lost uses nothing.
func settle(s *stream.Stream) error {
	err := s.Device().Do("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(s.Raw()) })
	if s.Device().Err() != nil {
		return nil
	}
	return err
}

// fits reports whether NCCL has a symmetric kernel for x that is right, and the window
// room.
func (w *window) fits(x nccl.Collective) bool {
	in, out := w.extents(x)
	return in > 0 && max(in, out) <= windowBytes && w.comm.Symmetric(x)
}

// extents returns how many bytes an operation reads and writes.
func (w *window) extents(x nccl.Collective) (in, out int) {
	part := bytesOf(x)
	switch x.Kind {
	case nccl.AllGatherKind:
		return part, part * w.comm.Size()
	case nccl.ReduceScatterKind:
		return part * w.comm.Size(), part
	}
	return part, part
}

// lend copies what an operation reads to the window, and returns where NCCL is to read
// and write. Until back the window is this operation's.
func (w *window) lend(s *stream.Stream, x nccl.Collective) (dst, src uint64, err error) {
	if err := s.Captured(&w.order); err != nil {
		return 0, 0, err
	}
	if err := w.order.Begin(s); err != nil {
		return 0, 0, err
	}
	in, _ := w.extents(x)
	src, dst = w.mem.Ptr(), w.mem.Ptr()+windowBytes
	if err := copyBytes(s, src, x.Src, in); err != nil {
		w.order.End()
		return 0, 0, err
	}
	return dst, src, nil
}

// back copies what an operation has written from the window, if NCCL has taken it.
func (w *window) back(s *stream.Stream, x nccl.Collective, taken bool) error {
	defer w.order.End()
	if !taken {
		return nil
	}
	_, out := w.extents(x)
	return copyBytes(s, x.Dst, w.mem.Ptr()+windowBytes, out)
}

func copyBytes(s *stream.Stream, dst, src uint64, n int) error {
	return s.Device().Do("cuMemcpyDtoDAsync", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoDAsync(cudadrv.DevicePtr(dst), cudadrv.DevicePtr(src), uintptr(n), s.Raw())
	})
}
