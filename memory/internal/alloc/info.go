package alloc

import (
	"cmp"
	"slices"
)

// Counts are the statistics that are not gauges.
type Counts struct {
	Retries, OutOfMemory, Syncs, Taken, Given int64
	OversizeBlocks, OversizeSegments          Stat
}

// Counts returns the statistics that are not gauges.
func (d *Device) Counts() Counts {
	d.oversize.mu.Lock()
	defer d.oversize.mu.Unlock()
	return Counts{
		Retries: d.retries.Load(), OutOfMemory: d.ooms.Load(), Syncs: d.syncs.Load(), Taken: d.taken.Load(), Given: d.given.Load(),
		OversizeBlocks: d.oversize.blocks, OversizeSegments: d.oversize.segments,
	}
}

// A SegmentInfo describes a segment, or a mapped part of an expandable segment.
type SegmentInfo struct {
	Addr       uint64
	Size       uint64
	Small      bool
	Expandable bool
	Graphs     bool // of a pool for captures
	Stream     uint64
	Pool       PoolID
	Stack      *Stack
	Blocks     []BlockInfo // contiguous, from Addr to Addr+Size
}

// A BlockInfo describes a block.
type BlockInfo struct {
	Addr      uint64
	Size      uint64
	Requested uint64
	Used      bool // in use by a caller
	Pending   bool // it was freed, but streams may still use it
	Stack     *Stack
}

// Segments describes all segments, by address. The description of each arena is of one
// moment; different arenas are described at different moments, so that no stream waits
// for all others.
func (d *Device) Segments() (list []SegmentInfo) {
	d.growth.Lock()
	defer d.growth.Unlock()
	for _, p := range d.pools {
		list = append(list, p.segments()...)
	}
	slices.SortFunc(list, func(x, y SegmentInfo) int { return cmp.Compare(x.Addr, y.Addr) })
	return list
}

// Segments describes the segments of the pool.
func (p *Pool) Segments() []SegmentInfo {
	p.device.growth.Lock()
	defer p.device.growth.Unlock()
	return p.segments()
}

func (p *Pool) segments() (list []SegmentInfo) {
	for _, a := range p.arenas {
		a.domain.lock()
		for _, s := range a.segments {
			list = append(list, s.info()...)
		}
		for _, s := range a.spans {
			if s != nil {
				list = append(list, s.info()...)
			}
		}
		a.domain.mu.Unlock()
	}
	return list
}

// info describes the mapped parts of a segment.
func (s *segment) info() (list []SegmentInfo) {
	hole := true
	s.each(func(b block) {
		x := b.slot()
		if x.has(isHole) {
			hole = true
			return
		}
		if hole {
			i := SegmentInfo{Addr: b.addr(), Small: s.kind == small, Expandable: s.span != nil, Graphs: s.home.pool.base != nil, Pool: s.home.pool.id, Stack: s.stack}
			if s.home.stream != nil {
				i.Stream = s.home.stream.Number()
			}
			list = append(list, i)
		}
		hole = false
		part := &list[len(list)-1]
		part.Size += b.size()
		i := BlockInfo{Addr: b.addr(), Size: b.size(), Used: x.has(isUsed), Pending: x.has(isPending), Stack: b.stack()}
		if !x.isFree() {
			i.Requested = x.requested()
		}
		part.Blocks = append(part.Blocks, i)
	})
	return list
}

// History returns the recorded entries in chronological order. Before that it records
// an ActionSnapshot.
func (d *Device) History() []Entry {
	h := d.history.Load()
	if h == nil {
		return nil
	}
	d.note(ActionSnapshot, 0, uint64(d.Read(ActiveBytes).All.Current), nil, nil)
	return h.list()
}

// Reserved returns the bytes that the pool has reserved from the driver.
func (p *Pool) Reserved() uint64 {
	n := uint64(0)
	for _, s := range p.Segments() {
		n += s.Size
	}
	return n
}

// Allocated returns the bytes of the pool that are in use.
func (p *Pool) Allocated() uint64 {
	n := uint64(0)
	for _, s := range p.Segments() {
		for _, b := range s.Blocks {
			if b.Used {
				n += b.Size
			}
		}
	}
	return n
}
