package cluster

import (
	"fmt"
	"slices"
	"time"
)

// An electorate is the hosts of an epoch, which decide on the next one: the UUIDs of their
// agents in the order of succession, the coordinator first.
type electorate []string

// count returns the number of hosts that have not ended, and how many of them are present.
func (e electorate) count(present, ended map[string]bool) (left, here int) {
	for _, uuid := range e {
		if ended[uuid] {
			continue
		}
		left++
		if present[uuid] {
			here++
		}
	}
	return left, here
}

// suffices reports whether the hosts that are present may go on: more than half of the
// electorate, or half of it with the first host. Hosts whose launcher is known to have ended do
// not count. Of two parts of a network, at most one may go on.
func (e electorate) suffices(present, ended map[string]bool) bool {
	left, here := e.count(present, ended)
	if 2*here != left {
		return 2*here > left
	}
	for _, uuid := range e {
		if !ended[uuid] {
			return present[uuid]
		}
	}
	return false
}

// A charter is what an agent knows of the epochs of its job, so that another coordinator can
// go on after the loss of the first one.
type charter struct {
	Run    string     `json:"run,omitempty"`
	Term   uint64     `json:"term,omitempty"` // the greatest that the agent has followed or voted for
	Epoch  uint64     `json:"epoch"`          // the last that has begun
	Voters electorate `json:"voters"`
	// Proposed are proposals of epochs that have perhaps begun on other hosts. Only the begin of an epoch that is at least
	// as late removes one: a later proposal proves nothing about an earlier one.
	Proposed []proposal `json:"proposed,omitempty"`
	// Ended are hosts of the electorate whose launchers are known to have ended.
	Ended   []string `json:"ended,omitempty"`
	Lost    string   `json:"lost"` // UUID of the coordinator that was lost
	Reason  string   `json:"reason"`
	Planned bool     `json:"planned,omitempty"` // it was not lost: its host has left the job
	Plan    plan     `json:"plan"`
	Members []Member `json:"members"`
	Ledger  ledger   `json:"ledger,omitzero"`

	// Of the agent's host:
	Running []int          `json:"running,omitempty"` // local ranks of the workers that have not exited
	Exits   map[int][]Exit `json:"exited,omitempty"`  // by local rank; a running worker may have been started after them
	// Fresh are the processes that were proposed as new members. The agent may have missed that the epoch has begun.
	Fresh map[int]int `json:"fresh,omitempty"` // PIDs by local rank

	lostAfter time.Duration // Timing.LostAfter of the coordinator that was lost
}

// A proposal is an epoch that may have begun, with its hosts.
type proposal struct {
	Epoch  uint64     `json:"epoch"`
	Voters electorate `json:"voters"`
}

// electorates returns the electorates that have to agree on the next epoch.
func (c *charter) electorates() []electorate {
	es := []electorate{c.Voters}
	for _, p := range c.Proposed {
		if p.Epoch > c.Epoch {
			es = append(es, p.Voters)
		}
	}
	return es
}

// last returns the number of the last epoch that has perhaps begun.
func (c *charter) last() uint64 {
	last := c.Epoch
	for _, p := range c.Proposed {
		last = max(last, p.Epoch)
	}
	return last
}

// hosts returns the UUIDs of the hosts that may decide, in the order of succession, with duplicates.
func (c *charter) hosts() []string { return slices.Concat(c.electorates()...) }

// propose records a proposal.
func (c *charter) propose(p proposal) {
	same := func(q proposal) bool { return q.Epoch == p.Epoch && slices.Equal(q.Voters, p.Voters) }
	if p.Epoch > c.Epoch && len(p.Voters) > 0 && !slices.ContainsFunc(c.Proposed, same) {
		c.Proposed = append(slices.Clone(c.Proposed), p)
	}
}

// open returns the proposals that the begin of an epoch leaves open.
func (c *charter) open(begun uint64) []proposal {
	return without(c.Proposed, func(p proposal) bool { return p.Epoch <= begun })
}

// excerpt returns the part of the charter that a coordinator does not know. A coordinator that has taken over
// needs only the epoch. A candidate needs the lists of all hosts only if its own are older.
func (c *charter) excerpt(to welcome) *charter {
	if to.Running {
		return &charter{Run: c.Run, Term: c.Term, Epoch: c.Epoch, Lost: c.Lost}
	}
	n := *c
	if to.Epoch >= c.Epoch {
		n.Plan, n.Members, n.Voters = plan{}, nil, nil
	}
	return &n
}

// merge adds the knowledge of another agent.
func (c *charter) merge(o *charter) {
	if o.Epoch > c.Epoch {
		c.Epoch, c.Voters, c.Plan, c.Members = o.Epoch, o.Voters, o.Plan, o.Members
		c.Proposed = c.open(c.Epoch)
	}
	for _, p := range o.Proposed {
		c.propose(p)
	}
	c.Term = max(c.Term, o.Term)
	c.Ledger.merge(o.Ledger)
	c.Ended = append(c.Ended, o.Ended...)
}

// allow reports whether the hosts present may form the next epoch.
func allow(es []electorate, present, ended map[string]bool) bool {
	for _, e := range es {
		if !e.suffices(present, ended) {
			return false
		}
	}
	return true
}

// minority explains why the hosts present may not go on.
func minority(es []electorate, present, ended map[string]bool, epoch uint64) string {
	for _, e := range es {
		if left, here := e.count(present, ended); !e.suffices(present, ended) {
			return fmt.Sprintf("this part of the network has %d of the %s of epoch %d, and the job goes on only with more than half of them: the others may do so",
				here, quantity(left, unitHost), epoch)
		}
	}
	return ""
}

func setOf(uuids []string) map[string]bool {
	m := map[string]bool{}
	for _, u := range uuids {
		m[u] = true
	}
	return m
}
