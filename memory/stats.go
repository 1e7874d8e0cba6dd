package memory

// A Stat is the history of one quantity, in bytes or in blocks.
type Stat struct {
	Current   int64 // now
	Peak      int64 // maximum since the peaks were reset
	Allocated int64 // sum of all increases since the totals were reset
	Freed     int64 // sum of all decreases since the totals were reset
}

// PoolStats has a Stat for the small pool, whose blocks have at most 1 MiB, for the
// large pool, and for both together. Each has its own peak: the peak of All may be less
// than the sum of the other two.
type PoolStats struct{ All, Small, Large Stat }

// Stats are the statistics of a device's allocator, with torch's names and meanings
// (torch.cuda.memory_stats). Sizes are in bytes. The value is a copy and does not
// change while the allocator runs.
type Stats struct {
	Allocation    PoolStats // blocks that the program uses
	Segment       PoolStats // allocations from the driver
	Active        PoolStats // blocks in use, including freed blocks that other streams still use
	InactiveSplit PoolStats // free blocks in segments that cannot be released because other blocks are in use

	AllocatedBytes     PoolStats // of Allocation, as rounded
	ReservedBytes      PoolStats // of Segment
	ActiveBytes        PoolStats // of Active
	InactiveSplitBytes PoolStats // of InactiveSplit
	RequestedBytes     PoolStats // of Active, without rounding

	OversizeAllocations Stat // blocks of at least max_split_size
	OversizeSegments    Stat // segments of at least max_split_size

	AllocRetries   int64 // allocations from the driver that were repeated after the cache was emptied
	OOMs           int64 // out-of-memory errors
	SyncAllStreams int64 // synchronizations with all streams to free memory
	DeviceAllocs   int64 // calls of the driver that allocate or map
	DeviceFrees    int64 // calls of the driver that free or unmap
	MaxSplitSize   int64 // of the settings; -1 is unlimited
}

// Flat returns the statistics with torch's keys, such as
// "allocated_bytes.small_pool.peak" (torch.cuda.memory_stats).
func (s Stats) Flat() map[string]int64 {
	flat := map[string]int64{}
	flatten(flat, "", s.Nested())
	return flat
}

func flatten(flat map[string]int64, prefix string, nested map[string]any) {
	for key, v := range nested {
		switch v := v.(type) {
		case int64:
			flat[prefix+key] = v
		case map[string]any:
			flatten(flat, prefix+key+".", v)
		}
	}
}

// Nested returns the statistics nested as in torch: a value is an int64 or another
// map[string]any (torch.cuda.memory_stats_as_nested_dict).
func (s Stats) Nested() map[string]any {
	return map[string]any{
		"allocation":           s.Allocation.nested(),
		"segment":              s.Segment.nested(),
		"active":               s.Active.nested(),
		"inactive_split":       s.InactiveSplit.nested(),
		"allocated_bytes":      s.AllocatedBytes.nested(),
		"reserved_bytes":       s.ReservedBytes.nested(),
		"active_bytes":         s.ActiveBytes.nested(),
		"inactive_split_bytes": s.InactiveSplitBytes.nested(),
		"requested_bytes":      s.RequestedBytes.nested(),
		"oversize_allocations": s.OversizeAllocations.nested(),
		"oversize_segments":    s.OversizeSegments.nested(),
		"num_alloc_retries":    s.AllocRetries,
		"num_ooms":             s.OOMs,
		"num_sync_all_streams": s.SyncAllStreams,
		"num_device_alloc":     s.DeviceAllocs,
		"num_device_free":      s.DeviceFrees,
		"max_split_size":       s.MaxSplitSize,
	}
}

func (p PoolStats) nested() map[string]any {
	return map[string]any{"all": p.All.nested(), "small_pool": p.Small.nested(), "large_pool": p.Large.nested()}
}

func (s Stat) nested() map[string]any {
	return map[string]any{"current": s.Current, "peak": s.Peak, "allocated": s.Allocated, "freed": s.Freed}
}
