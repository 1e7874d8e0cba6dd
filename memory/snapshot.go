package memory

// A Snapshot is what the allocators of all devices hold at one moment, and what
// has led there (torch.cuda.memory_snapshot, torch.cuda.memory._snapshot). Its
// fields carry torch's names in JSON; sizes are in bytes.
type Snapshot struct {
	Segments []Segment        `json:"segments"`           // by address
	Traces   [][]TraceEntry   `json:"device_traces"`      // by ordinal of the device, then by time
	Settings SnapshotSettings `json:"allocator_settings"` //
}

// A Segment is an allocation of the driver, or a mapped range of an expandable
// segment. Its blocks lie side by side and fill it.
type Segment struct {
	Device        int         `json:"device"`
	Address       uint64      `json:"address"`
	TotalSize     uint64      `json:"total_size"`
	AllocatedSize uint64      `json:"allocated_size"` // of the blocks that the program has
	ActiveSize    uint64      `json:"active_size"`    // and of those that other streams still use
	RequestedSize uint64      `json:"requested_size"` // of the active blocks, as the program asked for them
	Stream        uint64      `json:"stream"`         // as the driver names it; 0 is the default stream
	Type          SegmentType `json:"segment_type"`
	Pool          [2]uint64   `json:"segment_pool_id"` // zeros are the device's own pool
	Expandable    bool        `json:"is_expandable"`
	Frames        Stack       `json:"frames"` // where it was allocated
	Blocks        []Block     `json:"blocks"`
}

// A SegmentType is which pool of blocks a segment belongs to.
type SegmentType string

// The types, under torch's names.
const (
	SmallSegment SegmentType = "small"
	LargeSegment SegmentType = "large"
)

// A Block is a part of a Segment.
type Block struct {
	Address       uint64     `json:"address"`
	Size          uint64     `json:"size"`
	RequestedSize uint64     `json:"requested_size"` // at most Size; 0 of a free block
	State         BlockState `json:"state"`
	Frames        Stack      `json:"frames"` // where it was allocated
}

// A BlockState is who has a block.
type BlockState string

// The states, under torch's names.
const (
	BlockAllocated   BlockState = "active_allocated"    // the program
	BlockPendingFree BlockState = "active_pending_free" // streams that still use what the program has freed
	BlockInactive    BlockState = "inactive"            // nobody: it is free
)

// A TraceEntry is something that an allocator did. Blocks have the size that was
// asked for, segments their own.
type TraceEntry struct {
	Action     TraceAction `json:"action"`
	Address    uint64      `json:"addr"`        // but for TraceOOM
	DeviceFree uint64      `json:"device_free"` // only for TraceOOM: what the device had left
	Size       uint64      `json:"size"`
	Stream     uint64      `json:"stream"`
	Time       int64       `json:"time_us"`         // in microseconds since 1970
	Pool       [2]uint64   `json:"segment_pool_id"` // zeros are the device's own pool
	Frames     Stack       `json:"frames"`          // where in the program, if that was recorded
}

// A TraceAction is what a TraceEntry tells of.
type TraceAction string

// The actions, under torch's names.
const (
	TraceAlloc         TraceAction = "alloc"
	TraceFreeRequested TraceAction = "free_requested" // the program has freed the block
	TraceFreeCompleted TraceAction = "free_completed" // and no stream uses it any more
	TraceSegmentAlloc  TraceAction = "segment_alloc"
	TraceSegmentFree   TraceAction = "segment_free"
	TraceSegmentMap    TraceAction = "segment_map" // an expandable segment has grown
	TraceSegmentUnmap  TraceAction = "segment_unmap"
	TraceSnapshot      TraceAction = "snapshot"
	TraceOOM           TraceAction = "oom"
)

// A Stack has the calls that have led to a place in the program, innermost first.
type Stack []Frame

// A Frame is one call.
type Frame struct {
	Name     string `json:"name"`
	Filename string `json:"filename"`
	Line     int    `json:"line"`
}

// SnapshotSettings are the allocator's options at the time of a Snapshot.
type SnapshotSettings struct {
	Conf                       string    `json:"PYTORCH_CUDA_ALLOC_CONF"` // as they were last given
	MaxSplitSize               int64     `json:"max_split_size"`          // in bytes; -1 is unlimited
	GarbageCollectionThreshold float64   `json:"garbage_collection_threshold"`
	ExpandableSegments         bool      `json:"expandable_segments"`
	PinnedRegisterThreads      int       `json:"pinned_num_register_threads"`
	ReleaseLockOnMalloc        bool      `json:"release_lock_on_cudamalloc"`
	PinnedHostRegister         bool      `json:"pinned_use_cuda_host_register"`
	RecordStreamReuse          bool      `json:"graph_capture_record_stream_reuse"`
	Divisions                  Divisions `json:"roundup_power2_divisions"`
}

// Divisions are into how many parts the sizes between two powers of two are
// divided for rounding, from 2^i MiB on; 0 is not at all.
type Divisions [16]uint64
