package cluster

import (
	"sync"
	"sync/atomic"
	"time"
)

// maxQueuedBytes bounds what waits for a peer that does not read; beyond it
// the peer is lost.
const maxQueuedBytes = MaxStoreBytes

// A peer is the coordinator's end of one member's connection. The fields below
// mu's line belong to the coordinator's lock.
type peer struct {
	link   *link
	addr   string
	sendBy time.Duration // how long one write may take
	heard  atomic.Int64  // UnixNano of the last frame

	outMu  sync.Mutex
	out    [][]byte
	queued int
	closed bool // no more is accepted; what is queued is still sent
	hungUp bool // nor is anything heard
	ready  chan struct{}
	done   chan struct{} // closed when the writer has ended

	// Guarded by coordinator.mu.
	role     role
	host     host         // of an agent
	reg      registration // of a worker
	state    peerState
	prepared bool // agent: has answered the present attempt
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
	peerDone // agent: its workers have ended and it waits for the others
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

// send queues a message and never blocks. Queued messages arrive in order.
func (p *peer) send(m message) {
	b := m.encode()
	p.outMu.Lock()
	defer p.outMu.Unlock()
	if p.closed {
		return
	}
	if p.queued += len(b); p.queued > maxQueuedBytes {
		p.closed = true
		p.link.close() // the reader notices and tells the coordinator
		return
	}
	p.out = append(p.out, b)
	p.wake()
}

// hangUp lets the writer send what is queued and then close the connection.
func (p *peer) hangUp() {
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

// giveUp sends no more after a write has failed. What the other end has said
// before it went is still to be read.
func (p *peer) giveUp() {
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

// writeLoop sends what is queued until the peer hangs up or a write fails. The
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
				p.giveUp()
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
