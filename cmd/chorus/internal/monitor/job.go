// Package monitor shows the state of a running job: as a table, as JSON, as metrics of
// Prometheus, and as a page for browsers.
package monitor

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/status"
)

// A Job is the state of a job at one moment.
type Job struct {
	Job      string    `json:"job"`
	Time     time.Time `json:"time"`
	Epoch    int       `json:"epoch"`
	Restarts int       `json:"restarts"`
	Hosts    []string  `json:"hosts"`
	// Launchers identifies the launchers of the job; it is empty while the hosts join.
	Launchers []string `json:"launchers,omitempty"`
	Ranks     []Rank   `json:"ranks"`
	Groups    []Group  `json:"groups"`
	Findings  []string `json:"findings"` // such as a rank that is behind, and since when
	// Interval is the time to which the rates refer; 0 if they are not known.
	Interval time.Duration `json:"interval_ns"`
}

// A Rank is one process of the job.
type Rank struct {
	Rank        int             `json:"rank"`
	Host        string          `json:"host"`
	Node        int             `json:"node"`
	LocalRank   int             `json:"local_rank"`
	PID         int             `json:"pid,omitempty"`
	State       string          `json:"state"`
	SilentNanos time.Duration   `json:"silent_ns"`
	Missing     string          `json:"missing,omitempty"` // why the process has no groups and devices here
	Groups      []Member        `json:"groups,omitempty"`
	Devices     []status.Device `json:"devices,omitempty"`
	Notes       []string        `json:"notes,omitempty"`
	NCCL        string          `json:"nccl,omitempty"` // version

	Errors    []status.Errors    `json:"errors,omitempty"`
	Durations []status.Durations `json:"durations,omitempty"`
}

// A Member is the progress of a rank in a group.
type Member struct {
	status.Group
	Behind uint64        `json:"behind"`    // collectives, relative to the rank that has issued the most
	Lag    time.Duration `json:"behind_ns"` // since another rank issued the first of these collectives
	// Rates over Job.Interval.
	BytesPerSecond      float64 `json:"bytes_per_second"`
	OperationsPerSecond float64 `json:"operations_per_second"`
	// Tally says how often the rank arrived last at collectives of the group.
	Tally analyze.Tally `json:"last_arrivals"`
}

// A Group is a communicator over all ranks that answered.
type Group struct {
	ID        string `json:"id"`
	Name      string `json:"name,omitempty"`
	Size      int    `json:"size"`
	Answered  int    `json:"answered"`  // ranks
	Issued    uint64 `json:"issued"`    // by the rank that has issued the most collectives
	Completed uint64 `json:"completed"` // by all ranks that answered
}

// newJob decodes the reports of all ranks and compares the ranks.
func newJob(s *job.Status, now time.Time) *Job {
	j := &Job{Job: s.Job, Time: now, Epoch: s.Epoch, Restarts: s.Restarts, Hosts: s.Hosts, Ranks: []Rank{}, Groups: []Group{}, Findings: []string{}}
	for _, m := range s.Members {
		r := Rank{Rank: m.Rank, Host: m.Host, Node: m.Node, LocalRank: m.LocalRank, PID: m.PID, State: m.State, SilentNanos: max(m.Silent, 0), Missing: m.Missing}
		if m.Report != nil {
			r.fill(m.Report)
		}
		j.Ranks = append(j.Ranks, r)
	}
	j.compare()
	j.find()
	return j
}

func (r *Rank) fill(report []byte) {
	p, err := status.Decode(report)
	if err != nil {
		r.Missing = "its report is not valid: " + err.Error()
		return
	}
	r.Devices, r.Notes, r.NCCL = p.Devices, p.Notes, p.NCCL
	r.Errors, r.Durations = p.Errors, p.Durations
	for _, g := range p.Groups {
		r.Groups = append(r.Groups, Member{Group: g})
	}
}

// members calls visit for each rank of each group.
func (j *Job) members(visit func(*Rank, *Member)) {
	for i := range j.Ranks {
		for k := range j.Ranks[i].Groups {
			visit(&j.Ranks[i], &j.Ranks[i].Groups[k])
		}
	}
}

// compare lists the groups, and sets how far each rank is behind.
func (j *Job) compare() {
	at, all := map[string]int{}, map[string][]*Member{}
	j.members(func(_ *Rank, m *Member) {
		i, found := at[m.ID]
		if !found {
			i = len(j.Groups)
			at[m.ID] = i
			j.Groups = append(j.Groups, Group{ID: m.ID, Name: m.Name, Size: m.Size, Completed: m.Completed})
		}
		g := &j.Groups[i]
		g.Answered++
		g.Issued, g.Completed = max(g.Issued, m.Issued), min(g.Completed, m.Completed)
		all[m.ID] = append(all[m.ID], m)
	})
	j.members(func(_ *Rank, m *Member) {
		if m.Behind = j.Groups[at[m.ID]].Issued - m.Issued; m.Behind > 0 {
			m.Lag = lag(m, all[m.ID])
		}
	})
}

// lag returns the time since another rank issued the collective that m issues
// next, because that rank usually waits for it. If no rank has issued it, the
// time since m issued its last operation is an estimate.
func lag(m *Member, all []*Member) time.Duration {
	longest := int64(0)
	for _, x := range all {
		if x.Oldest != nil && x.Oldest.Collective == m.Issued+1 && x.Issued > m.Issued {
			longest = max(longest, x.Oldest.AgeNanos)
		}
	}
	if longest == 0 {
		longest = m.IdleNanos
	}
	return time.Duration(longest)
}

// minLag is the shortest time that is a finding. The ranks of a healthy job are not asked at the
// same moment, so that some of them seem to be behind.
const minLag = time.Second

// find describes the ranks that hold the job up.
func (j *Job) find() {
	for _, r := range j.Ranks {
		if r.State == "running" && r.Missing != "" {
			j.Findings = append(j.Findings, fmt.Sprintf("rank %d (host %s, process %d) has no report: %s; its last message came %s ago", r.Rank, r.Host, r.PID, r.Missing, seconds(r.SilentNanos)))
		}
		if r.State == "lost" {
			j.Findings = append(j.Findings, fmt.Sprintf("rank %d (host %s) is lost: %s", r.Rank, r.Host, r.Missing))
		}
	}
	found := map[string]bool{}
	j.members(func(r *Rank, m *Member) {
		if m.Behind > 0 && m.Lag >= minLag {
			found[m.ID] = true
			j.Findings = append(j.Findings, fmt.Sprintf("rank %d (host %s, process %d) is behind in %s since %s: it has issued %d collectives, another rank %d",
				r.Rank, r.Host, r.PID, m.title(), seconds(m.Lag), m.Issued, m.Issued+m.Behind))
		}
	})
	for _, g := range j.Groups {
		if !found[g.ID] {
			j.findLaunches(g)
		}
		if !found[g.ID] && g.Answered == g.Size {
			j.findSlow(g)
		}
	}
}

// minLaunchWait is the shortest wait for launches that is a finding. The processes notice the ends of launches every second, and healthy
// ranks have launched different numbers of collectives at any moment.
const minLaunchWait = 5 * time.Second

// findLaunches describes the ranks whose launches of graphs had fewer collectives than those of a rank whose launches do not end.
func (j *Job) findLaunches(g Group) {
	var most *Member
	var who *Rank
	j.members(func(r *Rank, m *Member) {
		if m.ID == g.ID && time.Duration(m.WaitNanos) >= minLaunchWait && (most == nil || m.Launched > most.Launched) {
			who, most = r, m
		}
	})
	if most == nil {
		return
	}
	named := 0
	j.members(func(r *Rank, m *Member) {
		if m.ID == g.ID && m.Launched < most.Launched && named < mostNamed {
			named++
			j.Findings = append(j.Findings, fmt.Sprintf("rank %d (host %s, process %d) has launched %d collectives of %s in graphs, and rank %d %d, whose launches have not ended since %s",
				r.Rank, r.Host, r.PID, m.Launched, m.title(), who.Rank, most.Launched, seconds(time.Duration(most.WaitNanos))))
		}
	})
}

// mostNamed limits the ranks that a finding names.
const mostNamed = 8

// findSlow describes a collective that all ranks have issued and that does not complete.
func (j *Job) findSlow(g Group) {
	var first *Member
	var queued []string
	all, started := true, true
	j.members(func(r *Rank, m *Member) {
		if m.ID == g.ID {
			if m.Oldest != nil && m.Oldest.State == "queued" {
				queued = append(queued, fmt.Sprintf("rank %d (host %s, process %d)", r.Rank, r.Host, r.PID))
			}
			started = started && m.Oldest != nil && m.Oldest.State == "started"
			all = all && m.Oldest != nil && m.Behind == 0 && time.Duration(m.Oldest.AgeNanos) >= minLag
			first = m
		}
	})
	if !all || first == nil || first.Oldest.Collective != g.Completed+1 {
		return
	}
	why := "a device or a link is slow, or work before it on a stream"
	switch {
	case len(queued) > 0:
		why = fmt.Sprintf("work that was enqueued before it still runs or waits on the stream of %s", strings.Join(queued[:min(len(queued), mostNamed)], ", "))
		if more := len(queued) - mostNamed; more > 0 {
			why += fmt.Sprintf(" and %d more", more)
		}
	case started:
		why = "it has started on all ranks, so a device or a link is slow, or other work occupies a device"
	}
	j.Findings = append(j.Findings, fmt.Sprintf("all ranks have issued %s in %s, and it does not complete since %s: %s",
		first.Oldest.Text, first.title(), seconds(time.Duration(first.Oldest.AgeNanos)), why))
}

// title names the group for people.
func (m *Member) title() string {
	if m.Name != "" {
		return fmt.Sprintf("group %s", m.Name)
	}
	return fmt.Sprintf("the group of %d ranks", m.Size)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// setRates sets the rates since an earlier state of the same processes.
func (j *Job) setRates(before *Job) {
	if before == nil || before.Epoch != j.Epoch {
		return
	}
	type key struct {
		rank, pid int
		id        string
	}
	last := map[key]*Member{}
	before.members(func(r *Rank, m *Member) { last[key{r.Rank, r.PID, m.ID + m.Device}] = m })
	j.Interval = j.Time.Sub(before.Time)
	j.members(func(r *Rank, m *Member) {
		if old := last[key{r.Rank, r.PID, m.ID + m.Device}]; old != nil {
			count, bytes := m.sum()
			count0, bytes0 := old.sum()
			m.OperationsPerSecond = rate(count, count0, j.Interval)
			m.BytesPerSecond = rate(bytes, bytes0, j.Interval)
		}
	})
}

func rate(now, before uint64, d time.Duration) float64 {
	if now < before || d <= 0 {
		return 0
	}
	return float64(now-before) / d.Seconds()
}

// sum returns the number and the bytes of all operations.
func (m *Member) sum() (count, bytes uint64) {
	for _, t := range m.Totals {
		count, bytes = count+t.Count, bytes+t.Bytes
	}
	return count, bytes
}

// byLag returns the ranks, the one that is the furthest behind first.
func (j *Job) byLag() []Rank {
	worst := func(r Rank) time.Duration {
		d := time.Duration(0)
		if r.State == "running" && r.Missing != "" || r.State == "lost" {
			d = 1 << 62
		}
		for _, m := range r.Groups {
			if m.Behind > 0 && m.Lag >= minLag {
				d = max(d, m.Lag)
			}
		}
		return d
	}
	list := slices.Clone(j.Ranks)
	slices.SortStableFunc(list, func(a, b Rank) int { return int(min(max(worst(b)-worst(a), -1), 1)) })
	return list
}

const (
	// fresh is the age up to which a state is given to several readers. Many readers then cost
	// the processes as much as one.
	fresh = 400 * time.Millisecond
	// maxInterval is the longest interval of a rate.
	maxInterval = 30 * time.Second
	// askTime limits a question to the coordinator.
	askTime = 5 * time.Second
)

// A Source answers with the state of a job.
type Source struct {
	job   string
	hosts int // that the job needs to start
	since time.Time

	mu   sync.Mutex
	ask  func(context.Context) (*job.Status, error) // nil until the hosts have joined
	host string
	own  func() []string // identifiers of the launchers, or nil
	last *Job
	late tallies
}

// NewSource returns a Source of a job, whose name may be empty, that waits for
// its hosts.
func NewSource(job string, hosts int) *Source {
	return &Source{job: job, hosts: hosts, since: time.Now()}
}

// Join connects the Source to the agent, once all hosts have joined.
func (s *Source) Join(a *job.Agent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ask, s.host, s.own = a.Status, a.Host(), a.Launchers
}

// Host returns the name of this host in the job.
func (s *Source) Host() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.host
}

// joining returns the state of a job whose hosts have not joined.
func (s *Source) joining() *Job {
	j := &Job{Job: s.job, Time: time.Now(), Hosts: []string{}, Ranks: []Rank{}, Groups: []Group{}}
	if j.Job == "" {
		j.Job = "without a name"
	}
	j.Findings = []string{fmt.Sprintf("the job waits since %s for its hosts: it needs %d to start", seconds(time.Since(s.since)), s.hosts)}
	return j
}

// Job returns the state of the job, with rates since the state that was read
// before.
func (s *Source) Job(ctx context.Context) (*Job, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && time.Since(s.last.Time) < fresh {
		return s.last, nil
	}
	if s.ask == nil {
		return s.joining(), nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	answer, err := s.ask(ctx)
	if err != nil {
		return nil, err
	}
	j := newJob(answer, time.Now())
	if s.own != nil {
		j.Launchers = s.own()
	}
	if s.last != nil && j.Time.Sub(s.last.Time) <= maxInterval {
		j.setRates(s.last)
	}
	s.late.add(j)
	s.last = j
	return j, nil
}

// Print writes the state as a table, the ranks that are behind first. It writes at most lines
// lines; 0 means all of them.
func (j *Job) Print(out io.Writer, lines int) error {
	var b strings.Builder
	fmt.Fprintf(&b, "job %s  epoch %d  restarts %d  %s on %s  %s\n", j.Job, j.Epoch, j.Restarts,
		count(len(j.Ranks), "rank"), count(len(j.Hosts), "host"), j.Time.Format(time.TimeOnly))
	for _, f := range j.Findings {
		fmt.Fprintln(&b, f)
	}
	if len(j.Findings) == 0 {
		text := "no rank is behind"
		j.members(func(_ *Rank, m *Member) {
			if m.Behind > 0 {
				text = fmt.Sprintf("no rank is behind for %s or more", seconds(minLag))
			}
		})
		fmt.Fprintln(&b, text)
	}
	fmt.Fprintln(&b)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "RANK\tHOST\tPID\tSTATE\tGROUP\tISSUED\tDONE\tBEHIND\tIN FLIGHT\tAGE\tRATE\tDEVICE\tMEMORY\tBUSY\tPOWER")
	for _, r := range j.byLag() {
		r.print(w, j.Interval > 0)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	text := strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
	if lines > 1 && len(text) > lines {
		text = append(text[:lines-1], fmt.Sprintf("and %d more lines; chorus status without --watch shows them", len(text)-lines+1))
	}
	for i := range text {
		text[i] = strings.TrimRight(text[i], " ")
	}
	_, err := fmt.Fprintln(out, strings.Join(text, "\n"))
	return err
}

// print writes one line for each group of the rank, and for each device.
func (r *Rank) print(w io.Writer, rates bool) {
	state := r.State
	if state == "running" && r.Missing != "" {
		state = "no report"
	}
	pid := "-"
	if r.PID > 0 {
		pid = fmt.Sprint(r.PID)
	}
	fmt.Fprintf(w, "%d\t%s\t%s\t%s", r.Rank, r.Host, pid, state)
	for i := range max(len(r.Groups), len(r.Devices), 1) {
		if i > 0 {
			fmt.Fprint(w, "\t\t\t")
		}
		if i < len(r.Groups) {
			r.Groups[i].print(w, rates)
		} else {
			fmt.Fprint(w, "\t-\t-\t-\t-\t-\t-\t-")
		}
		if i < len(r.Devices) {
			d := &r.Devices[i]
			fmt.Fprintf(w, "\t%s\t%s of %s\t%s\t%s", d.Name, size(float64(d.Allocated)), size(float64(d.Total)), optional(d.Utilization, 1, "%"), optional(d.PowerDraw, 1000, " W"))
		} else {
			fmt.Fprint(w, "\t-\t-\t-\t-")
		}
		fmt.Fprintln(w)
	}
}

func (m *Member) print(w io.Writer, rates bool) {
	behind, op, age, speed := "-", "-", "-", "-"
	if m.Behind > 0 {
		behind = fmt.Sprintf("%d for %s", m.Behind, seconds(m.Lag))
	}
	if m.Oldest != nil {
		op, age = m.Oldest.Kind, seconds(time.Duration(m.Oldest.AgeNanos))
	}
	if m.State != "" {
		op = m.State
	}
	if rates {
		speed = size(m.BytesPerSecond) + "/s"
	}
	fmt.Fprintf(w, "\t%s\t%d\t%d\t%s\t%s\t%s\t%s", m.label(), m.Issued, m.Completed, behind, op, age, speed)
}

// optional returns the value of a sensor, divided by a unit.
func optional(v *int, unit int, suffix string) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v/unit) + suffix
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// size returns a number of bytes with three digits.
func size(bytes float64) string {
	for _, unit := range []string{"B", "KiB", "MiB", "GiB"} {
		if bytes < 1000 {
			return fmt.Sprintf("%.3g %s", bytes, unit)
		}
		bytes /= 1024
	}
	return fmt.Sprintf("%.3g TiB", bytes)
}

// PrintMemory writes what uses the memory of each rank's devices, the largest use first.
func (j *Job) PrintMemory(out io.Writer) error {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "RANK\tHOST\tDEVICE\tBYTES\tSHARE\tUSE")
	for i := range j.Ranks {
		r := &j.Ranks[i]
		if len(r.Devices) == 0 {
			why := "this rank has no device yet"
			if r.Missing != "" {
				why = r.Missing
			}
			fmt.Fprintf(w, "%d\t%s\t-\t-\t-\t%s\n", r.Rank, r.Host, why)
		}
		for k := range r.Devices {
			r.printMemory(w, &r.Devices[k])
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// printMemory writes one line for each use of a device, and one for the free memory.
func (r *Rank) printMemory(w io.Writer, d *status.Device) {
	line := func(bytes uint64, use string) {
		share := "-"
		if d.Total > 0 {
			share = fmt.Sprintf("%.1f%%", 100*float64(bytes)/float64(d.Total))
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\n", r.Rank, r.Host, d.Name, size(float64(bytes)), share, use)
	}
	if len(d.Uses) == 0 && d.Total > d.Free {
		line(d.Total-d.Free, "in use; the process did not tell for what")
	}
	for _, u := range d.Uses {
		line(u.Bytes, u.Owner)
	}
	line(d.Free, "free")
}

// tallies count who arrives last in each group of a job, over all states that were read.
type tallies struct {
	epoch, restarts int
	groups          map[string]*groupTally
}

type groupTally struct {
	last  uint64 // the last collective that was compared
	ranks map[int]*analyze.Tally
}

// add compares the arrivals of a state that is newer than all before it, and sets the counts of its ranks.
func (t *tallies) add(j *Job) {
	if t.groups == nil || t.epoch != j.Epoch || t.restarts != j.Restarts {
		*t = tallies{j.Epoch, j.Restarts, map[string]*groupTally{}}
	}
	all := map[string][]*Member{}
	j.members(func(_ *Rank, m *Member) { all[m.ID] = append(all[m.ID], m) })
	for id := range t.groups {
		if all[id] == nil {
			delete(t.groups, id) // it has ended
		}
	}
	for id, list := range all {
		g := t.groups[id]
		if g == nil {
			g = &groupTally{ranks: map[int]*analyze.Tally{}}
			t.groups[id] = g
		}
		g.add(list)
	}
	j.findStragglers()
}

// add compares the members of a group, if all ranks have answered.
func (g *groupTally) add(list []*Member) {
	for _, m := range list {
		if g.ranks[m.Rank] == nil {
			g.ranks[m.Rank] = new(analyze.Tally)
		}
	}
	if len(list) == list[0].Size {
		var counts []analyze.Tally
		ranks := make([]analyze.Arrivals, len(list))
		for i, m := range list {
			ranks[i].Clock = m.Clock
			for _, a := range m.Group.Arrivals {
				ranks[i].List = append(ranks[i].List, analyze.Arrival{Sequence: uint64(a[0]), Called: a[1], Took: a[2]})
			}
		}
		counts, g.last = analyze.CompareArrivals(ranks, g.last)
		for i, m := range list {
			g.ranks[m.Rank].Add(counts[i])
		}
	}
	for _, m := range list {
		m.Tally, m.Group.Arrivals, m.Clock = *g.ranks[m.Rank], nil, ""
	}
}

// findStragglers names the ranks that the others wait for again and again.
func (j *Job) findStragglers() {
	j.members(func(r *Rank, m *Member) {
		if t := m.Tally; t.Straggles() {
			j.Findings = append(j.Findings, fmt.Sprintf("rank %d (host %s, process %d) arrives last in %s: in %d of %d collectives that were compared, %s after the others on average (%s)",
				r.Rank, r.Host, r.PID, m.title(), t.Last, t.Compared, milliseconds(t.Mean()), t.Evidence()))
		}
	})
}

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1e3) }
