package memory

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"strconv"

	"github.com/gochorus/chorus/internal/pickle"
)

// WritePickle writes the snapshot for Python's pickle.load and for
// pytorch.org/memory_viz (torch.cuda.memory._dump_snapshot). Frames that several
// entries share by sharing the slice are written once.
func (s *Snapshot) WritePickle(w io.Writer) error {
	if err := s.check(); err != nil {
		return err
	}
	f := frameLists{}
	err := pickle.Encode(w, pickle.Dict{
		{Key: "segments", Value: sequence(s.Segments, f.segment)},
		{Key: "device_traces", Value: sequence(s.traces(), func(t *[]TraceEntry) any { return sequence(*t, f.entry) })},
		{Key: "allocator_settings", Value: s.Settings.dict()},
	})
	if err != nil {
		return fmt.Errorf("memory: snapshot: %w", err)
	}
	return nil
}

// sequence is a list whose items are converted while they are written.
func sequence[T any](list []T, value func(*T) any) iter.Seq[any] {
	return func(yield func(any) bool) {
		for i := range list {
			if !yield(value(&list[i])) {
				return
			}
		}
	}
}

// frameLists has the lists that were made of frames, by the first and how many.
type frameLists map[frameKey]*pickle.List

type frameKey struct {
	first *Frame
	n     int
}

func (f frameLists) list(frames Stack) any {
	if len(frames) == 0 {
		return pickle.List{}
	}
	key := frameKey{&frames[0], len(frames)}
	if f[key] == nil {
		l := make(pickle.List, len(frames))
		for i, fr := range frames {
			l[i] = pickle.Dict{{Key: "name", Value: fr.Name}, {Key: "filename", Value: fr.Filename}, {Key: "line", Value: fr.Line}}
		}
		f[key] = &l
	}
	return f[key]
}

func (f frameLists) segment(g *Segment) any {
	return pickle.Dict{
		{Key: "device", Value: g.Device},
		{Key: "address", Value: g.Address},
		{Key: "total_size", Value: g.TotalSize},
		{Key: "allocated_size", Value: g.AllocatedSize},
		{Key: "active_size", Value: g.ActiveSize},
		{Key: "requested_size", Value: g.RequestedSize},
		{Key: "stream", Value: g.Stream},
		{Key: "segment_type", Value: string(g.Type)},
		{Key: "segment_pool_id", Value: poolID(g.Pool)},
		{Key: "is_expandable", Value: g.Expandable},
		{Key: "frames", Value: f.list(g.Frames)},
		{Key: "blocks", Value: sequence(g.Blocks, f.block)},
	}
}

func (f frameLists) block(b *Block) any {
	return pickle.Dict{
		{Key: "address", Value: b.Address},
		{Key: "size", Value: b.Size},
		{Key: "requested_size", Value: b.RequestedSize},
		{Key: "state", Value: string(b.State)},
		{Key: "frames", Value: f.list(b.Frames)},
	}
}

func (f frameLists) entry(e *TraceEntry) any {
	where := pickle.Item{Key: "addr", Value: e.Address}
	if e.Action == traceOOM {
		where = pickle.Item{Key: "device_free", Value: e.DeviceFree}
	}
	d := pickle.Dict{
		{Key: "action", Value: string(e.Action)},
		where,
		{Key: "size", Value: e.Size},
		{Key: "stream", Value: e.Stream},
		{Key: "time_us", Value: e.Time},
		{Key: "segment_pool_id", Value: poolID(e.Pool)},
	}
	if e.Frames != nil {
		d = append(d, pickle.Item{Key: "frames", Value: f.list(e.Frames)})
	}
	return d
}

func poolID(id [2]uint64) pickle.Tuple { return pickle.Tuple{id[0], id[1]} }

func (s *SnapshotSettings) dict() pickle.Dict {
	divisions := pickle.Dict{}
	for i, n := range s.Divisions {
		divisions = append(divisions, pickle.Item{Key: strconv.Itoa(1 << i), Value: n})
	}
	return pickle.Dict{
		{Key: "PYTORCH_CUDA_ALLOC_CONF", Value: s.Conf},
		{Key: "max_split_size", Value: s.MaxSplitSize},
		{Key: "garbage_collection_threshold", Value: s.GarbageCollectionThreshold},
		{Key: "expandable_segments", Value: s.ExpandableSegments},
		{Key: "pinned_num_register_threads", Value: s.PinnedRegisterThreads},
		{Key: "release_lock_on_cudamalloc", Value: s.ReleaseLockOnMalloc},
		{Key: "pinned_use_cuda_host_register", Value: s.PinnedHostRegister},
		{Key: "graph_capture_record_stream_reuse", Value: s.RecordStreamReuse},
		{Key: "roundup_power2_divisions", Value: divisions},
	}
}

// WriteJSON writes the same as WritePickle as a JSON object, with one segment and
// one entry of the traces on each line.
func (s *Snapshot) WriteJSON(w io.Writer) error {
	if err := s.check(); err != nil {
		return err
	}
	j := &jsonWriter{w: bufio.NewWriter(w)}
	j.text(`{"segments":[`)
	for i := range s.Segments {
		j.item(i, &s.Segments[i])
	}
	j.text(`],"device_traces":[`)
	for i, t := range s.traces() {
		if i > 0 {
			j.text(",")
		}
		j.text("[")
		for k := range t {
			j.item(k, &t[k])
		}
		j.text("]")
	}
	j.text(`],"allocator_settings":`)
	j.item(0, &s.Settings)
	j.text("}\n")
	if j.err == nil {
		j.err = j.w.Flush()
	}
	if j.err != nil {
		return fmt.Errorf("memory: snapshot: %w", j.err)
	}
	return nil
}

// A jsonWriter writes values one by one and keeps the first error.
type jsonWriter struct {
	w   *bufio.Writer
	err error
}

func (j *jsonWriter) text(s string) {
	if j.err == nil {
		_, j.err = j.w.WriteString(s)
	}
}

// item writes the ith item of a list.
func (j *jsonWriter) item(i int, v any) {
	if i > 0 {
		j.text(",")
	}
	text, err := json.Marshal(v)
	if j.err == nil {
		j.err = err
	}
	j.text("\n" + string(text))
}

// MarshalJSON writes the keys of torch's dictionary for such an entry.
func (e TraceEntry) MarshalJSON() ([]byte, error) {
	type plain TraceEntry // without this method
	v := struct {
		plain
		Address    *uint64 `json:"addr,omitempty"`
		DeviceFree *uint64 `json:"device_free,omitempty"`
		Frames     Stack   `json:"frames,omitempty"`
	}{plain: plain(e), Frames: e.Frames}
	if e.Action == traceOOM {
		v.DeviceFree = &e.DeviceFree
	} else {
		v.Address = &e.Address
	}
	return json.Marshal(v)
}

// MarshalJSON writes an object with the sizes in MiB as keys, as torch does.
func (d divisions) MarshalJSON() ([]byte, error) {
	sizes := map[string]uint64{}
	for i, n := range d {
		sizes[strconv.Itoa(1<<i)] = n
	}
	return json.Marshal(sizes)
}

// MarshalJSON writes an empty list, not null, for an empty stack: readers iterate over
// it.
func (s Stack) MarshalJSON() ([]byte, error) {
	if len(s) == 0 {
		return []byte("[]"), nil
	}
	return json.Marshal([]Frame(s))
}
