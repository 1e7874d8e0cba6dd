package analyze

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
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

// transfers pairs the sends of a group with its receives, in issue order for each pair of ranks.
func (g *group) transfers() (list []transferFinding) {
	for _, c := range g.channels() {
		if f, found := g.unpaired(c); found {
			list = append(list, f)
		}
	}
	return list
}

// channels returns the transfers of each pair of ranks, in rank order.
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

// sent returns the send that belongs to a receive if it has completed, because
// NCCL's buffers may have taken all its data, or nil.
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

// The kinds of findings, in the order in which they explain a hang.
const (
	KindTwice    = "twice"    // several files are of one rank, so that the ranks cannot be compared
	KindMismatch = "mismatch" // ranks issued different operations under one number
	KindOrder    = "order"    // ranks use groups in different orders
	KindBehind   = "behind"   // a rank has not issued an operation that others wait for
	KindMissing  = "missing"  // a rank has no file
	KindFailed   = "failed"   // a rank ended the group, and the other ranks ended it because of that
	KindTransfer = "transfer" // a send or receive has no partner
	KindSlow     = "slow"     // a rank does not complete an operation that others have completed
	KindQueued   = "queued"   // all ranks have issued the operation, and earlier work keeps the stream of a rank from it
	KindStuck    = "stuck"    // all ranks have issued the operation, and none is known to have completed it
	KindService  = "ras"      // NCCL's RAS service reports it
	KindFile     = "file"     // a file cannot be read
	KindNone     = "none"
)

var kinds = []string{KindTwice, KindMismatch, KindOrder, KindBehind, KindQueued, KindMissing, KindFailed, KindTransfer, KindSlow, KindStuck, KindService, KindFile}

// A Finding is something that explains a hang, or weakens the analysis.
type Finding struct {
	Kind  string `json:"kind"`
	Text  string `json:"text"`
	Group string `json:"group,omitempty"`
	Seq   uint64 `json:"sequence,omitempty"` // of the collective; 0 if there is none
	Ranks []Rank `json:"ranks,omitempty"`    // the culprits
	Job   string `json:"job,omitempty"`      // if the files are of several jobs
}

// A Rank names a rank of the job.
type Rank struct {
	Name   string `json:"name"`
	World  *int   `json:"world_rank"` // null if not known
	Host   string `json:"host,omitempty"`
	PID    int    `json:"pid,omitempty"`
	Device string `json:"device,omitempty"`
	UUID   string `json:"uuid,omitempty"`
}

// A Row has the progress of one rank in a group.
type Row struct {
	Rank      Rank   `json:"rank"`
	InGroup   int    `json:"rank_in_group"`
	Issued    uint64 `json:"last_issued"`
	Completed uint64 `json:"last_completed"`
	Oldest    uint64 `json:"oldest_recorded"` // the first collective that the ring still holds
	Last      string `json:"last_operation,omitempty"`
	State     string `json:"state,omitempty"` // of the last operation
}

// A Table has the rows of a group.
type Table struct {
	Group string `json:"group"`
	Size  int    `json:"size"`
	Rows  []Row  `json:"ranks"`
	Job   string `json:"job,omitempty"` // if the files are of several jobs
}

// A Report is the result of an analysis.
type Report struct {
	Verdict  string    `json:"verdict"`
	Kind     string    `json:"kind"`
	Sure     Sureness  `json:"sure"`
	Doubts   []string  `json:"doubts"` // why the verdict may be wrong
	Culprits []Rank    `json:"culprits"`
	Findings []Finding `json:"findings"`
	Groups   []Table   `json:"groups"`
	Files    []File    `json:"files"`
	Job      string    `json:"job,omitempty"`  // if the files are of several jobs
	Jobs     []*Report `json:"jobs,omitempty"` // if the files are of several jobs; the other fields are those of all
}

func (n *node) rank() Rank {
	r := Rank{Name: n.name, Host: n.host, PID: n.pid, UUID: n.uuid}
	if n.uuid != "" {
		r.Device = n.device
	}
	if n.world >= 0 && !n.guessed {
		r.World = &n.world
	}
	return r
}

func ranks(list []*member) (out []Rank) {
	for _, m := range list {
		out = append(out, m.node.rank())
	}
	return out
}

// names joins the names of ranks, a few of them.
func names(list []*member) string {
	var b strings.Builder
	for i, m := range list[:min(len(list), mostNamed)] {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(m.name)
	}
	if more := len(list) - mostNamed; more > 0 {
		fmt.Fprintf(&b, " and %d more", more)
	}
	return b.String()
}

func upper(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// place returns where the program issued an operation, if the dump has call stacks.
func place(e *entry) string {
	if e.frame == "" {
		return ""
	}
	return " at " + e.frame
}

func (g *group) table() Table {
	t := Table{Group: g.name, Size: g.size, Rows: []Row{}}
	for _, m := range g.present() {
		r := Row{Rank: m.node.rank(), InGroup: m.rank, Issued: m.last, Oldest: m.first}
		for i := range m.colls {
			if m.colls[i].completed {
				r.Completed = max(r.Completed, m.colls[i].seq)
			}
		}
		if n := len(m.list); n > 0 {
			r.Last, r.State = m.list[n-1].position(), m.list[n-1].state()
		}
		t.Rows = append(t.Rows, r)
	}
	return t
}

// WriteText writes the report for people: the verdict first.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	if len(r.Jobs) > 0 {
		fmt.Fprintf(&b, "The files are of %d jobs.\n", len(r.Jobs))
	}
	for i, j := range append(r.Jobs, r)[:max(len(r.Jobs), 1)] {
		if j.Job != "" {
			fmt.Fprintf(&b, "%s\nJob %s: ", strings.Repeat("\n", min(i, 1)), j.Job)
		}
		j.write(&b)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// write writes the report of a job.
func (r *Report) write(b *strings.Builder) {
	fmt.Fprintf(b, "%s\n", r.Verdict)
	if r.Kind != KindNone {
		fmt.Fprintf(b, "This is %s.%s\n", r.Sure, sentences(r.Doubts))
	}
	for _, f := range r.Findings {
		if f.Text != r.Verdict {
			fmt.Fprintf(b, "\n%s: %s\n", f.Kind, f.Text)
		}
	}
	for i := range r.Groups {
		r.Groups[i].write(b)
	}
}

func sentences(list []string) string {
	text := ""
	for _, s := range list {
		text += " " + upper(s) + "."
	}
	return text
}

// mostRows limits the rows of a table in text: ranks that issued the same are next to each other.
const mostRows = 64

func (t *Table) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n%s, %d ranks\n", t.Group, t.Size)
	rows := slices.Clone(t.Rows)
	slices.SortStableFunc(rows, func(x, y Row) int { return cmp.Compare(x.Issued, y.Issued) }) // the ranks behind first
	tw := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "RANK\tISSUED\tCOMPLETED\tRECORDED FROM\tLAST OPERATION\tSTATE")
	for _, x := range rows[:min(len(rows), mostRows)] {
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%s\t%s\n", x.Rank.Name, x.Issued, x.Completed, x.Oldest, cmp.Or(x.Last, "none"), x.State)
	}
	_ = tw.Flush() // a strings.Builder does not fail
	if more := len(rows) - mostRows; more > 0 {
		fmt.Fprintf(b, "and %d more: --json lists all\n", more)
	}
}

// moment returns a time of an entry.
func moment(ns int64) string { return time.Unix(0, ns).UTC().Format("15:04:05.000 UTC") }
