package job

import (
	"fmt"
	"slices"
	"strings"
)

// A registry is a coordinator without a world. Its workers come and leave at any time; each is on its list under a name of its own.
// It invites them to worlds, and each of these has another coordinator.

const (
	MaxEnlisted      = 4096     // members of a registry
	MaxEnlistedBytes = 16 << 10 // the value of one member
	maxDepartures    = 64       // that a registry remembers
)

// An Invitation tells a member of a registry that it belongs to a world. The id of its message is the rank.
type Invitation struct {
	Job  string `json:"job"` // of the world's coordinator, at the port of the registry
	Size int    `json:"size"`
}

type (
	// invite asks members of a registry to join the coordinator of another job. The index in names is the rank.
	invite struct {
		names []string
		to    Invitation
	}
	// absent: a process that has a rank in the world has left its registry, or is lost.
	absent struct {
		fault Fault
		left  bool
	}
	// delisted is an action: a member is not on the list of the registry any more.
	delisted struct {
		Departure
		number int // of all that have left the list or were lost, from 1 on
	}
	// listed is an action: the list of the registry has changed.
	listed struct{}
)

// A roster is the members of a registry, in the order in which they came.
type roster []*peer

// objection returns the reason why a worker cannot be on the list, or nil.
func (r roster) objection(reg Registration) *Refusal {
	if r := checkNames(reg.Host, reg.Name); r != nil {
		return r
	}
	switch {
	case !reg.Enlists:
		return &Refusal{Reason: "this address has a registry of members, which has no world to join: call cluster.Enlist"}
	case reg.Name == "":
		return &Refusal{Reason: "a member of a registry needs a name"}
	case len(reg.Value) > MaxEnlistedBytes:
		return &Refusal{Reason: fmt.Sprintf("its value has %d bytes: want at most %d", len(reg.Value), MaxEnlistedBytes)}
	case len(r) >= MaxEnlisted:
		return &Refusal{Reason: fmt.Sprintf("the registry has %d members already", MaxEnlisted)}
	}
	if q := r.member(reg.Name); q != nil {
		return &Refusal{Place: "the name " + reg.Name, First: &q.reg.Member, Second: &reg.Member}
	}
	return nil
}

// member returns the member with a name, or nil.
func (r roster) member(name string) *peer {
	if i := slices.IndexFunc(r, func(p *peer) bool { return p.reg.Name == name }); i >= 0 {
		return r[i]
	}
	return nil
}

// happen returns an error if one of the processes is not on the list: then none is invited.
func (e invite) happen(c *coordinator) error {
	ps := make([]*peer, len(e.names))
	var missing []string
	for i, name := range e.names {
		if slices.Contains(e.names[:i], name) {
			return fmt.Errorf("member %s is named twice", name)
		}
		if ps[i] = roster(c.workers).member(name); ps[i] == nil {
			missing = append(missing, absence(c.departed, name))
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s%s", strings.Join(missing[:min(len(missing), maxNamed)], "; "), andMore(len(missing)))
	}
	for rank, p := range ps {
		m := say(KindInvite, &e.to)
		m.id = uint64(rank)
		c.send(p, m)
	}
	return nil
}

// absence says why a name is not on the list.
func absence(departed []Departure, name string) string {
	for _, d := range slices.Backward(departed) {
		switch {
		case d.Name != name:
		case d.Planned:
			return fmt.Sprintf("member %s (%s) has left", name, memberList([]Member{d.Member}))
		default:
			return fmt.Sprintf("member %s (%s) was lost: %s", name, memberList([]Member{d.Member}), d.Reason)
		}
	}
	return fmt.Sprintf("no member has the name %s", name)
}

// Before the world is complete, nobody else can take the place. Afterwards, a process that has left the registry may still be in the
// world, and one that has left the world is not missed there.
func (e absent) happen(c *coordinator) error {
	member := func(p *peer) bool { return p.reg.Rank == e.fault.Rank && p.state == peerJoined }
	if c.world == nil || !e.left && slices.ContainsFunc(c.workers, member) {
		c.fail(e.fault, tellSessions)
	}
	return nil
}
