package comm

import (
	"fmt"
	"time"

	"github.com/gochorus/chorus/internal/route"
)

// An Issuer accepts collectives: a *Group enqueues each collective at once, and a *Batch
// collects them.
type Issuer interface {
	issuer() (*Group, *Batch)
}

func (g *Group) issuer() (*Group, *Batch) { return g, nil }

func (b *Batch) issuer() (*Group, *Batch) {
	if b == nil {
		return nil, nil
	}
	return b.g, b
}

// groupOf returns the group, and the batch that its operations belong to, or nil.
func groupOf(on Issuer) (*Group, *Batch) {
	if on == nil {
		return nil, nil
	}
	return on.issuer()
}

// A Batch collects collectives, sends and receives of a group that start together. It is
// an nccl.Batch with the same rules: its operations run concurrently, and if an operation
// is refused when it is added, the whole batch fails. If a backend refuses a part of a batch
// after another part was enqueued, the group is broken. One goroutine uses a Batch at a
// time.
type Batch struct {
	g        *Group
	batch    *route.Batch
	members  []member  // of g; their operations go into batch
	refused  error     // the first operation that was refused
	stagings []staging // of tensors that are not contiguous
	ended    bool      // Group.Batch has returned
}

// NewBatch returns an empty Batch of g. A loop that reuses one Batch allocates nothing.
func (g *Group) NewBatch() *Batch {
	if g == nil {
		return &Batch{batch: route.Routers(nil).NewBatch()}
	}
	b := g.routers.NewBatch()
	return &Batch{g: g, batch: b, members: withIssuer(g.members, b)}
}

// withIssuer returns copies of the members whose operations go into a batch.
func withIssuer(members []member, b *route.Batch) []member {
	list := make([]member, len(members))
	for i, m := range members {
		m.on = b.On(m.comm)
		list[i] = m
	}
	return list
}

// Batch runs fn and enqueues the operations that fn has added to the batch. It does
// not enqueue any operation if fn returns an error or panics, or if an operation was refused.
//
//	err := g.Batch(func(b *comm.Batch) error {
//		if err := comm.Send(b, next, x); err != nil {
//			return err
//		}
//		return comm.Recv(b, previous, y)
//	})
//
// The batch ends with fn: do not retain it.
func (g *Group) Batch(fn func(b *Batch) error) error {
	const op = "batch"
	if err := g.check(op); err != nil {
		return err
	}
	if fn == nil {
		return badArgument(op, "no function given")
	}
	b, _ := g.batches.Get().(*Batch)
	if b == nil {
		b = g.NewBatch()
	}
	b.ended = false
	b.Reset()
	defer func() { // also if fn panics
		b.Reset()
		b.ended = true
		g.batches.Put(b)
	}()
	if err := fn(b); err != nil {
		return err
	}
	return b.Enqueue()
}

// Enqueue enqueues all operations, or none if one was refused, and empties the batch.
func (b *Batch) Enqueue() error {
	if b == nil {
		return badArgument("enqueue", "no batch given")
	}
	defer b.Reset()
	if b.refused != nil {
		return b.refused
	}
	if err := b.g.check("enqueue"); err != nil {
		return err
	}
	b.g.issuing.Lock()
	defer b.g.issuing.Unlock()
	if err := b.copyIn(); err != nil {
		return err
	}
	if err := b.g.breakIfRefused(b.batch.Enqueue()); err != nil {
		return err
	}
	return b.copyOut()
}

// SetTimeout sets the timeout of the batch's operations until Enqueue or Reset (the timeout
// argument of torch.distributed). 0 means the group's timeout; a negative value means none.
// Operations with different timeouts belong in different batches.
func (b *Batch) SetTimeout(d time.Duration) {
	if b != nil {
		b.batch.SetTimeout(d)
	}
}

// SetDeterministic makes the reductions of the batch deterministic until Enqueue or Reset, in a
// group whose Config.Deterministic has OnRequest: see Order. All ranks must call it for the same
// batches. In other deterministic groups it changes nothing. Without Config.Deterministic it
// returns an error that matches ErrMismatch, and the batch fails.
func (b *Batch) SetDeterministic() error {
	const op = "set deterministic"
	switch {
	case b == nil || b.g == nil:
		return badArgument(op, "no batch of a group given")
	case b.ended:
		return b.markRefused(errBatchEnded)
	case b.g.Deterministic() == nil:
		return b.markRefused(badArgument(op, "the group has no order of reductions: set Config.Deterministic to &comm.Order{OnRequest: true}"))
	}
	b.batch.ReduceInOrder()
	return nil
}

// Reset removes the operations, the timeout and the effect of SetDeterministic.
func (b *Batch) Reset() {
	b.batch.Reset()
	b.freeStagings()
	b.refused = nil
}

// markRefused records that an operation was refused, so that the batch fails. b may be nil.
func (b *Batch) markRefused(err error) error {
	if b != nil && b.refused == nil {
		b.refused = err
	}
	return err
}

// each adds one operation of every local rank.
func (b *Batch) each(issue func(i int, m *member) error) error {
	return b.add(len(b.members), issue)
}

// first adds one operation of the first local rank.
func (b *Batch) first(issue func(m *member) error) error {
	return b.add(1, func(_ int, m *member) error { return issue(m) })
}

// add adds one operation of each of the first n local ranks.
func (b *Batch) add(n int, issue func(i int, m *member) error) error {
	if b.ended {
		return b.markRefused(errBatchEnded)
	}
	for i := range n {
		if err := issue(i, &b.members[i]); err != nil {
			return b.markRefused(b.g.causeOf(err))
		}
	}
	return nil
}

var errBatchEnded = fmt.Errorf("comm: the function of the batch has returned: use NewBatch: %w", ErrMismatch)
