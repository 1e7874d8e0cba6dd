package job

import (
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// judged is a coordinator without connections: a host with three workers.
func judged() (j *paperJob, agent *peer, worker func(rank int) *peer) {
	j = onPaper(CoordConfig{agents: 1, Self: Welcome{LostAfter: 3 * time.Second}})
	j.plan = &plan{Hosts: []host{{Host: "h", UUID: "u", LocalSize: 3}}}
	agent = &peer{role: roleAgent, state: peerJoined, host: j.plan.Hosts[0], heard: j.now}
	j.agents = []*peer{agent}
	for r := range 3 {
		j.workers = append(j.workers, &peer{role: roleWorker, state: peerJoined, heard: j.now, reg: Registration{Member: Member{Rank: r, Host: "h", PID: 100 + r}}})
	}
	j.world = &World{Members: members(j.workers)}
	return j, agent, func(rank int) *peer { return j.workers[rank] }
}

// served returns a server with the coordinator and its peers, without goroutines.
func (j *paperJob) served() (*Server, func(*peer) *conn) {
	s := &Server{coordinator: j.coordinator, cfg: ServerConfig{CoordConfig: j.cfg}, clock: NewRunClock(time.Second), quit: make(chan struct{}),
		conns: map[string]*conn{}, allNotified: make(chan struct{}), timer: time.AfterFunc(time.Hour, func() {})}
	for _, p := range slices.Concat(j.agents, j.workers) {
		k := newConn(NewStream(nil, s.clock, 0), p.addr, p.worker)
		p.id = k.peer.id
		k.peer = p
		s.conns[p.id] = k
	}
	return s, func(p *peer) *conn { return s.conns[p.id] }
}

// ends ends the connection of a peer with an error.
func (j *paperJob) ends(p *peer, err error) {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		p.heard = j.now - 2*j.cfg.Self.LostAfter
	}
	j.happen(disconnected{p, ending{closed: isClosedByPeer(err), reason: reasonOf(err, j.silenceLimit())}})
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
			testhost.Bubble(t, func(t *testing.T) {
				c, agent, worker := judged()
				for event := range strings.FieldsSeq(order) {
					switch event {
					case "c1":
						c.ends(worker(1), io.EOF)
					case "c2":
						c.ends(worker(2), io.EOF)
					case "e1":
						c.exited(agent, killed)
					case "e2":
						c.exited(agent, asked)
					}
					if event == "wait" {
						c.sleep(2 * ExitGrace)
					}
				}
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
	testhost.Bubble(t, func(t *testing.T) {
		c, agent, worker := judged()
		c.ends(worker(1), io.EOF)
		c.ends(agent, io.EOF)
		require.Equal(t, Fault{Rank: -1, Host: "h", Reason: "its launcher ended", Code: -1}, *c.faults.stop)
	})
}

// Both hosts of a path that fails are connected, and learn the reason.
func TestPathFailureReachesBothHosts(t *testing.T) {
	j, a, _ := judged()
	b := &peer{role: roleAgent, state: peerJoined, host: host{Host: "i", UUID: "v", LocalSize: 1}, heard: j.now}
	j.plan.Hosts, j.agents = append(j.plan.Hosts, b.host), append(j.agents, b)
	require.NoError(t, j.handle(a, Note(kindPath, pathReport{UUID: "v", State: pathCut, Before: true})))
	require.Contains(t, j.faults.stop.Reason, "cannot connect to it; both reach the coordinator")
	for _, p := range j.agents {
		require.Equal(t, []Kind{KindFault}, kindsOf(j.take(p)))
	}
}

// TestOpenSession ends a worker well with its session open: a loss to the
// sessions, a note to the launchers.
func TestOpenSession(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		c, agent, worker := judged()
		c.ends(worker(1), io.EOF)
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
			testhost.Bubble(t, func(t *testing.T) {
				c, agent, worker := judged()
				c.cfg.Self = Welcome{Host: "h", PID: 99, Rank: -1, LostAfter: 3 * time.Second}
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
						c.ends(p, io.EOF)
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
	testhost.Bubble(t, func(t *testing.T) {
		c, agent, _ := judged()
		c.exited(agent, Exit{Rank: 1, PID: 101, Code: 5, Reason: "exited with code 5"})
		require.Nil(t, c.faults.stop)
		c.sleep(2 * ExitGrace)
		require.Equal(t, []any{1, 5}, []any{c.faults.stop.Rank, c.faults.stop.Code})
	})
}

// The launcher has its time for the report of an exit while the coordinator's clock runs.
func TestCoordinatorAwaitsTheReport(t *testing.T) {
	c, agent, worker := judged()
	c.ends(worker(1), io.EOF)
	c.sleep(ExitGrace - 1)
	require.NotNil(t, c.faults.pending)
	c.exited(agent, Exit{Rank: 1, PID: 101, Code: 5, Reason: "exited with code 5"})
	require.Equal(t, []any{1, 5}, []any{c.faults.stop.Rank, c.faults.stop.Code})

	c, _, worker = judged() // the report never arrives
	c.ends(worker(1), io.EOF)
	c.sleep(ExitGrace)
	require.Nil(t, c.faults.pending)
	require.Equal(t, []any{1, -1}, []any{c.faults.stop.Rank, c.faults.stop.Code})
}

// The deadlines of a coordinator do not pass while its process is stopped or starved, which its clock shows.
func TestStarvedCoordinator(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		step := Welcome{Heartbeat: time.Second, LostAfter: 10 * time.Second}
		stopped := make(chan struct{})
		s := NewServer(newWireListener(), ServerConfig{Job: "j", Notify: func(string) {}, CoordConfig: CoordConfig{agents: 1, Size: 1, Self: step}, Sys: &System{Run: func() { <-stopped }}})
		s.mu.Lock()
		s.coordinator.after(ExitGrace, deadline{what: dueProposal})
		_ = s.step(nil)
		s.mu.Unlock()
		passed := func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return !slices.ContainsFunc(s.deadlines, func(d deadline) bool { return d.what == dueProposal })
		}
		time.Sleep(10 * ExitGrace)
		synctest.Wait()
		require.False(t, passed())
		close(stopped)
		time.Sleep(ExitGrace / 2)
		synctest.Wait()
		require.False(t, passed(), "most of the time is left")
		time.Sleep(ExitGrace)
		synctest.Wait()
		require.True(t, passed())
		s.Close()
	})
}

// TestFailureBeforeTheEnd holds back a launcher's word that all its workers have
// ended until it is known how one of them did.
func TestFailureBeforeTheEnd(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		c, agent, _ := judged()
		require.NoError(t, c.handle(agent, Note(kindExit, Exit{Rank: 1, PID: 101, Code: 5, Reason: "exited with code 5"})))
		require.NoError(t, c.handle(agent, Message{Kind: kindDone, Epoch: FirstEpoch}))
		c.sleep(2 * ExitGrace)
		var kinds []Kind
		kinds = append(kinds, kindsOf(c.take(agent))...)
		require.Equal(t, []Kind{KindFault, kindEnded}, kinds)
	})
}

// TestRunClock stands still while the process does, which only the late tick shows.
func TestRunClock(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		c := NewRunClock(100 * time.Millisecond)
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
	testhost.Bubble(t, func(t *testing.T) {
		c, _, worker := judged()
		require.Empty(t, c.waitingLine(), "the world is complete")
		c.world, c.workers = nil, []*peer{worker(0), worker(2)}
		c.now += WaitLine
		require.Equal(t, "waiting since 5s: 2 of 3 processes have joined: rank 0 (host h pid 100), rank 2 (host h pid 102); missing rank 1", c.waitingLine())
		c.workers = nil
		require.Empty(t, c.waitingLine(), "programs that never attach are waited for by nobody")
	})
}
