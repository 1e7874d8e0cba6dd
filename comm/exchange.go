package comm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/stream"
)

// exchangeBy returns the exchange of a rank of this process over a Rendezvous. Rank 0 gathers the values and
// publishes them together, so that the number of calls grows linearly with the number of ranks.
func exchangeBy(r Rendezvous, prefix string, rank, size int) collective.Exchange {
	round := 0
	return func(ctx context.Context, mine []byte) ([][]byte, error) {
		at := fmt.Sprint(prefix, round, "/")
		round++
		if rank != 0 {
			if err := r.Set(ctx, fmt.Sprint(at, rank), mine); err != nil {
				return nil, err
			}
			return published(ctx, r, at, size)
		}
		all, err := gather(ctx, r, at, size)
		if err != nil {
			return nil, err
		}
		all[0] = mine
		return all, publish(ctx, r, at, all)
	}
}

// gatherer is a Rendezvous that gets several values by one call, as cluster.Session and cluster.World do.
type gatherer interface {
	GetAll(ctx context.Context, keys ...string) ([][]byte, error)
}

// maxGathered is the number of values that one call gets.
const maxGathered = 128

// gather waits, on rank 0 only, for the values of the other of size ranks,
// whose keys are their numbers after a prefix.
func gather(ctx context.Context, r Rendezvous, prefix string, size int) ([][]byte, error) {
	all := make([][]byte, 1, size)
	several, _ := r.(gatherer)
	for len(all) < size {
		var keys []string
		for rank := len(all); rank < min(size, len(all)+maxGathered); rank++ {
			keys = append(keys, fmt.Sprint(prefix, rank))
		}
		if several != nil {
			values, err := several.GetAll(ctx, keys...)
			if err == nil {
				all = append(all, values...)
				continue
			}
			if ctx.Err() != nil || r.Context().Err() != nil {
				return nil, fmt.Errorf("wait for rank %d: %w", missing(r, keys, len(all)), err)
			}
			several = nil // the values may be too large for one call
		}
		for _, key := range keys {
			value, err := r.Get(ctx, key)
			if err != nil {
				return nil, fmt.Errorf("wait for rank %d: %w", len(all), err)
			}
			all = append(all, value)
		}
	}
	return all, nil
}

// missing returns the first rank whose key has no value, where the first key belongs to rank first. It
// returns first if that cannot be found out any more.
func missing(r Rendezvous, keys []string, first int) int {
	ctx, cancel := context.WithTimeout(context.Background(), alarmReadTime/10)
	defer cancel()
	for i, key := range keys {
		if _, err := r.Get(ctx, key); err != nil {
			return first + i
		}
	}
	return first
}

const (
	// maxPart is the number of bytes of one part of the published values, less than the limit of a value in
	// a cluster.Store, and maxTogether limits their sum.
	maxPart     = 512 << 10
	maxTogether = 32 << 20
)

// publish sets the values of all ranks for published.
func publish(ctx context.Context, r Rendezvous, prefix string, all [][]byte) error {
	var b []byte
	for _, value := range all {
		b = append(binary.AppendUvarint(b, uint64(len(value))), value...)
	}
	if len(b) > maxTogether {
		return fmt.Errorf("the ranks exchange %d bytes: want at most %d", len(b), maxTogether)
	}
	b = append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
	for i := 0; len(b) > 0; i++ {
		part := b[:min(len(b), maxPart)]
		if err := r.Set(ctx, fmt.Sprint(prefix, "all/", i), part); err != nil {
			return err
		}
		b = b[len(part):]
	}
	return nil
}

// published waits for the values that rank 0 publishes.
func published(ctx context.Context, r Rendezvous, prefix string, ranks int) ([][]byte, error) {
	var b []byte
	size := -1
	for i := 0; size < 0 || len(b) < size; i++ {
		part, err := r.Get(ctx, fmt.Sprint(prefix, "all/", i))
		if err != nil {
			return nil, fmt.Errorf("wait for rank 0: %w", err)
		}
		if i == 0 {
			if len(part) < 4 || binary.BigEndian.Uint32(part) > maxTogether {
				return nil, fmt.Errorf("rank 0 publishes values of an unknown length: %w", ErrMismatch)
			}
			size, part = int(binary.BigEndian.Uint32(part)), part[4:]
		}
		if b = append(b, part...); len(part) == 0 && len(b) < size {
			break
		}
	}
	all := make([][]byte, 0, ranks)
	for len(b) > 0 {
		n, head := binary.Uvarint(b)
		if head <= 0 || n > uint64(len(b)-head) || len(all) == ranks {
			break
		}
		all, b = append(all, b[head:head+int(n)]), b[head+int(n):]
	}
	if len(b) > 0 || len(all) != ranks {
		return nil, fmt.Errorf("rank 0 publishes the values of %d of %d ranks: %w", len(all), ranks, ErrMismatch)
	}
	return all, nil
}

// withAlarm runs fn, which waits for the other ranks of a Rendezvous, possibly inside a
// library. If fn fails on one rank, or the context ends there, the context ends on the
// other ranks with an error that names that rank. withAlarm returns after all ranks have
// read that error.
func withAlarm(parent context.Context, r Rendezvous, prefix string, fn func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(parent)
	var received error // written before done is closed
	done := make(chan struct{})
	go func() {
		defer close(done)
		if text, err := r.Get(ctx, prefix+"alarm"); err == nil {
			received = errors.New(told(string(text)))
			cancel(received)
		}
	}()
	err := fn(ctx)
	late := ctx.Err() != nil
	cancel(nil)
	<-done
	switch {
	case err == nil:
		return nil
	case late && received != nil:
		err = received
	case r.Context().Err() != nil:
		return err // the session ends on all ranks
	}
	raiseAlarm(parent, r, prefix, err, !late && !knownToAll(err))
	return err
}

// told returns a text of another rank, for an error of this one.
func told(text string) string { return safe.Text(safe.Clip(text, maxErrorText)) }

// knownToAll reports whether all ranks have the same error.
func knownToAll(err error) bool {
	if _, own := errors.AsType[*localError](err); own {
		return false
	}
	_, known := errors.AsType[*collective.ToldError](err)
	return known || errors.Is(err, ErrMismatch)
}

// A localError is an error of the arguments of this process only, which the others do not know.
type localError struct{ error }

func (e *localError) Unwrap() error { return e.error }

// alarmReadTime is the maximum time that a rank waits for the others to read its alarm.
const alarmReadTime = 5 * time.Second

// raiseAlarm raises the alarm if the error is the rank's own or its context has ended. It then
// waits until the other ranks have read it. It does not wait if the context has ended. The
// wait matters because this rank may host the store: without it, the other ranks would
// only see that the store is gone.
func raiseAlarm(parent context.Context, r Rendezvous, prefix string, cause error, own bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), alarmReadTime)
	defer cancel()
	if own || parent.Err() != nil {
		// If another rank has also failed and raised the alarm, its text is equally good.
		_ = r.Set(ctx, prefix+"alarm", fmt.Appendf(nil, "rank %d cannot: %v", r.Rank(), cause))
	}
	wait, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(parent, stop)()
	if r.Rank() != 0 {
		_ = r.Set(ctx, fmt.Sprint(prefix, "read/", r.Rank()), []byte("read")) // report the cause, not this error
		_, _ = r.Get(wait, prefix+"read/all")
		return
	}
	_, _ = gather(wait, r, prefix+"read/", r.Size())
	_ = r.Set(ctx, prefix+"read/all", []byte("read"))
}

// sameArguments is the usual cure of a failure of checkSame.
const sameArguments = "give the same on all ranks"

// checkSame returns an error on all ranks if the processes have different arguments, because the
// ranks would wait for each other. Collective.
func (g *Group) checkSame(ctx context.Context, op, has, cure string) error {
	if err := g.check(op); err != nil {
		return err
	}
	return route.Agree(ctx, g, "comm: "+op, slices.Repeat([]string{has}, len(g.members)), nil, func(all []collective.Said[string]) error {
		i := slices.IndexFunc(all, func(x collective.Said[string]) bool { return x.Value != all[0].Value })
		if i < 0 {
			return nil
		}
		return badArgument(op, "rank 0 has %s and rank %d %s: %s", told(all[0].Value), i, told(all[i].Value), cure)
	})
}

// Between enqueues collectives between two points of other streams. The group's streams wait
// for the operations that are enqueued on streams so far. Then fn enqueues collectives, and
// streams wait for these collectives before they continue. streams[i] is for local rank i, on
// the rank's device, and may be the group's own stream. The call does not block, and a graph
// can capture it. The streams wait also if fn returns an error.
func (g *Group) Between(streams []*stream.Stream, fn func() error) error {
	const op = "between"
	if err := g.check(op); err != nil {
		return err
	}
	if fn == nil || len(streams) != g.Locals() {
		return badArgument(op, "%d streams, and a function is given: %t; want a function and a stream for each of the %d local ranks", len(streams), fn != nil, g.Locals())
	}
	for i, s := range streams {
		if s == nil || s.Device() != g.Device(i) {
			return badArgument(op, "stream %d is nil or on another device than rank %d: want a stream on %s", i, i, g.Device(i))
		}
	}
	for i, s := range streams {
		if s != g.Stream(i) {
			if err := g.Stream(i).WaitStream(s); err != nil {
				return err
			}
		}
	}
	err := fn()
	for i, s := range streams {
		if s != g.Stream(i) {
			err = errors.Join(err, s.WaitStream(g.Stream(i)))
		}
	}
	return err
}
