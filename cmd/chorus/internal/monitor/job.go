package monitor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/internal/status"
)

// A Job is the state of a job at one moment.
type Job struct {
	Job      string    `json:"job"`
	Time     time.Time `json:"time"`
	Epoch    int       `json:"epoch"`
	Restarts int       `json:"restarts"`
	Hosts    []string  `json:"hosts"`
	Ranks    []Rank    `json:"ranks"`
	Groups   []Group   `json:"groups"`
	Findings []string  `json:"findings"` // such as a rank that is behind, and since when
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
func newJob(s *cluster.Status, now time.Time) *Job {
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

// lag returns the time since another rank issued the collective that m issues next. Usually that
// rank waits for it. Otherwise the time since m issued its last operation is an estimate.
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
		if !found[g.ID] && g.Answered == g.Size {
			j.findSlow(g)
		}
	}
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
