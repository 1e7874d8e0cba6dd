package nccl

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/goroutine"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/stream"
)

// Group makes one of all operations that fn issues (ncclGroupStart,
// ncclGroupEnd): they start together, so that several ranks in one process, or
// sends and receives, cannot wait for each other. c is any of the communicators
// that take part.
//
// Operations are checked when they are issued and enqueued when fn has returned,
// all of them or none: none if fn returns an error or panics, or if an operation was
// refused, whose error is then Group's also where fn forgets it, or if one of the ranks has
// failed, or a buffer was closed, by then. Where there is one for each of
// several ranks of one communicator, threads that wait for that may enqueue them at
// the same time (CHORUS_LAUNCH_PATIENCE); what NCCL itself refuses for one rank only
// then fails the communicators of the others, as it does where Chorus's own kernels have
// taken a part of the group before. Where NCCL itself fails in the group, all its
// communicators do. The group belongs to the goroutine; what
// fn starts on other goroutines is not part of it.
// Groups nest; the outermost one enqueues, and nothing if an inner one failed or
// panicked.
//
// Within fn nothing of the group runs yet. So what waits for operations or comes after
// them is refused there with a *GroupError: Wait, Split, Shrink, Grow, RegisterWindow,
// Close and Shutdown of a communicator that has operations in the group, and the same in
// package comm. What other packages enqueue within fn, such as copies, comes before the
// operations. A capture of a graph begins before the group and ends after it, and has
// the streams of all its operations, or the group is refused.
//
// The operations of a group run side by side: what one of a rank writes must not overlap with
// what another one reads or writes there. It is refused where Send or Recv is one of the two.
//
// Sends and receives between two ranks that are in one group are for each other, in the
// order in which they were issued: they are refused if their lengths or types differ.
func Group(c *Communicator, fn func() error) error {
	return inGroup(c, fn, func(g *group) error { return g.enqueue(c) })
}

// A group is what a goroutine has issued within Group.
type group struct {
	of      atomic.Uintptr // the goroutine; 0 is none
	depth   int
	failed  error // of an inner group, or of an operation that was refused
	ops     []operation
	counts  []int           // what their sends and recvs refer to
	comms   []*Communicator // of the operations, once each, in the order of their locks
	errs    []error         // of the operations, where launchers enqueue them
	ends    []end           // of the transfers among its ranks
	extents []extent        // of its transfers, by address
}

// groups are those of all goroutines: each goroutine has its part of them, so that
// ranks do not wait for each other. first is that of the goroutine which came first, and
// the others that are open at that time are in a list.
var groups [64]struct {
	first group
	more  atomic.Int32 // how many are in the list, for a look without the lock
	mu    sync.Mutex
	list  []*group
	spare []*group // that have been in the list
	_     [64]byte // a cache line between two
}

// openGroup returns the calling goroutine's group, or nil.
func openGroup() *group {
	me := goroutine.ID()
	part := &groups[place(me)]
	if part.first.of.Load() == me {
		return &part.first
	}
	if part.more.Load() == 0 {
		return nil
	}
	return listedGroup(me)
}

// listedGroup is openGroup of a goroutine that did not come first.
func listedGroup(me uintptr) *group {
	part := &groups[place(me)]
	part.mu.Lock()
	defer part.mu.Unlock()
	for _, g := range part.list {
		if g.of.Load() == me {
			return g
		}
	}
	return nil
}

// place is which part of the groups a goroutine has.
func place(goroutine uintptr) int {
	return int(uint64(goroutine) * 0x9e3779b97f4a7c15 >> 58)
}

// inGroup runs fn in a group, and end when it is the outermost one and fn has
// returned without an error.
func inGroup(c *Communicator, fn func() error, end func(g *group) error) error {
	if err := c.usable("ncclGroupStart"); err != nil {
		return err
	}
	if fn == nil {
		return fmt.Errorf("nccl: ncclGroupStart on rank %d of %d: no function given: %w", c.rank, c.size, ErrorInvalidArgument)
	}
	g := openGroup()
	if g == nil {
		g = beginGroup()
	}
	g.depth++
	returned := false
	// Also when fn panics: then nothing is enqueued, whoever recovers.
	defer func() {
		if !returned {
			g.failed = fmt.Errorf("nccl: ncclGroupEnd: a group within this one panicked or ended its goroutine: nothing is enqueued")
		}
		g.leave()
	}()
	err := fn()
	returned = true
	if err != nil {
		g.failed = err
		return err
	}
	if g.depth > 1 || g.failed != nil {
		return g.failed
	}
	return end(g)
}

// spoil makes the group that the goroutine has open fail because an operation was refused:
// also when fn forgets the error, since the other ranks would wait for that operation.
func spoil(refused error) error {
	if g := openGroup(); g != nil && g.failed == nil {
		g.failed = refused
	}
	return refused
}

func beginGroup() *group {
	me := goroutine.ID()
	part := &groups[place(me)]
	if part.first.of.CompareAndSwap(0, me) {
		return &part.first
	}
	part.mu.Lock()
	defer part.mu.Unlock()
	var g *group
	if n := len(part.spare); n > 0 {
		g, part.spare = part.spare[n-1], part.spare[:n-1]
	} else {
		g = &group{}
	}
	g.of.Store(me)
	part.list = append(part.list, g)
	part.more.Add(1)
	return g
}

func (g *group) leave() {
	if g.depth--; g.depth > 0 {
		return
	}
	g.empty()
	part := &groups[place(g.of.Load())]
	if g == &part.first {
		g.of.Store(0) // from here on it may be another goroutine's
		return
	}
	part.mu.Lock()
	defer part.mu.Unlock()
	part.list = slices.DeleteFunc(part.list, func(o *group) bool { return o == g })
	part.spare = append(part.spare, g)
	part.more.Add(-1)
}

// empty forgets what the group had.
func (g *group) empty() {
	clear(g.ops)
	clear(g.comms)
	if len(g.ends) > 0 {
		clear(g.ends)
	}
	if len(g.errs) > 0 {
		clear(g.errs)
	}
	g.ops, g.counts, g.comms, g.ends, g.errs, g.failed = g.ops[:0], g.counts[:0], g.comms[:0], g.ends[:0], g.errs[:0], nil
	g.extents = g.extents[:0]
}

// add takes an operation that was checked into the group.
func (g *group) add(o *operation) (err error) {
	if stream.AnyCapture() {
		if o.capture, err = o.stream.CaptureID(); err != nil {
			return err
		}
	}
	g.ops = append(g.ops, *o)
	if o.sends == nil {
		return nil
	}
	// The caller may change its numbers before the group ends.
	at := &g.ops[len(g.ops)-1]
	at.sends, at.recvs = g.keep(o.sends), g.keep(o.recvs)
	return nil
}

func (g *group) keep(counts []int) []int {
	i := len(g.counts)
	g.counts = append(g.counts, counts...)
	return g.counts[i:len(g.counts):len(g.counts)]
}

// enqueue gives the group to NCCL. c is the communicator in whose name it began.
func (g *group) enqueue(c *Communicator) error {
	if len(g.ops) == 0 {
		return nil
	}
	if err := g.carryOut(c); err != nil {
		return g.ops[0].comm.known(err)
	}
	return nil
}

// carryOut enters the communicators for the group.
func (g *group) carryOut(c *Communicator) error {
	if err := g.enter(); err != nil {
		return err
	}
	defer g.exit()
	substituted, t := g.substituted(), now()
	for i := range g.ops {
		if err := g.ops[i].schedule(t); err != nil {
			g.refused(i)
			return err
		}
	}
	switch {
	case g.whole():
		return g.atOnce()
	case g.apart() && launchers.Try(len(g.ops), g):
		return g.outcome()
	case substituted:
		return g.inTurn()
	}
	given, err := g.give(c, ncclapi.API.GroupEnd)
	if err != nil || g.lent() {
		return g.settle(given, err)
	}
	g.took()
	return nil
}

// lent reports whether a Substitute has lent buffers for an operation.
func (g *group) lent() bool {
	for i := range g.ops {
		if g.ops[i].lent {
			return true
		}
	}
	return false
}

// took notes that NCCL has taken the group.
func (g *group) took() {
	for i := range g.ops {
		if !g.leads(i) {
			g.ops[i].comm.rec.took(&g.ops[i])
		}
	}
}

// settle ends what was lent for the operations, of which the first were given before the
// group failed, if it did, and notes what became of each.
func (g *group) settle(given int, err error) error {
	g.expect()
	for i := range g.ops {
		if err != nil && (i >= given || g.ops[i].service != Instead) {
			g.errs[i] = err
		}
	}
	for i := range g.ops {
		if err := g.ops[i].settle(g.errs[i] == nil); g.errs[i] == nil {
			g.errs[i] = err
		}
	}
	return g.outcome()
}

// refused takes the first n operations back.
func (g *group) refused(n int) {
	for i := n - 1; i >= 0; i-- {
		g.ops[i].refused()
	}
}

// give issues the operations between the start of a group of NCCL, which that keeps
// on the OS thread, and its end. What NCCL refuses makes it drop all that are its, but of
// the first given ones those of a Substitute are enqueued.
func (g *group) give(c *Communicator, end func(ncclapi.API) ncclapi.Result) (given int, err error) {
	if !g.ops[0].captured && !stream.AnyCapture() {
		return g.issue(c, end)
	}
	never := relaxed(c.dev, func() error {
		given, err = g.issue(c, end)
		return nil
	})
	return given, errors.Join(never, err)
}

// issue is give in the mode of captures that the thread has.
func (g *group) issue(c *Communicator, end func(ncclapi.API) ncclapi.Result) (given int, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	api := g.comms[0].api
	if err := c.fail("ncclGroupStart", api.GroupStart()); err != nil {
		return 0, err
	}
	var first error
	for ; given < len(g.ops); given++ {
		if first = g.ops[given].give(); first != nil {
			break
		}
	}
	r := end(api)
	if first != nil {
		return given, first
	}
	return given, c.fail("ncclGroupEnd", r)
}

// enter checks the group as a whole and enters all its communicators, in the order in
// which they were made, so that two groups cannot wait for each other.
func (g *group) enter() error {
	for i := range g.ops {
		if err := g.ops[i].still(); err != nil {
			return err
		}
		if c := g.ops[i].comm; len(g.comms) == 0 {
			g.comms = append(g.comms, c)
		} else if len(g.comms) > 1 || c != g.comms[0] {
			if err := g.takeIn(c); err != nil {
				return err
			}
		}
	}
	if err := g.checkCaptures(); err != nil {
		return err
	}
	if err := g.checkOverlap(); err != nil {
		return err
	}
	if err := g.match(); err != nil {
		return err
	}
	if err := g.checkSymmetric(); err != nil {
		return err
	}
	for i, c := range g.comms {
		if err := c.enter("ncclGroupEnd"); err != nil {
			g.comms = g.comms[:i]
			g.exit()
			return err
		}
	}
	return nil
}

// takeIn adds a communicator to those of the group, if it is not there.
func (g *group) takeIn(c *Communicator) error {
	if first := g.ops[0].comm; c.api != first.api {
		return fmt.Errorf("nccl: ncclGroupEnd: rank %d (%s) and rank %d (%s) are of two systems: want a group of one",
			first.rank, first.dev, c.rank, c.dev)
	}
	if at, found := slices.BinarySearchFunc(g.comms, c, func(a, b *Communicator) int { return int(a.number - b.number) }); !found {
		g.comms = slices.Insert(g.comms, at, c)
	}
	return nil
}

func (g *group) exit() {
	for _, c := range g.comms {
		c.mu.Unlock()
	}
}

func (c *Communicator) closed(op string) error {
	if c == nil {
		return fmt.Errorf("nccl: %s: no communicator given", op)
	}
	what := fmt.Sprintf("%s on rank %d of %d (%s)", op, c.rank, c.size, c.dev)
	if e := c.closing.Load(); e != nil {
		return &closedError{what, e}
	}
	return fmt.Errorf("nccl: %s: %w", what, device.ErrClosed)
}
