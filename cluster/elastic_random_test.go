package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var epochChanges = flag.Int("epochs", 25, "random changes of TestRandomEpochs")

// A witness checks what all functions of a job see.
type witness struct {
	t  *testing.T
	mu sync.Mutex
	// running are the workers whose functions have not returned, in each epoch.
	running map[int]map[*randomWorker]bool
	// lists are the local ranks of each epoch's members in the order of ranks.
	lists map[int][]int
	last  int
	lines []string
}

// enter records that a function begins, and reports false if its worker was killed. No function of an
// earlier epoch may be running, all members of an epoch have the same list, and survivors keep their order.
func (x *witness) enter(r *randomWorker, w *World) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if r.killed {
		return false
	}
	e := w.Epoch()
	if x.running[e] == nil {
		x.running[e] = map[*randomWorker]bool{}
	}
	x.running[e][r] = true
	for old, rs := range x.running {
		if old < e && len(rs) > 0 {
			x.t.Errorf("%d functions of epoch %d run in epoch %d", len(rs), old, e)
		}
	}
	x.checkList(e, w)
	return true
}

func (x *witness) checkList(e int, w *World) {
	var list []int
	for r, m := range w.Members() {
		if m.Rank != r {
			x.t.Errorf("epoch %d: rank %d at place %d", e, m.Rank, r)
		}
		list = append(list, m.LocalRank)
	}
	if known, ok := x.lists[e]; ok {
		if !slices.Equal(known, list) {
			x.t.Errorf("epoch %d is %v and %v", e, known, list)
		}
		return
	}
	x.lists[e] = list
	x.checkOrder(e, list, w.New())
	x.last = max(x.last, e)
}

func (x *witness) checkOrder(e int, list, fresh []int) {
	before, ok := x.lists[e-1]
	if !ok {
		return
	}
	survivors := list[:len(list)-len(fresh)]
	for i, r := range fresh {
		if r != len(survivors)+i {
			x.t.Errorf("epoch %d: new ranks %v of %d", e, fresh, len(list))
		}
	}
	at := -1
	for _, s := range survivors {
		i := slices.Index(before, s)
		if i <= at {
			x.t.Errorf("epoch %d has survivors %v of %v", e, survivors, before)
		}
		at = i
	}
}

func (x *witness) leave(r *randomWorker, w *World) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.running[w.Epoch()], r)
}

// leaveForGood records that a worker is dead, whatever its goroutines still do.
func (x *witness) leaveForGood(r *randomWorker) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r.killed = true
	for _, rs := range x.running {
		delete(rs, r)
	}
}

func (x *witness) lastEpoch() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.last
}

func (x *witness) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return strings.Join(x.lines, "\n")
}

// A randomWorker is one start of a worker.
type randomWorker struct {
	local  int
	world  chan *World // the last
	result chan error
	dead   chan struct{} // closed by a kill: the function then ends as a dead process does
	killed bool          // guarded by witness.mu
}

// TestRandomEpochs kills workers at random times, also several at once and during changes, and
// starts them again when the coordinator orders it.
func TestRandomEpochs(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	const n = 5
	cfg := oneHost(n, 1<<20)
	cfg.Timing.Backoff, cfg.Timing.LostAfter = time.Millisecond, time.Minute // no worker is silent
	x := &witness{t: t, running: map[int]map[*randomWorker]bool{}, lists: map[int][]int{}}
	cfg.Notify = func(line string) { x.mu.Lock(); defer x.mu.Unlock(); x.lines = append(x.lines, line) }
	as, errs := startAll(t, cfg)
	require.NoError(t, errors.Join(errs...))
	a := as[0]
	finish := make(chan struct{})
	workers := map[int]*randomWorker{}
	for local := range n {
		workers[local] = x.start(a, local, finish)
	}
	awaitWorlds(t, workers)
	least := *epochChanges / 8 // changes at the same time may give one epoch
	deadline := time.Now().Add(time.Minute)
	for i := 0; i < *epochChanges || x.lastEpoch() <= least && time.Now().Before(deadline); i++ {
		for range 1 + rnd.IntN(2) {
			local := slices.Sorted(maps.Keys(workers))[rnd.IntN(len(workers))]
			x.kill(a, workers[local])
			time.Sleep(time.Duration(rnd.IntN(3)) * 40 * time.Millisecond) // inside and outside of a change
			for pending := true; pending; {
				select {
				case o := <-a.Orders():
					x.obey(a, o, workers, finish)
				default:
					pending = false
				}
			}
		}
	}
	x.wholeAgain(a, workers, n, finish)
	close(finish)
	for _, w := range workers {
		require.NoError(t, <-w.result, x.text())
	}
	t.Logf("%d epochs", x.lastEpoch())
	require.Greater(t, x.lastEpoch(), least)
}

// obey starts a worker again if the coordinator orders it.
func (x *witness) obey(a *Agent, o Order, workers map[int]*randomWorker, finish chan struct{}) {
	if o.Start {
		workers[o.Local] = x.start(a, o.Local, finish)
	}
}

// wholeAgain obeys the remaining orders until all workers are members of one epoch.
func (x *witness) wholeAgain(a *Agent, workers map[int]*randomWorker, n int, finish chan struct{}) {
	deadline := time.After(time.Minute)
	for {
		x.mu.Lock()
		last := x.lists[x.last]
		members := len(last)
		whole := members == n && len(x.running[x.last]) == n
		x.mu.Unlock()
		if whole && len(a.Orders()) == 0 {
			return
		}
		select {
		case o := <-a.Orders():
			x.obey(a, o, workers, finish)
		case <-deadline:
			require.FailNow(x.t, "the world is not whole again", "%v\n%s", last, x.text())
		case <-time.After(time.Millisecond):
		}
	}
}

func (x *witness) start(a *Agent, local int, finish chan struct{}) *randomWorker {
	r := &randomWorker{local: local, world: make(chan *World, 1), result: make(chan error, 1), dead: make(chan struct{})}
	j, err := detect(environ(strings.Join(a.WorkerEnv(local), " ")))
	require.NoError(x.t, err)
	j.Notify = func(string) {}
	go func() {
		r.result <- Run(x.t.Context(), &RunConfig{Join: j}, func(ctx context.Context, w *World) error {
			if !x.enter(r, w) {
				return errors.New("dead")
			}
			defer x.leave(r, w)
			select {
			case <-r.world:
			default:
			}
			r.world <- w
			for {
				if err := w.Step(); err != nil {
					return err
				}
				select {
				case <-r.dead:
					return errors.New("dead")
				case <-ctx.Done():
					time.Sleep(time.Duration(rand.IntN(4)) * settleTime / 2) // an abort takes time
					return context.Cause(ctx)
				case <-finish:
					return nil
				case <-time.After(time.Millisecond):
				}
			}
		})
	}()
	return r
}

// kill ends a worker like kill -9. A worker that is not a member yet is spared.
func (x *witness) kill(a *Agent, r *randomWorker) {
	select {
	case w := <-r.world:
		close(r.dead)
		x.leaveForGood(r)
		reportKill(x.t, a, r.local)
		w.calls.(remote).k.closeConnection()
		<-r.result
	default:
	}
}

// awaitWorlds waits until each worker has a world.
func awaitWorlds(t *testing.T, workers map[int]*randomWorker) {
	t.Helper()
	for _, r := range workers {
		select {
		case w := <-r.world:
			r.world <- w
		case <-time.After(time.Minute):
			require.FailNow(t, fmt.Sprint("worker ", r.local, " has no world"))
		}
	}
}
