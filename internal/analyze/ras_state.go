package analyze

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/gochorus/chorus/internal/safe"
)

// A RASState compares two answers of a job. Counts of operations that differ between ranks are normal while a job runs, because
// the ranks are not asked at the same moment. Counts that differ and do not change show a job that hangs.
type RASState struct {
	Address       string         `json:"address"`
	NCCL          string         `json:"nccl"`
	Interval      time.Duration  `json:"interval_ns"` // between the answers
	Communicators []RASCommState `json:"communicators"`
	Findings      []string       `json:"findings"`
}

// The progress of a communicator.
const (
	Running = "running" // some count has grown
	Idle    = "idle"    // all ranks have launched the same operations, and no count has grown: the ranks may wait in the last operation
	Stuck   = "stuck"   // the ranks have launched different operations, and no count has grown
	Failing = "failing" // a rank is silent or dead, or has an error
)

// A RASCommState is the state of a communicator.
type RASCommState struct {
	Hash  string         `json:"hash"`
	Size  int            `json:"size"`
	State string         `json:"state"`
	Ranks []RASRankState `json:"ranks"`
}

// A RASRankState is the state of a rank.
type RASRankState struct {
	Rank     int               `json:"rank"`
	Host     string            `json:"host"`
	PID      int               `json:"pid"`
	Device   int               `json:"cuda_dev"`
	State    string            `json:"state"`    // "ok", "silent", "dead", "closed", or the error
	Launched uint64            `json:"launched"` // operations of all kinds
	Behind   uint64            `json:"behind"`   // operations, relative to the rank that has launched the most
	Grown    uint64            `json:"grown"`    // operations since the first answer
	Counts   map[string]uint64 `json:"counts"`
}

// WatchRAS asks a service twice, with a pause between the answers.
func WatchRAS(ctx context.Context, addr string, pause time.Duration) (*RASState, error) {
	first, err := AskRAS(addr)
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	select {
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-time.After(pause):
	}
	second, err := AskRAS(addr)
	if err != nil {
		return nil, fmt.Errorf("%w (it answered %s ago)", err, time.Since(begin).Round(100*time.Millisecond))
	}
	return CompareRAS(addr, first, second, time.Since(begin)), nil
}

// CompareRAS compares two answers of the service at an address.
func CompareRAS(addr string, first, second *RASAnswer, interval time.Duration) *RASState {
	s := &RASState{Address: addr, NCCL: second.NCCL, Interval: interval, Communicators: []RASCommState{}, Findings: []string{}}
	waiting := map[rasProcess]string{} // the communicator in which a process waits for others
	states := make([]RASCommState, len(second.Communicators))
	for i := range second.Communicators {
		c := &second.Communicators[i]
		states[i] = c.state(c.before(first))
		if states[i].State != Stuck {
			continue
		}
		for _, r := range states[i].Ranks {
			if r.State == "ok" && r.Behind == 0 && waiting[r.process()] == "" {
				waiting[r.process()] = c.Hash
			}
		}
	}
	for i := range second.Communicators {
		c, x := &second.Communicators[i], states[i]
		s.Communicators = append(s.Communicators, x)
		n := &namer{c, func(c *RASCommunicator, rank int) string { return fmt.Sprintf("rank %d", rank) }}
		texts := slices.Concat(n.silent(), n.errors())
		if x.State == Stuck {
			texts = append(texts, n.differing(waiting)...)
		}
		for _, text := range texts {
			s.Findings = append(s.Findings, fmt.Sprintf("communicator %s of %d ranks: %s", c.Hash, c.Size, text))
		}
		if x.State == Stuck {
			s.Findings[len(s.Findings)-1] += fmt.Sprintf("; no rank has launched anything in %.1f s, and sends and receives do not count", interval.Seconds())
		}
	}
	return s
}

// before returns the ranks of the communicator in an earlier answer.
func (c *RASCommunicator) before(first *RASAnswer) map[int]*RASRank {
	old := map[int]*RASRank{}
	if k := slices.IndexFunc(first.Communicators, c.same); k >= 0 {
		for i := range first.Communicators[k].Ranks {
			r := &first.Communicators[k].Ranks[i]
			old[r.Rank] = r
		}
	}
	return old
}

// A process is one of the job.
type rasProcess struct {
	host string
	pid  int
}

func (r *RASRankState) process() rasProcess { return rasProcess{r.Host, r.PID} }

// same reports whether o is the same communicator.
func (c *RASCommunicator) same(o RASCommunicator) bool {
	return c.Hash == o.Hash && c.Secondary == o.Secondary && c.Size == o.Size
}

// state compares the ranks with each other, and with their earlier counts.
func (c *RASCommunicator) state(old map[int]*RASRank) RASCommState {
	x := RASCommState{Hash: c.Hash, Size: c.Size, State: Idle, Ranks: []RASRankState{}}
	most, grown := uint64(0), false
	for i := range c.Ranks {
		r := &c.Ranks[i]
		s := RASRankState{Rank: r.Rank, Host: r.Host, PID: r.PID, Device: r.Device, State: "ok", Launched: r.launched(), Counts: r.Counts}
		if before := old[r.Rank]; before != nil && s.Launched > before.launched() {
			s.Grown, grown = s.Launched-before.launched(), true
		}
		for _, result := range []int{r.Status.InitState, r.Status.AsyncError} {
			if failed(result) {
				s.State = resultName(result)
			}
		}
		most = max(most, s.Launched)
		x.Ranks = append(x.Ranks, s)
	}
	failing := false
	for i := range x.Ranks {
		x.Ranks[i].Behind = most - x.Ranks[i].Launched
		failing = failing || x.Ranks[i].State != "ok"
	}
	for _, r := range c.Missing {
		s := RASRankState{Rank: r.Rank, Host: r.Host, PID: r.PID, Device: r.Device, State: "closed", Counts: map[string]uint64{}}
		switch {
		case r.Status.Dead:
			s.State = "dead"
		case r.Status.Unresponsive:
			s.State = "silent"
		}
		failing = failing || s.State != "closed"
		x.Ranks = append(x.Ranks, s)
	}
	slices.SortStableFunc(x.Ranks, func(a, b RASRankState) int { return a.Rank - b.Rank })
	differ := slices.ContainsFunc(c.Ranks, func(r RASRank) bool { return !maps.Equal(r.Counts, c.Ranks[0].Counts) })
	switch {
	case grown:
		x.State = Running
	case differ:
		x.State = Stuck
	case failing:
		x.State = Failing
	}
	return x
}

// launched returns the number of operations of all kinds.
func (r *RASRank) launched() (n uint64) {
	for _, count := range r.Counts {
		n += count
	}
	return n
}

// differing says which ranks have launched fewer or other operations than most ranks. If no counts are those of more ranks than any
// others, as with two ranks, the ranks with the fewest operations are behind, and if all have as many, nobody knows who is right.
func (n *namer) differing(waiting map[rasProcess]string) []string {
	classes := map[string][]*RASRank{}
	for i := range n.Ranks {
		r := &n.Ranks[i]
		key := fmt.Sprint(r.Counts) // sorted by kind
		classes[key] = append(classes[key], r)
	}
	list := slices.SortedFunc(maps.Values(classes), func(a, b []*RASRank) int {
		if len(a) != len(b) {
			return len(b) - len(a)
		}
		return a[0].Rank - b[0].Rank
	})
	usual := list[0]
	clear := len(list[0]) > len(list[1])
	if !clear {
		for _, class := range list { // the ranks that have launched the most are not behind
			if class[0].launched() > usual[0].launched() {
				usual = class
			}
		}
	}
	var texts, others []string
	for _, class := range list {
		if class[0] == usual[0] || len(texts) == maxClasses {
			continue
		}
		var here, elsewhere []*RASRank
		for _, r := range class {
			if other := waiting[rasProcess{r.Host, r.PID}]; other != "" && other != n.Hash && class[0].launched() < usual[0].launched() {
				elsewhere = append(elsewhere, r)
			} else {
				here = append(here, r)
			}
		}
		if len(here) > 0 {
			texts = append(texts, n.ranks(here)+" "+difference(here, usual, clear))
		}
		if len(elsewhere) > 0 {
			others = append(others, fmt.Sprintf("%s %s too, but %s in communicator %s", n.ranks(elsewhere), plural(len(elsewhere), "is behind", "are behind"),
				plural(len(elsewhere), "it waits", "they wait"), waiting[rasProcess{elsewhere[0].Host, elsewhere[0].PID}]))
		}
	}
	return []string{strings.Join(append(texts, others...), "; ")}
}

// difference compares the counts of a class of ranks with those of others.
func difference(class, usual []*RASRank, clear bool) string {
	var fewer, more []string
	names := map[string]bool{}
	for kind := range class[0].Counts {
		names[kind] = true
	}
	for kind := range usual[0].Counts {
		names[kind] = true
	}
	for _, kind := range slices.Sorted(maps.Keys(names)) {
		switch a, b := class[0].Counts[kind], usual[0].Counts[kind]; {
		case a < b:
			fewer = append(fewer, fmt.Sprintf("%d %s and not %d", a, kind, b))
		case a > b:
			more = append(more, fmt.Sprintf("%d %s and not %d", a, kind, b))
		}
	}
	others := plural(len(usual), fmt.Sprintf("rank %d", usual[0].Rank), "most other ranks")
	switch {
	case len(more) == 0:
		return fmt.Sprintf("%s behind: %s launched %s as %s", plural(len(class), "is", "are"), plural(len(class), "it has", "they have"), strings.Join(fewer, ", "), others)
	case len(fewer) == 0:
		return fmt.Sprintf("%s ahead: %s launched %s as %s", plural(len(class), "is", "are"), plural(len(class), "it has", "they have"), strings.Join(more, ", "), others)
	}
	text := fmt.Sprintf("%s in another operation: %s launched %s, and %s as %s", plural(len(class), "is", "are"), plural(len(class), "it has", "they have"),
		strings.Join(more, ", "), strings.Join(fewer, ", "), others)
	if !clear {
		text += ", and which of them is wrong is not known"
	}
	return text
}

// Print writes the state as a table, the communicators with findings first.
func (s *RASState) Print(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "NCCL %s at %s  %s  compared over %.1f s\n", s.NCCL, s.Address, countOf(len(s.Communicators), "communicator"), s.Interval.Seconds())
	for _, f := range s.Findings {
		fmt.Fprintln(&b, f)
	}
	if len(s.Findings) == 0 {
		fmt.Fprintln(&b, "no rank is silent, and none has launched other operations than the others")
	}
	fmt.Fprintln(&b)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "COMMUNICATOR\tSTATE\tRANK\tHOST\tPID\tGPU\tPROCESS\tLAUNCHED\tBEHIND\tNEW\tKINDS")
	list := slices.Clone(s.Communicators)
	slices.SortStableFunc(list, func(a, b RASCommState) int { return slices.Index(rasOrder, a.State) - slices.Index(rasOrder, b.State) })
	for _, c := range list {
		for _, r := range c.Ranks {
			fmt.Fprintf(w, "%s\t%s\t%d of %d\t%s\t%d\t%d\t%s\t%d\t%d\t%d\t%s\n", c.Hash, c.State, r.Rank, c.Size, r.Host, r.PID, r.Device, r.State, r.Launched, r.Behind, r.Grown, kindsOf(r.Counts))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(out, b.String())
	return err
}

var rasOrder = []string{Failing, Stuck, Idle, Running}

// kindsOf lists the counts that are not zero.
func kindsOf(counts map[string]uint64) string {
	var texts []string
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		if counts[kind] > 0 {
			texts = append(texts, fmt.Sprintf("%s %d", kind, counts[kind]))
		}
	}
	return safe.Text(strings.Join(texts, ", "))
}

func countOf(n int, what string) string { return plural(n, "1 "+what, fmt.Sprintf("%d %ss", n, what)) }

const (
	maxFindings = 2 // of a communicator
	maxNamed    = 4 // ranks that a finding names
	maxClasses  = 3 // different counts that a finding lists
)

// results has the names of the failures in a RASStatus, by ncclResult_t.
var results = map[int]string{
	1: "ncclUnhandledCudaError", 2: "ncclSystemError", 3: "ncclInternalError", 4: "ncclInvalidArgument",
	5: "ncclInvalidUsage", 6: "ncclRemoteError",
}

// failed reports whether an ncclResult_t is neither ncclSuccess nor ncclInProgress.
func failed(result int) bool { return result != 0 && result != 7 }

func resultName(result int) string { return cmp.Or(results[result], fmt.Sprint("NCCL error ", result)) }

// Findings describes the faults of the communicators, in sentences without a
// period: ranks that do not answer, ranks with errors, and counts of operations
// that differ. The most important ones come first. Ranks have the names that
// name returns for them.
func (a *RASAnswer) Findings(name func(c *RASCommunicator, rank int) string) (list []string) {
	for i := range a.Communicators {
		n := &namer{&a.Communicators[i], name}
		all := slices.Concat(n.silent(), n.errors(), n.counts())
		for _, text := range all[:min(len(all), maxFindings)] {
			if !slices.Contains(list, text) {
				list = append(list, text)
			}
		}
	}
	return list
}

// A namer names the ranks of a communicator.
type namer struct {
	*RASCommunicator
	name func(c *RASCommunicator, rank int) string
}

func (n *namer) rank(r *RASRank) string {
	text := n.name(n.RASCommunicator, r.Rank)
	if r.PID > 0 {
		text += fmt.Sprintf(" (process %d on host %s)", r.PID, r.Host)
	}
	return text
}

// ranks joins the names of ranks, a few of them.
func (n *namer) ranks(list []*RASRank) string {
	var texts []string
	for _, r := range list[:min(len(list), maxNamed)] {
		texts = append(texts, n.rank(r))
	}
	text := strings.Join(texts, ", ")
	if more := len(list) - maxNamed; more > 0 {
		text += fmt.Sprintf(" and %d more ranks", more)
	}
	return text
}

// silent names the processes that do not answer the service. A process that answers and has closed the
// communicator is not one of them: each rank closes it after a timeout.
func (n *namer) silent() (list []string) {
	var dead, silent []*RASRank
	for i := range n.Missing {
		switch r := &n.Missing[i]; {
		case r.Status.Dead:
			dead = append(dead, r)
		case r.Status.Unresponsive:
			silent = append(silent, r)
		}
	}
	if len(dead) > 0 {
		list = append(list, n.ranks(dead)+plural(len(dead), " is", " are")+" dead or unreachable")
	}
	if len(silent) > 0 {
		list = append(list, n.ranks(silent)+plural(len(silent), " does", " do")+" not answer")
	}
	return list
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// errors names the ranks with errors of the first kind that occurs.
func (n *namer) errors() []string {
	for _, kind := range []struct {
		text string
		of   func(*RASStatus) int
	}{
		{"failed to initialize", func(s *RASStatus) int { return s.InitState }},
		{"had an asynchronous error", func(s *RASStatus) int { return s.AsyncError }},
	} {
		var list []*RASRank
		for i := range n.Ranks {
			if r := &n.Ranks[i]; failed(kind.of(&r.Status)) {
				list = append(list, r)
			}
		}
		if len(list) > 0 {
			return []string{fmt.Sprintf("%s %s: %s", n.ranks(list), kind.text, resultName(kind.of(&list[0].Status)))}
		}
	}
	return nil
}

// counts names the ranks that have launched fewer operations of a kind than other ranks.
func (n *namer) counts() []string {
	kinds := map[string]bool{}
	for i := range n.Ranks {
		for kind := range n.Ranks[i].Counts {
			kinds[kind] = true
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		classes := map[uint64][]*RASRank{}
		for i := range n.Ranks {
			r := &n.Ranks[i]
			classes[r.Counts[kind]] = append(classes[r.Counts[kind]], r)
		}
		if len(classes) > 1 {
			return []string{fmt.Sprintf("the ranks have launched different numbers of %s: %s", kind, n.classes(classes))}
		}
	}
	return nil
}

// classes lists counts, the smallest first, and names the ranks of all but the largest.
func (n *namer) classes(classes map[uint64][]*RASRank) string {
	counts := slices.Sorted(maps.Keys(classes))
	last := counts[len(counts)-1]
	var texts []string
	for _, count := range counts[:min(len(counts)-1, maxClasses-1)] {
		texts = append(texts, fmt.Sprintf("%s %d", n.ranks(classes[count]), count))
	}
	who := fmt.Sprintf("%d other ranks", len(classes[last]))
	if len(classes[last]) == 1 {
		who = n.rank(classes[last][0])
	}
	return strings.Join(append(texts, fmt.Sprintf("%s %d", who, last)), ", ")
}
