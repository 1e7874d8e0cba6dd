package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// A Member is one process of the world.
type Member struct {
	Rank      int    `json:"rank"` // -1: not known yet
	LocalRank int    `json:"localRank"`
	LocalSize int    `json:"localSize"`
	Node      int    `json:"node"` // the number of its host
	Host      string `json:"host"`
	PID       int    `json:"pid"`
	Name      string `json:"name,omitempty"` // breaks ties where ranks are assigned

	arrival int // at the coordinator: where it is in the order of arrival
}

// registration is how a worker introduces itself.
type registration struct {
	Member
	Size int `json:"size"` // of the world, as its environment says; 0 means unknown
}

// host is how an agent introduces itself.
type host struct {
	Host       string `json:"host"`
	PID        int    `json:"pid"`
	UUID       string `json:"uuid"`
	NodeRank   int    `json:"nodeRank"` // -1: none was given
	Nodes      int    `json:"nodes"`
	LocalSize  int    `json:"localSize"`
	MasterAddr string `json:"masterAddr"` // for programs that expect torchrun's variables
	MasterPort int    `json:"masterPort"`
}

func (h host) member() Member { return Member{Rank: -1, Node: h.NodeRank, Host: h.Host, PID: h.PID} }

// welcome is the coordinator's first word: the timing that holds for all.
type welcome struct {
	Host      string        `json:"host"`
	PID       int           `json:"pid"`
	Rank      int           `json:"rank"` // of the process that holds the coordinator; -1 for an agent
	Heartbeat time.Duration `json:"heartbeat"`
	LostAfter time.Duration `json:"lostAfter"`
}

// world is the committed list of all processes, in the order of ranks.
type world struct {
	Members []Member `json:"members"`
}

// plan is the committed list of hosts, in the order of node numbers.
type plan struct {
	Hosts []host `json:"hosts"`
}

// first returns the rank of the first worker on a node.
func (p plan) first(node int) int {
	n := 0
	for _, h := range p.Hosts[:node] {
		n += h.LocalSize
	}
	return n
}

func (p plan) size() int { return p.first(len(p.Hosts)) }

// nodeOf returns the node whose agent has the UUID, or -1.
func (p plan) nodeOf(uuid string) int {
	return slices.IndexFunc(p.Hosts, func(h host) bool { return h.UUID == uuid })
}

// fault says why the job cannot go on.
type fault struct {
	Rank   int           `json:"rank"`
	Host   string        `json:"host"`
	PID    int           `json:"pid"`
	Silent time.Duration `json:"silent"` // since the coordinator last heard from it
	Reason string        `json:"reason"`
	Code   int           `json:"code"`           // exit code; -1 when not known
	Stop   bool          `json:"stop,omitempty"` // a launcher was told to stop the job
}

// err is the fault as the users of this process see it.
func (f fault) err() error {
	if f.Stop {
		return &StopError{Host: f.Host, Reason: f.Reason, ExitCode: f.Code}
	}
	return &MemberLostError{Rank: f.Rank, Host: f.Host, PID: f.PID,
		Since: time.Now().Add(-f.Silent), Reason: f.Reason, ExitCode: f.Code}
}

// refusal says why a registration was not accepted.
type refusal struct {
	Reason string  `json:"reason,omitempty"`
	Place  string  `json:"place,omitempty"` // set for a duplicate
	First  *Member `json:"first,omitempty"`
	Second *Member `json:"second,omitempty"`
	// Set when the time to join was over at the coordinator.
	Roll   *roll         `json:"roll,omitempty"`
	Waited time.Duration `json:"waited,omitempty"`
}

// why is the refusal as the coordinator's user sees it.
func (r refusal) why() string {
	if r.First != nil {
		return fmt.Sprintf("%s is taken by %s", r.Place, memberList([]Member{{Rank: -1, Host: r.First.Host, PID: r.First.PID}}))
	}
	return r.Reason
}

func (r refusal) err(job, addr string) error {
	if r.Roll != nil {
		e := &JoinTimeoutError{Job: job, Waited: r.Waited, Addr: addr}
		e.fill(*r.Roll)
		return e
	}
	if r.First != nil && r.Second != nil {
		return &DuplicateError{Job: job, Place: r.Place, First: *r.First, Second: *r.Second}
	}
	return &RefusedError{Job: job, Addr: addr, Reason: r.Reason}
}

// roll says who has come and who is missing.
type roll struct {
	Unit    string   `json:"unit"`
	Want    int      `json:"want"`
	Have    []Member `json:"have"`
	Missing []int    `json:"missing,omitempty"`
	Gone    []Member `json:"gone,omitempty"` // of Have: gave up before the others
	Hint    string   `json:"hint,omitempty"`
}

// maxLocalSize bounds what one host may bring: far beyond any machine, and
// small enough to count to.
const maxLocalSize = 1 << 12

// maxNamed bounds how many of a list a message spells out.
const maxNamed = 16

func (r roll) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %s have come", len(r.Have), quantity(r.Want, r.Unit))
	if len(r.Have) > 0 {
		fmt.Fprintf(&b, ": %s", memberList(r.Have))
	}
	switch {
	case len(r.Missing) > 0 && r.Unit == unitHost:
		fmt.Fprintf(&b, "; missing node %s", numberList(r.Missing))
	case len(r.Missing) > 0:
		fmt.Fprintf(&b, "; missing %s", rankList(r.Missing))
	}
	if len(r.Gone) > 0 {
		fmt.Fprintf(&b, "; of these gave up: %s", memberList(r.Gone))
	}
	if r.Hint != "" {
		fmt.Fprintf(&b, "; %s", r.Hint)
	}
	return b.String()
}

const (
	unitProcess = "process"
	unitHost    = "host"
)

func quantity(n int, unit string) string {
	if n == 1 {
		return "1 " + unit
	}
	if strings.HasSuffix(unit, "s") {
		return fmt.Sprintf("%d %ses", n, unit)
	}
	return fmt.Sprintf("%d %ss", n, unit)
}

func memberList(ms []Member) string {
	var parts []string
	for _, m := range ms[:min(len(ms), maxNamed)] {
		p := fmt.Sprintf("host %s pid %d", m.Host, m.PID)
		if m.Rank >= 0 {
			p = fmt.Sprintf("rank %d (%s)", m.Rank, p)
		}
		parts = append(parts, p)
	}
	return strings.Join(parts, ", ") + andMore(len(ms))
}

// rankList writes "rank 1" or "ranks 1, 2".
func rankList(ranks []int) string {
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d", ranks[0])
	}
	return "ranks " + numberList(ranks)
}

func numberList(ns []int) string {
	var parts []string
	for _, n := range ns[:min(len(ns), maxNamed)] {
		parts = append(parts, fmt.Sprint(n))
	}
	return strings.Join(parts, ", ") + andMore(len(ns))
}

func andMore(n int) string {
	if n <= maxNamed {
		return ""
	}
	return fmt.Sprintf(" and %d more", n-maxNamed)
}

// assignRanks completes the list of a world's members and puts it in order.
// Either all have a rank, which is kept, or none has and they are numbered by
// host, local rank and name. What a member's environment did not say of its
// host is worked out from the list.
func assignRanks(ms []Member) []Member {
	ms = slices.Clone(ms)
	if slices.ContainsFunc(ms, func(m Member) bool { return m.Rank < 0 }) {
		slices.SortStableFunc(ms, compareMembers)
		for i := range ms {
			ms[i].Rank = i
		}
	}
	slices.SortFunc(ms, func(a, b Member) int { return cmp.Compare(a.Rank, b.Rank) })
	numberHosts(ms)
	return ms
}

func compareMembers(a, b Member) int {
	return cmp.Or(naturalCompare(a.Host, b.Host), cmp.Compare(a.LocalRank, b.LocalRank),
		naturalCompare(a.Name, b.Name), cmp.Compare(a.PID, b.PID))
}

// numberHosts fills in the fields that are -1 (0 for LocalSize) of members in
// the order of ranks: hosts are numbered as they first appear.
func numberHosts(ms []Member) {
	node := map[string]int{}
	count := map[string]int{}
	for i := range ms {
		m := &ms[i]
		if _, ok := node[m.Host]; !ok {
			node[m.Host] = len(node)
		}
		if m.Node < 0 {
			m.Node = node[m.Host]
		}
		if m.LocalRank < 0 {
			m.LocalRank = count[m.Host]
		}
		count[m.Host]++
	}
	for i := range ms {
		if ms[i].LocalSize <= 0 {
			ms[i].LocalSize = count[ms[i].Host]
		}
	}
}

// assignNodes puts hosts in the order of node numbers: by the rank that was
// given to them, else by name.
func assignNodes(hs []host) []host {
	hs = slices.Clone(hs)
	slices.SortFunc(hs, func(a, b host) int {
		return cmp.Or(cmp.Compare(a.NodeRank, b.NodeRank), naturalCompare(a.Host, b.Host), cmp.Compare(a.UUID, b.UUID))
	})
	return hs
}
