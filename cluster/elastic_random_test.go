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

	"github.com/gochorus/chorus/internal/job"
)

var epochChanges = flag.Int("epochs", 25, "random changes of TestRandomEpochs")

// A witness checks what all functions of a job see.
type witness struct {
	t  *testing.T
	mu sync.Mutex
	// running are the functions of each epoch that have not returned.
	running map[int]int
	// lists are the places of each epoch's members, such as "host/0", in the order of ranks.
	lists    map[int][]string
	last     int
	lines    []string
	pids     int
	reportBy time.Duration // limit for the coordinator to acknowledge a report
}

func newWitness(t *testing.T) *witness {
	return &witness{t: t, running: map[int]int{}, lists: map[int][]string{}, pids: 1000, reportBy: time.Minute}
}

func (x *witness) notify(line string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.lines = append(x.lines, line)
}

// enter records that a function begins. No function of another epoch may be running, all
// members of an epoch have the same list, and survivors keep their order.
func (x *witness) enter(r *randomWorker, w *World) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if r.isDead() {
		return
	}
	e := w.Epoch()
	x.running[e]++
	r.epoch, r.left = e, append(r.left, w.Left()...)
	for other, n := range x.running {
		if other != e && n > 0 {
			x.t.Errorf("%d functions of epoch %d run in epoch %d", n, other, e)
		}
	}
	if e <= r.last {
		x.t.Errorf("epoch %d follows epoch %d", e, r.last)
	}
	r.last = e
	var list []string
	for r, m := range w.Members() {
		if m.Rank != r {
			x.t.Errorf("epoch %d: rank %d at place %d", e, m.Rank, r)
		}
		list = append(list, fmt.Sprint(m.Host, "/", m.LocalRank))
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

func (x *witness) checkOrder(e int, list []string, fresh []int) {
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

func (x *witness) leave(r *randomWorker) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.end(r)
}

func (x *witness) end(r *randomWorker) {
	if r.epoch > 0 {
		x.running[r.epoch]--
	}
	r.epoch = 0
}

// bury records that the process of a worker is dead: its function does not run any more.
func (x *witness) bury(r *randomWorker) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.end(r)
	close(r.dead)
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
	epoch  int           // of the function that runs
	last   int           // the greatest epoch
	left   []Departure   // in all its worlds
}

func (r *randomWorker) isDead() bool {
	select {
	case <-r.dead:
		return true
	default:
		return false
	}
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
	x := newWitness(t)
	cfg.Notify = x.notify
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
func (x *witness) obey(a *job.Agent, o job.Order, workers map[int]*randomWorker, finish chan struct{}) {
	if o.Start {
		workers[o.Local] = x.start(a, o.Local, finish)
	}
}

// wholeAgain obeys the remaining orders until all workers are members of one epoch.
func (x *witness) wholeAgain(a *job.Agent, workers map[int]*randomWorker, n int, finish chan struct{}) {
	deadline := time.After(time.Minute)
	for {
		x.mu.Lock()
		last := x.lists[x.last]
		members := len(last)
		whole := members == n && x.running[x.last] == n
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

func (x *witness) start(a *job.Agent, local int, finish chan struct{}) *randomWorker {
	r := &randomWorker{local: local, world: make(chan *World, 1), result: make(chan error, 1), dead: make(chan struct{})}
	j, err := detect(environ(strings.Join(a.WorkerEnv(local), " ")))
	require.NoError(x.t, err)
	j.Notify = func(string) {}
	x.mu.Lock()
	x.pids++
	j.pid = x.pids
	x.mu.Unlock()
	go func() {
		r.result <- Run(x.t.Context(), &RunConfig{Join: j}, func(ctx context.Context, w *World) error {
			x.enter(r, w)
			defer x.leave(r)
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
					time.Sleep(time.Duration(rand.IntN(4)) * job.SettleTime / 2) // an abort takes time
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

// kill ends a worker like kill -9. A worker that is not a member yet is excused.
func (x *witness) kill(a *job.Agent, r *randomWorker) {
	select {
	case w := <-r.world:
		x.bury(r)
		_ = reportKill(a, r.local, w.me.PID, x.reportBy) // another coordinator learns it, too
		w.calls.(job.Remote).Client.CloseConnection()
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
