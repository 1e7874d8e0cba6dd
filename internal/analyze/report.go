package analyze

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

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

var kinds = []string{KindTwice, KindMismatch, KindOrder, KindBehind, KindMissing, KindFailed, KindTransfer, KindQueued, KindSlow, KindStuck, KindService, KindFile}

// A Finding is something that explains a hang, or weakens the analysis.
type Finding struct {
	Kind  string `json:"kind"`
	Text  string `json:"text"`
	Group string `json:"group,omitempty"`
	Seq   uint64 `json:"sequence,omitempty"` // of the collective; 0 if there is none
	Ranks []Rank `json:"ranks,omitempty"`    // the culprits
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
}

// A Report is the result of an analysis.
type Report struct {
	Verdict  string    `json:"verdict"`
	Kind     string    `json:"kind"`
	Culprits []Rank    `json:"culprits"`
	Findings []Finding `json:"findings"`
	Groups   []Table   `json:"groups"`
	Files    []File    `json:"files"`
}

func (n *node) rank() Rank {
	r := Rank{Name: n.name, Host: n.host, PID: n.pid, UUID: n.uuid}
	if n.uuid != "" {
		r.Device = n.device
	}
	if n.world >= 0 {
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
	fmt.Fprintf(&b, "%s\n", r.Verdict)
	for _, f := range r.Findings {
		if f.Text != r.Verdict {
			fmt.Fprintf(&b, "\n%s: %s\n", f.Kind, f.Text)
		}
	}
	for i := range r.Groups {
		r.Groups[i].write(&b)
	}
	_, err := io.WriteString(w, b.String())
	return err
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
