package cluster

import (
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// judged is a coordinator without connections: a host with three workers.
func judged() (c *coordinator, agent *peer, worker func(rank int) *peer) {
	c = &coordinator{cfg: coordConfig{agents: 1, self: welcome{LostAfter: 3 * time.Second}}, peers: map[*peer]bool{}}
	c.faults.exits = map[int]Exit{}
	c.plan = &plan{Hosts: []host{{Host: "h", UUID: "u", LocalSize: 3}}}
	agent = newPeer(nil, "", 0)
	agent.role, agent.state, agent.host = roleAgent, peerJoined, c.plan.Hosts[0]
	c.agents = []*peer{agent}
	for r := range 3 {
		p := newPeer(nil, "", 0)
		p.role, p.state, p.reg.Member = roleWorker, peerJoined, Member{Rank: r, Host: "h", PID: 100 + r}
		c.workers = append(c.workers, p)
	}
	c.world = &world{Members: members(c.workers)}
	c.engine = newEngine(3)
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

func TestWaitingLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, worker := judged()
		c.cfg.job, c.started = "x", time.Now()
		require.Empty(t, c.waitingLine(), "the world is complete")
		c.world, c.workers = nil, []*peer{worker(0), worker(2)}
		time.Sleep(waitLine)
		require.Equal(t, "job x: waiting since 5s: 2 of 3 processes have come: rank 0 (host h pid 100), rank 2 (host h pid 102); missing rank 1", c.waitingLine())
		c.workers = nil
		require.Empty(t, c.waitingLine(), "programs that never attach are waited for by nobody")
	})
}
