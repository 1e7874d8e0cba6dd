package nccl

import (
	"context"
	"fmt"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Window is memory of this rank that the other ranks may read and write
// (ncclWindow_t). Collectives on windows take NCCL's symmetric kernels.
type Window struct {
	owner handle.Owner
	comm  *Communicator
	h     *ncclapi.Window // NCCL writes the handle through it
	bytes int
	span  *span // nil unless it is symmetric
}

// RegisterWindow makes the first bytes of b a window (ncclCommWindowRegister, NCCL
// 2.27.3 and newer). All ranks call it, in the same order as other operations, and it
// returns when they have. symmetric promises that all ranks have the same size and
// give the same offsets to collectives (NCCL_WIN_COLL_SYMMETRIC); before NCCL 2.28.7 such
// collectives are refused where its kernels are wrong: all-gathers and reduce-scatters of
// parts that are no multiple of 8 bytes, and several in one Group. The memory is
// Allocator's, and must live until the window is closed, which the end of the
// communicator does too. When ctx ends first RegisterWindow returns the cause, and c
// is to be closed.
func (c *Communicator) RegisterWindow(ctx context.Context, b *memory.Buffer, bytes int, symmetric bool) (*Window, error) {
	const f = ncclapi.FuncCommWindowRegister
	name := f.Name()
	if err := c.usable(name); err != nil {
		return nil, err
	}
	if err := RefuseGroup("nccl: " + name); err != nil {
		return nil, err
	}
	if err := c.needs(f); err != nil {
		return nil, err
	}
	x, err := memory.View[uint8](b, 0, bytes)
	if err != nil {
		return nil, fmt.Errorf("nccl: %s on rank %d of %d: %w", name, c.rank, c.size, err)
	}
	if err := x.Check(name, c.dev); err != nil {
		return nil, fmt.Errorf("nccl: %w", err)
	}
	flags := ncclapi.WindowDefault
	if symmetric {
		flags = ncclapi.WindowCollSymmetric
	}
	w := &Window{comm: c, h: new(ncclapi.Window), bytes: bytes}
	begun := time.Now()
	done := make(chan error, 1)
	go func() {
		if err := c.enter(name); err != nil {
			done <- err
			return
		}
		defer c.mu.Unlock()
		done <- relaxed(c.dev, func() error { return c.fail(name, c.api.CommWindowRegister(*c.h, x.Raw(), uintptr(bytes), w.h, flags)) })
	}()
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
		if symmetric {
			w.span = &span{x.Raw(), x.Raw() + cudadrv.DevicePtr(bytes)}
			c.addSpan(*w.span)
		}
		handle.Init(w, &w.owner, handle.About{Kind: "nccl window", On: c.dev, Bytes: bytes})
		return w, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("nccl: %s on rank %d of %d (%s): gave up after %v, other ranks have not come: %w",
			name, c.rank, c.size, c.dev, time.Since(begun).Round(time.Millisecond), context.Cause(ctx))
	}
}

// NoWindows returns why the loaded NCCL has no windows, or nil. For Chorus's own packages.
func (c *Communicator) NoWindows() error { return c.needs(ncclapi.FuncCommWindowRegister) }

// Bytes returns the size.
func (w *Window) Bytes() int { return w.bytes }

// Ptr returns the device address of the window as NCCL knows it (ncclWinGetUserPtr,
// NCCL 2.29.2 and newer).
func (w *Window) Ptr() (uint64, error) {
	const f = ncclapi.FuncWinGetUserPtr
	if err := w.check(f); err != nil {
		return 0, err
	}
	if err := w.comm.enter(f.Name()); err != nil {
		return 0, err
	}
	defer w.comm.mu.Unlock()
	p, r := w.comm.api.WinGetUserPtr(*w.comm.h, *w.h)
	return uint64(p), w.comm.fail(f.Name(), r)
}

// Close ends the window on this rank (ncclCommWindowDeregister). What uses it must
// have completed. It is idempotent, and does nothing after the end of the
// communicator.
func (w *Window) Close() error {
	const name = "ncclCommWindowDeregister"
	if w == nil || !w.owner.Close() {
		return nil
	}
	c := w.comm
	if w.span != nil {
		defer c.dropSpan(*w.span)
	}
	if err := c.enter(name); err != nil {
		return c.unlessOver(err)
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error { return c.fail(name, c.api.CommWindowDeregister(*c.h, *w.h)) })
}

func (w *Window) check(f ncclapi.Func) error {
	if w == nil || w.owner.Closed() {
		return fmt.Errorf("nccl: %s: the window is closed: %w", f.Name(), device.ErrClosed)
	}
	if err := w.comm.usable(f.Name()); err != nil {
		return err
	}
	return w.comm.needs(f)
}

// Put enqueues the copy of src into the window of rank peer, at a byte offset, and
// then a signal to that rank (ncclPutSignal, NCCL 2.29.2 and newer). w is this rank's
// window of those that were registered together; src lies in a window too. src may be
// changed when s is past the operation; peer sees the copy when its WaitSignal has
// completed.
func Put[T memory.Element](w *Window, s *stream.Stream, src memory.Slice[T], peer, offset int) error {
	const f = ncclapi.FuncPutSignal
	if err := w.check(f); err != nil {
		return err
	}
	if err := w.comm.oneSided(f, s, peer); err != nil {
		return err
	}
	if err := src.Check(f.Name(), w.comm.dev); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	if offset < 0 || src.Bytes() > w.bytes-offset {
		return fmt.Errorf("nccl: %s on rank %d of %d: %d bytes at byte %d: the window has %d", f.Name(), w.comm.rank, w.comm.size, src.Bytes(), offset, w.bytes)
	}
	return w.comm.signal(f, func(h ncclapi.Comm) ncclapi.Result {
		return w.comm.api.PutSignal(src.Raw(), uintptr(src.Bytes()), ncclapi.Uint8, int32(peer), *w.h, uintptr(offset), 0, 0, 0, h, s.Raw())
	})
}

// Signal enqueues a signal to rank peer (ncclSignal, NCCL 2.29.2 and newer).
func Signal(c *Communicator, s *stream.Stream, peer int) error {
	const f = ncclapi.FuncSignal
	if err := c.oneSided(f, s, peer); err != nil {
		return err
	}
	return c.signal(f, func(h ncclapi.Comm) ncclapi.Result { return c.api.Signal(int32(peer), 0, 0, 0, h, s.Raw()) })
}

// WaitSignal makes s wait for signals of rank peer, as many as n, with all that peer
// has put before them (ncclWaitSignal, NCCL 2.29.2 and newer). The host does not wait.
func WaitSignal(c *Communicator, s *stream.Stream, peer, n int) error {
	const f = ncclapi.FuncWaitSignal
	if err := c.oneSided(f, s, peer); err != nil {
		return err
	}
	if n < 1 {
		return fmt.Errorf("nccl: %s on rank %d of %d: %d signals: want one or more", f.Name(), c.rank, c.size, n)
	}
	descs := []ncclapi.SignalDesc{{Ops: int32(n), Peer: int32(peer)}}
	return c.signal(f, func(h ncclapi.Comm) ncclapi.Result { return c.api.WaitSignal(descs, h, s.Raw()) })
}

// oneSided checks what one-sided operations have in common.
func (c *Communicator) oneSided(f ncclapi.Func, s *stream.Stream, peer int) error {
	if err := c.usable(f.Name()); err != nil {
		return err
	}
	if err := c.needs(f); err != nil {
		return err
	}
	if err := s.Check(f.Name(), c.dev); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	if peer < 0 || peer >= c.size {
		return fmt.Errorf("nccl: %s on rank %d of %d: rank %d does not exist", f.Name(), c.rank, c.size, peer)
	}
	if openGroup() != nil {
		return fmt.Errorf("nccl: %s on rank %d of %d: one-sided operations wait for nobody: issue them outside of Group", f.Name(), c.rank, c.size)
	}
	return s.Captured(c)
}

func (c *Communicator) signal(f ncclapi.Func, call func(ncclapi.Comm) ncclapi.Result) error {
	if err := c.enter(f.Name()); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(f.Name(), call(*c.h))
}

// A Registration is memory that NCCL knows for one communicator, beside those of
// RegisterPool.
type Registration struct {
	owner handle.Owner
	comm  *Communicator
	id    ncclapi.RegID
}

// Register lets NCCL know the memory of b, so that collectives may use it without
// copying it first where all ranks have registered what they give (ncclCommRegister).
// It enqueues nothing and is not collective. Close it before b; the end of the
// communicator closes it too.
func (c *Communicator) Register(b *memory.Buffer) (*Registration, error) {
	const f = ncclapi.FuncCommRegister
	if err := c.usable(f.Name()); err != nil {
		return nil, err
	}
	if b == nil {
		return nil, fmt.Errorf("nccl: %s on rank %d of %d: no buffer given", f.Name(), c.rank, c.size)
	}
	x, err := memory.View[uint8](b, 0, max(b.Bytes(), 0))
	if err == nil {
		err = x.Check(f.Name(), c.dev)
	}
	if err != nil {
		return nil, fmt.Errorf("nccl: %s on rank %d of %d: %w", f.Name(), c.rank, c.size, err)
	}
	if err := c.enter(f.Name()); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	r := &Registration{comm: c}
	err = relaxed(c.dev, func() error {
		var res ncclapi.Result
		r.id, res = c.api.CommRegister(*c.h, cudadrv.DevicePtr(x.Ptr()), uintptr(x.Bytes()))
		return c.fail(f.Name(), res)
	})
	if err != nil {
		return nil, err
	}
	handle.Init(r, &r.owner, handle.About{Kind: "nccl registration", On: c.dev, Bytes: x.Bytes()})
	return r, nil
}

// Close lets NCCL forget the memory (ncclCommDeregister). What uses it must have
// completed. It is idempotent, and does nothing after the end of the communicator.
func (r *Registration) Close() error {
	const name = "ncclCommDeregister"
	if r == nil || !r.owner.Close() {
		return nil
	}
	c := r.comm
	if err := c.enter(name); err != nil {
		return c.unlessOver(err)
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error { return c.fail(name, c.api.CommDeregister(*c.h, r.id)) })
}
