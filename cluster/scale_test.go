package cluster

import (
	"flag"
	"fmt"
	"net"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var scaleAgents = flag.Int("agents", 100, "hosts of TestManyAgents")

// A pipeListener accepts pipes of this process.
type pipeListener struct {
	conns chan net.Conn
	over  chan struct{}
	once  sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.over:
		return nil, net.ErrClosed
	}
}
func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.over) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

// dial connects to the coordinator, and tries again as agents do: the coordinator closes
// connections if too many processes are in the handshake.
func (l *pipeListener) dial(key credential) (*link, welcome) {
	for delay := firstRetry; ; delay = min(2*delay, lastRetry) {
		near, far := net.Pipe()
		l.conns <- far
		link, err := dialHandshake(near, "scale", key)
		if err == nil {
			if hello, err := readWelcome(link); err == nil {
				return link, hello
			}
		}
		near.Close()
		time.Sleep(delay)
	}
}

// TestManyAgents lets many agents meet through the real handshake, streams and coordinator, over
// pipes and with a simulated clock. It prints the simulated time and the memory of all ends.
func TestManyAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := *scaleAgents
		keys, err := deriveKeys(testSecret, "scale")
		require.NoError(t, err)
		ln := &pipeListener{conns: make(chan net.Conn), over: make(chan struct{})}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		c := newCoordinator(ln, coordConfig{job: "scale", key: keys.control, agents: n, notify: func(string) {},
			self: welcome{Host: "h0", Agent: "u0", Rank: -1, Heartbeat: 500 * time.Millisecond, LostAfter: 3 * time.Second}})
		begun := time.Now()
		planned := make(chan int, n)
		ks := make([]*client, n)
		var all sync.WaitGroup
		for i := range n {
			all.Go(func() {
				l, hello := ln.dial(keys.control)
				ks[i] = newClient(l, target{job: "scale", key: keys.control}, "", "", hello, func(k *client, m message) {
					switch m.kind {
					case kindPrepare:
						_ = k.send(message{kind: kindPrepared, epoch: firstEpoch, id: m.id})
					case kindPlan:
						var p plan
						require.NoError(t, m.record(&p))
						planned <- len(p.Hosts)
					}
				})
				m := note(kindRegister, host{Host: fmt.Sprint("h", i), UUID: newUUID(), NodeRank: i, Nodes: n, MinNodes: n, LocalSize: 8,
					MasterAddr: "10.0.0.1", MasterPort: 29500, Control: "10.0.0.1:29478"})
				m.id = registerAgent
				require.NoError(t, ks[i].send(m))
			})
		}
		all.Wait()
		for range n {
			require.Equal(t, n, <-planned)
		}
		took := time.Since(begun)
		runtime.GC()
		runtime.ReadMemStats(&after)
		t.Logf("%d agents meet in %v of simulated time; memory of all ends: %d MiB", n, took, (int64(after.HeapInuse+after.StackInuse)-int64(before.HeapInuse+before.StackInuse))>>20)
		require.Less(t, took, 5*time.Second)
		for _, k := range ks {
			all.Go(k.close)
		}
		all.Wait()
		c.close()
	})
}
