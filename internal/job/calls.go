package job

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// A Caller runs store calls, either over the connection to the coordinator or, in
// a world of one process, directly in the engine.
type Caller interface {
	Call(ctx context.Context, c Call) (Call, error)
}

// Remote implements caller with a client, for one epoch.
type Remote struct {
	Client *Client
	epoch  uint64
	ctx    context.Context // of the epoch
}

// NewRemote returns the store of an epoch that ends with ctx.
func NewRemote(ctx context.Context, k *Client, epoch uint64) Remote { return Remote{k, epoch, ctx} }

func (r Remote) Call(ctx context.Context, c Call) (Call, error) {
	m, id, err := r.Client.ask(ctx, r.ctx.Done(), r.message(c))
	if err == nil {
		return decodeCall(m.Body)
	}
	if ended := context.Cause(r.ctx); ended != nil || ctx.Err() == nil {
		r.Client.drop(id)
		return Call{}, cmp.Or(ended, err)
	}
	return r.Client.cancelCall(id, c.Op, err)
}

func (r Remote) message(c Call) Message {
	return Message{Kind: KindCall, Epoch: r.epoch, Body: c.Encode()}
}

// Last reads a key even after the job has failed, while the connection is open.
func (r Remote) Last(ctx context.Context, c Call) (Call, error) {
	m, id, err := r.Client.ask(ctx, r.Client.open.Done(), r.message(c))
	if err != nil {
		r.Client.drop(id)
		return Call{}, err
	}
	return decodeCall(m.Body)
}

// cancelCall cancels a call at the coordinator. For a barrier it waits briefly for
// the reply, which lists the missing ranks.
func (k *Client) cancelCall(id uint64, op byte, cause error) (Call, error) {
	k.Mu.Lock()
	ch := k.replies[id]
	k.Mu.Unlock()
	defer k.drop(id)
	if err := k.Send(Message{Kind: kindCancel, Epoch: FirstEpoch, ID: id}); err != nil || ch == nil {
		return Call{}, cause
	}
	if op != OpBarrier && op != OpFinish {
		return Call{}, cause
	}
	ctx, cancel := context.WithTimeout(context.Background(), k.Hello.LostAfter)
	defer cancel()
	m, err := k.await(ctx, k.Ctx.Done(), ch)
	if err != nil {
		return Call{}, cause
	}
	r, err := decodeCall(m.Body)
	if err != nil {
		return Call{}, fmt.Errorf("%w; %w", cause, err)
	}
	if r.Op == StatusOK { // the barrier opened during the cancellation
		return r, nil
	}
	return r, cause
}

// solo is the store of a world of one process.
type solo struct {
	ctx    context.Context // of the world
	mu     sync.Mutex
	engine *engine
	lastID uint64
}

// NewSolo returns a store that ends with ctx.
func NewSolo(ctx context.Context) *solo {
	return &solo{ctx: ctx, engine: newEngine(1, new(atomic.Int64))}
}

func (s *solo) Call(ctx context.Context, c Call) (Call, error) {
	if s.ctx.Err() != nil {
		return Call{}, context.Cause(s.ctx)
	}
	ch := make(chan Call, 2) // a cancelled barrier may reply twice
	s.mu.Lock()
	s.lastID++
	t := ticket{0, s.lastID}
	s.engine.do(t, c, func(r Call) { ch <- r })
	s.mu.Unlock()
	select {
	case r := <-ch:
		return r, nil
	case <-s.ctx.Done():
		return Call{}, context.Cause(s.ctx)
	case <-ctx.Done():
		s.mu.Lock()
		s.engine.cancel(t)
		s.mu.Unlock()
		return Call{}, endOf(ctx)
	}
}
