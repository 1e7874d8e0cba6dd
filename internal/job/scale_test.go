package job

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

var scaleAgents = flag.Int("agents", 50, "hosts of TestManyAgents, with 8 workers each")

const scaleWorkers = 8

// A crowd is the members of a job on many hosts, with real handshakes, streams and clients over a
// simulated network. They answer as agents and workers do, but do not keep the lists that they get:
// all of them are in this process.
type crowd struct {
	t       *testing.T
	ln      *wireListener
	keys    keys
	run     string     // of the coordinator
	rnd     *rand.Rand // of the network
	loss    float64    // the share of segments that are lost
	timing  Timing     // Heartbeat and LostAfter
	mu      sync.Mutex
	all     sync.WaitGroup
	began   map[uint64]int // the number of workers that an epoch has reached
	size    map[uint64]int // of the world that one worker has decoded
	changed chan struct{}
	agents  []*Client
	workers []*Client // by host and local rank
}

func newCrowd(t *testing.T, n int, rnd *rand.Rand, loss float64) *crowd {
	ks, err := DeriveKeys(testSecret, "scale")
	require.NoError(t, err)
	return &crowd{t: t, ln: newWireListener(), keys: ks, rnd: rnd, loss: loss, timing: Timing{Heartbeat: 500 * time.Millisecond, LostAfter: 3 * time.Second}, began: map[uint64]int{}, size: map[uint64]int{}, changed: make(chan struct{}, 1),
		agents: make([]*Client, n), workers: make([]*Client, n*scaleWorkers)}
}

// meet starts a coordinator and all members.
func (x *crowd) meet() *Server {
	n := len(x.agents)
	c := NewServer(x.ln, ServerConfig{Job: "scale", Key: x.keys.Control, Notify: func(string) {},
		probe: func(_ context.Context, h host, _ string) finding {
			if x.agents[h.NodeRank].isDown() { // its port refuses connections
				return foundEnded
			}
			return foundAlive
		},
		CoordConfig: CoordConfig{agents: n, least: 1, JoinBy: time.Hour, RevokeBy: time.Minute, DrainBy: time.Minute, Self: Welcome{Host: "h0", Agent: "u0", Rank: -1, Heartbeat: x.timing.Heartbeat, LostAfter: x.timing.LostAfter}}})
	x.run = c.run
	for i := range n {
		x.all.Go(func() { x.join(i, n) })
	}
	return c
}

// isSlow reports whether a host is a straggler: one of 50.
func isSlow(i int) bool { return i%50 == 49 }

// pace is the delay of each answer of a host.
func pace(i int) time.Duration {
	if isSlow(i) {
		return 300 * time.Millisecond
	}
	return 0
}

// target returns what a member needs to connect.
func (x *crowd) target(key Credential, slow time.Duration) Target {
	return Target{Job: "scale", Key: key, connect: func(ctx context.Context) (net.Conn, error) {
		x.mu.Lock()
		near, far := newWires(x.rnd.Uint64(), 200*time.Microsecond+slow/10, x.loss)
		x.mu.Unlock()
		select {
		case x.ln.conns <- far:
			return near, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}}
}

// persist connects to the coordinator, and tries again as members do: the coordinator closes
// connections if too many processes are in the handshake.
func (to Target) persist(t *testing.T) (*Link, Welcome) {
	for delay := FirstRetry; ; delay = min(2*delay, LastRetry) {
		l, hello, err := to.Dial(t.Context())
		if err == nil {
			return l, hello
		}
		time.Sleep(delay)
	}
}

// begins counts a worker that an epoch has reached.
func (x *crowd) begins(epoch uint64) {
	x.mu.Lock()
	x.began[epoch]++
	x.mu.Unlock()
	select {
	case x.changed <- struct{}{}:
	default:
	}
}

// await waits until an epoch has reached n workers.
func (x *crowd) await(epoch uint64, n int) {
	for {
		x.mu.Lock()
		done := x.began[epoch] >= n
		x.mu.Unlock()
		if done {
			return
		}
		<-x.changed
	}
}

// join starts the members of host i.
func (x *crowd) join(i, n int) {
	slow := pace(i)
	time.Sleep(slow)
	uuid := newUUID()
	to := x.target(x.keys.Control, slow)
	l, hello := to.persist(x.t)
	x.agents[i] = newClient(l, to, "", "", hello, func(k *Client, m Message) {
		switch m.Kind {
		case kindRequestVote:
			x.answer(k, slow, Message{Kind: kindVote, Epoch: FirstEpoch, ID: m.ID})
		case kindPlan: // as a launcher, it starts its workers now
			for local := range scaleWorkers {
				x.all.Go(func() { x.joinWorker(i, local, uuid) })
			}
		case KindPropose:
			x.answer(k, slow, Message{Kind: kindAccepted, Epoch: m.Epoch, ID: m.ID})
		case kindLedger:
			x.answer(k, slow, Message{Kind: kindRecorded, Epoch: m.Epoch, ID: m.ID})
		}
	})
	m := Note(kindRegister, host{Host: fmt.Sprint("h", i), UUID: uuid, NodeRank: i, Nodes: n, MinNodes: 1, LocalSize: scaleWorkers,
		MasterAddr: "10.0.0.1", MasterPort: 29500, Control: "10.0.0.1:29478"})
	m.ID = registerAgent
	require.NoError(x.t, x.agents[i].Send(m))
}

func (x *crowd) joinWorker(i, local int, uuid string) {
	slow := pace(i)
	time.Sleep(slow)
	worker, err := x.keys.Control.forWorkers(x.run)
	require.NoError(x.t, err)
	to := x.target(worker, slow)
	l, hello := to.persist(x.t)
	k := newClient(l, to, "", "", hello, func(k *Client, m Message) {
		switch m.Kind {
		case KindWorld:
			if m.ID == 0 {
				var w World
				require.NoError(x.t, m.Record(&w))
				x.mu.Lock()
				x.size[m.Epoch] = len(w.Members)
				x.mu.Unlock()
			}
			x.begins(m.Epoch)
		case KindRevoke:
			x.answer(k, slow, Message{Kind: KindRevoked, Epoch: m.Epoch})
		case KindPropose:
			x.answer(k, slow, Message{Kind: KindPrepared, Epoch: m.Epoch, ID: m.ID})
		}
	})
	x.mu.Lock()
	x.workers[i*scaleWorkers+local] = k
	x.mu.Unlock()
	reg := Registration{Member: Member{Rank: i*scaleWorkers + local, LocalRank: local, LocalSize: scaleWorkers, Node: i, Host: fmt.Sprint("h", i), PID: 1000 + 37*i + local}, Elastic: true, Agent: uuid, Least: 1}
	require.NoError(x.t, k.Send(Note(kindRegister, reg)))
}

// answer sends a message, from a straggler only after a while.
func (x *crowd) answer(k *Client, slow time.Duration, m Message) {
	if slow == 0 {
		_ = k.Send(m) // the test waits for the epoch
		return
	}
	time.AfterFunc(slow, func() { _ = k.Send(m) })
}

// leave closes all members.
func (x *crowd) leave() {
	x.all.Wait()
	for _, k := range append(x.workers, x.agents...) {
		x.all.Go(func() { k.Stream.close(); k.CloseConnection(); k.wg.Wait() })
	}
	x.all.Wait()
}

// TestManyAgents lets many hosts meet, and loses one of them, through the real handshake, streams,
// clients and coordinator. The network and the clock are simulated: a latency of 0.2 ms, one of 100 segments lost, and
// one of 50 hosts 300 ms late with each answer. It prints the simulated times and the memory of the coordinator.
func TestManyAgents(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	testhost.Bubble(t, func(t *testing.T) {
		n := *scaleAgents
		x := newCrowd(t, n, rand.New(rand.NewPCG(seed, 1)), 0.01)
		begun := time.Now()
		c := x.meet()
		peak := watchMemory()
		x.await(1, n*scaleWorkers)
		met := time.Since(begun)
		x.all.Wait()
		begun = time.Now()
		for _, k := range append(x.workers[scaleWorkers:2*scaleWorkers:2*scaleWorkers], x.agents[1]) {
			k.CloseConnection() // as if they were killed
		}
		x.await(2, (n-1)*scaleWorkers)
		change := time.Since(begun)
		most := peak()
		t.Logf("seed %d: %d hosts with %d workers each meet in %v and change the epoch in %v of simulated time; memory of the coordinator: at most %d MiB",
			seed, n, scaleWorkers, met, change, most>>20)
		x.mu.Lock()
		require.Equal(t, map[uint64]int{1: n * scaleWorkers, 2: (n - 1) * scaleWorkers}, x.size)
		x.mu.Unlock()
		require.Less(t, met, 5*time.Second)
		require.Less(t, change, 3*time.Second, "usually less than 2 s; a lost segment adds 0.2 s")
		require.Less(t, most, int64(200<<20))
		x.leave()
		c.Close()
	})
}

// TestLossyNetwork runs jobs for ten minutes in networks that lose one of 20, and three of 10 segments. Members connect
// again if TCP waits too long, and none is lost, also if the answer to its new connection comes too late. With requests to
// continue one after the other, more than half of the runs lost a host.
func TestLossyNetwork(t *testing.T) {
	for _, loss := range []float64{0.05, 0.3} {
		t.Run(fmt.Sprint(loss), func(t *testing.T) { runLossy(t, loss) })
	}
}

func runLossy(t *testing.T, loss float64) {
	seed := uint64(time.Now().UnixNano())
	testhost.Bubble(t, func(t *testing.T) {
		const n = 3
		x := newCrowd(t, n, rand.New(rand.NewPCG(seed, 1)), loss)
		c := x.meet()
		x.await(1, n*scaleWorkers)
		time.Sleep(10 * time.Minute)
		x.mu.Lock()
		began := maps.Clone(x.began)
		x.mu.Unlock()
		renewed := 0
		for _, k := range append(x.agents, x.workers...) {
			renewed += k.Stream.Generation() - 1
		}
		t.Logf("seed %d: %d new connections", seed, renewed)
		x.leave()
		c.Close()
		require.Equal(t, map[uint64]int{1: n * scaleWorkers}, began)
	})
}

// Members that are idle keep their connections, also if the limit of silence is short compared with the heartbeat.
func TestIdleMembersStayConnected(t *testing.T) {
	for ratio := range 4 {
		testhost.Bubble(t, func(t *testing.T) {
			x := newCrowd(t, 2, rand.New(rand.NewPCG(1, 1)), 0)
			x.timing = Timing{Heartbeat: time.Second, LostAfter: time.Duration(ratio+2) * time.Second}
			c := x.meet()
			x.await(1, 2*scaleWorkers)
			time.Sleep(time.Minute)
			for _, k := range append(x.agents, x.workers...) {
				require.Equal(t, 1, k.Stream.Generation(), "ratio %d", ratio+2)
			}
			x.leave()
			c.Close()
		})
	}
}

// watchMemory measures the memory of coordinators from now on. The result returns its maximum.
func watchMemory() func() int64 {
	var most int64
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-quit:
				return
			case <-time.After(200 * time.Millisecond):
				most = max(most, coordinatorMemory())
			}
		}
	}()
	return func() int64 { close(quit); <-done; return max(most, coordinatorMemory()) }
}

// coordinatorMemory returns the bytes that goroutines of coordinators have allocated and still use, and
// their stacks.
func coordinatorMemory() int64 {
	runtime.GC()
	records := make([]runtime.MemProfileRecord, 4096)
	n, ok := runtime.MemProfile(records, true)
	for !ok {
		records = make([]runtime.MemProfileRecord, 2*n)
		n, ok = runtime.MemProfile(records, true)
	}
	var heap int64
	for _, r := range records[:n] {
		if isCoordinators(r.Stack()) {
			heap += scaled(r)
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return heap + int64(m.StackInuse)*2/5 // a member has three goroutines, and its peer two
}

// scaled returns the bytes in use of a record of a sampled profile.
func scaled(r runtime.MemProfileRecord) int64 {
	n := r.InUseObjects()
	if n == 0 {
		return 0
	}
	size := float64(r.InUseBytes()) / float64(n)
	rate := float64(runtime.MemProfileRate)
	return int64(float64(r.InUseBytes()) / -math.Expm1(-size/rate))
}

func isCoordinators(stack []uintptr) bool {
	frames := runtime.CallersFrames(stack)
	member := false
	for {
		f, more := frames.Next()
		switch {
		case strings.Contains(f.Function, "job.(*coordinator)"), strings.Contains(f.Function, "job.(*server)"), strings.Contains(f.Function, "job.newConn"):
			return true
		case strings.Contains(f.Function, "job.(*stream).writeLoop-fm"): // a member's: the coordinator starts the method itself
			member = true
		case strings.Contains(f.Function, "job.(*stream).writeLoop") && !more:
			return !member
		}
		if !more {
			return false
		}
	}
}
