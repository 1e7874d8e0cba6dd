package job

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// A Member is one process of the world.
type Member struct {
	Rank      int    `json:"rank"` // -1: not assigned yet
	LocalRank int    `json:"localRank"`
	LocalSize int    `json:"localSize"`
	Node      int    `json:"node"` // index of its host
	Host      string `json:"host"`
	PID       int    `json:"pid"`
	Name      string `json:"name,omitempty"` // breaks ties if the coordinator assigns ranks

	arrival int // at the coordinator: how many peers came before
}

// Same reports whether two members, perhaps of different epochs, are the same process.
func Same(m, o Member) bool {
	return m.Host == o.Host && m.PID == o.PID && m.LocalRank == o.LocalRank && m.Name == o.Name
}

// Registration is a worker's first message.
type Registration struct {
	Member
	Size  int    `json:"size"`            // world size in its environment; 0 means unknown
	Epoch uint64 `json:"epoch,omitempty"` // of its launcher when it started; 0 means unknown
	// Elastic is true for Run. Agent is the UUID of the launcher, and Least is RunConfig.MinSize.
	Elastic bool   `json:"elastic,omitempty"`
	Agent   string `json:"agent,omitempty"`
	// Peers identifies the list of peers that the process has; see PeersID.
	Peers string `json:"peers,omitempty"`
	// Enlists is true for a process that wants to be on the list of a registry, with a value.
	Enlists bool   `json:"enlists,omitempty"`
	Value   []byte `json:"value,omitempty"`
	Least   int    `json:"least,omitempty"`
	// Seat is the last epoch that the process was a member of, with Rank, under an earlier coordinator, By.
	Seat uint64 `json:"seat,omitempty"`
	By   Leader `json:"by,omitzero"`
}

// host is an agent's first message.
type host struct {
	Host       string `json:"host"`
	PID        int    `json:"pid"`
	UUID       string `json:"uuid"`
	NodeRank   int    `json:"nodeRank"` // -1: not set
	Nodes      int    `json:"nodes"`
	MinNodes   int    `json:"minNodes"`
	Restarts   int    `json:"restarts,omitempty"` // Config.MaxRestarts
	LocalSize  int    `json:"localSize"`
	MasterAddr string `json:"masterAddr"` // for programs that expect torchrun's variables
	MasterPort int    `json:"masterPort"`
	Unfit      string `json:"unfit,omitempty"`   // why the host cannot take part
	Control    string `json:"control,omitempty"` // address of its port
	Seed       bool   `json:"seed,omitempty"`
	// History is set after the loss of a coordinator.
	History *history `json:"history,omitempty"`
}

func (h host) member() Member { return Member{Rank: -1, Node: h.NodeRank, Host: h.Host, PID: h.PID} }

// Welcome is the coordinator's first message, with the timing for all members.
type Welcome struct {
	Host      string        `json:"host"`
	PID       int           `json:"pid"`
	Rank      int           `json:"rank"` // rank of the coordinator's process; -1 for an agent
	Heartbeat time.Duration `json:"heartbeat"`
	LostAfter time.Duration `json:"lostAfter"`
	Several   bool          `json:"several,omitempty"`  // the job is on several hosts
	Registry  bool          `json:"registry,omitempty"` // the process serves a registry
	Running   bool          `json:"running,omitempty"`  // the hosts of its job have been complete
	Stream    string        `json:"stream"`             // the receiver needs it to resume its stream
	Agent     string        `json:"agent,omitempty"`    // UUID of the coordinator's agent
	// Elects is true if only agents may register, because the hosts choose a coordinator. Hosts is the number of those that have, and
	// At the address of another candidate, with which this host has registered.
	Elects bool   `json:"elects,omitempty"`
	Hosts  int    `json:"hosts,omitempty"`
	Epoch  uint64 `json:"epoch,omitempty"` // the last that the coordinator knows
	Term   uint64 `json:"term,omitempty"`  // of a coordinator whose job is running
	Run    string `json:"run,omitempty"`   // of the coordinator's job; a term says nothing about another run
	// Refers is true if this host does not coordinate. At is the address of the coordinator, or "" if unknown.
	Refers bool   `json:"refers,omitempty"`
	At     string `json:"at,omitempty"`
	// Follows is how long ago this host has registered with the coordinator at At.
	Follows  time.Duration `json:"follows,omitempty"`
	Finished bool          `json:"finished,omitempty"` // with Refers: the program has ended
	Over     string        `json:"over,omitempty"`     // with Refers: why the job has ended on this host
}

// World is the committed list of all processes, by rank.
type World struct {
	By      Leader      `json:"by,omitzero"` // the coordinator that begins the epoch
	Members []Member    `json:"members"`
	New     []int       `json:"new,omitempty"`  // ranks that were not in the epoch before
	Left    []Departure `json:"left,omitempty"` // of the epoch before
}

// An elsewhere tells a coordinator that another one leads the job, and agents where it is.
type elsewhere struct {
	At string `json:"at,omitempty"` // its address, or "" if it is not known
	By Leader `json:"by"`
}

// A handover tells all members that the coordinator's host leaves the job, and that another one must coordinate.
type handover struct {
	Reason string   `json:"reason"`           // completes "its launcher ...", unless Failed is set
	Failed bool     `json:"failed,omitempty"` // the coordinator may not go on: too few hosts are with it, or another one has replaced it
	Ended  []string `json:"ended,omitempty"`  // hosts whose launchers do not vote any more
}

// An Order is a command of the coordinator to a launcher.
type Order struct {
	Local int `json:"local"` // rank of the worker on its host
	// Start is true if the launcher must start the worker again after a time. Without
	// Start, Kill and Stop, the worker is not started again.
	Start bool          `json:"start,omitempty"`
	After time.Duration `json:"after,omitempty"`
	Count int           `json:"count,omitempty"` // starts of this worker after the first
	// Kill is true if the launcher must kill the worker's process PID.
	Kill bool `json:"kill,omitempty"`
	PID  int  `json:"pid,omitempty"`
	// Stop is true if the launcher must stop all its workers: its host leaves the job.
	Stop bool `json:"stop,omitempty"`
	// Finish is true if no worker is started any more: the program has ended.
	Finish bool `json:"finish,omitempty"`
}

// news tells agents of an epoch.
type news struct {
	By      Leader   `json:"by,omitzero"`
	Plan    plan     `json:"plan"`
	Members []Member `json:"members"`
	Line    string   `json:"line,omitempty"`
	Voters  voterSet `json:"voters,omitempty"`
	// After a takeover, until the coordinator begins an epoch: Begun is the epoch of Voters, and Proposed are later ones that have
	// perhaps begun.
	Begun    uint64     `json:"begun,omitempty"`
	Proposed []proposal `json:"proposed,omitempty"`
	Ledger   ledger     `json:"ledger,omitzero"`
	// In a proposal: Ended are hosts whose launchers are known to have ended, and NewMembers are the
	// members that were not in the epoch before.
	Ended      []string    `json:"ended,omitempty"`
	NewMembers []newMember `json:"newMembers,omitempty"`
}

// A newMember is a process that is proposed as a member for the first time.
type newMember struct {
	Agent string `json:"agent"` // UUID of its launcher
	Local int    `json:"local"`
	PID   int    `json:"pid"`
}

// plan is the committed list of all hosts, by node index.
type plan struct {
	By       Leader `json:"by,omitzero"` // the coordinator that sends it
	Hosts    []host `json:"hosts"`
	Restarts int    `json:"restarts,omitempty"` // how often the processes were started again
	News     string `json:"news,omitempty"`     // for the user, if they are started again
}

// firstRank returns the rank of the first worker of a node.
func (p plan) firstRank(node int) int {
	n := 0
	for _, h := range p.Hosts[:node] {
		n += h.LocalSize
	}
	return n
}

// hostOf returns the name of the host of a rank.
func (p plan) hostOf(rank int) string {
	for node, h := range p.Hosts {
		if first := p.firstRank(node); first <= rank && rank < first+h.LocalSize {
			return h.Host
		}
	}
	return ""
}

// with returns the plan with a host, whose place does not change if the plan already includes it.
func (p plan) with(h host) *plan {
	p.Hosts = slices.Clone(p.Hosts)
	if at := p.nodeOf(h.UUID); at >= 0 {
		p.Hosts[at] = h
	} else {
		p.Hosts = append(p.Hosts, h)
	}
	return &p
}

func (p plan) size() int { return p.firstRank(len(p.Hosts)) }

// nodeOf returns the node whose agent has the UUID, or -1.
func (p plan) nodeOf(uuid string) int {
	return slices.IndexFunc(p.Hosts, func(h host) bool { return h.UUID == uuid })
}

// Fault is the reason why the job cannot continue.
type Fault struct {
	Rank    int           `json:"rank"`
	Host    string        `json:"host"`
	PID     int           `json:"pid"`
	Silent  time.Duration `json:"silent"` // time since its last message to the coordinator
	Reason  string        `json:"reason"`
	Code    int           `json:"code"`              // exit code; -1 if unknown
	Stop    bool          `json:"stop,omitempty"`    // a launcher was asked to stop the job
	Again   bool          `json:"again,omitempty"`   // all processes are started again
	Planned bool          `json:"planned,omitempty"` // nothing is lost: the world changes
	Closed  bool          `json:"closed,omitempty"`  // the connection of the process was closed
	Ago     time.Duration `json:"ago,omitempty"`     // since its function has failed
}

// Refusal is the reason why a registration was rejected.
type Refusal struct {
	Reason string  `json:"reason,omitempty"`
	All    bool    `json:"all,omitempty"`   // no member can join; also for duplicates
	Place  string  `json:"place,omitempty"` // set for a duplicate
	First  *Member `json:"first,omitempty"`
	Second *Member `json:"second,omitempty"`
	// Finished is true if the program has ended, so that a host that comes back to its coordinator has nothing left to do.
	Finished bool `json:"finished,omitempty"`
	// Set if the join timed out at the coordinator.
	Attendance *attendance   `json:"roll,omitempty"`
	Waited     time.Duration `json:"waited,omitempty"`
}

// why describes the refusal for the coordinator's user.
func (r Refusal) why() string {
	if r.First != nil {
		return fmt.Sprintf("%s is taken by %s", r.Place, memberList([]Member{{Rank: -1, Host: r.First.Host, PID: r.First.PID}}))
	}
	return r.Reason
}

// attendance lists the members that have joined and those that are missing.
type attendance struct {
	Unit    string   `json:"unit"`
	Want    int      `json:"want"`
	Have    []Member `json:"have"`
	Missing []int    `json:"missing,omitempty"`
	Gone    []Member `json:"gone,omitempty"`    // members of Have that timed out
	Refused []string `json:"refused,omitempty"` // who came and was refused, each with the reason
	Elastic bool     `json:"elastic,omitempty"` // the workers call Run
}

// maxLocalSize limits the processes of one host: more than any machine has, and
// small enough to iterate over.
const maxLocalSize = 1 << 12

// MaxSize limits the processes of a job. It is more than any job has, and keeps a mistake in a number, such as one of another
// variable, from costing memory and time before anybody has joined.
const MaxSize = 1 << 20

// maxMissing limits the list of missing members, which would otherwise be as long as the size that the user has given.
const maxMissing = 1 << 16

// maxNamed limits the number of list elements in a message.
const maxNamed = 16

func (r attendance) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %s have joined", len(r.Have), quantity(r.Want, r.Unit))
	if len(r.Have) > 0 {
		fmt.Fprintf(&b, ": %s", memberList(r.Have))
	}
	switch {
	case len(r.Missing) > 0 && r.Unit == unitHost:
		fmt.Fprintf(&b, "; missing node %s", numberList(r.Missing))
	case len(r.Missing) > 0:
		fmt.Fprintf(&b, "; missing %s", RankList(r.Missing))
	}
	if len(r.Gone) > 0 {
		fmt.Fprintf(&b, "; of these timed out: %s", memberList(r.Gone))
	}
	for _, text := range r.Refused[:min(len(r.Refused), maxNamed)] {
		fmt.Fprintf(&b, "; refused: %s", text)
	}
	return b.String()
}

const (
	UnitProcess = "process"
	UnitMember  = "member"
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

// RankList returns text such as "rank 1" or "ranks 1, 2".
func RankList(ranks []int) string {
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
	if n >= maxMissing { // the list may have been cut
		return fmt.Sprintf(" and at least %d more", n-maxNamed)
	}
	return fmt.Sprintf(" and %d more", n-maxNamed)
}

// assignRanks completes the list of a world's members and sorts it by rank. If
// all members have a rank, it keeps the ranks; otherwise it assigns ranks by
// host, local rank and name. It derives missing host information from the list.
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

// numberHosts sets unknown fields (-1, or 0 for LocalSize) of members, by rank,
// so that the host that appears first has number 0.
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

// assignNodes sorts hosts by node index: by the given node rank, otherwise by
// name.
func assignNodes(hs []host) []host {
	hs = slices.Clone(hs)
	slices.SortFunc(hs, func(a, b host) int {
		return cmp.Or(cmp.Compare(a.NodeRank, b.NodeRank), naturalCompare(a.Host, b.Host), cmp.Compare(a.UUID, b.UUID))
	})
	return hs
}

// Ids of kindLeave.
const (
	leaveJob = iota
	leaveGaveUp
	leaveForAnother // the launcher registers with another coordinator
)

// A pathState is the result of a probe of a path.
type pathState int

const (
	pathCut pathState = iota
	pathSmall
	pathGood
)

func (p pathState) String() string {
	switch p {
	case pathCut:
		return "cannot connect to it"
	case pathSmall:
		return "can connect to it, but packets of full size do not arrive: the MTU of an interface or a tunnel between them is probably smaller than the MTU of the hosts"
	}
	return "reaches it"
}

// A pathReport is an agent's message about its path to another host.
type pathReport struct {
	UUID  string    `json:"uuid"` // of the other host's agent
	State pathState `json:"state"`
	// Before is true if the path was good before.
	Before bool `json:"before"`
}

// overdueAfter returns the silence after which a member connects again: a heartbeat is overdue.
func (w Welcome) overdueAfter() time.Duration { return max(w.LostAfter/3, w.Heartbeat*3/2) }

// step is the time between two checks for silence of the other end.
func (w Welcome) step() time.Duration {
	return max(min(w.Heartbeat/4, w.LostAfter/48), time.Millisecond)
}

func Deref(p *int, unset int) int {
	if p == nil {
		return unset
	}
	return *p
}
