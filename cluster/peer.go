package cluster

import (
	"sync"
	"time"
)

// A peer is the coordinator's end of a member's stream.
type peer struct {
	*stream
	id     string // the member needs it to resume the stream
	worker bool   // it has only a worker's credential
	addr   string
	since  time.Duration // time of the coordinator's clock when it was admitted
	gone   chan struct{} // closed by end
	ending sync.Once

	// Guarded by coordinator.mu.
	role      role
	host      host         // if an agent
	reg       registration // if a worker
	state     peerState
	home      place  // worker: the place in which it was started
	seat      uint64 // worker: the last epoch that it was a member of; 0 if it is new
	elastic   answers
	draining  *fault // agent: its host leaves the job for this reason, such as "received SIGTERM"
	recording uint64 // agent: number of the last entry of the ledger that it was sent, and of the last that it has
	recorded  uint64
	leaves    bool    // agent: its workers were dismissed, and it leaves when the next epoch begins
	found     finding // agent: about its process, after the end of its connection
	request   uint64  // number of the last request to continue the stream
	prepared  bool    // agent: has accepted the current attempt
	asked     uint64  // agent: number of the last proposal that it was sent, and answered that of the last one that it has
	answered  uint64
	ready     bool // agent: no worker of an earlier attempt is running
}

// answers are the answers of a worker that calls Run to the coordinator, in one epoch.
type answers struct {
	returned bool // its function has returned
	finished bool // its function has returned nil
	prepared bool // it has the proposal
	held     bool // steps is set
	steps    uint64
	failed   bool  // its function has returned an error
	exit     *Exit // its launcher has reported its exit
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

func newPeer(s *stream, addr string) *peer {
	return &peer{stream: s, id: newUUID(), addr: addr, gone: make(chan struct{})}
}

// member describes the peer in messages.
func (p *peer) member() Member {
	if p.role == roleAgent {
		return p.host.member()
	}
	return p.reg.Member
}

// end records that the process has exited, so that it will not connect again.
func (p *peer) end() { p.ending.Do(func() { close(p.gone) }) }
