package memory

import (
	"fmt"
	"strings"
	"weak"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/status"
)

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

const (
	singleLine = "---------------------------------------------------------------------------"
	doubleLine = "==========================================================================="
)

// Summary returns the statistics as a table in torch's layout: 75 columns between bars,
// each line with a newline (torch.cuda.memory_summary). Only the title differs: it has
// Chorus's name and one more blank. device is the ordinal in the title. If abbreviated
// is true, the rows of the two pools are omitted.
func (s Stats) Summary(device int, abbreviated bool) string {
	t := &summary{abbreviated: abbreviated}
	t.line(doubleLine)
	t.line(fmt.Sprintf(" %16s Chorus CUDA memory summary, device ID %-18d ", "", device))
	t.line(singleLine)
	t.line(fmt.Sprintf("  %9s CUDA OOMs: %-12d | %6s cudaMalloc retries: %-8d  ", "", s.OOMs, "", s.AllocRetries))
	t.line(doubleLine)
	t.line("        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  ")
	t.pools("Allocated memory", s.AllocatedBytes, formatBytes)
	t.pools("Active memory", s.ActiveBytes, formatBytes)
	t.pools("Requested memory", s.RequestedBytes, formatBytes)
	t.pools("GPU reserved memory", s.ReservedBytes, formatBytes)
	t.pools("Non-releasable memory", s.InactiveSplitBytes, formatBytes)
	t.pools("Allocations", s.Allocation, formatCount)
	t.pools("Active allocs", s.Active, formatCount)
	t.pools("GPU reserved segments", s.Segment, formatCount)
	t.pools("Non-releasable allocs", s.InactiveSplit, formatCount)
	t.stat("Oversize allocations", s.OversizeAllocations)
	t.stat("Oversize GPU segments", s.OversizeSegments)
	t.line(doubleLine)
	return t.text.String()
}

// A summary builds the table of Summary.
type summary struct {
	text        strings.Builder
	abbreviated bool
}

func (t *summary) line(text string) { t.text.WriteString("|" + text + "|\n") }

// pools writes the rows of one quantity, in columns whose units the values of
// both pools together select.
func (t *summary) pools(name string, p PoolStats, format func(n, unit int64) string) {
	t.line(singleLine)
	t.row(name, p.All, p.All, format)
	if t.abbreviated {
		return
	}
	t.row("      from large pool", p.Large, p.All, format)
	t.row("      from small pool", p.Small, p.All, format)
}

func (t *summary) stat(name string, s Stat) {
	t.line(singleLine)
	t.row(name, s, s, formatCount)
}

func (t *summary) row(name string, s, unit Stat, format func(n, unit int64) string) {
	t.line(fmt.Sprintf(" %-21s | %s | %s | %s | %s ", name, format(s.Current, unit.Current), format(s.Peak, unit.Peak),
		format(s.Allocated, unit.Allocated), format(s.Freed, unit.Freed)))
}

// formatBytes writes n with the prefix for unit, where the next prefix begins
// at 768.
func formatBytes(n, unit int64) string {
	n, prefix := scale(n, unit, 1024, 768, "B  ", "KiB", "MiB", "GiB", "TiB", "PiB")
	return fmt.Sprintf("%6d %s", n, prefix)
}

func formatCount(n, unit int64) string {
	n, prefix := scale(n, unit, 1000, 750, " ", "K", "M")
	return fmt.Sprintf("%7d %s ", n, prefix)
}

// scale divides n by step, once for each prefix that unit exceeds by most, and returns
// n with its prefix. Torch keeps the fraction of unit, so unit itself is not divided.
func scale(n, unit, step, most int64, prefixes ...string) (int64, string) {
	i := 0
	for least := most * step; i < len(prefixes)-1 && unit >= least; least *= step {
		n /= step
		i++
	}
	return n, prefixes[i]
}

// register adds the heap to the status of the process, which does not keep the
// heap alive.
func (h *heap) register() {
	of := weak.Make(h)
	h.forget = status.Add("the memory of "+h.dev.String(), func(p *status.Process) {
		if h := of.Value(); h != nil {
			h.describe(p)
		}
	})
}

// describe adds the memory and the sensor values of the heap's device to the status of the process.
func (h *heap) describe(p *status.Process) {
	if h.closed.Load() {
		return
	}
	d := status.Device{Name: h.dev.String()}
	if s, err := StatsOf(h.dev); err == nil {
		d.Allocated, d.PeakAllocated = current(s.AllocatedBytes.All.Current), current(s.AllocatedBytes.All.Peak)
		d.Reserved, d.InactiveSplit = current(s.ReservedBytes.All.Current), current(s.InactiveSplitBytes.All.Current)
		d.Pools = []status.Pool{s.pool("small", smallPool), s.pool("large", largePool)}
		d.Allocations, d.Retries, d.OutOfMemory = current(s.Allocation.All.Allocated), current(s.AllocRetries), current(s.OOMs)
	}
	if u, err := Ledger(h.dev); err == nil {
		d.Total, d.Free = u.Total, u.Free
		for _, x := range bySize(u.Uses) {
			d.Uses = append(d.Uses, status.Use{Owner: x.Owner, Bytes: x.Bytes})
		}
	}
	if props, err := h.dev.Properties(); err == nil {
		d.UUID, d.Product, d.PCI = props.UUID, props.Name, props.PCIBusID
	}
	sys := gpu.DeviceOf(h.dev).System()
	d.Backend = sys.Name
	if v, r := sys.Driver.DriverGetVersion(); r == cudadrv.Success {
		d.Driver = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	d.Utilization, d.Temperature = sensor(h.dev.Utilization), sensor(h.dev.Temperature)
	d.PowerDraw, d.ClockRate = sensor(h.dev.PowerDraw), sensor(h.dev.ClockRate)
	p.Devices = append(p.Devices, d)
}

func smallPool(p *PoolStats) *Stat { return &p.Small }
func largePool(p *PoolStats) *Stat { return &p.Large }

// pool returns the bytes of a pool.
func (s *Stats) pool(name string, of func(*PoolStats) *Stat) status.Pool {
	return status.Pool{Name: name, Allocated: current(of(&s.AllocatedBytes).Current), PeakAllocated: current(of(&s.AllocatedBytes).Peak),
		Reserved: current(of(&s.ReservedBytes).Current), InactiveSplit: current(of(&s.InactiveSplitBytes).Current)}
}

// current returns a statistic that is not below 0: resets may make it negative.
func current(n int64) int64 { return max(n, 0) }

// sensor returns the value of a sensor, or nil if the device does not have it.
func sensor(read func() (int, error)) *int {
	v, err := read()
	if err != nil {
		return nil
	}
	return &v
}
