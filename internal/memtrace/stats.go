package memtrace

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
)

// A Sequence is a random sequence of calls of torch's allocator, with the
// statistics after each call.
type Sequence struct {
	Seed    int64
	MaxLog2 int // log2 of the largest size
	Streams int
	Steps   []Step
}

// A Step is one call. Stats contains the recorded values: current numbers except
// oversize, the peaks of allocated and reserved bytes of all pools, and the
// retries.
type Step struct {
	Op     Op
	Block  int  // number of the block of Alloc or Free, never reused
	Bytes  int  // size, for Alloc
	Stream int  // number of the stream, from 0, for Alloc
	End    bool // end of the sequence: remaining blocks are freed
	Stats  memory.Stats
}

func (s *Sequence) name() string { return fmt.Sprintf("seed %d", s.Seed) }

// columns are the columns of the files for ReadStats.
const columns = "allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes allocation segment " +
	"active inactive_split, each for all/small_pool/large_pool, then num_alloc_retries, allocated peak, reserved peak"

const statColumns = 9*3 + 3

// UnmarshalJSON decodes ["alloc", block, bytes, stream, statistics…], ["free",
// block, …], ["empty_cache", …] or ["end", …].
func (s *Step) UnmarshalJSON(text []byte) error {
	var fields []json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil || len(fields) == 0 {
		return fmt.Errorf("a step is %.80s: want a list", text)
	}
	var name string
	if err := json.Unmarshal(fields[0], &name); err != nil {
		return fmt.Errorf("a step starts with %.80s: want the name of a call", fields[0])
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

// ReadStats reads a file of sequences, which may be compressed with gzip.
func ReadStats(r io.Reader) ([]Sequence, error) {
	r, err := plain(r, mostBytes)
	if err != nil {
		return nil, err
	}
	var list []Sequence
	err = parseSequences(safe.NewJSON(r, mostValueBytes), &sequenceFuncs{
		step: func(q *Sequence, _ int, s *Step) error {
			q.Steps = append(q.Steps, *s)
			return nil
		},
		end: func(q *Sequence) error {
			list = append(list, *q)
			return nil
		},
	})
	return list, err
}

// sequenceFuncs are called while a file of sequences is read. A Sequence has the values that
// precede its steps.
type sequenceFuncs struct {
	step func(q *Sequence, i int, s *Step) error
	end  func(q *Sequence) error
}

func parseSequences(f *safe.JSONReader, fn *sequenceFuncs) error {
	found := ""
	err := f.Object(func(key string) error {
		switch key {
		case "columns":
			return f.Value(key, &found)
		case "sequences":
			return f.Each(key, func(int) error { return parseSequence(f, fn) })
		}
		return f.Skip()
	})
	if err == nil && found != columns {
		return fmt.Errorf("the columns are %q: want %q", found, columns)
	}
	return err
}

func parseSequence(f *safe.JSONReader, fn *sequenceFuncs) error {
	q := &Sequence{}
	err := f.Object(func(key string) error {
		switch key {
		case "seed":
			return f.Value(key, &q.Seed)
		case "max_log2":
			return f.Value(key, &q.MaxLog2)
		case "streams":
			return f.Value(key, &q.Streams)
		case "ops":
			return f.List(key, func(i int, text []byte) error {
				var s Step
				if err := s.UnmarshalJSON(text); err != nil {
					return &EventError{q.name(), i, err.Error()}
				}
				return fn.step(q, i, &s)
			})
		}
		return f.Skip()
	})
	if err != nil {
		return err
	}
	return fn.end(q)
}

func (rec *Recording) readSequences(f *safe.JSONReader) error {
	var traces []*Trace
	var b *builder
	var recorded Peaks
	begin := func() {
		b, recorded = newBuilder("", &rec.spool), Peaks{}
		b.place = "block %d"
	}
	begin()
	err := parseSequences(f, &sequenceFuncs{
		step: func(q *Sequence, i int, s *Step) error {
			b.name = q.name()
			recorded.Allocated = max(recorded.Allocated, s.Stats.AllocatedBytes.All.Peak)
			recorded.Reserved = max(recorded.Reserved, s.Stats.ReservedBytes.All.Peak)
			return b.step(i, s)
		},
		end: func(q *Sequence) error {
			b.name = q.name()
			if b.events.count == 0 { // fail, so that the indices of the others do not change
				return fmt.Errorf("%s: %w", b.name, errNothing)
			}
			if len(traces) == mostTraces {
				return fmt.Errorf("the file has more than %d sequences", mostTraces)
			}
			traces = append(traces, b.finish(recorded))
			begin()
			return nil
		},
	})
	if err != nil {
		return err
	}
	return rec.keep(traces...)
}

// step adds step i of a sequence.
func (b *builder) step(i int, s *Step) error {
	if p := s.Stats; p.AllocatedBytes.All.Peak < 0 || p.ReservedBytes.All.Peak < 0 {
		return b.fail(i, "the recorded peaks are %d bytes allocated and %d reserved: want 0 or more", p.AllocatedBytes.All.Peak, p.ReservedBytes.All.Peak)
	}
	switch {
	case s.End:
		return nil
	case s.Op == EmptyCache:
		return b.write(Event{Op: EmptyCache, Number: i})
	case s.Op == Free:
		return b.free(i, true, uint64(s.Block), 0, 0)
	case s.Bytes < 0 || s.Stream < 0:
		return b.fail(i, "allocates %d bytes on stream %d", s.Bytes, s.Stream)
	}
	return b.alloc(i, uint64(s.Block), uint64(s.Bytes), uint64(s.Stream))
}
