package analyze

import (
	"cmp"
	"fmt"
	"math"
	"strings"
)

// A rawConfig is an entry of "pg_config". PyTorch's has no rank and no size.
type rawConfig struct {
	Name  string `json:"name"`
	Desc  string `json:"desc"`
	Ranks string `json:"ranks"`
	Rank  *int   `json:"rank"`
	Size  int    `json:"size"`
}

// A rawSource is the object that only dumps of Chorus have; see internal/collective.
type rawSource struct {
	Host  string `json:"host"`
	PID   int    `json:"pid"`
	Clock struct {
		Wall int64 `json:"wall_ns"`
	} `json:"clock"`
	Groups []rawGroup `json:"groups"`
}

type rawGroup struct {
	Group      int64  `json:"pg_id"`
	WorldRank  *int   `json:"world_rank"`
	WorldRanks []int  `json:"world_ranks"`
	WorldSize  int    `json:"world_size"`
	Device     string `json:"device"`
	UUID       string `json:"uuid"`
	Capacity   int    `json:"capacity"`
	Shortened  bool   `json:"shortened"`
	End        string `json:"end"`
	EndFollows bool   `json:"end_follows"`
	Launched   uint64 `json:"launched"`
	Launches   bool   `json:"launches"`
	Issued     uint64 `json:"issued"`
	Accepted   uint64 `json:"accepted"`
}

type rawEntry struct {
	Record      uint64    `json:"record_id"`
	Group       int64     `json:"pg_id"`
	GroupName   []string  `json:"process_group"`
	Collective  uint64    `json:"collective_seq_id"`
	Transfers   uint64    `json:"p2p_seq_id"`
	Name        string    `json:"profiling_name"`
	Created     int64     `json:"time_created_ns"`
	InputSizes  [][]int64 `json:"input_sizes"`
	InputTypes  []string  `json:"input_dtypes"`
	OutputSizes [][]int64 `json:"output_sizes"`
	OutputTypes []string  `json:"output_dtypes"`
	State       string    `json:"state"`
	Retired     bool      `json:"retired"` // of PyTorch: the watchdog has seen its end, also of backends without states
	Begun       *int64    `json:"time_discovered_started_ns"`
	Queued      bool      `json:"queued"`
	Batch       uint64    `json:"batch_id"`
	Transfer    bool      `json:"is_p2p"`
	Captured    bool      `json:"captured"`
	Uneven      bool      `json:"uneven"`
	Kind        string    `json:"kind"`    // of Chorus: instead of the name
	Format      string    `json:"format"`  // of Chorus: of the 8-bit numbers
	Options     string    `json:"options"` // of Chorus
	Reduction   string    `json:"reduction"`
	Root        *int      `json:"root"`
	Frames      []struct {
		Name string `json:"name"`
		File string `json:"filename"`
		Line int    `json:"line"`
	} `json:"frames"`
}

// An entry is a recorded operation.
type entry struct {
	record, seq uint64
	transfers   uint64 // of PyTorch: the number of the last call with sends or receives
	op          string // such as "all_reduce"
	dtype       string
	format      string // of the 8-bit numbers of a quantized all-reduce, or of an all-reduce and norm; otherwise ""
	options     string // what else must be the same on all ranks
	in, out     int64  // elements
	reduction   string
	root        int // -1 if there is none
	peer        int // the other rank of a send or receive; -1 for a collective
	self        int // the rank that issued a send or receive
	sends       bool
	uneven      bool   // the ranks may have different sizes
	batch       uint64 // record of the first operation of its batch; 0 if not known
	started     bool   // its stream is known to have reached it
	queued      bool   // its stream is known not to have reached it
	timed       bool   // when it started is known
	completed   bool
	captured    bool
	inCall      bool // the call that issues it has not returned
	created     int64
	frame       string

	group     int64 // the key in the dump's configuration,
	groupName string
	groupDesc string
}

// texts stores each text of a dump once.
type texts map[string]string

func (t texts) of(s string) string {
	if len(s) > mostText {
		s = s[:mostText] + "..."
	}
	if known, ok := t[s]; ok {
		return known
	}
	s = strings.Clone(s)
	t[s] = s
	return s
}

// entry converts a raw entry.
func (r *rawEntry) entry(t texts) (entry, error) {
	e := entry{
		record: r.Record, seq: r.Collective, transfers: r.Transfers, root: -1, peer: -1, reduction: t.of(r.Reduction), format: t.of(r.Format), options: t.of(r.Options), created: r.Created, captured: r.Captured,
		uneven: r.Uneven, completed: r.State == "completed" || r.Retired, timed: r.Begun != nil, started: r.State != "scheduled", queued: r.Queued, batch: r.Batch, group: r.Group,
		in: elements(r.InputSizes), out: elements(r.OutputSizes), dtype: t.of(first(r.InputTypes, r.OutputTypes)),
	}
	if len(r.GroupName) > 0 {
		e.groupName = t.of(r.GroupName[0])
	}
	if len(r.GroupName) > 1 {
		e.groupDesc = t.of(r.GroupName[1])
	}
	if r.Root != nil {
		e.root = *r.Root
	}
	if e.in < 0 || e.out < 0 {
		return e, fmt.Errorf("record %d: the sizes %.80v and %.80v have more than %d elements, or a negative dimension", r.Record, r.InputSizes, r.OutputSizes, math.MaxInt64)
	}
	e.frame = t.of(r.caller())
	_, name, found := strings.Cut(r.Name, ":") // after the backend, such as nccl or gloo
	if !found {
		name = r.Name
	}
	if r.Transfer {
		if err := e.setPeer(name); err != nil {
			return e, err
		}
		name, _, _ = strings.Cut(name, " ")
	}
	e.op = t.of(cmp.Or(r.Kind, name))
	return e, nil
}

// caller returns the innermost function outside of Chorus's packages, of PyTorch and of Python's library for it: the line
// of the program that issued the operation.
func (r *rawEntry) caller() string {
	for _, f := range r.Frames {
		if !strings.HasPrefix(f.Name, "github.com/gochorus/chorus/") && !strings.Contains(f.File, "/torch/") && !strings.HasSuffix(f.File, "/contextlib.py") {
			return fmt.Sprintf("%s (%s:%d)", f.Name, f.File, f.Line)
		}
	}
	return ""
}

// setPeer reads "send 0->1" or "recv 1<-0".
func (e *entry) setPeer(name string) error {
	var self, peer int
	if _, err := fmt.Sscanf(name, "send %d->%d", &self, &peer); err == nil {
		e.sends, e.self, e.peer = true, self, peer
		return nil
	}
	if _, err := fmt.Sscanf(name, "recv %d<-%d", &self, &peer); err == nil {
		e.self, e.peer = self, peer
		return nil
	}
	return fmt.Errorf("record %d: the transfer is called %.80q: want \"send A->B\" or \"recv A<-B\"", e.record, name)
}

func first(lists ...[]string) string {
	for _, l := range lists {
		if len(l) > 0 {
			return l[0]
		}
	}
	return ""
}

// elements returns the number of elements, or -1 if it is negative or does not fit.
func elements(sizes [][]int64) (sum int64) {
	for _, dims := range sizes {
		n := int64(1)
		for _, d := range dims {
			if d < 0 || n > 0 && d > math.MaxInt64/n {
				return -1
			}
			n *= d
		}
		if sum > math.MaxInt64-n {
			return -1
		}
		sum += n
	}
	return sum
}

// count returns the elements of the operation for people.
func (e *entry) count() int64 {
	if e.peer >= 0 {
		return cmp.Or(e.in, e.out)
	}
	return max(e.in, e.out)
}

// call returns a text such as "all_reduce(1024 x Float, sum)".
func (e *entry) call() string {
	text := fmt.Sprintf("%s(%d x %s", e.op, e.count(), cmp.Or(e.dtype, "?"))
	if e.format != "" {
		text += " in " + e.format
	}
	if e.reduction != "" {
		text += ", " + e.reduction
	}
	if e.options != "" {
		text += ", " + e.options
	}
	if e.peer < 0 && e.root >= 0 {
		text += fmt.Sprintf(", root %d", e.root)
	}
	return text + ")"
}

// state returns the observed progress.
func (e *entry) state() string {
	switch {
	case e.completed:
		return "completed"
	case e.captured:
		return "captured into a graph"
	}
	switch {
	case e.inCall:
		return "in a call of NCCL that has not returned"
	case e.queued:
		return "not reached by its stream"
	case e.started:
		return "started, and not known to have completed"
	}
	return "not known to have completed"
}
