package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	waitPrograms = flag.Int("waits", 25, "how many `programs` TestWaitsNeverLie runs")
	waitSeed     = flag.Uint64("waitsseed", 0, "the `seed` of the first program of TestWaitsNeverLie; 0 is a random one")
)

// TestWaitsNeverLie runs random programs: the ranks of a world set keys, wait for keys and
// meet at barriers in several goroutines, while a session is closed, a rank is lost or
// contexts are cancelled beside them. A call that returns nil means that what it waited for
// has happened: the key has its value, and all ranks came to the barrier. Without such an
// event every call returns nil.
func TestWaitsNeverLie(t *testing.T) {
	seed := *waitSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	var nils, errs atomic.Int64
	for i := range *waitPrograms {
		p := &waitProgram{t: t, seed: seed + uint64(i), nils: &nils, errs: &errs}
		p.rng = rand.New(rand.NewPCG(p.seed, 1))
		if t.Run(fmt.Sprint(i), p.run); t.Failed() {
			t.Fatalf("-waits 1 -waitsseed %d repeats the program: %s beside the waits of %d ranks", p.seed, p.beside, p.size)
		}
	}
	t.Logf("seed %d: %d programs, %d calls returned nil and %d an error", seed, *waitPrograms, nils.Load(), errs.Load())
}

// A mishap is what happens beside the waits of a program.
type mishap int

const (
	nothing mishap = iota
	closes
	loses
	cancels
	shutsDown // one rank, which waits for the others
	leaves    // one rank closes while another one shuts down
	numMishaps
)

func (e mishap) String() string {
	return [...]string{"nothing", "close", "loss of a rank", "cancelled contexts", "shutdown", "close and shutdown"}[e]
}

// A waitProgram is a world with what its ranks do. What has begun is noted before the call
// that does it.
type waitProgram struct {
	t          *testing.T
	seed       uint64
	rng        *rand.Rand
	beside     mishap
	size       int
	ss         []*Session
	set        []atomic.Bool   // keys, by number
	come       [][]atomic.Bool // to the barriers, by rank
	closed     []atomic.Bool   // sessions that Close or Shutdown was called of
	lost       []atomic.Bool
	nils, errs *atomic.Int64

	mu     sync.Mutex
	opened map[int]int // the rank that passed a barrier
	failed map[int]int // the rank that the coordinator told who was missing at a barrier
	sums   []int64
	added  atomic.Int64
}

func (p *waitProgram) run(t *testing.T) {
	p.t, p.beside, p.size = t, mishap(p.rng.IntN(int(numMishaps))), 1+p.rng.IntN(4)
	if p.size == 1 && p.beside == loses {
		p.beside = nothing
	}
	p.ss = p.join()
	keys, barriers := 1+p.rng.IntN(8), p.rng.IntN(4)
	p.set, p.closed, p.lost = make([]atomic.Bool, keys), make([]atomic.Bool, p.size), make([]atomic.Bool, p.size)
	p.opened, p.failed = map[int]int{}, map[int]int{}
	for range barriers {
		p.come = append(p.come, make([]atomic.Bool, p.size))
	}
	limit := time.Minute
	switch p.beside {
	case nothing:
	case leaves:
		limit = 3 * time.Second // a coordinator that closes stays for half a second
	default:
		limit = time.Duration(50+p.rng.IntN(300)) * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var all sync.WaitGroup
	start := func(fn func()) {
		pause := p.rng.IntN(3000)
		all.Go(func() {
			yield(pause)
			fn()
		})
	}
	for k := range keys {
		start(p.setter(ctx, k))
	}
	for b := range barriers {
		for r := range p.size {
			start(func() { p.barrier(ctx, b, r) })
		}
	}
	for range 4 + p.rng.IntN(8) {
		start(p.waiter(ctx))
	}
	r := p.any()
	if p.beside == leaves && p.rng.IntN(2) == 0 {
		r = 0 // with the coordinator
	}
	start(p.happening(ctx, cancel, r))
	if p.beside == leaves && p.size > 1 {
		other := (r + 1 + p.rng.IntN(p.size-1)) % p.size
		start(func() { p.shutdown(ctx, other) })
	}
	all.Wait()
	p.check()
}

// join makes the world; one of a single rank has no coordinator.
func (p *waitProgram) join() []*Session {
	if p.size == 1 {
		s, err := Join(p.t.Context(), &JoinConfig{Job: p.t.Name(), Size: 1, Rank: new(0), Host: "h", Timing: quick, Notify: func(string) {}})
		require.NoError(p.t, err)
		p.t.Cleanup(func() { s.Close() })
		return []*Session{s}
	}
	return joinWorld(p.t, p.size, nil)
}

func yield(n int) {
	for range n {
		runtime.Gosched()
	}
}

func (p *waitProgram) any() int { return p.rng.IntN(p.size) }

func keyName(k int) string { return fmt.Sprint("key ", k) }

func (p *waitProgram) value(k int) string { return fmt.Sprint(p.seed, " ", k) }

// judge counts a result, and requires nil if nothing happens beside.
func (p *waitProgram) judge(what string, err error) (ok bool) {
	if err == nil {
		p.nils.Add(1)
		return true
	}
	p.errs.Add(1)
	if p.beside == nothing {
		p.t.Errorf("%s failed: %v", what, err)
	}
	return false
}

func (p *waitProgram) setter(ctx context.Context, k int) func() {
	s := p.ss[p.any()]
	return func() {
		p.set[k].Store(true)
		p.judge("Set", s.Set(ctx, keyName(k), []byte(p.value(k))))
	}
}

func (p *waitProgram) barrier(ctx context.Context, b, r int) {
	p.come[b][r].Store(true)
	err := p.ss[r].Barrier(ctx, fmt.Sprint("barrier ", b))
	ok := p.judge("Barrier", err)
	missing, told := errors.AsType[*BarrierError](err)
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case ok:
		p.opened[b] = r
		for o := range p.come[b] {
			if !p.come[b][o].Load() {
				p.t.Errorf("Barrier returned nil on rank %d: rank %d has not come", r, o)
			}
		}
	case told && len(missing.Missing) > 0:
		p.failed[b] = r
	}
}

// waiter waits in one of the ways.
func (p *waitProgram) waiter(ctx context.Context) func() {
	r, k := p.any(), p.rng.IntN(len(p.set))
	s := p.ss[r]
	reads := func(how string, get func(context.Context, string) ([]byte, error)) func() {
		return func() {
			got, err := get(ctx, keyName(k))
			if p.judge(how, err) && (!p.set[k].Load() || string(got) != p.value(k)) {
				p.t.Errorf("%s returned %q for key %d: want %q", how, got, k, p.value(k))
			}
		}
	}
	switch p.rng.IntN(5) {
	case 0:
		return reads("Get", s.Get)
	case 1:
		return reads("Last", s.Last)
	case 2:
		return func() {
			sum, err := s.Add(ctx, "sum", 1)
			p.added.Add(1)
			if p.judge("Add", err) {
				p.mu.Lock()
				defer p.mu.Unlock()
				p.sums = append(p.sums, sum)
			}
		}
	case 3:
		return func() { p.watch(ctx, r) }
	}
	var list []int
	var names []string
	for range 1 + p.rng.IntN(3) {
		list = append(list, p.rng.IntN(len(p.set)))
		names = append(names, keyName(list[len(list)-1]))
	}
	return func() {
		if !p.judge("Wait", s.Wait(ctx, names...)) {
			return
		}
		for _, k := range list {
			if !p.set[k].Load() {
				p.t.Errorf("Wait returned nil: nobody has set %s", names)
			}
		}
	}
}

// watch looks at the end of a session's context and at its cause.
func (p *waitProgram) watch(ctx context.Context, r int) {
	s := p.ss[r]
	select {
	case <-ctx.Done():
		return
	case <-s.Context().Done():
	case <-time.After(20 * time.Millisecond):
		return
	}
	cause := context.Cause(s.Context())
	e, isLoss := errors.AsType[*MemberLostError](cause)
	switch {
	case isLoss && !p.lost[e.Rank].Load() && !p.lost[r].Load():
		p.t.Errorf("rank %d says that rank %d was lost, which it was not: %v", r, e.Rank, cause)
	case errors.Is(cause, ErrClosed) && !p.closed[r].Load():
		p.t.Errorf("rank %d says that it was closed, which it was not: %v", r, cause)
	case p.beside == nothing || p.beside == cancels:
		p.t.Errorf("the context of rank %d has ended: %v", r, cause)
	}
}

// happening is the event, of rank r if it is the event of one rank.
func (p *waitProgram) happening(ctx context.Context, cancel func(), r int) func() {
	switch p.beside {
	case closes, leaves:
		return func() {
			p.closed[r].Store(true)
			_ = p.ss[r].Close()
		}
	case loses:
		r = 1 + r%(p.size-1) // rank 0 has the coordinator
		return func() {
			p.lost[r].Store(true)
			p.ss[r].k.CloseConnection()
		}
	case cancels:
		return cancel
	case shutsDown:
		return func() { p.shutdown(ctx, r) }
	}
	return func() {}
}

func (p *waitProgram) shutdown(ctx context.Context, r int) {
	p.closed[r].Store(true)
	if err := p.ss[r].Shutdown(ctx); !p.judge("Shutdown", err) {
		return
	}
	for o := range p.closed {
		if !p.closed[o].Load() {
			p.t.Errorf("Shutdown returned nil on rank %d: rank %d has called neither Shutdown nor Close", r, o)
		}
	}
}

// check compares what the calls of all ranks have returned, and leaves together if nothing
// has happened.
func (p *waitProgram) check() {
	for b, r := range p.opened {
		if o, both := p.failed[b]; both {
			p.t.Errorf("barrier %d opened for rank %d, and rank %d was told that ranks were missing", b, r, o)
		}
	}
	slices.Sort(p.sums)
	for i, sum := range p.sums {
		if sum < 1 || sum > p.added.Load() || i > 0 && sum == p.sums[i-1] {
			p.t.Errorf("Add returned %v in %d calls", p.sums, p.added.Load())
		}
	}
	if p.beside != nothing {
		return
	}
	var all sync.WaitGroup
	for r := range p.ss {
		pause := p.rng.IntN(3000)
		all.Go(func() {
			yield(pause)
			p.shutdown(p.t.Context(), r)
		})
	}
	all.Wait()
}
