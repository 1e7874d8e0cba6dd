package memory

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/inside"
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
// TakeSnapshot and for errors (torch.cuda.memory._record_memory_history). It
// discards the earlier history. A nil cfg stops the recording.
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

// A Use is a part of a device's memory, in bytes.
type Use struct {
	Owner    string // what uses it, such as "buffers" or "NCCL, communicator 0, rank 1 of 2"
	Bytes    uint64
	Reserved bool // the caching allocator has reserved it, so function Reserved counts it
}

// Usage says what uses the memory of a device.
type Usage struct {
	Device string
	Total  uint64 // of the device
	Free   uint64 // for all processes
	Uses   []Use  // the sum of all Bytes is Total - Free, unless memory changed meanwhile
}

// The names of the uses that Ledger itself counts.
const (
	useBuffers = "buffers"
	usePools   = "buffers in pools"
	useGraphs  = "buffers of graphs"
	useCached  = "free memory that the caching allocator keeps"
	useOthers  = "everything else: contexts, modules, libraries that do not tell, other processes"
)

// Ledger returns what uses the memory of d. It counts the program's buffers,
// the memory that Chorus keeps for products and for its kernels, NCCL's memory
// of each communicator, the cache of the allocator, and the rest. The rest has
// NCCL's memory too if NCCL is older than 2.29.7, or while another goroutine
// calls NCCL for the communicator. Ledger waits for no work on the device.
// torch has no counterpart.
func Ledger(d *device.Device) (*Usage, error) {
	h, err := heapOf(d)
	if err != nil {
		return nil, fmt.Errorf("memory: ledger: %w", err)
	}
	u := &Usage{Device: d.String()}
	if u.Free, u.Total, err = d.MemoryInfo(); err != nil {
		return nil, fmt.Errorf("memory: ledger of %s: %w", d, err)
	}
	u.Uses = h.uses()
	known := uint64(0)
	for _, x := range u.Uses {
		known += x.Bytes
	}
	if used := u.Total - min(u.Free, u.Total); used > known {
		u.Uses = append(u.Uses, Use{Owner: useOthers, Bytes: used - known})
	}
	return u, nil
}

// uses returns what the process knows of the device's memory.
func (h *heap) uses() []Use {
	list := h.allocated()
	for _, x := range inside.Uses(h.dev) {
		if x.Inside {
			list[0].Bytes -= min(list[0].Bytes, x.Bytes)
		}
		if i := slices.IndexFunc(list, func(u Use) bool { return u.Owner == x.Owner }); i >= 0 {
			list[i].Bytes += x.Bytes
		} else {
			list = append(list, Use{x.Owner, x.Bytes, x.Inside})
		}
	}
	return slices.DeleteFunc(list, func(x Use) bool { return x.Bytes == 0 })
}

// allocated divides the reserved memory among its uses, the buffers outside of
// pools first.
func (h *heap) allocated() []Use {
	list := []Use{{Owner: useBuffers, Reserved: true}, {Owner: usePools, Reserved: true}, {Owner: useGraphs, Reserved: true}, {Owner: useCached, Reserved: true}}
	for _, s := range h.native.Segments() {
		to := &list[0]
		switch {
		case s.Graphs:
			to = &list[2]
		case s.Pool != h.native.Default().ID():
			to = &list[1]
		}
		used := uint64(0)
		for _, b := range s.Blocks {
			if b.Used || b.Pending {
				used += b.Size
			}
		}
		to.Bytes += used
		list[3].Bytes += s.Size - used
	}
	list[0].Bytes += h.uncachedBytes()
	return list
}

// uncachedBytes returns the bytes that Allocators without a cache have allocated for the device.
func (h *heap) uncachedBytes() (bytes uint64) {
	h.mu.Lock()
	engines := slices.Clone(h.engines)
	h.mu.Unlock()
	for _, e := range engines {
		e.mu.Lock()
		bytes += uint64(max(e.stats.AllocatedBytes.All.Current, 0))
		e.mu.Unlock()
	}
	return bytes
}

// String returns a table with a line for each use, the largest first.
func (u *Usage) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s of %s are free\n", u.Device, formatSize(u.Free), formatSize(u.Total))
	for _, x := range bySize(u.Uses) {
		fmt.Fprintf(&b, "%12s  %s\n", formatSize(x.Bytes), x.Owner)
	}
	return b.String()
}

func bySize(list []Use) []Use {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b Use) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return list
}
