package analyze

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/gochorus/chorus/internal/timeline"
)

// Thread numbers of a rank in the merged file.
const (
	firstHost   = 1 // calls of the host
	mostHosts   = 99
	firstStream = 100 // streams
	firstBranch = 600 // branches of graphs; later if there are more streams
)

// An event is an event of Chrome's trace format, which Perfetto reads.
type event struct {
	Phase    string         `json:"ph"`
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	PID      int            `json:"pid"`
	TID      int            `json:"tid"`
	Time     micros         `json:"ts"`
	Duration *micros        `json:"dur,omitempty"`
	ID       string         `json:"id,omitempty"`
	Bind     string         `json:"bp,omitempty"` // "e": a flow ends in the slice around it
	Scope    string         `json:"s,omitempty"`  // of an instant event
	Args     map[string]any `json:"args,omitempty"`
}

// micros are nanoseconds that are written as microseconds, exactly.
type micros int64

func (m micros) MarshalJSON() ([]byte, error) {
	sign := ""
	if m < 0 {
		sign, m = "-", -m
	}
	return fmt.Appendf(nil, "%s%d.%03d", sign, m/1000, m%1000), nil
}

// A writer writes events.
type writer struct {
	w   *bufio.Writer
	n   int
	err error
	tid map[*track]int
}

// WriteTrace writes the job in Chrome's trace format.
func (j *Timeline) WriteTrace(to io.Writer) error {
	w := &writer{w: bufio.NewWriter(to), tid: map[*track]int{}}
	info, err := json.Marshal(map[string]any{
		"displayTimeUnit": "ns", "distributedInfo": map[string]any{"backend": "nccl", "rank": 0, "world_size": j.worldSize()},
		"otherData": map[string]any{"dropped_records": j.Dropped, "incomplete_files": j.Cut},
	})
	if err != nil {
		return err
	}
	w.text(string(info[:len(info)-1]) + `,"traceEvents":[`)
	for _, r := range j.Ranks {
		w.rank(r)
	}
	for _, f := range j.flows() {
		w.flow(f)
	}
	w.text("\n]}\n")
	return cmp.Or(w.err, w.w.Flush())
}

func (j *Timeline) worldSize() int {
	n := len(j.Ranks)
	for _, r := range j.Ranks {
		n = max(n, r.world)
	}
	return n
}

func (w *writer) text(s string) {
	if _, err := w.w.WriteString(s); err != nil && w.err == nil {
		w.err = err
	}
}

func (w *writer) event(e event) {
	b, err := json.Marshal(e)
	if err != nil {
		w.err = cmp.Or(w.err, err)
		return
	}
	if w.n++; w.n > 1 {
		w.text(",")
	}
	w.text("\n" + string(b))
}

// meta writes a name or a position of a process or a thread.
func (w *writer) meta(pid, tid int, name, key string, value any) {
	w.event(event{Phase: "M", Name: name, PID: pid, TID: tid, Args: map[string]any{key: value}})
}

func (w *writer) rank(r *TimelineRank) {
	name := fmt.Sprintf("rank %d · %s", r.Number, r.Host)
	if !r.known {
		name = fmt.Sprintf("process %d · %s", r.Number, r.Host)
	}
	if r.Device != "" {
		name += " · " + r.Device
	}
	w.meta(r.Number, 0, "process_name", "name", name)
	w.meta(r.Number, 0, "process_sort_index", "sort_index", r.Number)
	w.host(r)
	tracks := slices.SortedFunc(maps.Values(r.streams), func(a, b *track) int { return cmp.Compare(a.slices[0].Order, b.slices[0].Order) })
	next := map[bool]int{false: firstStream, true: max(firstBranch, firstStream+len(tracks))}
	for i, t := range tracks {
		tid := next[t.branch]
		next[t.branch]++
		w.tid[t] = tid
		name := fmt.Sprintf("stream %#x", t.handle)
		if t.branch {
			name = fmt.Sprintf("graph on stream %#x", t.handle)
		}
		w.thread(r, tid, name, firstStream+i)
		for _, s := range t.slices {
			w.slice(s, tid)
		}
	}
	w.ranges(r)
	w.memory(r)
}

func (w *writer) thread(r *TimelineRank, tid int, name string, position int) {
	w.meta(r.Number, tid, "thread_name", "name", name)
	w.meta(r.Number, tid, "thread_sort_index", "sort_index", position)
}

// host writes the calls that kept the host. Because goroutines change their
// threads, the first row that is free shows a call.
func (w *writer) host(r *TimelineRank) {
	var free []int64 // when each row is free
	for _, x := range r.host {
		row := slices.IndexFunc(free, func(at int64) bool { return at <= x.Begin })
		if row < 0 {
			if row = len(free); row == mostHosts {
				continue
			}
			free = append(free, 0)
			w.thread(r, firstHost+row, fmt.Sprintf("host %d", row+1), firstHost+row)
		}
		x.End = max(x.Begin, x.End)
		free[row] = x.End
		w.complete(r, firstHost+row, x, bytesOf(x))
	}
}

// complete writes a slice.
func (w *writer) complete(r *TimelineRank, tid int, x timeline.Record, args map[string]any) {
	d := micros(x.End - x.Begin)
	w.event(event{Phase: "X", Name: x.Name, Category: x.Kind, PID: r.Number, TID: tid, Time: micros(x.Begin), Duration: &d, Args: args})
}

func bytesOf(x timeline.Record) map[string]any {
	if x.Bytes == 0 {
		return nil
	}
	args := map[string]any{"bytes": x.Bytes}
	if d := x.End - x.Begin; d > 0 {
		args["GB/s"] = float64(x.Bytes) / float64(d)
	}
	return args
}

func (w *writer) slice(s *slice, tid int) {
	x, args := s.Record, bytesOf(s.Record)
	if len(x.Ops) > 0 {
		x.Name = s.title()
		o := x.Ops[0]
		if args == nil {
			args = map[string]any{}
		}
		args["Process Group Name"] = cmp.Or(s.rank.groups[o.Group], o.Group)
		args["group"], args["seq"], args["rank in group"], args["operations"] = o.Group, o.Sequence, o.Rank, len(x.Ops)
		if o.Peer >= 0 {
			args["peer or root"] = o.Peer
		}
	}
	w.complete(s.rank, tid, x, args)
}

// title returns the name of a collective, or of a batch.
func (s *slice) title() string {
	name := s.Ops[0].Name
	if len(s.Ops) == 1 {
		return name
	}
	for _, o := range s.Ops {
		if o.Name != name {
			return fmt.Sprintf("nccl batch of %d", len(s.Ops))
		}
	}
	return fmt.Sprintf("%s × %d", name, len(s.Ops))
}

// ranges writes ranges as asynchronous events, because they may overlap.
func (w *writer) ranges(r *TimelineRank) {
	for i, x := range r.ranges {
		e := event{Phase: "b", Name: x.Name, Category: "range", PID: r.Number, TID: 0, Time: micros(x.Begin), ID: fmt.Sprintf("%d/range/%d", r.Number, i)}
		if x.Kind == timeline.Instant {
			e.Phase, e.ID, e.Scope = "i", "", "p"
			w.event(e)
			continue
		}
		w.event(e)
		e.Phase, e.Time = "e", micros(x.End)
		w.event(e)
	}
}

// memory writes the memory that was allocated and reserved since the start of the recording.
func (w *writer) memory(r *TimelineRank) {
	var allocated, reserved int64
	for _, x := range r.memory {
		n := int64(x.Bytes)
		switch x.Name {
		case "alloc":
			allocated += n
		case "free_completed":
			allocated -= n
		case "segment_alloc", "segment_map":
			reserved += n
		case "segment_free", "segment_unmap":
			reserved -= n
		case "oom":
			w.event(event{Phase: "i", Name: "out of memory", Category: x.Kind, PID: r.Number, Time: micros(x.Begin), Scope: "p"})
			continue
		default:
			continue
		}
		w.event(event{Phase: "C", Name: "bytes since the start", PID: r.Number, Time: micros(x.Begin),
			Args: map[string]any{"allocated": allocated, "reserved": reserved}})
	}
}

// flow writes an arrow between two slices.
func (w *writer) flow(f flow) {
	for i, s := range []*slice{f.from, f.to} {
		e := event{Phase: "s", Name: f.name, Category: "flow", ID: f.id, PID: s.rank.Number, TID: w.tid[s.on], Time: micros(f.leaves)}
		if i == 1 {
			e.Phase, e.Bind, e.Time = "f", "e", micros(f.arrives)
		}
		w.event(e)
	}
}
