package nccl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
)

// ErrRevoked is what Revoke leaves: operations fail with it, while Split, Shrink and
// Grow still make communicators from what there is.
var ErrRevoked = errors.New("the communicator was revoked")

// Split makes communicators of the ranks with the same color, ordered by key and
// then by rank (ncclCommSplit). All ranks of c call it. A negative color takes part
// in none of them: it returns nil and no error. Colors and keys have 32 bits, as NCCL's.
// Operations in flight go on, and c stays as it is: it may be closed before its children and
// after them.
//
// A nil cfg is c's own. When ctx ends first, Split returns the cause, and what it
// began goes on by itself and is aborted when it ends.
func (c *Communicator) Split(ctx context.Context, color, key int, cfg *Config) (*Communicator, error) {
	if c != nil && (color > math.MaxInt32 || key < math.MinInt32 || key > math.MaxInt32) {
		return nil, fmt.Errorf("nccl: %s on rank %d of %d: color %d, key %d: want a color of at most %d, and a key of 32 bits",
			ncclapi.FuncCommSplit.Name(), c.rank, c.size, color, key, math.MaxInt32)
	}
	return c.child(ctx, ncclapi.FuncCommSplit, cfg, func(nth int) string { return fmt.Sprintf("split%d.%d", nth, color) },
		func(out *ncclapi.Comm, raw *ncclapi.Config) ncclapi.Result {
			return c.api.CommSplit(*c.h, int32(max(color, -1)), int32(key), out, raw)
		})
}

// ShrinkMode says what becomes of the operations in flight on the communicator from
// which Shrink makes a smaller one.
type ShrinkMode int

// The modes of Shrink.
const (
	// ShrinkDefault is for a communicator that works and has nothing in flight
	// (NCCL_SHRINK_DEFAULT).
	ShrinkDefault = ShrinkMode(ncclapi.ShrinkDefault)
	// ShrinkAbort ends what is in flight first, also where a rank was lost or the
	// communicator has failed; that takes Config.Recoverable (NCCL_SHRINK_ABORT).
	ShrinkAbort = ShrinkMode(ncclapi.ShrinkAbort)
)

// Shrink makes a communicator of the ranks that are not excluded, in their order
// (ncclCommShrink, NCCL 2.27.3 and newer). They call it, with the same list; the
// excluded ones don't. Close c afterwards. cfg and ctx are as in Split.
func (c *Communicator) Shrink(ctx context.Context, mode ShrinkMode, exclude []int, cfg *Config) (*Communicator, error) {
	const f = ncclapi.FuncCommShrink
	list := make([]int32, len(exclude))
	for i, rank := range exclude {
		if c != nil && (rank < 0 || rank >= c.size || rank == c.rank) {
			return nil, fmt.Errorf("nccl: %s on rank %d of %d: rank %d cannot be excluded: want other ranks than this one", f.Name(), c.rank, c.size, rank)
		}
		list[i] = int32(rank)
	}
	if mode == ShrinkAbort && c != nil && !c.over() {
		c.forgive()
		c.lastLook()
		c.endNow("aborted the communicator's operations by Shrink", true)
	}
	return c.child(ctx, f, cfg, func(nth int) string { return fmt.Sprintf("shrink%d%v", nth, exclude) },
		func(out *ncclapi.Comm, raw *ncclapi.Config) ncclapi.Result {
			return c.api.CommShrink(*c.h, list, out, raw, int32(mode))
		})
}

// forgive lets a communicator that has failed and was not aborted be a parent.
func (c *Communicator) forgive() {
	if f := c.failed.Load(); f != nil && c.recoverable {
		<-f.settled
		c.forgiven.Store(true)
	}
}

// GrowID makes the id with which new ranks join c (ncclCommGetUniqueId, NCCL 2.29.2
// and newer). One rank calls it, gives it to the new ranks, and passes it to Grow.
func (c *Communicator) GrowID() (UniqueID, error) {
	const f = ncclapi.FuncCommGetUniqueID
	if err := c.parent(f.Name()); err != nil {
		return UniqueID{}, err
	}
	if err := c.needs(f); err != nil {
		return UniqueID{}, err
	}
	var id ncclapi.UniqueID
	err := relaxed(c.dev, func() error {
		var r ncclapi.Result
		id, r = c.api.CommGetUniqueID(*c.h)
		return c.fail(f.Name(), r)
	})
	return UniqueID(id), err
}

// Grow makes a communicator of size ranks: those of c, which keep their numbers and
// all call it, and new ones, which call JoinGrown (ncclCommGrow, NCCL 2.29.2 and
// newer). id is GrowID's on the rank that made it, and nil on the others of c. c has
// nothing in flight; close it afterwards. cfg and ctx are as in Split.
func (c *Communicator) Grow(ctx context.Context, size int, id *UniqueID, cfg *Config) (*Communicator, error) {
	const f = ncclapi.FuncCommGrow
	if c != nil && size <= c.size {
		return nil, fmt.Errorf("nccl: %s on rank %d of %d: to %d ranks: want more", f.Name(), c.rank, c.size, size)
	}
	return c.child(ctx, f, cfg, func(nth int) string { return fmt.Sprintf("grow%d", nth) },
		func(out *ncclapi.Comm, raw *ncclapi.Config) ncclapi.Result {
			return c.api.CommGrow(*c.h, int32(size), (*ncclapi.UniqueID)(id), -1, out, raw)
		})
}

// JoinGrown makes dev a new rank of a communicator that others enlarge with Grow
// (ncclCommGrow). rank is from the number of the old ranks up to size-1. It returns
// when all ranks are there; ctx is as in NewCommunicator.
func JoinGrown(ctx context.Context, dev *device.Device, id UniqueID, rank, size int, cfg *Config) (*Communicator, error) {
	const f = ncclapi.FuncCommGrow
	if err := checkRank(dev, rank, size); err != nil {
		return nil, err
	}
	c, raw, err := prepare(dev, rank, size, cfg)
	if err != nil {
		return nil, err
	}
	if err := c.needs(f); err != nil {
		return nil, err
	}
	return c.start(ctx, f.Name(), string(id[:]), func() ncclapi.Result {
		return c.api.CommGrow(0, int32(size), (*ncclapi.UniqueID)(&id), int32(rank), c.h, raw)
	})
}

// child makes a communicator from c by one call of NCCL. All ranks of the child get
// the same name for c's nth child, which is its own in traces where cfg has none.
func (c *Communicator) child(ctx context.Context, f ncclapi.Func, cfg *Config, label func(nth int) string,
	create func(out *ncclapi.Comm, raw *ncclapi.Config) ncclapi.Result) (*Communicator, error) {
	name := f.Name()
	if err := c.parent(name); err != nil {
		return nil, err
	}
	if err := RefuseGroup("nccl: " + name); err != nil {
		return nil, err
	}
	if err := c.needs(f); err != nil {
		return nil, err
	}
	inherited := cfg == nil
	if inherited {
		cfg = c.settings
	}
	k, raw, err := prepare(c.dev, c.rank, c.size, cfg)
	if err != nil {
		return nil, err
	}
	if c.shares(f) && c.flag.by.Load() == nil {
		k.flag = c.flag
	}
	if inherited {
		raw = nil // NCCL takes the parent's
	}
	// What hangs in NCCL is ended by what is about to be called.
	if poll.UntilNoLaterThan(100*time.Millisecond, c.mu.TryLock) {
		defer c.mu.Unlock()
	}
	if err := c.parent(name); err != nil {
		return nil, err
	}
	c.children++
	said := label(c.children)
	if inherited || cfg.Name == "" {
		k.rec.name = strings.TrimPrefix(c.rec.name+"-"+said, "-")
		if raw != nil && c.version >= sinceName {
			raw.CommName = cstring(k.rec.name)
		}
	}
	return k.start(ctx, name, c.clique.key+"/"+said, func() ncclapi.Result {
		return create(k.h, raw)
	})
}

// shares reports whether children that f makes have NCCL's resources of c, and its abort flag.
func (c *Communicator) shares(f ncclapi.Func) bool {
	s := c.settings
	switch {
	case s == nil:
		return false
	case f == ncclapi.FuncCommSplit:
		return s.SplitShare != nil && *s.SplitShare
	case f == ncclapi.FuncCommShrink:
		return s.ShrinkShare != nil && *s.ShrinkShare
	}
	return false
}

// parent says why nothing can be made from c.
func (c *Communicator) parent(name string) error {
	err := c.usable(name)
	if err == nil || c != nil && !c.over() && (errors.Is(err, ErrRevoked) || c.forgiven.Load()) {
		return nil
	}
	return err
}

// join makes a communicator that NCCL has connected one of this process, once its
// rank is known.
func (c *Communicator) join(key string) error {
	for _, ask := range []struct {
		name string
		get  func(ncclapi.Comm) (int32, ncclapi.Result)
		to   *int
	}{
		{"ncclCommCount", c.api.CommCount, &c.size},
		{"ncclCommUserRank", c.api.CommUserRank, &c.rank},
	} {
		v, r := ask.get(*c.h)
		if err := c.fail(ask.name, r); err != nil {
			return err
		}
		*ask.to = int(v)
	}
	c.rec.rank, c.rec.size = c.rank, c.size
	if c.size == 1 {
		c.rec.apart()
	}
	c.enterClique(key)
	handle.Init(c, &c.owner, handle.About{Kind: "nccl communicator", On: c.dev})
	return nil
}

// Revoke ends what is in flight on this rank and keeps the communicator for Split,
// Shrink and Grow (ncclCommRevoke, NCCL 2.28.7 and newer); outputs of unfinished
// operations are undefined. Later operations fail with an error that matches
// ErrRevoked. Other ranks notice nothing: they call it too. It may be called by any
// goroutine, also while another one is blocked in an operation.
func (c *Communicator) Revoke() error {
	const name = "ncclCommRevoke"
	if err := c.usable(name); err != nil {
		return err
	}
	if err := c.needs(ncclapi.FuncCommRevoke); err != nil {
		return err
	}
	c.lastLook()
	settled := make(chan struct{})
	close(settled)
	why := fmt.Errorf("nccl: rank %d of %d (%s): %w", c.rank, c.size, c.dev, ErrRevoked)
	if !c.failed.CompareAndSwap(nil, &failure{first: why, err: why, settled: settled}) {
		return c.usable(name)
	}
	c.rec.cut(Aborted)
	c.flag.by.CompareAndSwap(nil, &closing{how: "revoked a communicator", at: time.Now()})
	c.life.RLock()
	defer c.life.RUnlock()
	if c.over() {
		return c.closed(name)
	}
	return relaxed(c.dev, func() error { return c.fail(name, c.api.CommRevoke(*c.h, ncclapi.RevokeDefault)) })
}

// Suspend gives back what memory NCCL has for c, until Resume (ncclCommSuspend, NCCL
// 2.29.7 and newer). Nothing is in flight, and all ranks call it; operations fail
// meanwhile.
func (c *Communicator) Suspend() error {
	return c.manage(ncclapi.FuncCommSuspend, func() ncclapi.Result {
		return c.api.CommSuspend(*c.h, ncclapi.SuspendMem)
	})
}

// Resume takes memory again after Suspend (ncclCommResume). All ranks call it.
func (c *Communicator) Resume() error {
	return c.manage(ncclapi.FuncCommResume, func() ncclapi.Result { return c.api.CommResume(*c.h) })
}

// manage makes one call that changes the communicator.
func (c *Communicator) manage(f ncclapi.Func, call func() ncclapi.Result) error {
	name := f.Name()
	if err := c.usable(name); err != nil {
		return err
	}
	if err := c.needs(f); err != nil {
		return err
	}
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error { return c.fail(name, call()) })
}

// needs is the error of a function that the loaded NCCL lacks.
func (c *Communicator) needs(f ncclapi.Func) error {
	if c.api.Has(f) {
		return nil
	}
	return needs(f.Name(), f.Since(), c.version)
}
