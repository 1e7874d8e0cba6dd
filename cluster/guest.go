package cluster

import "time"

// A guest is an authenticated peer that is not a member of the job: it has not registered
// or resumed its stream yet, or it has left. A worker's token is sufficient to be a guest.
const (
	// maxGuests limits the guests. A new one displaces the oldest: members that start or
	// connect again are guests for milliseconds.
	maxGuests = 1024
	// maxGuestFrame limits the frames of a peer that is new: a registration has less than 4 KiB.
	maxGuestFrame = 64 << 10
	// maxCharterFrame is the limit for launchers that choose a coordinator: they may send a charter. It
	// suffices for about 10,000 hosts with 8 processes each.
	maxCharterFrame = maxFrameBytes
)

// admit makes a guest a member. The reader of the peer calls it.
func (p *peer) admit() {
	p.state, p.reading.most = peerJoined, 0
}

func (p *peer) isGuest() bool { return p.state == peerNew || p.state == peerGone }

// displaceGuest closes the oldest guest if there are too many. Lost members count as
// members, so that the limit is not exact.
func (c *coordinator) displaceGuest() {
	if len(c.peers) < len(c.agents)+len(c.workers)+maxGuests {
		return
	}
	var oldest *peer
	for _, p := range c.peers {
		if p.isGuest() && (oldest == nil || p.since < oldest.since) {
			oldest = p
		}
	}
	if oldest != nil {
		delete(c.peers, oldest.id)
		oldest.close()
	}
}

// isLate reports whether a peer should have registered already: its heartbeats do not count.
func (c *coordinator) isLate(p *peer, limit time.Duration) bool {
	return p.state == peerNew && c.clock.now()-p.since > limit
}
