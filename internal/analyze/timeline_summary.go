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

	"github.com/gochorus/chorus/internal/timeline"
)

// A Share is how a rank, or a step of it, spent its time. All durations are times of the device
// during which at least one stream ran such operations.
type Share struct {
	Span          time.Duration `json:"span_ns"`
	Compute       time.Duration `json:"compute_ns"`       // kernels, copies and fills
	Communication time.Duration `json:"communication_ns"` // collectives, sends and receives
	Exposed       time.Duration `json:"exposed_ns"`       // communication while nothing else ran
	Overlap       time.Duration `json:"overlap_ns"`       // communication while something else ran
	Gaps          time.Duration `json:"gaps_ns"`          // nothing ran
	LongestGap    time.Duration `json:"longest_gap_ns"`
}

// A RankShare is the share of a rank.
type RankShare struct {
	Rank   int    `json:"rank"`
	Host   string `json:"host"`
	Device string `json:"device"`
	Share
	HostWaits time.Duration `json:"host_waits_ns"` // a goroutine waits for the device
	Steps     []Share       `json:"steps"`
	// Arrivals says how often the rank arrived last at collectives.
	Arrivals Tally `json:"last_arrivals"`
}

// A Summary is the share of all ranks.
type Summary struct {
	Ranks   []RankShare `json:"ranks"`
	Steps   string      `json:"steps_by"` // what marks the steps: "nvtx ranges", "graph launches" or ""
	Dropped uint64      `json:"dropped_records"`
	Cut     []string    `json:"incomplete_files"`
	Unread  []string    `json:"unread_files,omitempty"` // with the reasons

	unread string // a line for people, or ""
}

// Summarize computes the shares.
func (j *Timeline) Summarize() *Summary {
	s := &Summary{Ranks: []RankShare{}, Dropped: j.Dropped, Cut: j.Cut, Unread: j.Unread, unread: j.UnreadNote()}
	steps := (*TimelineRank).markedSteps
	if s.Steps = "nvtx ranges"; !j.any(steps) {
		if steps, s.Steps = (*TimelineRank).launchedSteps, "graph launches"; !j.any(steps) {
			s.Steps = ""
		}
	}
	ranges, late := j.ranges(), j.tallyArrivals()
	for _, r := range j.Ranks {
		work, comm := r.busy()
		x := RankShare{Rank: r.Number, Host: r.Host, Device: r.Device, Share: share(work, comm, extent(work, comm)), Steps: []Share{}}
		x.HostWaits = time.Duration(r.waits().length())
		own := steps(r)
		if len(own) == 0 && s.Steps == "nvtx ranges" {
			own = ranges[r.boot+r.Host] // the process has several ranks
		}
		for _, w := range own {
			x.Steps = append(x.Steps, share(work, comm, w))
		}
		x.Arrivals = *late[r]
		s.Ranks = append(s.Ranks, x)
	}
	return s
}

// any reports whether a rank has steps.
func (j *Timeline) any(steps func(*TimelineRank) []interval) bool {
	return slices.ContainsFunc(j.Ranks, func(r *TimelineRank) bool { return len(steps(r)) > 0 })
}

// ranges returns the marked steps of the first rank of each host that has some.
func (j *Timeline) ranges() map[string][]interval {
	all := map[string][]interval{}
	for _, r := range j.Ranks {
		if all[r.boot+r.Host] == nil {
			all[r.boot+r.Host] = r.markedSteps()
		}
	}
	return all
}

// markedSteps returns the ranges of nvtx whose names begin with "step".
func (r *TimelineRank) markedSteps() (list []interval) {
	for _, x := range r.ranges {
		if x.Kind == timeline.Range && strings.HasPrefix(strings.ToLower(x.Name), "step") {
			list = append(list, interval{x.Begin, x.End})
		}
	}
	return list
}

// launchedSteps returns the times from one launch of a graph to the next on the stream with the
// most launches: the one with the smallest handle if several have as many.
func (r *TimelineRank) launchedSteps() (list []interval) {
	byHandle := func(a, b *track) int { return cmp.Compare(a.handle, b.handle) }
	for _, t := range slices.SortedFunc(maps.Values(r.streams), byHandle) {
		var begins []int64
		for _, s := range t.slices {
			if s.Kind == timeline.Graph {
				begins = append(begins, s.Begin)
			}
		}
		if len(begins)-1 > len(list) {
			list = nil
			for i := range begins[1:] {
				list = append(list, interval{begins[i], begins[i+1]})
			}
		}
	}
	return list
}

// busy returns when the rank's streams worked, and when they communicated. A graph counts as work
// only if its operations are not recorded one by one.
func (r *TimelineRank) busy() (work, comm set) {
	var works, comms []interval
	branches := slices.ContainsFunc(r.slices, func(s *slice) bool { return s.Branch })
	for _, s := range r.slices {
		x := interval{s.Begin, s.End}
		switch {
		case s.Kind == timeline.Collective:
			comms = append(comms, x)
		case s.Parent != 0 || s.Kind == timeline.Callback || s.Kind == timeline.Graph && branches:
		default:
			works = append(works, x)
		}
	}
	return unite(works), unite(comms)
}

// waits returns when the host waited for the device.
func (r *TimelineRank) waits() set {
	var list []interval
	for _, x := range r.host {
		if x.Kind == timeline.Wait {
			list = append(list, interval{x.Begin, x.End})
		}
	}
	return unite(list)
}

// extent returns the time from the first to the last operation.
func extent(work, comm set) interval {
	all := unite(append(slices.Clone(work), comm...))
	if len(all) == 0 {
		return interval{}
	}
	return interval{all[0].from, all[len(all)-1].to}
}

// share computes the share of a window.
func share(work, comm set, window interval) Share {
	all := set{window}
	work, comm = work.intersect(all), comm.intersect(all)
	gaps := all.subtract(unite(append(slices.Clone(work), comm...)))
	return Share{
		Span: time.Duration(max(0, all.length())), Compute: time.Duration(work.length()), Communication: time.Duration(comm.length()),
		Exposed: time.Duration(comm.subtract(work).length()), Overlap: time.Duration(comm.intersect(work).length()),
		Gaps: time.Duration(gaps.length()), LongestGap: time.Duration(gaps.longest()),
	}
}

// mostSteps limits the steps in text.
const mostSteps = 20

// WriteText writes tables for people.
func (s *Summary) WriteText(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "rank\thost\tdevice\ttime\tcompute\tcommunication\texposed\toverlap\tgaps\tlongest gap\thost waits\t")
	for _, r := range s.Ranks {
		fmt.Fprintf(tw, "%d\t%s\t%s\t%s\t%s\n", r.Rank, r.Host, r.Device, r.cells(), round(r.HostWaits)+"\t")
	}
	if n := s.steps(); n > 0 {
		fmt.Fprintf(tw, "\t\t\t\t\t\t\t\t\t\t\t\nstep\t\trank\ttime\tcompute\tcommunication\texposed\toverlap\tgaps\tlongest gap\t\t\n")
		for i := range min(n, mostSteps) {
			r := s.slowest(i)
			fmt.Fprintf(tw, "%d\t\t%d\t%s\t\t\n", i, r.Rank, r.Steps[i].cells())
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if err := s.writeArrivals(w); err != nil {
		return err
	}
	return s.writeNotes(w)
}

func (s *Summary) writeNotes(w io.Writer) error {
	var b strings.Builder
	switch n := s.steps(); {
	case n > 0:
		fmt.Fprintf(&b, "\nSteps are marked by %s. Each row has the rank whose step took longest.", s.Steps)
		if n > mostSteps {
			fmt.Fprintf(&b, " %d more steps: see --json.", n-mostSteps)
		}
		b.WriteString("\n")
	default:
		b.WriteString("\nNo steps are marked: call nvtx.Range(\"step\", ...) around each step.\n")
	}
	if s.Dropped > 0 {
		fmt.Fprintf(&b, "%d records are missing: too many operations were in flight, or the disk was too slow.\n", s.Dropped)
	}
	for _, name := range s.Cut {
		fmt.Fprintf(&b, "%s is incomplete: its process ended while it wrote.\n", name)
	}
	if s.unread != "" {
		fmt.Fprintf(&b, "%s.\n", s.unread)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// steps returns the largest number of steps of a rank.
func (s *Summary) steps() (n int) {
	for _, r := range s.Ranks {
		n = max(n, len(r.Steps))
	}
	return n
}

// slowest returns the rank whose step took longest.
func (s *Summary) slowest(step int) (slow *RankShare) {
	for i := range s.Ranks {
		r := &s.Ranks[i]
		if step < len(r.Steps) && (slow == nil || r.Steps[step].Span > slow.Steps[step].Span) {
			slow = r
		}
	}
	return slow
}

func (s Share) cells() string {
	part := func(d time.Duration) string {
		if s.Span == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f %%", 100*float64(d)/float64(s.Span))
	}
	return strings.Join([]string{round(s.Span), part(s.Compute), part(s.Communication), part(s.Exposed), part(s.Overlap), part(s.Gaps), round(s.LongestGap)}, "\t")
}

// round returns a duration with four digits.
func round(d time.Duration) string {
	unit := time.Duration(1)
	for d/unit >= 10000 {
		unit *= 10
	}
	return d.Round(unit).String()
}

// tallyArrivals counts who arrives last at the collectives of each group whose ranks all have a timeline. Ranks are compared
// by how long a collective took on their streams, which does not depend on the clocks of the hosts.
func (j *Timeline) tallyArrivals() map[*TimelineRank]*Tally {
	all := map[*TimelineRank]*Tally{}
	byGroup := map[string]map[*TimelineRank][]Arrival{}
	var order []string
	for _, r := range j.Ranks {
		all[r] = new(Tally)
		for _, s := range r.slices {
			if s.Kind != timeline.Collective || len(s.Ops) != 1 || s.Ops[0].Transfer || s.Ops[0].Peer >= 0 {
				continue // of a batch it is not known which operation waited, and not all ranks wait for a root
			}
			o := &s.Ops[0]
			if byGroup[o.Group] == nil {
				byGroup[o.Group] = map[*TimelineRank][]Arrival{}
				order = append(order, o.Group)
			}
			byGroup[o.Group][r] = append(byGroup[o.Group][r], Arrival{Sequence: o.Sequence, Took: s.End - s.Begin})
		}
	}
	for _, id := range order {
		var members []*TimelineRank
		var list []Arrivals
		for _, r := range j.Ranks {
			if a := byGroup[id][r]; len(a) > 0 {
				slices.SortFunc(a, func(a, b Arrival) int { return cmp.Compare(a.Sequence, b.Sequence) })
				members, list = append(members, r), append(list, Arrivals{List: a})
			}
		}
		if len(members) != j.sizes[id] {
			continue
		}
		counts, _ := CompareArrivals(list, 0)
		for i, r := range members {
			all[r].Add(counts[i])
		}
	}
	return all
}

// writeArrivals writes how often each rank arrived last, the one that held the others up the longest first.
func (s *Summary) writeArrivals(w io.Writer) error {
	list := slices.Clone(s.Ranks)
	slices.SortStableFunc(list, func(a, b RankShare) int { return cmp.Compare(b.Arrivals.HeldUp, a.Arrivals.HeldUp) })
	var b strings.Builder
	for _, r := range list {
		t := r.Arrivals
		if t.Last == 0 {
			continue
		}
		if b.Len() == 0 {
			b.WriteString("\nLast to arrive at collectives, which take the shortest time on the stream of the last rank:\n")
		}
		fmt.Fprintf(&b, "rank %d on %s: %d of %d, and the others waited %s for it, %s each time", r.Rank, r.Host, t.Last, t.Compared, round(t.HeldUp), round(t.Mean()))
		if t.Straggles() {
			b.WriteString(": it is a straggler")
		}
		b.WriteString("\n")
	}
	if s.unread != "" {
		fmt.Fprintf(&b, "%s.\n", s.unread)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
