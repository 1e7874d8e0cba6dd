package memory

import (
	"math"
	"time"

	"github.com/gochorus/chorus/device"
)

// HostStats are the statistics of a System's pinned memory, with torch's names and
// meanings (torch.cuda.host_memory_stats). Sizes are in bytes, rounded as the allocator
// rounds them. The value is a copy.
type HostStats struct {
	Allocations    Stat // blocks that the allocator owns, used or cached
	AllocatedBytes Stat // of Allocations
	ActiveRequests Stat // blocks in use, including closed blocks that streams still use
	ActiveBytes    Stat // of ActiveRequests

	NumHostAlloc  int64  // allocations from the system
	NumHostFree   int64  // blocks returned to the system
	HostAllocTime Timing // of the allocations
	HostFreeTime  Timing // of the frees
}

// A Timing summarizes the durations of calls, in microseconds.
type Timing struct{ Total, Max, Min, Count, Avg int64 }

// Flat returns the statistics with torch's keys, such as
// "active_bytes.peak" (torch.cuda.host_memory_stats).
func (s HostStats) Flat() map[string]int64 {
	flat := map[string]int64{}
	flatten(flat, "", s.Nested())
	return flat
}

// Nested returns the statistics nested as in torch: a value is an int64 or another
// map[string]any (torch.cuda.host_memory_stats_as_nested_dict).
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
// (torch.cuda.host_memory_stats). They do not include memory of PinSlice.
func ReadHostStats(dev *device.Device) HostStats {
	h := hostOf(dev)
	h.mu.Lock()
	defer h.mu.Unlock()
	s := HostStats(h.stats)
	s.NumHostAlloc, s.NumHostFree = s.HostAllocTime.Count, s.HostFreeTime.Count
	return s
}

// ResetPeakHostStats resets the peaks of ReadHostStats and the minimum and maximum
// durations (torch.cuda.reset_peak_host_memory_stats).
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

// ResetAccumulatedHostStats sets the totals of ReadHostStats to zero
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

// hostCounts is HostStats as the allocator updates it.
type hostCounts HostStats

func (c *hostCounts) all() []*Stat {
	return []*Stat{&c.Allocations, &c.AllocatedBytes, &c.ActiveRequests, &c.ActiveBytes}
}

// own counts an allocated block, or a freed block if by is -1.
func (c *hostCounts) own(bytes, by int64, took time.Duration) {
	c.Allocations.add(by)
	c.AllocatedBytes.add(by * bytes)
	if by > 0 {
		c.HostAllocTime.add(took)
	} else {
		c.HostFreeTime.add(took)
	}
}

// request counts a block that was taken, or a block that came back if by is -1.
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
