package memory

import (
	"math"
	"time"

	"github.com/gochorus/chorus/device"
)

// HostStats are the statistics of the pinned memory of a System, under torch's
// names and with torch's meaning (torch.cuda.host_memory_stats). Sizes are in
// bytes, as rounded. The value is a copy.
type HostStats struct {
	Allocations    Stat // blocks that the allocator has, used or cached
	AllocatedBytes Stat // of Allocations
	ActiveRequests Stat // blocks in use, also those that were closed while streams still use them
	ActiveBytes    Stat // of ActiveRequests

	NumHostAlloc  int64  // blocks that were made
	NumHostFree   int64  // blocks that were given back to the system
	HostAllocTime Timing // of making them
	HostFreeTime  Timing // of giving them back
}

// A Timing sums calls up by the time that they took, in microseconds.
type Timing struct{ Total, Max, Min, Count, Avg int64 }

// Flat returns the statistics under torch's keys, such as
// "active_bytes.peak" (torch.cuda.host_memory_stats).
func (s HostStats) Flat() map[string]int64 {
	flat := map[string]int64{}
	flatten(flat, "", s.Nested())
	return flat
}

// Nested returns the statistics as torch nests them: a value is an int64 or
// again a map[string]any (torch.cuda.host_memory_stats_as_nested_dict).
func (s HostStats) Nested() map[string]any {
	return map[string]any{
		"allocations":     s.Allocations.nested(),
		"allocated_bytes": s.AllocatedBytes.nested(),
		"active_requests": s.ActiveRequests.nested(),
		"active_bytes":    s.ActiveBytes.nested(),
		"num_host_alloc":  s.NumHostAlloc,
		"num_host_free":   s.NumHostFree,
		"host_alloc_time": s.HostAllocTime.nested(),
		"host_free_time":  s.HostFreeTime.nested(),
	}
}

func (t Timing) nested() map[string]any {
	return map[string]any{"total": t.Total, "max": t.Max, "min": t.Min, "count": t.Count, "avg": t.Avg}
}

// ReadHostStats returns the statistics of the pinned memory of dev's System
// (torch.cuda.host_memory_stats). Memory of PinSlice is not in them.
func ReadHostStats(dev *device.Device) HostStats {
	h := hostOf(dev)
	h.mu.Lock()
	defer h.mu.Unlock()
	s := HostStats(h.stats)
	s.NumHostAlloc, s.NumHostFree = s.HostAllocTime.Count, s.HostFreeTime.Count
	return s
}

// ResetPeakHostStats lets the peaks of ReadHostStats, and the least and the
// longest times, begin anew (torch.cuda.reset_peak_host_memory_stats).
func ResetPeakHostStats(dev *device.Device) {
	h := hostOf(dev)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.stats.all() {
		x.Peak = x.Current
	}
	for _, t := range []*Timing{&h.stats.HostAllocTime, &h.stats.HostFreeTime} {
		t.Max, t.Min = 0, 0
	}
}

// ResetAccumulatedHostStats lets the totals of ReadHostStats begin anew
// (torch.cuda.reset_accumulated_host_memory_stats).
func ResetAccumulatedHostStats(dev *device.Device) {
	h := hostOf(dev)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.stats.all() {
		x.Allocated, x.Freed = 0, 0
	}
	for _, t := range []*Timing{&h.stats.HostAllocTime, &h.stats.HostFreeTime} {
		t.Total, t.Count, t.Avg = 0, 0, 0
	}
}

// hostCounts are HostStats as the allocator keeps them.
type hostCounts HostStats

func (c *hostCounts) all() []*Stat {
	return []*Stat{&c.Allocations, &c.AllocatedBytes, &c.ActiveRequests, &c.ActiveBytes}
}

// own counts a block that was made, or given back where by is -1.
func (c *hostCounts) own(bytes, by int64, took time.Duration) {
	c.Allocations.add(by)
	c.AllocatedBytes.add(by * bytes)
	if by > 0 {
		c.HostAllocTime.add(took)
	} else {
		c.HostFreeTime.add(took)
	}
}

// request counts a block that was handed out, or has come back where by is -1.
func (c *hostCounts) request(bytes, by int64) {
	c.ActiveRequests.add(by)
	c.ActiveBytes.add(by * bytes)
}

func (s *Stat) add(n int64) {
	s.Current += n
	s.Peak = max(s.Peak, s.Current)
	if n > 0 {
		s.Allocated += n
	} else {
		s.Freed -= n
	}
}

func (t *Timing) add(took time.Duration) {
	us := took.Microseconds()
	if t.Min == 0 && t.Max == 0 {
		t.Min = math.MaxInt64
	}
	t.Min, t.Max = min(t.Min, us), max(t.Max, us)
	t.Total += us
	t.Count++
	t.Avg = t.Total / t.Count
}
