package memory

import (
	"errors"
	"fmt"
	"math"
)

// mostDevices bounds the ordinals, because there is one trace for each ordinal.
const mostDevices = 4096

// check validates the invariants that readers of the format rely on: segments do not
// overlap and are sorted by address, and the blocks of each segment fill it.
// WritePickle and WriteJSON call it.
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
