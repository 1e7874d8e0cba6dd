package memory

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"reflect"
	"strconv"

	"github.com/gochorus/chorus/internal/torchfile"
)

// A Snapshot describes the memory of the allocators of all devices at one moment, and
// its history (torch.cuda.memory_snapshot, torch.cuda.memory._snapshot). In JSON the
// fields have torch's names. Sizes are in bytes.
type Snapshot struct {
	Segments []Segment        `json:"segments" torch:"always"` // by address
	Traces   [][]TraceEntry   `json:"device_traces"`           // by device ordinal, then by time
	Settings SnapshotSettings `json:"allocator_settings"`      //
}

// A Segment is one allocation from the driver, or a mapped range of an expandable
// segment. Its blocks are contiguous and fill it.
type Segment struct {
	Device        int       `json:"device"`
	Address       uint64    `json:"address" torch:"always"`
	TotalSize     uint64    `json:"total_size" torch:"always"`
	AllocatedSize uint64    `json:"allocated_size"`  // of the blocks that the program uses
	ActiveSize    uint64    `json:"active_size"`     // of the blocks that the program or other streams use
	RequestedSize uint64    `json:"requested_size"`  // of the active blocks, without rounding
	Stream        uint64    `json:"stream"`          // the driver's handle; 0 is the default stream
	Type          string    `json:"segment_type"`    // "small" or "large", for the size of its blocks
	Pool          [2]uint64 `json:"segment_pool_id"` // zeros for the device's default pool
	Expandable    bool      `json:"is_expandable"`
	Frames        Stack     `json:"frames"` // stack of its allocation
	Blocks        []Block   `json:"blocks" torch:"always"`
}

// A Block is a part of a Segment. Its state is torch's:
//
//	active_allocated     the program uses it
//	active_pending_free  the program has freed it, but other streams still use it
//	inactive             it is free
type Block struct {
	Address       uint64 `json:"address"`
	Size          uint64 `json:"size" torch:"always"`
	RequestedSize uint64 `json:"requested_size"` // at most Size; 0 if the block is free
	State         string `json:"state"`
	Frames        Stack  `json:"frames"` // stack of its allocation
}

// The states of blocks.
const (
	blockAllocated   = "active_allocated"
	blockPendingFree = "active_pending_free"
	blockInactive    = "inactive"
)

// A TraceEntry is one operation of an allocator. Blocks have their requested size,
// segments their actual size. Its action is torch's:
//
//	alloc           a block was allocated
//	free_requested  the program freed the block
//	free_completed  the block is free: no stream uses it any more
//	segment_alloc   the driver allocated a segment
//	segment_free    the driver freed a segment
//	segment_map     an expandable segment grew
//	segment_unmap   an expandable segment shrank
//	snapshot        a snapshot was taken
//	oom             the device was out of memory
type TraceEntry struct {
	Action     string    `json:"action"`
	Address    uint64    `json:"addr"`        // except for oom
	DeviceFree uint64    `json:"device_free"` // only for oom: free memory of the device
	Size       uint64    `json:"size"`
	Stream     uint64    `json:"stream"`
	Time       int64     `json:"time_us"`         // in microseconds since 1970
	Pool       [2]uint64 `json:"segment_pool_id"` // zeros for the device's default pool
	Frames     Stack     `json:"frames"`          // the stack of the call, if recorded
}

// traceOOM is the action of an allocation that failed.
const traceOOM = "oom"

// A Stack is a call stack, innermost call first.
type Stack []Frame

// A Frame is one call.
type Frame struct {
	Name     string `json:"name"`
	Filename string `json:"filename"`
	Line     int    `json:"line"`
}

// SnapshotSettings are the allocator's options at the time of a Snapshot.
type SnapshotSettings struct {
	Conf                       string  `json:"PYTORCH_CUDA_ALLOC_CONF"` // the text that was last set
	MaxSplitSize               int64   `json:"max_split_size"`          // in bytes; -1 is unlimited
	GarbageCollectionThreshold float64 `json:"garbage_collection_threshold"`
	ExpandableSegments         bool    `json:"expandable_segments"`
	PinnedRegisterThreads      int     `json:"pinned_num_register_threads"`
	ReleaseLockOnMalloc        bool    `json:"release_lock_on_cudamalloc"`
	PinnedHostRegister         bool    `json:"pinned_use_cuda_host_register"`
	RecordStreamReuse          bool    `json:"graph_capture_record_stream_reuse"`
	// Divisions is, for each power of two from 2^i MiB on, the number of steps into which
	// the sizes up to the next power are divided for rounding. 0 means no rounding.
	Divisions divisions `json:"roundup_power2_divisions"`
}

type divisions [16]uint64

// mostDevices bounds the ordinals, because there is one trace for each ordinal.
const mostDevices = 4096

// check validates the invariants that readers of the format rely on: segments
// do not overlap and are sorted by address, and the blocks of each segment fill
// it.
func (s *Snapshot) check() error {
	if t := s.Settings.GarbageCollectionThreshold; math.IsNaN(t) || math.IsInf(t, 0) {
		return fmt.Errorf("memory: snapshot: the garbage collection threshold is %v", t)
	}
	end := uint64(0)
	for i := range s.Segments {
		g := &s.Segments[i]
		if g.Device < 0 || g.Device >= mostDevices {
			return fmt.Errorf("memory: snapshot: the segment at %#x is of device %d: want 0 to %d", g.Address, g.Device, mostDevices-1)
		}
		if i > 0 && g.Address < end {
			return fmt.Errorf("memory: snapshot: the segment at %#x comes after one that ends at %#x", g.Address, end)
		}
		if err := g.check(); err != nil {
			return fmt.Errorf("memory: snapshot: the segment of %d bytes at %#x: %w", g.TotalSize, g.Address, err)
		}
		end = g.Address + g.TotalSize
	}
	return nil
}

func (g *Segment) check() error {
	if len(g.Blocks) == 0 {
		return errors.New("it has no blocks")
	}
	at := g.Address
	allocated, active, requested := uint64(0), uint64(0), uint64(0)
	for _, b := range g.Blocks {
		if b.Address != at {
			return fmt.Errorf("a block is at %#x: want %#x, where the last one ends", b.Address, at)
		}
		if b.RequestedSize > b.Size {
			return fmt.Errorf("the block of %d bytes at %#x was requested with %d", b.Size, b.Address, b.RequestedSize)
		}
		switch b.State {
		case blockAllocated:
			allocated += b.Size
			fallthrough
		case blockPendingFree:
			active += b.Size
			requested += b.RequestedSize
		case blockInactive:
		default:
			return fmt.Errorf("the block of %d bytes at %#x has the state %q", b.Size, b.Address, b.State)
		}
		at += b.Size
	}
	if at != g.Address+g.TotalSize {
		return fmt.Errorf("its blocks end at %#x: want %#x", at, g.Address+g.TotalSize)
	}
	if allocated != g.AllocatedSize || active != g.ActiveSize || requested != g.RequestedSize {
		return fmt.Errorf("its blocks have %d, %d and %d bytes allocated, active and requested: the segment says %d, %d and %d",
			allocated, active, requested, g.AllocatedSize, g.ActiveSize, g.RequestedSize)
	}
	return nil
}

// traces returns the traces, extended to one for each device that has a segment:
// readers look them up by ordinal.
func (s *Snapshot) traces() [][]TraceEntry {
	traces := s.Traces
	for _, g := range s.Segments {
		for len(traces) <= g.Device {
			traces = append(traces[:len(traces):len(traces)], nil)
		}
	}
	return traces
}

// mostStacks is the number of stacks that WalkSnapshot keeps to share them between entries.
const mostStacks = 1024

// WalkSnapshot reads a snapshot like ReadSnapshot, but passes the entries of
// its traces to fn, in their order, instead of keeping them. Histories that are
// larger than memory can thus be read: an entry of JSON leaves nothing behind,
// and an entry of a pickle leaves about fifty bytes. The result has no Traces.
// If fn returns an error, WalkSnapshot returns it.
//
// The limits are the limits of ReadSnapshot, except that the values of entries do not count.
func WalkSnapshot(r io.Reader, fn func(device int, e TraceEntry) error) (*Snapshot, error) {
	w := &snapshotWalk{fn: fn, reader: newSnapshotReader()}
	v, err := readValue(r, w.entry)
	switch {
	case w.failed != nil:
		return nil, w.failed
	case w.reader.err != nil:
		return nil, readError(w.reader.err)
	case err != nil:
		return nil, readError(err)
	}
	s, err := snapshotOf(v)
	if err != nil {
		return nil, readError(err)
	}
	for device, entries := range s.Traces { // written in a way that no known writer uses
		for _, e := range entries {
			if err := fn(device, e); err != nil {
				return nil, err
			}
		}
	}
	s.Traces = nil
	return s, nil
}

// A snapshotWalk is one call of WalkSnapshot.
type snapshotWalk struct {
	fn     func(device int, e TraceEntry) error
	reader *snapshotReader
	device int
	count  int   // entries of the device so far
	failed error // of fn
}

func (w *snapshotWalk) entry(device int, v any) error {
	if device != w.device {
		w.device, w.count = device, 0
	}
	e := w.reader.entry("entry", v)
	if w.reader.err != nil {
		w.reader.err = fmt.Errorf("trace %d: entry %d: %w", device, w.count, w.reader.err)
		return w.reader.err
	}
	w.count++
	if len(w.reader.frames) > mostStacks {
		clear(w.reader.frames)
	}
	w.failed = w.fn(device, e)
	return w.failed
}

// A snapshotField is a field of a struct of snapshots. Reading and writing both use the list of
// a struct's fields, so that a key is in one place: the field's tag.
type snapshotField struct {
	index  int
	key    string // as in torch's dictionaries and in JSON
	always bool   // every version of torch writes the key
}

var snapshotFields = func() map[reflect.Type][]snapshotField {
	all := map[reflect.Type][]snapshotField{}
	for _, t := range []reflect.Type{reflect.TypeFor[Snapshot](), reflect.TypeFor[Segment](), reflect.TypeFor[Block](),
		reflect.TypeFor[TraceEntry](), reflect.TypeFor[Frame](), reflect.TypeFor[SnapshotSettings]()} {
		for i := range t.NumField() {
			tag := t.Field(i).Tag
			all[t] = append(all[t], snapshotField{i, tag.Get("json"), tag.Get("torch") == "always"})
		}
	}
	return all
}()

// has reports whether torch writes a key for such an entry.
func (e *TraceEntry) has(key string) bool {
	switch key {
	case "addr":
		return e.Action != traceOOM
	case "device_free":
		return e.Action == traceOOM
	case "frames":
		return e.Frames != nil
	}
	return true
}

// WritePickle writes the snapshot for Python's pickle.load and for
// pytorch.org/memory_viz (torch.cuda.memory._dump_snapshot). Frames that several
// entries share by sharing the slice are written once.
func (s *Snapshot) WritePickle(w io.Writer) error {
	if err := s.check(); err != nil {
		return err
	}
	whole := *s
	whole.Traces = s.traces()
	if err := torchfile.EncodePickle(w, frameLists{}.value(reflect.ValueOf(&whole).Elem())); err != nil {
		return fmt.Errorf("memory: snapshot: %w", err)
	}
	return nil
}

// frameLists has the lists that were made of frames, by the first and how many.
type frameLists map[frameKey]*torchfile.List

type frameKey struct {
	first *Frame
	n     int
}

func (f frameLists) list(frames Stack) any {
	if len(frames) == 0 {
		return torchfile.List{}
	}
	key := frameKey{&frames[0], len(frames)}
	if f[key] == nil {
		l := make(torchfile.List, len(frames))
		for i := range frames {
			l[i] = f.value(reflect.ValueOf(&frames[i]).Elem())
		}
		f[key] = &l
	}
	return f[key]
}

// value converts an addressable field, except the items of lists, which are
// converted while they are written.
func (f frameLists) value(v reflect.Value) any {
	switch x := v.Addr().Interface().(type) {
	case *Stack:
		return f.list(*x)
	case *[2]uint64:
		return torchfile.Tuple{x[0], x[1]}
	case *divisions:
		sizes := torchfile.Dict{}
		for i, n := range x {
			sizes = append(sizes, torchfile.DictItem{Key: strconv.Itoa(1 << i), Value: n})
		}
		return sizes
	}
	switch v.Kind() {
	case reflect.Slice:
		return iter.Seq[any](func(yield func(any) bool) {
			for i := range v.Len() {
				if !yield(f.value(v.Index(i))) {
					return
				}
			}
		})
	case reflect.Struct:
		e, isEntry := v.Addr().Interface().(*TraceEntry)
		d := make(torchfile.Dict, 0, v.NumField())
		for _, field := range snapshotFields[v.Type()] {
			if !isEntry || e.has(field.key) {
				d = append(d, torchfile.DictItem{Key: field.key, Value: f.value(v.Field(field.index))})
			}
		}
		return d
	}
	return v.Interface()
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
	if e.has("device_free") {
		v.DeviceFree = &e.DeviceFree
	}
	if e.has("addr") {
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
