package memory

import (
	"fmt"
	"strconv"

	"github.com/gochorus/chorus/internal/pickle"
)

// snapshotOf makes a snapshot from the values of a pickle.
func snapshotOf(v any) (*Snapshot, error) {
	r := newSnapshotReader()
	var s Snapshot
	top := r.dict("the snapshot", v)
	s.Segments = listOf(r, top.list("segments", true), "segment", nil, r.segment)
	s.Traces = listOf(r, top.list(tracesKey, false), "trace", nil, r.trace)
	if settings, ok := top.get("allocator_settings"); ok {
		s.Settings = r.settings(settings)
	}
	return &s, r.err
}

// A snapshotReader converts the values of a pickle and keeps the first error. A list
// that occurs several times is converted once.
type snapshotReader struct {
	err     error
	frames  map[*pickle.List][]Frame
	blocks  map[*pickle.List][]Block
	entries map[*pickle.List][]TraceEntry
}

func newSnapshotReader() *snapshotReader {
	return &snapshotReader{
		frames: map[*pickle.List][]Frame{}, blocks: map[*pickle.List][]Block{}, entries: map[*pickle.List][]TraceEntry{},
	}
}

func (r *snapshotReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}

// listOf converts each item of a list, unless the list was converted before.
func listOf[T any](r *snapshotReader, l *pickle.List, what string, known map[*pickle.List][]T, item func(string, any) T) []T {
	if l == nil || r.err != nil {
		return nil
	}
	if list, ok := known[l]; ok {
		return list
	}
	list := make([]T, 0, len(*l))
	for i, v := range *l {
		list = append(list, item(what, v))
		if r.err != nil {
			r.err = fmt.Errorf("%s %d: %w", what, i, r.err)
			return nil
		}
	}
	if known != nil {
		known[l] = list
	}
	return list
}

func (r *snapshotReader) segment(what string, v any) Segment {
	d := r.dict(what, v)
	g := Segment{
		Device: d.int("device"), Address: d.uint("address", true), TotalSize: d.uint("total_size", true),
		AllocatedSize: d.uint("allocated_size", false), ActiveSize: d.uint("active_size", false),
		RequestedSize: d.uint("requested_size", false), Stream: d.uint("stream", false),
		Type: d.text("segment_type"), Pool: d.pool(), Expandable: d.bool("is_expandable"), Frames: d.frames(),
	}
	g.Blocks = listOf(r, d.list("blocks", true), "block", r.blocks, r.block)
	g.place()
	return g
}

// place assigns addresses to blocks without one, as in files of older torch. A list of
// blocks that several segments share keeps the addresses of the first.
func (g *Segment) place() {
	at := g.Address
	for i := range g.Blocks {
		if b := &g.Blocks[i]; b.Address == 0 {
			b.Address = at
		}
		at += g.Blocks[i].Size
	}
}

func (r *snapshotReader) block(what string, v any) Block {
	d := r.dict(what, v)
	return Block{Address: d.uint("address", false), Size: d.uint("size", true), RequestedSize: d.uint("requested_size", false),
		State: d.text("state"), Frames: d.frames()}
}

func (r *snapshotReader) trace(_ string, v any) []TraceEntry {
	l, ok := v.(*pickle.List)
	if !ok {
		r.fail("it is %s: want a list", describe(v))
	}
	return listOf(r, l, "entry", r.entries, r.entry)
}

func (r *snapshotReader) entry(what string, v any) TraceEntry {
	d := r.dict(what, v)
	return TraceEntry{Action: d.text("action"), Address: d.uint("addr", false), DeviceFree: d.uint("device_free", false),
		Size: d.uint("size", false), Stream: d.uint("stream", false), Time: int64(d.int("time_us")), Pool: d.pool(), Frames: d.frames()}
}

func (r *snapshotReader) frame(what string, v any) Frame {
	d := r.dict(what, v)
	return Frame{Name: d.text("name"), Filename: d.text("filename"), Line: d.int("line")}
}

func (r *snapshotReader) settings(v any) SnapshotSettings {
	d := r.dict("the settings", v)
	s := SnapshotSettings{Conf: d.text("PYTORCH_CUDA_ALLOC_CONF"), MaxSplitSize: int64(d.int("max_split_size")),
		GarbageCollectionThreshold: d.float("garbage_collection_threshold"), ExpandableSegments: d.bool("expandable_segments"),
		PinnedRegisterThreads: d.int("pinned_num_register_threads"), ReleaseLockOnMalloc: d.bool("release_lock_on_cudamalloc"),
		PinnedHostRegister: d.bool("pinned_use_cuda_host_register"), RecordStreamReuse: d.bool("graph_capture_record_stream_reuse")}
	if v, ok := d.get("roundup_power2_divisions"); ok {
		sizes := r.dict("roundup_power2_divisions", v)
		for i := range s.Divisions {
			s.Divisions[i] = sizes.uint(strconv.Itoa(1<<i), false)
		}
	}
	return s
}

// A snapshotDict reads typed values from a dictionary.
type snapshotDict struct {
	r    *snapshotReader
	what string
	dict pickle.Dict
}

func (r *snapshotReader) dict(what string, v any) snapshotDict {
	d, ok := v.(*pickle.Dict)
	if !ok {
		r.fail("%s is %s: want a dictionary", what, describe(v))
		d = &pickle.Dict{}
	}
	return snapshotDict{r, what, *d}
}

// get returns the value of key, unless it is missing or None.
func (d snapshotDict) get(key string) (any, bool) {
	v, ok := d.dict.Get(key)
	return v, ok && v != nil
}

// mistake reports a value that is missing or has the wrong type.
func (d snapshotDict) mistake(key string, v any, want string) {
	d.r.fail("%s of %s is %v: want %s", strconv.Quote(key), d.what, describe(v), want)
}

// describe formats a value for an error.
func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "missing"
	case *pickle.List:
		return "a list"
	case *pickle.Dict:
		return "a dictionary"
	case pickle.Tuple:
		return "a tuple"
	case string:
		return strconv.Quote(v[:min(len(v), 40)])
	}
	return fmt.Sprint(v)
}

func (d snapshotDict) uint(key string, needed bool) uint64 {
	v, ok := d.get(key)
	switch n := v.(type) {
	case int64:
		if n >= 0 {
			return uint64(n)
		}
	case uint64:
		return n
	}
	if ok || needed {
		d.mistake(key, v, "a whole number from 0 on")
	}
	return 0
}

func (d snapshotDict) int(key string) int {
	v, ok := d.get(key)
	if n, whole := v.(int64); whole {
		return int(n)
	}
	if ok {
		d.mistake(key, v, "a whole number")
	}
	return 0
}

func (d snapshotDict) float(key string) float64 {
	v, ok := d.get(key)
	switch x := v.(type) {
	case float64:
		return x
	case int64:
		return float64(x)
	}
	if ok {
		d.mistake(key, v, "a number")
	}
	return 0
}

func (d snapshotDict) bool(key string) bool {
	v, ok := d.get(key)
	b, isBool := v.(bool)
	if ok && !isBool {
		d.mistake(key, v, "true or false")
	}
	return b
}

func (d snapshotDict) text(key string) string {
	v, ok := d.get(key)
	s, isText := v.(string)
	if ok && !isText {
		d.mistake(key, v, "a text")
	}
	return s
}

func (d snapshotDict) list(key string, needed bool) *pickle.List {
	v, ok := d.get(key)
	l, isList := v.(*pickle.List)
	if (ok || needed) && !isList {
		d.mistake(key, v, "a list")
	}
	return l
}

func (d snapshotDict) frames() Stack {
	return listOf(d.r, d.list("frames", false), "frame", d.r.frames, d.r.frame)
}

// pool reads the pair of numbers that identifies a pool.
func (d snapshotDict) pool() (id [2]uint64) {
	const key = "segment_pool_id"
	v, ok := d.get(key)
	var pair []any
	switch v := v.(type) {
	case pickle.Tuple:
		pair = v
	case *pickle.List: // from JSON
		pair = *v
	}
	if ok && len(pair) != 2 {
		d.mistake(key, v, "two numbers")
		return id
	}
	for i, v := range pair {
		n, whole := v.(int64)
		if !whole || n < 0 {
			d.mistake(key, v, "two numbers")
		}
		id[i] = uint64(n)
	}
	return id
}
