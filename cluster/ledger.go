package cluster

import "slices"

// A ledger is what the next coordinator must know beside the epochs: the restarts so far, and whether the program has
// ended. A coordinator acts on an entry only when all launchers that it reaches have it, so that the entry survives
// the coordinator. Entries only grow, so that two ledgers can be merged.
type ledger struct {
	Used     int         `json:"used,omitempty"` // restarts so far
	Restarts []restarted `json:"restarts,omitempty"`
	Finished bool        `json:"finished,omitempty"` // all functions of an epoch have returned nil
}

// restarted are the restarts in one place.
type restarted struct {
	Agent  string `json:"agent"`
	Local  int    `json:"local"`
	PID    int    `json:"pid"` // of the process whose exit was counted last
	Total  int    `json:"total"`
	InARow int    `json:"inARow,omitempty"`
}

// merge adds the entries of another ledger.
func (l *ledger) merge(o ledger) {
	l.Used, l.Finished = max(l.Used, o.Used), l.Finished || o.Finished
	l.Restarts = slices.Clone(l.Restarts)
	for _, r := range o.Restarts {
		i := slices.IndexFunc(l.Restarts, func(q restarted) bool { return q.Agent == r.Agent && q.Local == r.Local })
		switch {
		case i < 0:
			l.Restarts = append(l.Restarts, r)
		case l.Restarts[i].Total < r.Total:
			l.Restarts[i] = r
		}
	}
}

// An entry waits for the answers of launchers.
type entry struct {
	number uint64
	then   func()
}

// ledger returns the ledger of the job.
func (c *coordinator) ledger() ledger {
	l := ledger{Used: c.retries.total}
	e := c.elastic
	if e == nil {
		return l
	}
	l.Finished = e.finished
	for at, r := range e.retries {
		if r.total > 0 {
			l.Restarts = append(l.Restarts, restarted{Agent: at.agent, Local: at.local, PID: r.counted, Total: r.total, InARow: r.inARow})
		}
	}
	return l
}

// inherit takes over the ledger of an earlier coordinator.
func (c *coordinator) inherit(l ledger) {
	c.retries.total = l.Used
	for _, r := range l.Restarts {
		c.elastic.retries[place{r.Agent, r.Local}] = &retries{total: r.Total, inARow: r.InARow, counted: r.PID}
	}
}

// record calls then when all launchers have the ledger as it is now.
func (c *coordinator) record(then func()) {
	if c.plan == nil {
		then()
		return
	}
	c.lastEntry++
	c.entries = append(c.entries, entry{c.lastEntry, then})
	m := note(kindLedger, news{By: c.leads(), Ledger: c.ledger()})
	m.id = c.lastEntry
	for _, a := range c.agents {
		if a.state != peerGone {
			a.recording = c.lastEntry
			a.send(m)
		}
	}
	c.checkRecorded()
}

// recorded records the answer of a launcher.
func (c *coordinator) recorded(a *peer, number uint64) {
	a.recorded = max(a.recorded, min(number, a.recording))
	c.checkRecorded()
}

// checkRecorded acts on the entries that all launchers have. Those that were lost meanwhile are not waited for, as long as the
// others may go on.
func (c *coordinator) checkRecorded() {
	for len(c.entries) > 0 {
		x, have := c.entries[0], map[string]bool{}
		for _, a := range c.agents {
			switch {
			case a.state == peerGone || a.recording < x.number:
			case a.recorded < x.number:
				return
			default:
				have[a.host.UUID] = true
			}
		}
		if c.faults.stop != nil {
			c.entries = nil
			return
		}
		if !allow(c.electorates, have, c.ended) {
			return
		}
		c.entries = c.entries[1:]
		x.then()
	}
}

// keepLedger records the ledger of the coordinator on this host.
func (a *Agent) keepLedger(k *client, m message) {
	var n news
	if err := m.record(&n); err != nil {
		a.end(k, err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.follow(n.By); err != nil {
		a.refuseLeader(k, err)
		return
	}
	a.book.merge(n.Ledger)
	_ = k.send(message{kind: kindRecorded, epoch: m.epoch, id: m.id}) // the reader handles a failure
}

// conclude ends the job on this host with success, although the coordinator is lost: the program has ended.
func (a *Agent) conclude() {
	a.mu.Lock()
	first := !a.finished
	a.finished, a.over, a.choosing = true, true, false
	a.mu.Unlock()
	a.concluding.Do(func() { close(a.concluded) })
	if first {
		select {
		case a.orders <- Order{Finish: true}:
		default:
		}
	}
}
