package cluster

import (
	"errors"
	"io"
	"net"
	"os"
	"time"
)

// resumeGrace is the time limit for a process to connect again after its connection closed.
const resumeGrace = 400 * time.Millisecond

// awaitLink waits for a peer to connect again after err ended its link.
func (c *coordinator) awaitLink(p *peer, err error) (renewal, error) {
	c.mu.Lock()
	over := p.state == peerGone || c.closed
	c.mu.Unlock()
	if over || p.isClosed() || errors.Is(err, os.ErrDeadlineExceeded) {
		return renewal{}, err
	}
	end := p.clock.now() + c.grace(p, err)
	for {
		select {
		case r := <-p.renewals:
			return r, nil
		case <-p.expired:
			return renewal{}, os.ErrDeadlineExceeded
		case <-p.gone:
			return renewal{}, err
		case <-c.quit:
			return renewal{}, err
		case <-time.After(end - p.clock.now()): // the clock stands still while this process is starved
			if p.clock.now() < end {
				continue
			}
			if !c.mustProve(p, err) || c.examine(p) == foundEnded {
				return renewal{}, err
			}
			end = p.clock.now() + slowAfter(c.cfg.self.LostAfter)
		}
	}
}

// grace returns how long a peer has time to connect again. A process that exits closes its
// connection. A reset may have reached only this end: then the peer notices it when it
// sends the next heartbeat.
func (c *coordinator) grace(p *peer, err error) time.Duration {
	limit := c.cfg.self.LostAfter / 2
	if _, local := p.reading.c.(*net.UnixConn); local {
		return 0 // no network, so the process has ended
	}
	if errors.Is(err, io.EOF) {
		return min(resumeGrace, limit)
	}
	return min(resumeGrace+c.cfg.self.Heartbeat, limit)
}

var errOtherStream = errors.New("the connection continues another one")

// resume hands the link of p to the peer whose stream the message names.
func (c *coordinator) resume(p *peer, m message) error {
	c.mu.Lock()
	q := c.peers[string(m.body)]
	valid := p.role == roleNone && q != nil && q != p && q.worker == p.worker && q.state != peerGone
	late := valid && m.epoch < q.request
	if valid {
		q.request = max(q.request, m.epoch)
	}
	c.mu.Unlock()
	if late { // the member has sent another request since, over another link
		return errOtherStream
	}
	if !valid {
		p.send(note(kindRefuse, refusal{Reason: "this process is not a member of the job any more"}))
		p.closeAfterQueue()
		return nil
	}
	l := p.detach()
	if l == nil { // a write on it has failed
		return errOtherStream
	}
	l.most = 0
	q.replaceBy(renewal{link: l, acked: m.id, greet: true})
	return errOtherStream
}
