package job

import (
	"context"
	"errors"
	"maps"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Collectives need a path between each two hosts, while the control connections only form a star
// and gossip goes around a path that is cut. So each host regularly connects to the gossip port of
// each other host, and sends more bytes than fit into one packet. The kernels of both hosts do all
// of this, so the path also works if a process is busy or stopped.

const (
	// pairsPerSecond is the number of probes that a host starts in a second, at most.
	pairsPerSecond = 10
	// pairTimeout is the time of a probe. TCP tries again after 1 s and after 3 s.
	pairTimeout = 4 * time.Second
	// pairBytes fill several packets, also if they are jumbo frames.
	pairBytes = 64 << 10
)

// pairs probes the paths from this host to the others.
type pairs struct {
	agent  *Agent
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// startPairs starts the probes to all other hosts of the plan, and follows its changes.
func startPairs(a *Agent) *pairs {
	ctx, cancel := context.WithCancel(context.Background())
	p := &pairs{agent: a, cancel: cancel}
	p.wg.Go(func() { p.follow(ctx) })
	return p
}

// follow watches the hosts of the latest plan until ctx ends.
func (p *pairs) follow(ctx context.Context) {
	watched := map[string]context.CancelFunc{}
	var seen *placement
	k := p.agent.Client()
	for {
		if now := p.agent.Client(); now != k { // the clock of the watches has stopped
			k, seen = now, nil
			for uuid, cancel := range watched {
				cancel()
				delete(watched, uuid)
			}
		}
		if at := p.agent.Now.Load().Place.Load(); at != seen {
			seen = at
			p.change(ctx, watched, at.plan.Hosts)
		}
		if !Sleep(ctx, time.Second) {
			return
		}
	}
}

// change begins to watch hosts that are new, and stops to watch hosts that have left.
func (p *pairs) change(ctx context.Context, watched map[string]context.CancelFunc, hosts []host) {
	left := maps.Clone(watched)
	every := max(time.Second, time.Duration(len(hosts))*time.Second/pairsPerSecond)
	for _, h := range hosts {
		delete(left, h.UUID)
		if h.UUID == p.agent.UUID || watched[h.UUID] != nil {
			continue
		}
		one, cancel := context.WithCancel(ctx)
		watched[h.UUID] = cancel
		p.wg.Go(func() { p.watch(one, h.UUID, every) })
	}
	for uuid, cancel := range left {
		cancel()
		delete(watched, uuid)
	}
}

func (p *pairs) close() {
	if p != nil {
		p.cancel()
		p.wg.Wait()
	}
}

// A pathWatch is the history of the probes of one path.
type pathWatch struct {
	mu     sync.Mutex
	since  time.Duration // when a probe last succeeded, the path was last reported, or the first probe began
	before bool          // a probe has succeeded
	tries  int           // ended since
}

// watch probes one host until ctx ends, with probes that overlap, because one
// takes long on a path with losses.
func (p *pairs) watch(ctx context.Context, uuid string, every time.Duration) {
	clock := p.agent.Client().Clock
	w := &pathWatch{since: clock.now()}
	limit := max(2*p.agent.Client().Hello.LostAfter, 6*every)
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	var probes sync.WaitGroup
	defer probes.Wait()
	for {
		if addr := p.agent.Gossip.addrOf(uuid); addr != "" {
			probes.Go(func() {
				state := probePath(ctx, addr)
				if r := w.ended(state, clock.now(), limit); r != nil && ctx.Err() == nil {
					r.UUID = uuid
					_ = p.agent.Client().Send(Note(kindPath, r)) // the coordinator is lost, too, if it fails
				}
			})
		}
		select {
		case <-ticks.C:
		case <-ctx.Done():
			return
		}
	}
}

// minPairTries is the number of probes that must fail before a path counts as cut.
const minPairTries = 3

// ended records the end of a probe, and returns a report if the path has not worked for limit.
func (w *pathWatch) ended(state pathState, now, limit time.Duration) *pathReport {
	w.mu.Lock()
	defer w.mu.Unlock()
	if state == pathGood {
		w.since, w.before, w.tries = now, true, 0
		return nil
	}
	if w.tries++; w.tries < minPairTries || now-w.since < limit {
		return nil
	}
	w.since, w.tries = now, 0
	return &pathReport{State: state, Before: w.before}
}

// probePath connects to a TCP port and sends data until the other kernel has acknowledged all.
func probePath(ctx context.Context, addr string) pathState {
	ctx, cancel := context.WithTimeout(ctx, pairTimeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED): // the other host has answered
		return pathGood
	case err != nil:
		return pathCut
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	_ = c.SetDeadline(deadline)
	// The other host closes the connection when it has read the first packet.
	if _, err := c.Write(make([]byte, pairBytes)); err != nil && !isClosedByPeer(err) {
		return pathSmall
	}
	for {
		if unacknowledged(c.(*net.TCPConn)) == 0 {
			return pathGood
		}
		if !Sleep(ctx, 10*time.Millisecond) {
			return pathSmall
		}
	}
}

// unacknowledged returns the number of bytes or packets that the other host has not received, or 0
// if the connection is closed. After a reset, the kernel still counts the data that it never sent.
func unacknowledged(c *net.TCPConn) (n uint32) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil && info.State != unix.BPF_TCP_CLOSE {
			n = info.Unacked + info.Notsent_bytes
		}
	})
	return n
}
