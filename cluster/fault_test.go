package cluster

import (
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// judged is a coordinator without connections: a host with three workers.
func judged() (c *coordinator, agent *peer, worker func(rank int) *peer) {
	c = &coordinator{cfg: coordConfig{agents: 1, self: welcome{LostAfter: 3 * time.Second}}, peers: map[string]*peer{}, clock: newRunClock(time.Second)}
	c.faults.exits = map[int]Exit{}
	c.plan = &plan{Hosts: []host{{Host: "h", UUID: "u", LocalSize: 3}}}
	agent = newPeer(newStream(nil, newRunClock(time.Second), 0), "")
	agent.role, agent.state, agent.host = roleAgent, peerJoined, c.plan.Hosts[0]
	c.agents = []*peer{agent}
	for r := range 3 {
		p := newPeer(newStream(nil, newRunClock(time.Second), 0), "")
		p.role, p.state, p.reg.Member = roleWorker, peerJoined, Member{Rank: r, Host: "h", PID: 100 + r}
		c.workers = append(c.workers, p)
	}
	c.world = &world{Members: members(c.workers)}
	c.engine = newEngine(3, new(atomic.Int64))
	return c, agent, func(rank int) *peer { return c.workers[rank] }
}

// TestFirstFailure sends what a coordinator may receive when rank 1 is killed
// and its launcher then stops rank 2, in each order in which busy connections
// may deliver it.
func TestFirstFailure(t *testing.T) {
	killed := Exit{Rank: 1, PID: 101, Code: 137, Reason: "killed by SIGKILL"}
	asked := Exit{Rank: 2, PID: 102, Code: 143, Reason: "killed by SIGTERM", Asked: true}
	for name, order := range map[string]string{
		"connections first": "c1 c2 e1 e2",
		"consequence first": "c2 c1 e1 e2",
		"report first":      "e1 e2 c2 c1",
		"mixed":             "c2 e1 e2 c1",
		"agent is slow":     "c1 c2 wait e1 e2",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, agent, worker := judged()
				for event := range strings.FieldsSeq(order) {
					c.mu.Lock()
					switch event {
					case "c1":
						c.disconnected(worker(1), io.EOF)
					case "c2":
						c.disconnected(worker(2), io.EOF)
					case "e1":
						c.exited(agent, killed)
					case "e2":
						c.exited(agent, asked)
					}
					c.mu.Unlock()
					if event == "wait" {
						time.Sleep(2 * exitGrace)
						synctest.Wait()
					}
				}
				c.mu.Lock()
				defer c.mu.Unlock()
				require.Nil(t, c.faults.pending)
				require.Empty(t, c.faults.held)
				require.Equal(t, 1, c.faults.stop.Rank)
				require.Equal(t, 1, c.faults.lost.Rank)
				if name == "agent is slow" { // it is only known that rank 1 was lost
					require.Equal(t, -1, c.faults.stop.Code)
				} else {
					require.Equal(t, 137, c.faults.stop.Code)
				}
			})
		})
	}
}

// TestHostTakesItsWorkers loses a worker's connection before its launcher's.
func TestHostTakesItsWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, agent, worker := judged()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.disconnected(worker(1), io.EOF)
		c.disconnected(agent, io.EOF)
		require.Equal(t, fault{Rank: -1, Host: "h", Reason: "its launcher ended", Code: -1}, *c.faults.stop)
	})
}

// TestOpenSession ends a worker well with its session open: a loss to the
// sessions, a note to the launchers.
func TestOpenSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, agent, worker := judged()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.disconnected(worker(1), io.EOF)
		c.exited(agent, Exit{Rank: 1, PID: 101, Reason: "exited with code 0"})
		require.Equal(t, "exited with code 0 without Close or Shutdown of its session", c.faults.lost.Reason)
		require.Nil(t, c.faults.stop)
	})
}

// TestSilenceIsFirst resumes a coordinator whose worker has given up on it and
// failed: the launcher's word of that may be read before the worker's.
func TestSilenceIsFirst(t *testing.T) {
	for name, order := range map[string]string{
		"worker's word first": "s1 c1 e1", "launcher's word first": "e1 s1 c1", "connection last": "s1 e1 c1", "others first": "e2 e1 s1 c1 s2 c2",
		"launcher gave up and stopped its worker": "c1 sa ca", "launcher's connection first": "sa ca c1",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, agent, worker := judged()
				c.cfg.self = welcome{Host: "h", PID: 99, Rank: -1, LostAfter: 3 * time.Second}
				c.mu.Lock()
				defer c.mu.Unlock()
				for event := range strings.FieldsSeq(order) {
					rank := int(event[1] - '0')
					p := agent
					if rank < 3 {
						p = worker(rank)
					}
					switch event[0] {
					case 's':
						c.memberTimedOut(p)
					case 'c':
						c.disconnected(p, io.EOF)
					case 'e':
						c.exited(agent, Exit{Rank: rank, PID: 100 + rank, Code: 5, Reason: "exited with code 5"})
					}
				}
				require.Nil(t, c.faults.pending)
				require.Equal(t, c.faults.stop, c.faults.lost)
				require.Equal(t, []any{-1, 99}, []any{c.faults.stop.Rank, c.faults.stop.PID})
				require.Contains(t, c.faults.stop.Reason, "silent for 3s, so that ")
			})
		})
	}
}

// TestExitWithOpenConnection waits no longer for the worker's last word than it
// must: a grandchild may hold the connection.
func TestExitWithOpenConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, agent, _ := judged()
		c.mu.Lock()
		c.exited(agent, Exit{Rank: 1, PID: 101, Code: 5, Reason: "exited with code 5"})
		require.Nil(t, c.faults.stop)
		c.mu.Unlock()
		time.Sleep(2 * exitGrace)
		synctest.Wait()
		c.mu.Lock()
		defer c.mu.Unlock()
		require.Equal(t, []any{1, 5}, []any{c.faults.stop.Rank, c.faults.stop.Code})
	})
}

// TestStarvedCoordinatorAwaitsTheReport gives the launcher its time for the report of an exit while
// the process that both share runs.
func TestStarvedCoordinatorAwaitsTheReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, agent, worker := judged()
		c.clock = newRunClock(exitGrace / 5)
		c.mu.Lock()
		c.disconnected(worker(1), io.EOF)
		c.mu.Unlock()
		time.Sleep(10 * exitGrace) // without a tick: the process stands still
		synctest.Wait()
		c.mu.Lock()
		require.NotNil(t, c.faults.pending)
		c.exited(agent, Exit{Rank: 1, PID: 101, Code: 5, Reason: "exited with code 5"})
		require.Equal(t, []any{1, 5}, []any{c.faults.stop.Rank, c.faults.stop.Code})
		c.mu.Unlock()
	})
	synctest.Test(t, func(t *testing.T) { // the report never arrives
		c, _, worker := judged()
		c.clock = newRunClock(exitGrace / 5)
		c.mu.Lock()
		c.disconnected(worker(1), io.EOF)
		c.mu.Unlock()
		for range 20 {
			time.Sleep(exitGrace / 10)
			c.clock.tick()
		}
		synctest.Wait()
		c.mu.Lock()
		defer c.mu.Unlock()
		require.Nil(t, c.faults.pending)
		require.Equal(t, []any{1, -1}, []any{c.faults.stop.Rank, c.faults.stop.Code})
	})
}

// TestFailureBeforeTheEnd holds back a launcher's word that all its workers have
// ended until it is known how one of them did.
func TestFailureBeforeTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, agent, _ := judged()
		require.NoError(t, c.handle(agent, note(kindExit, Exit{Rank: 1, PID: 101, Code: 5, Reason: "exited with code 5"})))
		require.NoError(t, c.handle(agent, message{kind: kindDone, epoch: firstEpoch}))
		time.Sleep(2 * exitGrace)
		synctest.Wait()
		var kinds []kind
		for _, m := range agent.out {
			kinds = append(kinds, m.kind)
		}
		require.Equal(t, []kind{kindFault, kindEnded}, kinds)
	})
}

// TestRunClock stands still while the process does, which only the late tick shows.
func TestRunClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newRunClock(100 * time.Millisecond)
		for range 10 {
			time.Sleep(100 * time.Millisecond)
			c.tick()
		}
		require.Equal(t, time.Second, c.now())
		time.Sleep(4 * time.Second)
		require.Equal(t, 1100*time.Millisecond, c.now(), "before the ticker runs")
		c.tick()
		require.Equal(t, 1100*time.Millisecond, c.now(), "after it ran")
		time.Sleep(140 * time.Millisecond)
		require.Equal(t, 1240*time.Millisecond, c.now(), "a tick may be a little late")
		for range 10 { // starved: each tick comes late
			time.Sleep(400 * time.Millisecond)
			c.tick()
		}
		require.Equal(t, 2100*time.Millisecond, c.now())
	})
}

func TestWaitingLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, worker := judged()
		c.cfg.job, c.started = "x", time.Now()
		require.Empty(t, c.waitingLine(), "the world is complete")
		c.world, c.workers = nil, []*peer{worker(0), worker(2)}
		time.Sleep(waitLine)
		require.Equal(t, "job x: waiting since 5s: 2 of 3 processes have joined: rank 0 (host h pid 100), rank 2 (host h pid 102); missing rank 1", c.waitingLine())
		c.workers = nil
		require.Empty(t, c.waitingLine(), "programs that never attach are waited for by nobody")
	})
}
