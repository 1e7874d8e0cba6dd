package cluster

import (
	"sync"
	"sync/atomic"
	"time"
)

// maxQueuedBytes limits the data queued for a peer that does not read. A peer
// that exceeds it is lost.
const maxQueuedBytes = MaxStoreBytes

// A peer is the coordinator's end of a member's connection.
type peer struct {
	link   *link
	addr   string
	sendBy time.Duration // time limit of one write
	heard  atomic.Int64  // UnixNano of the last frame

	outMu  sync.Mutex
	out    [][]byte
	queued int
	closed bool // no new messages; queued messages are still sent
	hungUp bool // received messages are ignored, too
	ready  chan struct{}
	done   chan struct{} // closed when the writer goroutine has ended

	// Guarded by coordinator.mu.
	role     role
	host     host         // if an agent
	reg      registration // if a worker
	state    peerState
	prepared bool // agent: has accepted the current attempt
}

type role int

const (
	roleNone role = iota
	roleAgent
	roleWorker
)

type peerState int

const (
	peerNew peerState = iota
	peerJoined
	peerDone // agent: its workers have exited and it waits for the others
	peerGone // left, lost or refused
)

func newPeer(l *link, addr string, sendBy time.Duration) *peer {
	p := &peer{link: l, addr: addr, sendBy: sendBy,
		ready: make(chan struct{}, 1), done: make(chan struct{})}
	p.heard.Store(time.Now().UnixNano())
	return p
}

// member describes the peer in messages.
func (p *peer) member() Member {
	if p.role == roleAgent {
		return p.host.member()
	}
	return p.reg.Member
}

func (p *peer) silent() time.Duration { return time.Since(time.Unix(0, p.heard.Load())) }

// send queues a message and does not block. Messages arrive in order.
func (p *peer) send(m message) {
	b := m.encode()
	p.outMu.Lock()
	defer p.outMu.Unlock()
	if p.closed {
		return
	}
	if p.queued += len(b); p.queued > maxQueuedBytes {
		p.closed = true
		p.link.close() // the reader then reports the loss
		return
	}
	p.out = append(p.out, b)
	p.wake()
}

// closeAfterQueue closes the connection after all queued messages are sent.
func (p *peer) closeAfterQueue() {
	p.outMu.Lock()
	defer p.outMu.Unlock()
	p.closed, p.hungUp = true, true
	p.wake()
}

func (p *peer) hasHungUp() bool {
	p.outMu.Lock()
	defer p.outMu.Unlock()
	return p.hungUp
}

// stopSending stops sending after a failed write. The reader continues, to receive
// messages that the peer sent before.
func (p *peer) stopSending() {
	p.outMu.Lock()
	p.closed = true
	p.outMu.Unlock()
	p.link.finish()
}

func (p *peer) wake() {
	select {
	case p.ready <- struct{}{}:
	default:
	}
}

// writeLoop sends queued messages until the peer hangs up or a write fails. The
// reader closes the connection.
func (p *peer) writeLoop() {
	defer close(p.done)
	for range p.ready {
		for {
			b, last := p.next()
			if b == nil {
				if last {
					p.link.finish()
					return
				}
				break
			}
			if err := p.link.write(b, p.sendBy); err != nil {
				p.stopSending()
				return
			}
		}
	}
}

func (p *peer) next() (b []byte, last bool) {
	p.outMu.Lock()
	defer p.outMu.Unlock()
	if len(p.out) == 0 {
		return nil, p.closed
	}
	b, p.out = p.out[0], p.out[1:]
	p.queued -= len(b)
	return b, false
}
