package memory

// A Snapshot describes the memory of the allocators of all devices at one moment, and
// its history (torch.cuda.memory_snapshot, torch.cuda.memory._snapshot). In JSON the
// fields have torch's names. Sizes are in bytes.
type Snapshot struct {
	Segments []Segment        `json:"segments"`           // by address
	Traces   [][]TraceEntry   `json:"device_traces"`      // by device ordinal, then by time
	Settings SnapshotSettings `json:"allocator_settings"` //
}

// A Segment is one allocation from the driver, or a mapped range of an expandable
// segment. Its blocks are contiguous and fill it.
type Segment struct {
	Device        int       `json:"device"`
	Address       uint64    `json:"address"`
	TotalSize     uint64    `json:"total_size"`
	AllocatedSize uint64    `json:"allocated_size"`  // of the blocks that the program uses
	ActiveSize    uint64    `json:"active_size"`     // of the blocks that the program or other streams use
	RequestedSize uint64    `json:"requested_size"`  // of the active blocks, without rounding
	Stream        uint64    `json:"stream"`          // the driver's handle; 0 is the default stream
	Type          string    `json:"segment_type"`    // "small" or "large", for the size of its blocks
	Pool          [2]uint64 `json:"segment_pool_id"` // zeros for the device's default pool
	Expandable    bool      `json:"is_expandable"`
	Frames        Stack     `json:"frames"` // stack of its allocation
	Blocks        []Block   `json:"blocks"`
}

// A Block is a part of a Segment. Its state is torch's:
//
//	active_allocated     the program uses it
//	active_pending_free  the program has freed it, but other streams still use it
//	inactive             it is free
type Block struct {
	Address       uint64 `json:"address"`
	Size          uint64 `json:"size"`
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
