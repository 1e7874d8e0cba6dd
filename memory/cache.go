package memory

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// EmptyCache returns all cached memory that is not in use to the driver
// (torch.cuda.empty_cache), except the memory of an open Pool. The host waits for the
// streams that RecordStream named for freed blocks. A segment stays if a part is in use.
func EmptyCache(d *device.Device) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	return h.empty()
}

func (h *heap) empty() error {
	err := h.native.Empty()
	h.tidy()
	if a, ok := h.async(); ok {
		err = errors.Join(err, a.trim(h.dev))
	}
	if err != nil {
		return fmt.Errorf("memory: empty the cache of %s: %w", h.dev, err)
	}
	return nil
}

// StatsOf returns the statistics of the device's allocator (torch.cuda.memory_stats).
// All values are of one moment; the call visits every stream that has allocated. For
// cudaMallocAsync and for allocators of ChangeAllocator, only the allocations and the
// reserved memory are known. If the program used both such an allocator and the caching
// allocator, each peak is the sum of their two peaks, which may be from different
// times.
func StatsOf(d *device.Device) (Stats, error) {
	h, err := heapOf(d)
	if err != nil {
		return Stats{}, err
	}
	s := h.nativeStats()
	h.mu.Lock()
	engines := slices.Clone(h.engines)
	h.mu.Unlock()
	for _, e := range engines {
		if err := e.add(&s); err != nil {
			return Stats{}, fmt.Errorf("memory: read the statistics of %s: %w", d, err)
		}
	}
	return s, nil
}

func (h *heap) nativeStats() Stats {
	r, c := h.native.ReadAll(), h.native.Counts()
	s := Stats{
		OversizeAllocations: Stat(c.OversizeBlocks), OversizeSegments: Stat(c.OversizeSegments),
		AllocRetries: c.Retries, OOMs: c.OutOfMemory, SyncAllStreams: c.Syncs, DeviceAllocs: c.Taken, DeviceFrees: c.Given,
		MaxSplitSize: -1,
	}
	if most := options.Load().MaxSplit; most != math.MaxUint64 {
		s.MaxSplitSize = int64(most)
	}
	for g, to := range map[alloc.Gauge]*PoolStats{
		alloc.Allocation: &s.Allocation, alloc.Segments: &s.Segment, alloc.Active: &s.Active, alloc.InactiveSplit: &s.InactiveSplit,
		alloc.AllocatedBytes: &s.AllocatedBytes, alloc.ReservedBytes: &s.ReservedBytes, alloc.ActiveBytes: &s.ActiveBytes,
		alloc.InactiveSplitBytes: &s.InactiveSplitBytes, alloc.RequestedBytes: &s.RequestedBytes,
	} {
		*to = PoolStats{All: Stat(r[g].All), Small: Stat(r[g].Small), Large: Stat(r[g].Large)}
	}
	return s
}

// add adds the engine's statistics to s.
func (e *uncached) add(s *Stats) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.stats
	if a, ok := e.a.(asyncAllocator); ok {
		var err error
		if x.ReservedBytes.All.Current, x.ReservedBytes.All.Peak, err = a.reserved(e.h.dev); err != nil {
			return err
		}
	}
	to, from := s.ofEngines(), x.ofEngines()
	for i := range to {
		to[i].sum(*from[i])
	}
	s.OOMs += x.OOMs
	s.DeviceAllocs += x.DeviceAllocs
	s.DeviceFrees += x.DeviceFrees
	return nil
}

// ofEngines returns the statistics of s that an engine also keeps.
func (s *Stats) ofEngines() []*Stat {
	return []*Stat{&s.Allocation.All, &s.Active.All, &s.AllocatedBytes.All, &s.ActiveBytes.All, &s.RequestedBytes.All, &s.ReservedBytes.All}
}

func (s *Stat) sum(o Stat) {
	s.Current += o.Current
	s.Peak += o.Peak
	s.Allocated += o.Allocated
	s.Freed += o.Freed
}

// ResetPeakStats resets the peaks to the current values
// (torch.cuda.reset_peak_memory_stats).
func ResetPeakStats(d *device.Device) error {
	return resetStats(d, (*alloc.Device).ResetPeaks, (*uncached).resetPeaks)
}

// ResetAccumulatedStats sets the totals of allocated and freed memory, retries and
// errors to zero (torch.cuda.reset_accumulated_memory_stats).
func ResetAccumulatedStats(d *device.Device) error {
	return resetStats(d, (*alloc.Device).ResetSums, (*uncached).resetSums)
}

func resetStats(d *device.Device, native func(*alloc.Device), engine func(*uncached) error) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	native(h.native)
	h.mu.Lock()
	engines := slices.Clone(h.engines)
	h.mu.Unlock()
	var errs []error
	for _, e := range engines {
		errs = append(errs, engine(e))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("memory: reset the statistics of %s: %w", d, err)
	}
	return nil
}

func (e *uncached) resetPeaks() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.stats.ofEngines() {
		s.Peak = s.Current
	}
	if a, ok := e.a.(asyncAllocator); ok {
		return a.resetPeak(e.h.dev)
	}
	return nil
}

func (e *uncached) resetSums() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.stats.ofEngines() {
		s.Allocated, s.Freed = 0, 0
	}
	e.stats.OOMs, e.stats.DeviceAllocs, e.stats.DeviceFrees = 0, 0, 0
	return nil
}

// Allocated returns the bytes that the program has allocated on the device, with the
// rounded size of each block (torch.cuda.memory_allocated).
func Allocated(d *device.Device) (int64, error) {
	s, err := StatsOf(d)
	return s.AllocatedBytes.All.Current, err
}

// MaxAllocated returns the peak of Allocated since ResetPeakStats
// (torch.cuda.max_memory_allocated).
func MaxAllocated(d *device.Device) (int64, error) {
	s, err := StatsOf(d)
	return s.AllocatedBytes.All.Peak, err
}

// Reserved returns the bytes that the allocator has reserved from the driver, used or
// cached
// (torch.cuda.memory_reserved, torch.cuda.memory_cached).
func Reserved(d *device.Device) (int64, error) {
	s, err := StatsOf(d)
	return s.ReservedBytes.All.Current, err
}

// MaxReserved returns the peak of Reserved since ResetPeakStats
// (torch.cuda.max_memory_reserved, torch.cuda.max_memory_cached).
func MaxReserved(d *device.Device) (int64, error) {
	s, err := StatsOf(d)
	return s.ReservedBytes.All.Peak, err
}

// SetFraction limits how much memory the allocator reserves from the driver: a fraction
// of the device's memory, from 0 to 1. Allocations beyond it are out of memory
// (torch.cuda.set_per_process_memory_fraction). Memory that is already reserved stays
// reserved. 1 means no limit.
func SetFraction(d *device.Device, fraction float64) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	if !(fraction >= 0 && fraction <= 1) {
		return fmt.Errorf("memory: limit the memory of %s to %g of all: want a number from 0 to 1", d, fraction)
	}
	h.native.SetFraction(fraction)
	return nil
}

// Fraction returns the fraction set by SetFraction, or else by the options
// (torch.cuda.get_per_process_memory_fraction).
func Fraction(d *device.Device) (float64, error) {
	h, err := heapOf(d)
	if err != nil {
		return 0, err
	}
	return h.native.Fraction(), nil
}
