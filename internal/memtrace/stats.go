package memtrace

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/gochorus/chorus/memory"
)

// A Sequence is a random sequence of calls of torch's allocator, with its
// statistics after each.
type Sequence struct {
	Seed    int64
	MaxLog2 int `json:"max_log2"` // of the sizes
	Streams int
	Steps   []Step `json:"ops"`
}

// A Step is one call. Of its Stats, what was recorded is set: the current numbers
// but for the oversize ones, the peaks of allocated and reserved bytes of all
// pools, and the retries.
type Step struct {
	Op     Op
	Block  int  // Alloc and Free name it, by a number that is used once
	Bytes  int  // of Alloc
	Stream int  // of Alloc, from 0 on
	End    bool // of the sequence: what was left is freed
	Stats  memory.Stats
}

// UnmarshalJSON reads an object, and says which step is wrong.
func (s *Sequence) UnmarshalJSON(text []byte) error {
	type plain Sequence
	f := struct {
		*plain
		Steps []json.RawMessage `json:"ops"`
	}{plain: (*plain)(s)}
	if err := parse(text, &f); err != nil {
		return err
	}
	s.Steps = make([]Step, len(f.Steps))
	for i, step := range f.Steps {
		if err := s.Steps[i].UnmarshalJSON(step); err != nil {
			return &EventError{s.name(), i, err.Error()}
		}
	}
	return nil
}

func (s *Sequence) name() string { return fmt.Sprintf("seed %d", s.Seed) }

// columns are those of the files that ReadStats reads.
const columns = "allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes allocation segment " +
	"active inactive_split, each for all/small_pool/large_pool, then num_alloc_retries, allocated peak, reserved peak"

const statColumns = 9*3 + 3

// UnmarshalJSON reads ["alloc", block, bytes, stream, statistics…],
// ["free", block, …], ["empty_cache", …] or ["end", …].
func (s *Step) UnmarshalJSON(text []byte) error {
	var fields []json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil || len(fields) == 0 {
		return fmt.Errorf("a step is %.80s: want a list", text)
	}
	var name string
	if err := json.Unmarshal(fields[0], &name); err != nil {
		return fmt.Errorf("a step begins with %.80s: want the name of a call", fields[0])
	}
	var arguments []*int
	switch name {
	case "alloc":
		s.Op, arguments = Alloc, []*int{&s.Block, &s.Bytes, &s.Stream}
	case "free":
		s.Op, arguments = Free, []*int{&s.Block}
	case "empty_cache":
		s.Op = EmptyCache
	case "end":
		s.End = true
	default:
		return fmt.Errorf("unknown action %q", name)
	}
	fields = fields[1:]
	if want := len(arguments) + statColumns; len(fields) != want {
		return fmt.Errorf("%s has %d numbers: want %d", name, len(fields), want)
	}
	for i, to := range arguments {
		if err := json.Unmarshal(fields[i], to); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return s.stats(fields[len(arguments):])
}

func (s *Step) stats(fields []json.RawMessage) (err error) {
	next := func(to *int64) {
		if err == nil {
			err = json.Unmarshal(fields[0], to)
		}
		fields = fields[1:]
	}
	t := &s.Stats
	for _, p := range []*memory.PoolStats{&t.AllocatedBytes, &t.ReservedBytes, &t.ActiveBytes, &t.InactiveSplitBytes,
		&t.RequestedBytes, &t.Allocation, &t.Segment, &t.Active, &t.InactiveSplit} {
		next(&p.All.Current)
		next(&p.Small.Current)
		next(&p.Large.Current)
	}
	next(&t.AllocRetries)
	next(&t.AllocatedBytes.All.Peak)
	next(&t.ReservedBytes.All.Peak)
	return err
}

// ReadStats reads a file of sequences, which may be compressed by gzip.
func ReadStats(r io.Reader) ([]Sequence, error) {
	file, err := content(r)
	if err != nil {
		return nil, err
	}
	return sequences(file)
}

func sequences(file []byte) ([]Sequence, error) {
	var f struct {
		Columns   string
		Sequences []Sequence
	}
	if err := parse(file, &f); err != nil {
		return nil, err
	}
	if f.Columns != columns {
		return nil, fmt.Errorf("the columns are %q: want %q", f.Columns, columns)
	}
	return f.Sequences, nil
}

// Trace returns the calls of the sequence.
func (s *Sequence) Trace() (*Trace, error) {
	b := newBuilder(s.name())
	b.place = "block %d"
	var recorded Peaks
	for i, step := range s.Steps {
		var err error
		switch {
		case step.End:
		case step.Op == EmptyCache:
			b.trace.Events = append(b.trace.Events, Event{Op: EmptyCache, Number: i})
		case step.Op == Free:
			err = b.free(i, true, uint64(step.Block), 0, 0)
		case step.Bytes < 0 || step.Stream < 0:
			err = b.fail(i, "allocates %d bytes on stream %d", step.Bytes, step.Stream)
		default:
			err = b.alloc(i, uint64(step.Block), uint64(step.Bytes), uint64(step.Stream))
		}
		if err != nil {
			return nil, err
		}
		if p := step.Stats; p.AllocatedBytes.All.Peak < 0 || p.ReservedBytes.All.Peak < 0 {
			return nil, b.fail(i, "the recorded peaks are %d bytes allocated and %d reserved: want 0 or more", p.AllocatedBytes.All.Peak, p.ReservedBytes.All.Peak)
		}
		recorded.Allocated = max(recorded.Allocated, step.Stats.AllocatedBytes.All.Peak)
		recorded.Reserved = max(recorded.Reserved, step.Stats.ReservedBytes.All.Peak)
	}
	return b.finish(recorded), nil
}

func readSequences(file []byte) ([]*Trace, error) {
	list, err := sequences(file)
	if err != nil {
		return nil, err
	}
	var traces []*Trace
	for i := range list {
		t, err := list[i].Trace()
		if err != nil {
			return nil, err
		}
		if len(t.Events) == 0 { // and the others keep their numbers
			return nil, fmt.Errorf("%s: %w", t.Name, errNothing)
		}
		traces = append(traces, t)
	}
	return withCalls(traces)
}
