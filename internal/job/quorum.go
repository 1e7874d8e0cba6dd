package job

import (
	"fmt"
	"slices"
	"time"
)

// Why two epochs never follow the same one. A coordinator begins an epoch after enough hosts of each voter set that it knows have
// answered the proposal; it takes over after enough hosts of each set that they or it know have voted (suffices). A host that has voted
// answers no smaller term, and a vote comes with all proposals that the host has answered. So if the answers to a proposal and the
// votes for a later term share a host, the later coordinator knows the proposal, or the earlier one never begins the epoch.
//
// They share a host, because both are a majority of one set, or half of it with its first host. The exception is a host that one side
// leaves out as ended, and that has answered or voted on the other side. Therefore a host counts as ended only
//   - if its process has ended, or coordinates no more (proof.go), while it followed the coordinator under which that was found: it
//     could not have lost that coordinator for silence before (isCertain), and has not left it for another one (leaveForAnother);
//   - for coordinators that know all proposals that it had answered, and for hosts that know what such a coordinator knew
//     (voter.haveEnded). A coordinator tells that to each host that follows it (tellNews), and begins an epoch only after all of them have
//     answered its proposal (hasNotAnswered), also those that came after it (admitHost). It begins none while a host that it has lost may
//     still follow it without knowing (lease).
//
// A host and a coordinator that have lost each other for silence may meet again (choice.mayLead). The host's registration has its greatest term, so that
// the coordinator ends if the host has voted for another one.
//
// Who is merely connected decides only that this coordinator gives up.

// A voterSet is the hosts of an epoch, which decide on the next one: the UUIDs of their
// agents by succession, the coordinator first.
type voterSet []string

// without returns the hosts that are not in o.
func (e voterSet) without(o voterSet) []string {
	return without(e, func(uuid string) bool { return slices.Contains(o, uuid) })
}

// count returns the number of hosts that have not ended, and how many of them are present.
func (e voterSet) count(present, ended map[string]bool) (left, here int) {
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
// voter set, or half of it with the first host. Hosts whose launcher is known to have ended do
// not count. Of two parts of a network, at most one may go on.
func (e voterSet) suffices(present, ended map[string]bool) bool {
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

// A history is what an agent knows of the epochs of its job, so that another coordinator can
// go on after the loss of the first one.
type history struct {
	Run    string   `json:"run,omitempty"`
	Term   uint64   `json:"term,omitempty"` // the greatest that the agent has followed or voted for
	Epoch  uint64   `json:"epoch"`          // the last that has begun
	Voters voterSet `json:"voters"`
	// Proposed are proposals of epochs that have perhaps begun on other hosts. Only the begin of an epoch that is at least
	// as late removes one: a later proposal proves nothing about an earlier one.
	Proposed []proposal `json:"proposed,omitempty"`
	// Ended are hosts of the voter set whose launchers are known to have ended.
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
	// NewMembers are the processes that were proposed as new members. The agent may have missed that the epoch has begun.
	NewMembers map[int]int `json:"newMembers,omitempty"` // PIDs by local rank

	lostAfter time.Duration // Timing.LostAfter of the coordinator that was lost
	dropped   []string      // hosts that were lost a moment ago, before the last epoch began; they may come back
}

// A proposal is an epoch that may have begun, with its hosts.
type proposal struct {
	Epoch  uint64   `json:"epoch"`
	Voters voterSet `json:"voters"`
}

// voterSets returns the sets of voters that have to agree on the next epoch.
func (c *history) voterSets() []voterSet {
	es := []voterSet{c.Voters}
	for _, p := range c.Proposed {
		if p.Epoch > c.Epoch {
			es = append(es, p.Voters)
		}
	}
	return es
}

// last returns the number of the last epoch that has perhaps begun.
func (c *history) last() uint64 {
	last := c.Epoch
	for _, p := range c.Proposed {
		last = max(last, p.Epoch)
	}
	return last
}

// hosts returns the UUIDs of the hosts that may decide, by succession, with duplicates.
func (c *history) hosts() []string { return slices.Concat(c.voterSets()...) }

// propose records a proposal.
func (c *history) propose(p proposal) {
	same := func(q proposal) bool { return q.Epoch == p.Epoch && slices.Equal(q.Voters, p.Voters) }
	if p.Epoch > c.Epoch && len(p.Voters) > 0 && !slices.ContainsFunc(c.Proposed, same) {
		c.Proposed = append(slices.Clone(c.Proposed), p)
	}
}

func (c *history) proposeAll(ps []proposal) {
	for _, p := range ps {
		c.propose(p)
	}
}

// open returns the proposals that the begin of an epoch leaves open.
func (c *history) open(begun uint64) []proposal {
	return without(c.Proposed, func(p proposal) bool { return p.Epoch <= begun })
}

// excerpt returns the part of the history that a coordinator does not know. A coordinator that has taken over
// needs only the epoch. A candidate needs the lists of all hosts only if its own are older.
func (c *history) excerpt(to Welcome) *history {
	if to.Running {
		return &history{Run: c.Run, Term: c.Term, Epoch: c.Epoch, Lost: c.Lost}
	}
	n := *c
	if to.Epoch >= c.Epoch {
		n.Plan, n.Members, n.Voters = plan{}, nil, nil
	}
	return &n
}

// merge adds the knowledge of another agent.
func (c *history) merge(o *history) {
	if o.Epoch > c.Epoch {
		c.dropped = append(c.dropped, c.Voters.without(o.Voters)...)
		c.Epoch, c.Voters, c.Plan, c.Members = o.Epoch, o.Voters, o.Plan, o.Members
		c.Proposed = c.open(c.Epoch)
	}
	c.proposeAll(o.Proposed)
	c.Term = max(c.Term, o.Term)
	c.Ledger.merge(o.Ledger)
	c.Ended = append(c.Ended, o.Ended...)
}

// allow reports whether the hosts present may form the next epoch.
func allow(es []voterSet, present, ended map[string]bool) bool {
	for _, e := range es {
		if !e.suffices(present, ended) {
			return false
		}
	}
	return true
}

// minority explains why the hosts present may not go on.
func minority(es []voterSet, present, ended map[string]bool, epoch uint64) string {
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

// firstTerm is the term of the coordinator that starts a job. Each takeover has a greater one.
const firstTerm = 1

// A Leader identifies a coordinator. A term has at most one coordinator that begins epochs, and agents
// follow only terms that are at least the greatest that they know. A coordinator that others have
// replaced can therefore win no host back.
type Leader struct {
	Term  uint64 `json:"term,omitempty"`
	Agent string `json:"agent,omitempty"` // UUID of its agent
	Run   string `json:"run,omitempty"`   // the start of the job, which another start with the same name does not have
	Name  string `json:"name,omitempty"`  // such as "host a (pid 12)"
}

func (l Leader) String() string { return fmt.Sprintf("%s in term %d", l.Name, l.Term) }

// name names the process of a coordinator.
func (w Welcome) name() string { return fmt.Sprintf("host %s (pid %d)", w.Host, w.PID) }

// A Leadership is the coordinators that a process has met.
type Leadership struct {
	promised Leader // of the greatest term that the process has followed or voted for
	Followed Leader // the last that has led it
}

// vote promises to ignore coordinators of smaller terms than by's, unless that would break an earlier promise.
func (l *Leadership) vote(by Leader) error {
	if f := l.Followed; f.Run != "" && by.Run != f.Run {
		return fmt.Errorf("%v is a candidate of another run of the job than that of %v", by, f)
	}
	if p := l.promised; by.Term < p.Term || by.Term == p.Term && by.Agent != p.Agent && p.Agent != "" {
		return fmt.Errorf("%v asks for a promise that was given to %v", by, p)
	}
	l.promised = by
	return nil
}

// Follow checks that a coordinator leads the job. If another one has led in the
// same term, the job runs twice.
func (l *Leadership) Follow(by Leader) error {
	switch p, f := l.promised, l.Followed; {
	case f.Run != "" && by.Run != f.Run:
		return fmt.Errorf("cluster: %v leads another run of the job than %v", by, f)
	case by.Term < p.Term:
		return fmt.Errorf("cluster: %v does not coordinate the job any more: %v has replaced it", by, p)
	case by.Term == f.Term && by.Agent != f.Agent && f.Agent != "":
		return fmt.Errorf("cluster: two coordinators lead the job in one term: %v and %v: report this as a fault of Chorus", f, by)
	}
	l.promised, l.Followed = by, by
	return nil
}

// EpochsMustGrow returns the error of an epoch that does not come after the last one.
func EpochsMustGrow(last uint64, by Leader, next uint64, from Leader) error {
	return fmt.Errorf("cluster: the job has two coordinators: %v has begun epoch %d, and %v comes with epoch %d: report this as a fault of Chorus", by, last, from, next)
}

// check refuses news that contradict themselves.
func (n *news) check() error {
	if err := checkProposals(n.Proposed); err != nil {
		return err
	}
	return checkMembership(n.Plan, n.Members, n.Voters, len(n.Plan.Hosts) > 0)
}

// check refuses histories that contradict themselves.
func (c *history) check() error {
	if c.Epoch < FirstEpoch {
		return fmt.Errorf("epoch %d: epochs start with %d", c.Epoch, FirstEpoch)
	}
	if err := checkProposals(c.Proposed); err != nil {
		return err
	}
	return checkMembership(c.Plan, c.Members, c.Voters, len(c.Plan.Hosts) > 0)
}

func checkProposals(ps []proposal) error {
	for _, p := range ps {
		if err := checkMembership(plan{}, nil, p.Voters, false); err != nil || p.Epoch < FirstEpoch || len(p.Voters) == 0 {
			return fmt.Errorf("a proposal of epoch %d has %d hosts: %w", p.Epoch, len(p.Voters), err)
		}
	}
	return nil
}

// checkMembership checks that members have hosts, and that each host decides once.
func checkMembership(p plan, ms []Member, voters voterSet, hasPlan bool) error {
	for _, m := range ms {
		if m.Node < 0 || m.Node >= len(p.Hosts) {
			return fmt.Errorf("rank %d is on host number %d of %d", m.Rank, m.Node, len(p.Hosts))
		}
	}
	seen := map[string]bool{}
	for _, u := range voters {
		if seen[u] {
			return fmt.Errorf("host %q decides twice", u)
		}
		if seen[u] = true; hasPlan && p.nodeOf(u) < 0 {
			return fmt.Errorf("host %q decides, and is not a host of the job", u)
		}
	}
	return nil
}
