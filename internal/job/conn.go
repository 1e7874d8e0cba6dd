package job

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// A conn is the coordinator's end of the stream of a process.
type conn struct {
	*stream
	peer   *peer
	gone   chan struct{} // closed by end
	ending sync.Once

	// Guarded by server.mu.
	found     finding  // about its process, after the end of its connection
	inquiries []uint64 // requests for the attendance that are not answered yet
	request   uint64   // number of the last request to continue the stream
}

func newConn(s *stream, addr string, worker bool) *conn {
	return &conn{stream: s, peer: &peer{id: newUUID(), addr: addr, worker: worker}, gone: make(chan struct{})}
}

// end records that the process has exited, so that it will not connect again.
func (k *conn) end() { k.ending.Do(func() { close(k.gone) }) }

// An unregistered peer is authenticated, and not a member of the job: it has not registered
// or resumed its stream yet, or it has left. A worker's token is sufficient for that.
const (
	// maxUnregistered limits these peers. A new one displaces the oldest: members that start or
	// connect again are unregistered for milliseconds.
	maxUnregistered = 1024
	// maxUnregisteredFrame limits the frames of a peer that is new: a registration has less than 4 KiB.
	maxUnregisteredFrame = 64 << 10
	// maxHistoryFrame is the limit for launchers that choose a coordinator: they may send a history. It
	// suffices for about 10,000 hosts with 8 processes each.
	maxHistoryFrame = MaxFrameBytes
)

// displaceUnregistered closes the oldest unregistered peer if there are too many. Lost members count as
// members, so that the limit is not exact.
func (s *Server) displaceUnregistered() {
	if len(s.conns) < len(s.agents)+len(s.workers)+maxUnregistered {
		return
	}
	var oldest *conn
	for _, k := range s.conns {
		if k.peer.isUnregistered() && (oldest == nil || k.peer.since < oldest.peer.since) {
			oldest = k
		}
	}
	if oldest != nil {
		delete(s.conns, oldest.peer.id)
		oldest.close()
	}
}

// isLate reports whether a peer should have registered already: its heartbeats do not count.
func (s *Server) isLate(p *peer, limit time.Duration) bool {
	return p.state == peerNew && s.now()-p.since > limit
}

// watchSilence looks for silent peers.
func (s *Server) watchSilence() {
	t := time.NewTicker(s.clock.step)
	defer t.Stop()
	for {
		select {
		case <-s.quit:
			return
		case <-t.C:
			s.clock.tick()
			s.expireSilent()
		}
	}
}

func (s *Server) expireSilent() {
	s.mu.Lock()
	defer s.mu.Unlock()
	limit := s.silenceLimit()
	excused := s.silenceExcused(limit)
	for _, k := range s.conns {
		if k.isTooSilent(limit) && !(excused && s.isElsewhere(k.peer)) || s.isLate(k.peer, limit) {
			k.expire()
		}
	}
}

// isElsewhere reports whether p is a member on another host.
func (s *Server) isElsewhere(p *peer) bool {
	return !p.isUnregistered() && p.member().Host != s.cfg.Self.Host
}

// silenceExcused reports whether no silence of a member on another host counts, because the network of this host is the likely
// cause: all of them are silent, or were a moment ago. They are lost at the same time, when the last one has been silent for the limit.
// If one of them is heard before that, the others have the time to connect again. With one other host, the cause cannot be known.
func (s *Server) silenceExcused(limit time.Duration) bool {
	var last *conn
	several := false
	for _, k := range s.conns {
		if !s.isElsewhere(k.peer) {
			continue
		}
		several = several || last != nil && last.peer.member().Host != k.peer.member().Host
		if last == nil || k.silent() < last.silent() {
			last = k
		}
	}
	if !several || last.isTooSilent(limit) {
		return false
	}
	if last.silent() > limit/2 {
		s.excusedUntil = s.now() + limit/4
	}
	return s.now() < s.excusedUntil
}

// resumeGrace is the time limit for a process to connect again after its connection closed.
const resumeGrace = 400 * time.Millisecond

// errNotBack is the error of a peer whose connection closed and that was silent from then on. Whether it has ended is not known.
var errNotBack = fmt.Errorf("the connection closed, and the peer did not connect again: %w", os.ErrDeadlineExceeded)

// awaitLink waits for a peer to connect again after err ended its link.
func (s *Server) awaitLink(k *conn, err error) (renewal, error) {
	s.mu.Lock()
	over, begun := k.peer.state == peerGone || s.closed, s.now()
	s.mu.Unlock()
	if over || k.isClosed() || errors.Is(err, os.ErrDeadlineExceeded) {
		return renewal{}, err
	}
	graceEnds := k.clock.now() + s.grace(k, err)
	end := graceEnds
	if s.mustProve(k, err) { // a proof needs no grace
		end = min(end, k.clock.now()+2*FirstRetry)
	}
	for {
		select {
		case r := <-k.renewals:
			return r, nil
		case <-k.expired:
			if isClosedByPeer(err) {
				return renewal{}, errNotBack
			}
			return renewal{}, os.ErrDeadlineExceeded
		case <-k.gone:
			return renewal{}, err
		case <-s.quit:
			return renewal{}, err
		case <-time.After(end - k.clock.now()): // the clock stands still while this process is starved
			if k.clock.now() < end {
				continue
			}
			if s.isCutOffWith(k, begun) { // when the network carries packets again, the worker needs time, too
				graceEnds = k.clock.now() + s.grace(k, err)
			}
			if needed := s.mustProve(k, err); !needed && k.clock.now() >= graceEnds || needed && s.examine(k) == foundEnded {
				return renewal{}, err
			}
			end = max(graceEnds, k.clock.now()+slowAfter(s.cfg.Self.LostAfter))
		}
	}
}

// grace returns how long a peer has time to connect again. A process that exits
// closes its connection, but a reset may have reached only this end: then the
// peer notices it when it sends the next heartbeat.
func (s *Server) grace(k *conn, err error) time.Duration {
	limit := s.cfg.Self.LostAfter / 2
	if _, local := k.reading.Conn.(*net.UnixConn); local {
		return 0 // no network, so the process has ended
	}
	if errors.Is(err, io.EOF) {
		return min(resumeGrace, limit)
	}
	return min(resumeGrace+s.cfg.Self.Heartbeat, limit)
}

var errOtherStream = errors.New("the connection continues another one")

// resume hands the link of k to the stream that the message names.
func (s *Server) resume(k *conn, m Message) error {
	s.mu.Lock()
	to := s.conns[string(m.Body)]
	valid := k.peer.role == roleNone && to != nil && to != k && to.peer.worker == k.peer.worker && to.peer.state != peerGone
	late := valid && m.Epoch < to.request
	if valid {
		to.request = max(to.request, m.Epoch)
		to.peer.heard = s.now()
	}
	s.mu.Unlock()
	if late { // the member has sent another request since, over another link
		return errOtherStream
	}
	if !valid {
		k.send(Note(KindRefuse, Refusal{Reason: "this process is not a member of the job any more"}))
		k.closeAfterQueue()
		return nil
	}
	l := k.detach()
	if l == nil { // a write on it has failed
		return errOtherStream
	}
	to.replaceBy(renewal{link: l, acked: m.ID, greet: true})
	return errOtherStream
}

// mustProve reports whether the launcher whose connection has ended with err is lost only if it is silent for long enough or has
// provably ended. The end of a connection alone proves nothing: a firewall, a proxy or a router that has restarted resets
// connections of processes that live. Until the launcher notices silence, it still follows this coordinator.
func (s *Server) mustProve(k *conn, err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := k.peer
	return s.cfg.probes && p.role == roleAgent && s.isDeciding() && s.counts(p) && !s.closed && !s.handedOver && isClosedByPeer(err) && p.host.Control != ""
}

// isCutOffWith reports whether nothing was heard from the launcher of a worker
// since its connection has ended. The network is then the likely cause, and the
// worker may live, because its launcher would report its exit. The limit of
// silence still applies.
func (s *Server) isCutOffWith(k *conn, since instant) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := k.peer
	if p.role != roleWorker || !s.isElastic() || s.closed || s.handedOver {
		return false
	}
	a := s.agentOf(p)
	return a != nil && a.heard <= since
}

// examine looks for a proof that the launcher of a closed connection has ended.
func (s *Server) examine(k *conn) finding {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Self.LostAfter/4)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-s.quit:
			cancel()
		case <-stop:
		}
	}()
	ip, _, _ := net.SplitHostPort(k.peer.addr)
	found := s.cfg.probe(ctx, k.peer.host, ip)
	s.mu.Lock()
	defer s.mu.Unlock()
	k.found = found
	return found
}
