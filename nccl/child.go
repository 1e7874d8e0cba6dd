package nccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"weak"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
)

// ErrRevoked is the error of operations after Revoke. Split, Shrink and Grow still work.
var ErrRevoked = errors.New("the communicator was revoked")

// Split creates one communicator for each color, with the ranks ordered by key
// and then by rank (ncclCommSplit). All ranks of c must call it; for a negative
// color it returns nil and a nil error. Colors and keys have 32 bits, as in
// NCCL. Split does not affect pending operations or c, which may be closed
// before or after its children.
//
// A nil cfg means the configuration of c. If ctx ends first, Split returns the cause; the
// attempt continues in the background and its result is aborted.
func (c *Communicator) Split(ctx context.Context, color, key int, cfg *Config) (*Communicator, error) {
	if c != nil && (color > math.MaxInt32 || key < math.MinInt32 || key > math.MaxInt32) {
		return nil, c.errorf(ncclapi.FuncCommSplit.Name(), "color %d, key %d: want a color of at most %d, and a key of 32 bits", color, key, math.MaxInt32)
	}
	return c.child(ctx, ncclapi.FuncCommSplit, cfg, func(nth int) string { return fmt.Sprintf("split%d.%d", nth, color) },
		func(out *ncclapi.Comm, raw *ncclapi.Config) ncclapi.Result {
			return c.api.CommSplit(*c.h, int32(max(color, -1)), int32(key), out, raw)
		})
}

// A ShrinkMode says what happens to the pending operations of the parent communicator.
type ShrinkMode int

// The modes of Shrink.
const (
	// ShrinkDefault requires a working communicator without pending operations
	// (NCCL_SHRINK_DEFAULT).
	ShrinkDefault = ShrinkMode(ncclapi.ShrinkDefault)
	// ShrinkAbort aborts pending operations first. It also works if a rank was lost or the
	// communicator has failed, which requires Config.Recoverable (NCCL_SHRINK_ABORT).
	ShrinkAbort = ShrinkMode(ncclapi.ShrinkAbort)
)

// Shrink creates a communicator of the ranks that are not excluded, in their
// order (ncclCommShrink, NCCL 2.27.3 and newer). The remaining ranks must call
// it with the same list; the excluded ranks must not. The caller closes c
// afterwards. The arguments cfg and ctx are as in Split.
func (c *Communicator) Shrink(ctx context.Context, mode ShrinkMode, exclude []int, cfg *Config) (*Communicator, error) {
	const f = ncclapi.FuncCommShrink
	list := make([]int32, len(exclude))
	for i, rank := range exclude {
		if c != nil && (rank < 0 || rank >= c.size || rank == c.rank) {
			return nil, c.errorf(f.Name(), "rank %d cannot be excluded: want other ranks than this one", rank)
		}
		list[i] = int32(rank)
	}
	if mode == ShrinkAbort && c != nil && !c.isClosed() {
		c.allowChildren()
		c.observeBeforeAbort()
		c.recordClosing("aborted the communicator's operations by Shrink", true)
	}
	return c.child(ctx, f, cfg, func(nth int) string { return fmt.Sprintf("shrink%d%v", nth, exclude) },
		func(out *ncclapi.Comm, raw *ncclapi.Config) ncclapi.Result {
			return c.api.CommShrink(*c.h, list, out, raw, int32(mode))
		})
}

// allowChildren lets a failed communicator that was not aborted be a parent.
func (c *Communicator) allowChildren() {
	if f := c.failed.Load(); f != nil && c.recoverable {
		<-f.done
		c.parentAfterFailure.Store(true)
	}
}

// GrowID returns the id that new ranks need to join c (ncclCommGetUniqueId, NCCL 2.29.2 and
// newer). One rank calls it, sends it to the new ranks, and passes it to Grow.
func (c *Communicator) GrowID() (UniqueID, error) {
	const f = ncclapi.FuncCommGetUniqueID
	if err := c.checkParent(f.Name()); err != nil {
		return UniqueID{}, err
	}
	if err := c.needs(f); err != nil {
		return UniqueID{}, err
	}
	var id ncclapi.UniqueID
	err := relaxed(c.dev, func() error {
		var r ncclapi.Result
		id, r = c.api.CommGetUniqueID(*c.h)
		return c.check(f.Name(), r)
	})
	return UniqueID(id), err
}

// Grow creates a communicator with size ranks (ncclCommGrow, NCCL 2.29.2 and
// newer). All ranks of c must call it and keep their numbers; the new ranks
// call JoinGrown. id is the result of GrowID on the rank that called it, and
// nil on the other ranks of c. c must have no pending operations, and the
// caller closes it afterwards. The arguments cfg and ctx are as in Split.
func (c *Communicator) Grow(ctx context.Context, size int, id *UniqueID, cfg *Config) (*Communicator, error) {
	const f = ncclapi.FuncCommGrow
	if c != nil && size <= c.size {
		return nil, c.errorf(f.Name(), "to %d ranks: want more", size)
	}
	return c.child(ctx, f, cfg, func(nth int) string { return fmt.Sprintf("grow%d", nth) },
		func(out *ncclapi.Comm, raw *ncclapi.Config) ncclapi.Result {
			return c.api.CommGrow(*c.h, int32(size), (*ncclapi.UniqueID)(id), -1, out, raw)
		})
}

// JoinGrown joins with dev as a new rank of a communicator that other ranks enlarge with Grow
// (ncclCommGrow). rank is from the old number of ranks to size-1. It returns when all
// ranks have joined; ctx is as in NewCommunicator.
func JoinGrown(ctx context.Context, dev *device.Device, id UniqueID, rank, size int, cfg *Config) (*Communicator, error) {
	const f = ncclapi.FuncCommGrow
	if err := checkRank(dev, rank, size); err != nil {
		return nil, err
	}
	c, raw, err := newUnconnected(dev, rank, size, cfg)
	if err != nil {
		return nil, err
	}
	if err := c.needs(f); err != nil {
		return nil, err
	}
	return c.connect(ctx, f.Name(), string(id[:]), func() ncclapi.Result {
		return c.api.CommGrow(0, int32(size), (*ncclapi.UniqueID)(&id), int32(rank), c.h, raw)
	})
}

// child creates a communicator from c by one call of NCCL. If cfg has no name, the child
// gets a name in traces that is the same on all its ranks: c's name and the number of the
// child.
func (c *Communicator) child(ctx context.Context, f ncclapi.Func, cfg *Config, label func(nth int) string,
	create func(out *ncclapi.Comm, raw *ncclapi.Config) ncclapi.Result) (*Communicator, error) {
	name := f.Name()
	if err := c.checkParent(name); err != nil {
		return nil, err
	}
	if err := c.needs(f); err != nil {
		return nil, err
	}
	inherited := cfg == nil
	if inherited {
		cfg = c.settings
	}
	k, raw, err := newUnconnected(c.dev, c.rank, c.size, cfg)
	if err != nil {
		return nil, err
	}
	if c.shares(f) && c.flag.by.Load() == nil {
		k.flag = c.flag
	}
	if inherited {
		raw = nil // NCCL takes the parent's
	}
	// A call that hangs in NCCL holds mu; the functions called below end it.
	if poll.UntilNoLaterThan(100*time.Millisecond, c.mu.TryLock) {
		defer c.mu.Unlock()
	}
	if err := c.checkParent(name); err != nil {
		return nil, err
	}
	c.children++
	childName := label(c.children)
	if inherited || cfg.Name == "" {
		c.nameChild(k, raw, childName)
	}
	return k.connect(ctx, name, c.localRanks.key+"/"+childName, func() ncclapi.Result {
		return create(k.h, raw)
	})
}

// nameChild sets the name of a child in traces and in NCCL's configuration, if it has its own.
func (c *Communicator) nameChild(k *Communicator, raw *ncclapi.Config, childName string) {
	k.rec.Name = strings.TrimPrefix(c.rec.Name+"-"+childName, "-")
	if raw != nil && c.version >= sinceName {
		raw.CommName = cstring(k.rec.Name)
	}
}

// shares reports whether children made by f share NCCL's resources and abort flag with c.
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

// checkParent returns an error if c cannot have children.
func (c *Communicator) checkParent(name string) error {
	err := c.checkUsable(name)
	if err == nil || c != nil && !c.isClosed() && (errors.Is(err, ErrRevoked) || c.parentAfterFailure.Load()) {
		return nil
	}
	return err
}

// finishInit registers a communicator that NCCL has connected, once its rank is known.
func (c *Communicator) finishInit(key string) error {
	for _, ask := range []struct {
		name string
		get  func(ncclapi.Comm) (int32, ncclapi.Result)
		to   *int
	}{
		{"ncclCommCount", c.api.CommCount, &c.size},
		{"ncclCommUserRank", c.api.CommUserRank, &c.rank},
	} {
		v, r := ask.get(*c.h)
		if err := c.check(ask.name, r); err != nil {
			return err
		}
		*ask.to = int(v)
	}
	if err := c.openNaNCheck(); err != nil {
		return err
	}
	c.rec.Rank, c.rec.Size = c.rank, c.size
	if c.size == 1 {
		c.rec.SetUnordered()
	}
	c.enterLocalRanks(key)
	c.account()
	handle.Init(c, &c.owner, handle.About{Kind: "nccl communicator", On: c.dev})
	return nil
}

// Revoke aborts pending operations on this rank and keeps the communicator for Split,
// Shrink and Grow (ncclCommRevoke, NCCL 2.28.7 and newer); outputs of unfinished
// operations are undefined. Later operations fail with an error that matches ErrRevoked.
// Other ranks are not informed: they must call Revoke too. It may be called by any
// goroutine, also while another one is blocked in an operation.
func (c *Communicator) Revoke() error {
	const name = "ncclCommRevoke"
	if err := c.checkUsable(name); err != nil {
		return err
	}
	if err := c.needs(ncclapi.FuncCommRevoke); err != nil {
		return err
	}
	c.observeBeforeAbort()
	done := make(chan struct{})
	close(done)
	why := fmt.Errorf("nccl: rank %d of %d (%s): %w", c.rank, c.size, c.dev, ErrRevoked)
	if !c.failed.CompareAndSwap(nil, &failure{first: why, err: why, done: done}) {
		return c.checkUsable(name)
	}
	c.rec.SetFinalState(collective.Aborted)
	c.flag.by.CompareAndSwap(nil, &closing{how: "revoked a communicator", at: time.Now()})
	c.life.RLock()
	defer c.life.RUnlock()
	if c.isClosed() {
		return c.errClosed(name)
	}
	return relaxed(c.dev, func() error { return c.check(name, c.api.CommRevoke(*c.h, ncclapi.RevokeDefault)) })
}

// Suspend frees the memory that NCCL has allocated for c, so that operations
// fail until Resume (ncclCommSuspend, NCCL 2.29.7 and newer). c must have no
// pending operations, and all ranks must call it.
func (c *Communicator) Suspend() error {
	return c.manage(ncclapi.FuncCommSuspend, func() ncclapi.Result {
		return c.api.CommSuspend(*c.h, ncclapi.SuspendMem)
	})
}

// Resume allocates the memory again after Suspend (ncclCommResume). All ranks must call
// it.
func (c *Communicator) Resume() error {
	return c.manage(ncclapi.FuncCommResume, func() ncclapi.Result { return c.api.CommResume(*c.h) })
}

// manage calls NCCL once to change the communicator.
func (c *Communicator) manage(f ncclapi.Func, call func() ncclapi.Result) error {
	name := f.Name()
	if err := c.checkUsable(name); err != nil {
		return err
	}
	if err := c.needs(f); err != nil {
		return err
	}
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error { return c.check(name, call()) })
}

// needs returns an error if the loaded NCCL lacks a function.
func (c *Communicator) needs(f ncclapi.Func) error {
	if c.api.Has(f) {
		return nil
	}
	return needs(f.Name(), f.Since(), c.version)
}

// A localRanks is the set of ranks of one communicator in this process. Only these ranks can
// be compared without communication.
type localRanks struct {
	key        string
	mismatches collective.MismatchTable // compares the operations that the ranks issue

	mu      sync.Mutex
	members []*member // by rank
}

// A member is one rank of a localRanks. It does not keep the communicator alive.
type member struct {
	*collective.Recorder
	comm weak.Pointer[Communicator]
}

var localRankSets struct {
	mu    sync.Mutex
	byKey map[string]*localRanks
}

// enterLocalRanks adds the rank to the localRanks of the communicators made from the same id.
func (c *Communicator) enterLocalRanks(key string) {
	registerStatus()
	localRankSets.mu.Lock()
	defer localRankSets.mu.Unlock()
	q := localRankSets.byKey[key]
	if q == nil {
		q = &localRanks{key: key}
		if localRankSets.byKey == nil {
			localRankSets.byKey = map[string]*localRanks{}
		}
		localRankSets.byKey[key] = q
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.members = append(q.members, &member{c.rec, weak.Make(c)})
	slices.SortFunc(q.members, func(a, b *member) int { return cmp.Compare(a.Rank, b.Rank) })
	q.mismatches.Ranks(len(q.members))
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // hashed because the key itself is a secret
	c.rec.Group = strconv.FormatUint(h.Sum64(), 16)
	c.localRanks = q
}

// leaveLocalRanks removes the rank, and with the last rank the localRanks.
func (c *Communicator) leaveLocalRanks() {
	q := c.localRanks
	if q == nil {
		return // it was never added
	}
	localRankSets.mu.Lock()
	defer localRankSets.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.members = slices.DeleteFunc(q.members, func(m *member) bool { return m.Recorder == c.rec })
	if len(q.members) == 0 && localRankSets.byKey[q.key] == q {
		delete(localRankSets.byKey, q.key)
	}
}

// others returns the other ranks in this process.
func (c *Communicator) others() []*member {
	c.localRanks.mu.Lock()
	defer c.localRanks.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.localRanks.members), func(m *member) bool { return m.Recorder == c.rec })
}

// countOthers returns the number of others, without allocating.
func (c *Communicator) countOthers() (n int) {
	c.localRanks.mu.Lock()
	defer c.localRanks.mu.Unlock()
	for _, m := range c.localRanks.members {
		if m.Recorder != c.rec {
			n++
		}
	}
	return n
}

// recorders returns the flight recorders of ranks.
func recorders(list []*member) []*collective.Recorder {
	rs := make([]*collective.Recorder, len(list))
	for i, m := range list {
		rs[i] = m.Recorder
	}
	return rs
}

// liveRecorders returns the recorders of all communicators that are not closed, by age.
func liveRecorders() []*collective.Recorder { return recorders(liveMembers()) }

func liveMembers() (list []*member) {
	localRankSets.mu.Lock()
	defer localRankSets.mu.Unlock()
	for _, q := range localRankSets.byKey {
		q.mu.Lock()
		list = append(list, q.members...)
		q.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b *member) int { return cmp.Compare(a.Number, b.Number) })
	return list
}

// setSignature computes a number that differs between operations that are incompatible.
func (o *operation) setSignature() {
	h := uint64(o.Kind)<<32 | uint64(uint32(o.Root))
	mix := func(v uint64) { h = (h ^ v) * 0x9e3779b97f4a7c15; h ^= h >> 29 }
	mix(uint64(o.wire)<<32 | uint64(uint32(min(o.redop, ncclapi.Avg+1)))) // the factors may differ
	mix(uint64(o.Service) | uint64(o.Format)<<8)
	if o.Detail != 0 {
		mix(uint64(o.Detail)<<32 | uint64(math.Float32bits(o.Eps)))
	}
	if o.Kind != collective.AllToAllV && !o.Kind.OfExperts() {
		mix(uint64(o.N * o.unit))
		for _, n := range o.Sends {
			mix(uint64(n))
		}
	}
	o.Signature = uint32(h >> 32)
}
