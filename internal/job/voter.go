package job

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// A Loss tells how a member has lost the coordinator.
type Loss int32

const (
	NotLost      Loss = iota
	lostSilent        // nothing has arrived: it may coordinate others
	lostEnded         // its process has ended
	lostByIt          // it has lost this process
	lostLeaving       // its host leaves the job, as asked
	lostResigned      // it may not go on, and coordinates no more
)

// A voter is the part of a host in the decisions about epochs: what it has promised, and what it has to tell the next
// coordinator. Like a coordinator, it is a function of what happens to it. Agent.mu guards it.
type voter struct {
	Leadership
	history    *history // nil unless the workers call Run and their first world is complete
	running    map[int]bool
	exits      map[int][]Exit // by local rank, without the exits before the start of a member of the last epoch
	unanswered map[int]Exit   // failures for which no order has come
	newMembers map[int]int    // PIDs of workers that were proposed as new members, by local rank
	drains     *Fault         // this host was asked to leave
	stops      *Fault         // the job was asked to end here
	kills      bool           // all workers were asked to be killed here
	done       bool           // the workers of this host have exited
	book       ledger
	finished   bool               // the program has ended
	over       bool               // the job goes on without this host, or its program has ended
	ended      []string           // hosts whose launchers are known to have ended
	informed   Leader             // the coordinator that has told which hosts decide, since this host follows it
	dropped    map[string]instant // when an epoch has begun without hosts of the epoch before
}

func newVoter(workers int) voter {
	v := voter{running: map[int]bool{}, exits: map[int][]Exit{}, unanswered: map[int]Exit{}, newMembers: map[int]int{}, dropped: map[string]instant{}}
	for local := range workers {
		v.running[local] = true
	}
	return v
}

// exited records the exit of a worker.
func (v *voter) exited(e Exit) {
	delete(v.running, e.Local)
	v.exits[e.Local] = append(v.exits[e.Local], e)
	if v.newMembers[e.Local] == e.PID {
		delete(v.newMembers, e.Local)
	}
	if e.Code != 0 && !e.Asked {
		v.unanswered[e.Local] = e
	}
}

// begun forgets the exits of the processes that were in the place of a member
// before it, but not the exit of the member itself.
func (v *voter) begun(local, pid int) {
	if i := exitOf(v.exits[local], pid); i < 0 {
		delete(v.exits, local)
	} else {
		v.exits[local] = v.exits[local][i:]
	}
}

// exitOf returns the place of the exit of a process in a list, or -1.
func exitOf(exits []Exit, pid int) int {
	return slices.IndexFunc(exits, func(e Exit) bool { return e.PID == pid })
}

// ordered records a command of the coordinator.
func (v *voter) ordered(o Order) {
	switch {
	case o.Stop, o.Finish:
		v.over, v.finished = true, v.finished || o.Finish
	case o.Kill:
	default:
		delete(v.unanswered, o.Local)
		if o.Start {
			v.running[o.Local] = true
		}
	}
}

// A badNews is the error of news that contradict themselves or what this host knows. Other errors refuse the leader.
type badNews struct{ error }

// proposal records the proposal of an epoch, after which this host takes part
// in no decision that contradicts it.
func (v *voter) proposal(uuid string, epoch uint64, n news) error {
	if err := n.check(); err != nil {
		return &badNews{err}
	}
	if err := v.Follow(n.By); err != nil {
		return err
	}
	if v.history != nil {
		v.history.propose(proposal{epoch, n.Voters})
	}
	v.haveEnded(n.By.Agent, n.Ended...)
	for _, f := range n.NewMembers {
		if f.Agent == uuid && exitOf(v.exits[f.Local], f.PID) < 0 {
			v.newMembers[f.Local] = f.PID
		}
	}
	return nil
}

// keep records the ledger of the coordinator.
func (v *voter) keep(n news) error {
	if err := v.Follow(n.By); err != nil {
		return err
	}
	v.book.merge(n.Ledger)
	return nil
}

// begins records an epoch that has begun, or what a coordinator knows that has taken over and has not begun one yet. It returns the
// place of this host in the epoch, or nil if the host leaves the job or knows of a later epoch.
func (v *voter) begins(uuid string, epoch uint64, n news, now instant) (*placement, error) {
	if v.history != nil && epoch < v.history.Epoch {
		return nil, &badNews{EpochsMustGrow(v.history.Epoch, v.Followed, epoch, n.By)}
	}
	if err := n.check(); err != nil {
		return nil, &badNews{fmt.Errorf("cluster: the coordinator's news of epoch %d: %w", epoch, err)}
	}
	if err := v.Follow(n.By); err != nil {
		return nil, err
	}
	at := &placement{Epoch: epoch, plan: n.Plan, Node: n.Plan.nodeOf(uuid), ranks: map[int]int{}}
	if at.Node < 0 {
		return nil, nil
	}
	v.book.merge(n.Ledger)
	v.informed = n.By
	next := &history{Epoch: cmp.Or(n.Begun, epoch), Voters: n.Voters, Plan: n.Plan, Members: n.Members}
	if v.history != nil {
		if v.history.Epoch > next.Epoch { // the coordinator counts it as perhaps begun
			v.history.proposeAll(n.Proposed)
			return nil, nil
		}
		next.Proposed = v.history.open(next.Epoch) // news may also come while an epoch is proposed
		for _, u := range v.history.Voters.without(next.Voters) {
			v.dropped[u] = now
		}
		for _, u := range next.Voters {
			delete(v.dropped, u)
		}
	}
	next.proposeAll(n.Proposed)
	v.history = next
	for _, m := range n.Members {
		if m.Node == at.Node {
			at.ranks[m.LocalRank] = m.Rank
			v.begun(m.LocalRank, m.PID)
		}
	}
	return at, nil
}

// accepts reports whether this host may register with a coordinator after the loss of another one: a candidate, or
// the leader of a term that is at least the greatest that this host knows. Both must belong to the same run of the job.
func (v *voter) accepts(hello Welcome) bool {
	by := v.promised
	return hello.Run == by.Run && (hello.Elects || hello.Running && hello.Term >= by.Term)
}

// mayChoose reports whether this host may choose another coordinator after a loss.
func (v *voter) mayChoose(how Loss) bool { return how != NotLost && v.history != nil && !v.over }

// candidacy returns what this host knows after the loss of the coordinator that has said hello.
func (v *voter) candidacy(how Loss, hello Welcome, reason string, now instant) *history {
	if how == lostEnded || how == lostLeaving || how == lostResigned {
		v.haveEnded(hello.Agent, hello.Agent)
	}
	v.informed = Leader{}
	ch := *v.history
	ch.Run, ch.Ledger = v.Followed.Run, v.book
	ch.Term, ch.lostAfter = v.promised.Term, hello.LostAfter
	ch.Planned = how == lostLeaving
	ch.Lost, ch.Reason, ch.Ended = hello.Agent, reason, slices.Clone(v.ended)
	ch.Running, ch.Exits = slices.Sorted(maps.Keys(v.running)), map[int][]Exit{}
	for local, exits := range v.exits {
		ch.Exits[local] = slices.Clone(exits)
	}
	ch.NewMembers = maps.Clone(v.newMembers)
	v.away(hello.LostAfter, now)
	ch.dropped = slices.Sorted(maps.Keys(v.dropped))
	return &ch
}

// away returns until when hosts that were lost a moment ago, and are not known to have ended, may come back.
func (v *voter) away(lostAfter time.Duration, now instant) (until instant) {
	maps.DeleteFunc(v.dropped, func(u string, at instant) bool {
		return now-at > returnTime(lostAfter) || slices.Contains(v.ended, u)
	})
	for _, at := range v.dropped {
		until = max(until, at+returnTime(lostAfter))
	}
	return until
}

// haveEnded records hosts that take part in decisions no more, as a coordinator has found or shown. Without the knowledge of that
// coordinator, this host does not know what the hosts had agreed to: their end then proves nothing.
func (v *voter) haveEnded(by string, uuids ...string) {
	if v.history == nil || v.informed != v.Followed || v.informed.Agent != by {
		return
	}
	for _, u := range uuids {
		if !slices.Contains(v.ended, u) {
			v.ended = append(v.ended, u)
		}
	}
}

// repeats returns the messages that the last coordinator may have got, but the next one may not know of.
func (v *voter) repeats() (list []msg) {
	for _, local := range slices.Sorted(maps.Keys(v.exits)) {
		last := v.exits[local][len(v.exits[local])-1]
		_, unanswered := v.unanswered[local]
		if unanswered || !v.running[local] && (last.Code == 0 || last.Asked) { // the others were ordered to start again
			list = append(list, say(kindExit, last))
		}
	}
	if v.drains != nil {
		list = append(list, say(kindDrain, *v.drains))
	}
	if v.stops != nil {
		list = append(list, say(kindStop, *v.stops))
	}
	if v.kills {
		list = append(list, msg{kind: kindKill, epoch: FirstEpoch})
	}
	if v.done {
		list = append(list, msg{kind: kindDone, epoch: FirstEpoch})
	}
	return list
}

// A placement is the place of a host in an epoch.
type placement struct {
	Epoch uint64
	plan  plan
	Node  int
	ranks map[int]int // by local rank, if the workers call Run; otherwise nil
}

func (p *placement) rank(local int) int {
	if p.ranks == nil {
		return p.plan.firstRank(p.Node) + local
	}
	if r, ok := p.ranks[local]; ok {
		return r
	}
	return -1
}

// addresses returns the addresses of the candidates, by succession.
func (c *history) addresses() []string {
	var out []string
	ended := setOf(c.Ended)
	for _, uuid := range c.hosts() {
		i := c.Plan.nodeOf(uuid)
		if i < 0 || uuid == c.Lost || ended[uuid] {
			continue
		}
		if addr := c.Plan.Hosts[i].Control; addr != "" && !slices.Contains(out, addr) {
			out = append(out, addr)
		}
	}
	return out
}

// isPossible reports whether all hosts without the lost one would be enough, if one of them knows which proposals have begun.
func (c *history) isPossible() bool {
	all, ended := setOf(c.hosts()), setOf(c.Ended)
	delete(all, c.Lost)
	if allow(c.voterSets(), all, ended) {
		return true
	}
	return slices.ContainsFunc(c.open(c.Epoch), func(p proposal) bool {
		begun := history{Epoch: p.Epoch, Voters: p.Voters, Proposed: c.Proposed}
		return allow(begun.voterSets(), all, ended)
	})
}
