package job

import (
	"context"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// haveLedger lets all launchers answer the entries of the ledger.
func (j *paperJob) haveLedger() {
	j.do(func() {
		for _, a := range j.agents {
			j.recorded(a, j.lastEntry)
		}
	})
}

// ordersTo returns the orders among the queued messages of a host.
func (j *paperJob) ordersTo(t *testing.T, host string) (out []Order) {
	t.Helper()
	for _, m := range j.take(j.hosts[host]) {
		if m.Kind == kindOrder {
			var o Order
			require.NoError(t, m.Record(&o))
			out = append(out, o)
		}
	}
	return out
}

// A coordinator counts a restart, and is lost before its order arrives. The next one counts it once, and the back-off
// goes on.
func TestRestartsSurviveTheCoordinator(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		policy := restartPolicy{most: 2, backoff: time.Second}
		exit := Exit{PID: 101, Code: 1, Reason: "exited with code 1"}
		j := newPaperJob("a", "b", "c")
		j.cfg.again = policy
		b, c := j.agentOn(t, "b"), j.agentOn(t, "c")
		b.exited(exit)
		j.do(func() { j.elasticExit(j.hosts["b"], exit) })
		require.Equal(t, 1, j.retries.total)
		j.hear(t, c)
		j.do(func() {
			j.recorded(j.hosts["a"], j.lastEntry)
			j.recorded(j.hosts["c"], j.lastEntry)
		})
		require.Empty(t, j.ordersTo(t, "b"), "b has not recorded it")

		k := candidate(t, "a", map[string]int{"c": 102}, b, c)
		k.cfg.again = policy
		require.Equal(t, 1, k.retries.total)
		for range 2 {
			k.do(func() { k.elasticExit(k.hosts["b"], exit) }) // b repeats it, because it has no order
			require.Equal(t, 1, k.retries.total)
			require.Empty(t, k.ordersTo(t, "b"))
			k.haveLedger()
			require.Equal(t, []Order{{Start: true, Count: 1}}, k.ordersTo(t, "b"))
		}
		exit.PID = 201
		k.do(func() { k.elasticExit(k.hosts["b"], exit) })
		k.haveLedger()
		require.Equal(t, []Order{{Start: true, Count: 2, After: time.Second}}, k.ordersTo(t, "b"), "the second failure in a row")
		exit.PID = 301
		k.do(func() { k.elasticExit(k.hosts["b"], exit) })
		require.Equal(t, []Order{{}}, k.ordersTo(t, "b"), "no restart is left")
	})
}

// The first world begins when all launchers know of it, and can go on without the coordinator.
func TestFirstWorldWaitsForTheLaunchers(t *testing.T) {
	j := completePaperJob("a", "b", "c")
	for _, host := range []string{"a", "b", "c"} {
		for _, p := range j.procs {
			require.Empty(t, j.queues[p], "before %s", host)
		}
		require.Equal(t, []Kind{kindNews, kindLedger}, kindsOf(j.queues[j.hosts[host]][1:]))
		j.do(func() { j.recorded(j.hosts[host], j.lastEntry) })
	}
	for _, p := range j.procs {
		require.Equal(t, []Kind{KindWorld}, kindsOf(j.queues[p]))
	}

	j = completePaperJob("a", "b", "c")
	j.lose("b") // its worker is told what it has lost, too
	require.Equal(t, []Kind{KindWorld, KindRevoke}, kindsOf(j.queues[j.procs["a"]]))
}

// A launcher that is lost is not waited for.
func TestLedgerWithoutALostHost(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c")
		j.cfg.again = restartPolicy{most: 1}
		j.do(func() { j.elasticExit(j.hosts["b"], Exit{PID: 101, Code: 1}) })
		j.do(func() {
			j.recorded(j.hosts["a"], j.lastEntry)
			j.recorded(j.hosts["b"], j.lastEntry)
			j.recorded(j.hosts["c"], j.lastEntry-1)
		})
		require.Empty(t, j.ordersTo(t, "b"))
		j.lose("c")
		require.Len(t, j.ordersTo(t, "b"), 1)
	})
}

// finished lets the functions of all members return nil.
func (j *paperJob) finished(t *testing.T) {
	t.Helper()
	for _, p := range j.procs {
		require.NoError(t, j.handle(p, Message{Kind: KindFinished, Epoch: j.epoch}))
	}
}

// The coordinator is lost while it tells that the program has ended. The next one tells it, too.
func TestEndSurvivesTheCoordinator(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c")
		b, c := j.agentOn(t, "b"), j.agentOn(t, "c")
		j.finished(t)
		require.NotContains(t, kindsOf(j.take(j.procs["b"])), KindFinish, "the launchers do not know yet")
		j.hear(t, c)
		require.True(t, c.book.Finished)
		k := candidate(t, "a", nil, b, c)
		for _, u := range []string{"b", "c"} {
			require.Equal(t, []Order{{Finish: true}}, k.ordersTo(t, u))
		}
		p := k.register("b", 101, 1)
		k.do(func() { require.NoError(t, k.registerWorker(p)) })
		sent := k.take(p)
		require.Equal(t, KindFinish, sent[len(sent)-1].Kind)
		require.Nil(t, k.faults.lost)

		j.haveLedger()
		require.Contains(t, kindsOf(j.take(j.procs["b"])), KindFinish)
		require.Equal(t, []Order{{Finish: true}}, j.ordersTo(t, "b"))
	})
}

// A launcher that knows that the program has ended does not fail with its coordinator, also if too few others are left to choose
// another one.
func TestLossAfterTheEnd(t *testing.T) {
	for name, knows := range map[string]func(*Agent){
		"it was told":     func(a *Agent) { a.ordered(Order{Finish: true}) },
		"it has recorded": func(a *Agent) { a.book.Finished = true },
	} {
		t.Run(name, func(t *testing.T) {
			testhost.Bubble(t, func(t *testing.T) {
				j := newPaperJob("a", "b", "c")
				a := j.agentOn(t, "b")
				knows(a)
				a.life, a.die = context.WithCancel(t.Context())
				defer a.die()
				a.concluded, a.orders, a.port = make(chan struct{}), make(chan Order, 1), newPort(a)
				a.keys = keys{}
				k := &Client{Stream: NewStream(nil, NewRunClock(time.Second), time.Minute), Hello: Welcome{Agent: "a", LostAfter: time.Second}, EndedC: make(chan struct{})}
				k.Ctx, k.Cancel = context.WithCancelCause(t.Context())
				k.open, k.shut = context.WithCancel(t.Context())
				a.k = k
				at := &attempt{}
				at.ctx, at.cancel = context.WithCancelCause(t.Context())
				a.Now.Store(at)
				a.history.Plan.Hosts = nil // no candidate has an address
				k.Loss.Store(int32(lostSilent))
				k.Cancel(&MemberLostError{Host: "a"})
				k.shut()
				a.coordinatorLost(k, at)
				require.NoError(t, at.ctx.Err())
				if name == "it has recorded" {
					require.Equal(t, Order{Finish: true}, <-a.orders)
				}
				require.Empty(t, a.orders)
				require.True(t, a.referral().Finished)
				require.NoError(t, a.Shutdown(t.Context()))
				a.wg.Wait()
			})
		})
	}
}
