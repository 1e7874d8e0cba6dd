package analyze

import (
	"fmt"
	"maps"
	"slices"
)

// A channel has the sends from one rank to another, and their receives.
type channel struct {
	from, to     int
	sends, recvs []*entry
}

// A transferFinding is a send or receive that has no partner, or another one than it needs.
type transferFinding struct {
	wait  // nil nodes if both sides have issued it
	text  string
	ranks []*member
}

// transfers pairs the sends of a group with its receives, in the order of each pair of ranks.
func (g *group) transfers() (list []transferFinding) {
	for _, c := range g.channels() {
		if f, found := g.unpaired(c); found {
			list = append(list, f)
		}
	}
	return list
}

// channels returns the transfers of each pair of ranks, in the order of the ranks.
func (g *group) channels() (list []*channel) {
	channels := map[[2]int]*channel{}
	for _, m := range g.present() {
		for i := range m.list {
			if m.list[i].peer >= 0 && !m.list[i].captured {
				g.channel(channels, m.rank, &m.list[i])
			}
		}
	}
	keys := slices.SortedFunc(maps.Keys(channels), func(a, b [2]int) int { return slices.Compare(a[:], b[:]) })
	for _, k := range keys {
		list = append(list, channels[k])
	}
	return list
}

func (g *group) channel(channels map[[2]int]*channel, rank int, e *entry) {
	k := [2]int{e.peer, rank}
	if e.sends {
		k = [2]int{rank, e.peer}
	}
	c := channels[k]
	if c == nil {
		c = &channel{from: k[0], to: k[1]}
		channels[k] = c
	}
	if e.sends {
		c.sends = append(c.sends, e)
	} else {
		c.recvs = append(c.recvs, e)
	}
}

// unpaired returns the first pair of a channel that does not fit. If a ring has overwritten
// transfers, only pending ones are paired.
func (g *group) unpaired(c *channel) (f transferFinding, found bool) {
	from, to := g.members[c.from], g.members[c.to]
	if from == nil || to == nil || from.unknown || to.unknown {
		return f, false
	}
	sends, recvs := c.sends, c.recvs
	if from.full || to.full {
		sends, recvs = running(sends), running(recvs)
		if len(sends) > 0 && len(recvs) > 0 {
			return f, false // their numbers are not known
		}
	}
	n := min(len(sends), len(recvs))
	for i := range n {
		s, r := sends[i], recvs[i]
		if s.completed && r.completed || s.dtype == r.dtype && s.in == r.out {
			continue
		}
		f.ranks = []*member{from, to}
		f.text = fmt.Sprintf("In %s, %s sends %s, but %s receives %s as its transfer %d of this pair of ranks.", g.name, from.name, s.call()+place(s), to.name, r.call()+place(r), i+1)
		return f, true
	}
	side, e, who, other := "receive", (*entry)(nil), from, to
	switch {
	case len(sends) > n:
		e = sends[n]
	case len(recvs) > n:
		side, e, who, other = "send", recvs[n], to, from
	}
	if e == nil || e.completed {
		return f, false
	}
	f.ranks = []*member{other}
	f.wait = wait{who.node, other.node, g, e, nil}
	f.text = fmt.Sprintf("In %s, %s waits in %s%s%s, but %s has not issued the matching %s.", g.name, who.name, e.position(), e.unreturned(), place(e), other.name, side)
	return f, true
}

// unreturned says that the call which issues an operation has not returned: the first operation of two ranks connects them.
func (e *entry) unreturned() string {
	if e.inCall {
		return ", which has not returned from NCCL"
	}
	return ""
}

func running(list []*entry) []*entry {
	return slices.DeleteFunc(slices.Clone(list), func(e *entry) bool { return e.completed })
}

// behindOthers returns the waits of started transfers for ranks that have issued the matching
// transfer behind another operation that has not completed.
func (g *group) behindOthers() (list []wait) {
	for _, c := range g.channels() {
		from, to := g.members[c.from], g.members[c.to]
		s, r := firstOf(c.sends), firstOf(c.recvs)
		if from == nil || to == nil || s == nil || r == nil {
			continue
		}
		sendBehind, recvBehind := from.waitsBehindItself(s), to.waitsBehindItself(r)
		switch {
		case !sendBehind && recvBehind && s.started:
			list = append(list, wait{from.node, to.node, g, s, to.head()})
		case sendBehind && !recvBehind && r.started:
			list = append(list, wait{to.node, from.node, g, r, from.head()})
		}
	}
	return list
}

// firstOf returns the first transfer that is not known to have completed, or nil.
func firstOf(list []*entry) *entry {
	if i := slices.IndexFunc(list, func(e *entry) bool { return !e.completed }); i >= 0 {
		return list[i]
	}
	return nil
}

// sent returns the send that belongs to a receive if it has completed, or nil. NCCL's buffers may have taken all its data.
func (c *channel) sent(recv *entry) *entry {
	if i := slices.Index(c.recvs, recv); i >= 0 && i < len(c.sends) && c.sends[i].completed {
		return c.sends[i]
	}
	return nil
}

// addPendingTransfer reports the first transfer that both sides have issued and the receiver has not completed.
func (r *Report) addPendingTransfer(g *group) {
	for _, c := range g.channels() {
		from, to := g.members[c.from], g.members[c.to]
		s, v := firstOf(c.sends), firstOf(c.recvs)
		if s == nil && v != nil && v.queued && from != nil && to != nil && !from.full && !to.full && !to.waitsBehindItself(v) {
			s = c.sent(v)
		}
		if s == nil || v == nil || from == nil || to == nil {
			continue
		}
		behind := from.waitsBehindItself(s) || to.waitsBehindItself(v)
		for _, side := range []struct {
			m *member
			e *entry
		}{{from, s}, {to, v}} {
			if side.e.queued && !behind {
				r.add(KindQueued, fmt.Sprintf("In %s, %s has issued %s and %s the matching receive, but the stream of %s has not reached %s%s. Work that was enqueued on the stream before it still runs or waits, such as a kernel, or a wait for another stream. Look at what the program enqueues before this operation.",
					g.name, from.name, s.position(), to.name, side.m.name, side.e.position(), place(side.e)), g, 0, ranks([]*member{side.m}))
				return
			}
		}
		r.add(KindStuck, fmt.Sprintf("In %s, %s has issued %s and %s the matching receive, and neither is known to have completed. %s: %s.",
			g.name, from.name, s.position(), to.name, stuckAdvice(s.started && v.started && !behind), devices([]*member{from, to})), g, 0, nil)
		return
	}
}
