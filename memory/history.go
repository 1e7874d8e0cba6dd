package memory

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// HistoryConfig says what RecordHistory records.
type HistoryConfig struct {
	// Entries is how many entries are kept, the latest ones, so that the history does
	// not grow without bound. 0 keeps none; then only blocks in use have stacks
	// (torch's "state").
	Entries int
	// Stacks records the call stacks of allocations and frees. Each stack costs about a
	// microsecond.
	Stacks bool
}

// RecordHistory starts to record the operations of the device's allocator, for
// TakeSnapshot and for errors (torch.cuda.memory._record_memory_history). It discards
// the earlier history. A nil cfg stops the recording.
func RecordHistory(d *device.Device, cfg *HistoryConfig) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	if cfg == nil {
		h.native.Record(nil)
		return nil
	}
	if cfg.Entries < 0 {
		return fmt.Errorf("memory: record %d entries of the history of %s: the number is negative", cfg.Entries, d)
	}
	h.native.Record(&alloc.HistoryConfig{Entries: cfg.Entries, Stacks: cfg.Stacks})
	return nil
}

// TakeSnapshot describes the memory of the devices and the history that RecordHistory
// has recorded (torch.cuda.memory_snapshot, torch.cuda.memory._snapshot). Other
// goroutines may allocate meanwhile; the memory of each stream is of one moment.
func TakeSnapshot(devices ...*device.Device) (*Snapshot, error) {
	s := &Snapshot{}
	for _, d := range devices {
		h, err := heapOf(d)
		if err != nil {
			return nil, err
		}
		for len(s.Traces) <= d.Ordinal() {
			s.Traces = append(s.Traces, []TraceEntry{})
		}
		for _, x := range h.native.Segments() {
			s.Segments = append(s.Segments, segmentOf(d.Ordinal(), x))
		}
		s.Traces[d.Ordinal()] = traceOf(h.native.History())
	}
	slices.SortStableFunc(s.Segments, func(x, y Segment) int { return int(int64(x.Address - y.Address)) })
	opts, err := settings()
	if err != nil {
		return nil, err
	}
	s.Settings = settingsOf(opts)
	return s, nil
}

func settingsOf(o alloc.Settings) SnapshotSettings {
	s := SnapshotSettings{
		Conf: *optionsText.Load(), MaxSplitSize: -1, GarbageCollectionThreshold: o.GarbageThreshold, ExpandableSegments: o.Expandable,
		PinnedRegisterThreads: o.PinnedThreads, ReleaseLockOnMalloc: o.UnlockedMalloc, PinnedHostRegister: o.PinnedRegister,
		RecordStreamReuse: o.RecordStreamReuse, Divisions: o.Divisions,
	}
	if o.MaxSplit != math.MaxUint64 {
		s.MaxSplitSize = int64(o.MaxSplit)
	}
	return s
}

func segmentOf(ordinal int, x alloc.SegmentInfo) Segment {
	s := Segment{
		Device: ordinal, Address: x.Addr, TotalSize: x.Size, Stream: x.Stream, Type: "large", Pool: x.Pool,
		Expandable: x.Expandable, Frames: stackOf(x.Stack),
	}
	if x.Small {
		s.Type = "small"
	}
	for _, b := range x.Blocks {
		block := Block{Address: b.Addr, Size: b.Size, RequestedSize: b.Requested, State: blockInactive, Frames: stackOf(b.Stack)}
		switch {
		case b.Used:
			block.State = blockAllocated
			s.AllocatedSize += b.Size
		case b.Pending:
			block.State = blockPendingFree
		}
		if block.State != blockInactive {
			s.ActiveSize += b.Size
			s.RequestedSize += b.Requested
		}
		s.Blocks = append(s.Blocks, block)
	}
	return s
}

func traceOf(entries []alloc.Entry) []TraceEntry {
	list := make([]TraceEntry, 0, len(entries))
	for _, e := range entries {
		t := TraceEntry{Action: e.Action.String(), Address: e.Addr, Size: e.Size, Stream: e.Stream,
			Time: e.Time.UnixMicro(), Pool: e.Pool, Frames: stackOf(e.Stack)}
		if e.Action == alloc.ActionOOM {
			t.Address, t.DeviceFree = 0, e.Addr
		}
		list = append(list, t)
	}
	return list
}

// stackOf converts a recorded stack and drops the frames of the allocator itself.
func stackOf(s *alloc.Stack) (list Stack) {
	if s == nil {
		return nil
	}
	for frames := runtime.CallersFrames(s.PCs); ; {
		f, more := frames.Next()
		if len(list) > 0 || !strings.Contains(f.Function, "/internal/alloc.") {
			list = append(list, Frame{Name: f.Function, Filename: f.File, Line: f.Line})
		}
		if !more {
			return list
		}
	}
}

// String returns the innermost frames outside of Chorus's memory package.
func (s Stack) String() string {
	var places []string
	for _, f := range s {
		if strings.Contains(f.Name, "gochorus/chorus/memory.") && !strings.HasSuffix(f.Filename, "_test.go") {
			continue
		}
		if places = append(places, fmt.Sprintf("%s:%d", f.Filename, f.Line)); len(places) == 3 {
			break
		}
	}
	return strings.Join(places, ", from ")
}
