// Package alloc is the caching allocator of device memory. It tracks which bytes are in
// use, and which stream may reuse them. It does not call a driver:
// package memory implements [Source], which allocates segments, and [Stream], which
// records events.
//
// The rules are the same as in torch's caching allocator, to the byte: sizes, pools,
// best fit, splitting, coalescing, the order of fallbacks when memory runs out, and the
// statistics. A [Device] has several [Pool]s, and a Pool has one [Arena] per stream. An
// Arena has the free blocks that only its stream may use, in small and large segments.
// Each arena of the default pool has its own lock, so that streams do not wait for each
// other. State that is common to the device is used only when memory is allocated from
// the driver or returned to it.
package alloc

import (
	"math"
	"sync"
)

// An Arena allocates memory for use on one stream. It reuses freed memory at once,
// because the stream's later operations run after the earlier ones. Its methods may be
// called by several goroutines.
type Arena struct {
	device *Device
	pool   *Pool
	domain *domain
	stream Stream // nil if the stream has ended, and for the base of a pool
	ended  Event  // after the last operation of the stream, or nil if that has completed
	lost   error  // why the end of the operations is unknown
	audits bool
	owed   []piece // freed after the stream ended, and not yet reported to the auditor

	freeLists   [kinds]freeList
	lastFreed   block
	lastFreedOK fitted
	missed      uint       // frees since lastFreed was last useful
	segments    []*segment // from a Source, allocated for this arena
	spans       [kinds]*segment
	waiting     waiting
}

// Alloc returns the address of at least n bytes, n > 0, for use on the
// arena's stream.
func (a *Arena) Alloc(n uint64) (addr uint64, err error) {
	d := a.device
	stack := d.stackOf()
	if n >= absurd {
		return 0, &NoMemoryError{Requested: n}
	}
	s := d.settings.Load()
	size := s.round(n)
	k := kindOf(size)
	a.domain.mu.Lock()
	if a.waiting.any() {
		a.collect()
	}
	if p := a.lastFreed; p.s != nil {
		if a.fromLastFreed(size) {
			addr = a.splitLastFreed(p, size, n, stack)
			d.unlockDomain(a.domain)
			return addr, nil
		}
		a.flushLastFreed()
	}
	b := a.bestFree(s, k, size)
	if b.nothing() {
		a.domain.mu.Unlock()
		if b, err = a.grow(s, k, size); err != nil {
			return 0, err
		}
		if b.s.domain != a.domain {
			a = b.arena() // of a pool with PoolConfig.UseOnOOM
		}
	}
	addr = a.allocate(s, b, size, n, stack)
	d.unlockDomain(a.domain)
	return addr, nil
}

// bestFree returns the best free block and leaves it in its free list, or nothing.
func (a *Arena) bestFree(s *Settings, k kind, size uint64) block {
	if a.pool.closed.Load() || a.stream == nil {
		return block{} // grow returns the error
	}
	b := a.pick(s, k, size)
	if b.nothing() && a.pool.base != nil {
		b = a.pool.base.pick(s, k, size)
	}
	return b
}

// pick returns the best block on the arena's own freeLists.
func (a *Arena) pick(s *Settings, k kind, size uint64) block {
	e, ok := a.freeLists[k].best(size)
	if !ok {
		return block{}
	}
	b := a.domain.block(k, e.key)
	if s.MaxSplit != math.MaxUint64 && !s.suits(b, size) {
		return block{}
	}
	return b
}

// suits prevents small requests from using unsplittable huge blocks.
func (s *Settings) suits(b block, size uint64) bool {
	if size < s.MaxSplit {
		return b.size() < s.MaxSplit || b.s.span != nil
	}
	return b.size() < size+s.MaxNonSplitRounding || b.s.span != nil
}

// worthSplitting reports whether the rest of a block after a request is kept as a
// block.
func (a *Arena) worthSplitting(s *Settings, g *segment, rest, size uint64) bool {
	switch {
	case a.pool.noSplit:
		return false
	case g.kind == small:
		return rest >= unit
	}
	return rest > smallMost && (size < s.MaxSplit || g.span != nil)
}

// allocate takes the first size bytes of a block that is in a free list. The domain is
// locked.
func (a *Arena) allocate(s *Settings, b block, size, requested uint64, stack *Stack) uint64 {
	k, m, x := b.s.kind, &a.domain.meter, b.slot()
	freeList := &a.freeLists[k]
	if x.place&isMoved != 0 || b.s.home != a {
		freeList = &b.arena().freeLists[k]
	}
	counts := b.s.span == nil // torch does not count expandable segments here
	wasSplit := x.size != b.s.units
	e := entry{uint64(x.size) * unit, b.key()}
	if a.worthSplitting(s, b.s, e.size-size, size) {
		rest := b.cut(size)
		freeList.swap(e, entry{e.size - size, e.key + size/unit})
		rest.slot().setOver(freeList.searches)
		switch {
		case counts && wasSplit:
			m.down(k, InactiveSplitBytes, int64(size))
		case counts:
			m.up(k, InactiveSplit, 1)
			m.up(k, InactiveSplitBytes, int64(e.size-size))
		}
	} else {
		freeList.drop(e)
		size = e.size
		if counts && wasSplit {
			m.down(k, InactiveSplit, 1)
			m.down(k, InactiveSplitBytes, int64(size))
		}
	}
	if a.pool.base != nil {
		b.setArena(a)
	}
	addr := a.markAllocated(b, x, size, requested, stack)
	if size >= s.MaxSplit {
		x.over |= isOversize
		a.device.oversize.up(&a.device.oversize.blocks)
	}
	return addr
}

// markAllocated marks b as in use and updates statistics, history and the auditor. Every
// allocation ends here.
func (a *Arena) markAllocated(b block, x *slot, size, requested uint64, stack *Stack) uint64 {
	addr := b.addr()
	x.place |= isUsed
	x.setOver(size - requested)
	if stack != nil {
		b.keep().stack = stack
	}
	a.domain.meter.markAllocated(b.s.kind, int64(size), int64(requested))
	if a.audits {
		a.device.cfg.Auditor.Allocated(a.stream, addr, size)
	}
	a.device.note(ActionAlloc, addr, requested, a, stack)
	return addr
}

// freeUsed frees a used block. If other streams may still use it, freeUsed returns a
// batch, which the caller passes to postpone. The domain is locked.
func (a *Arena) freeUsed(b block, x *slot) *batch {
	d, k, size := a.device, b.s.kind, uint64(x.size)*unit
	s := d.settings.Load()
	if x.over&isOversize != 0 {
		x.over &^= isOversize
		d.oversize.down(&d.oversize.blocks)
	}
	d.note(ActionFreeRequested, b.addr(), x.requested(), a, d.stackOf())
	x.place &^= isUsed
	if x.has(isRecorded) {
		if users, captured := b.dropUsers(); len(users)+len(captured) > 0 {
			a.domain.meter.giveBack(k, int64(size))
			x.place |= isPending
			t := newBatch(b, users, captured)
			if len(captured) == 0 {
				return t
			}
			a.waiting.add(t) // until the capture has ended; Rejoin then drops it under this lock
			return nil
		}
	}
	a.domain.meter.giveBack(k, int64(size))
	a.freeUnused(b, x, s)
	return nil
}

// freeUnused frees a block that no stream uses any more.
func (a *Arena) freeUnused(b block, x *slot, s *Settings) {
	if p := a.pool; p.base != nil && !p.capturing {
		a = p.base
		b.setArena(a)
	}
	if x.has(isRecorded) {
		b.dropRecord()
	}
	size, requested := uint64(x.size)*unit, x.requested()
	a.domain.meter.retire(b.s.kind, int64(size), int64(requested))
	a.device.note(ActionFreeCompleted, b.addr(), requested, a, nil)
	if a.audits {
		a.reportFreed(b.addr(), size)
	}
	x.place |= isPending // so that no neighbor merges with it
	if !a.lastFreed.nothing() {
		a.flushLastFreed()
	}
	if a.keepLastFreed(b, x, s) {
		return
	}
	x.place &^= isPending
	a.insertFree(b)
}

// insertFree merges a free block with its free neighbors and puts it in its free list.
func (a *Arena) insertFree(b block) {
	if b.s.slots != nil && a.pool.base == nil {
		a.insertFreePlain(b)
		return
	}
	k, m := b.s.kind, &a.domain.meter
	b, joined, bytes := a.join(b)
	a.freeLists[k].add(b)
	if b.s.span != nil {
		return
	}
	blocks, change := -int64(joined), -int64(bytes)
	if x := b.slot(); x.size != b.s.units {
		blocks++
		change += int64(x.size) * unit
	}
	m.change(k, InactiveSplit, blocks)
	m.change(k, InactiveSplitBytes, change)
}

// insertFreePlain is insertFree for a segment without holes and with blocks of one arena only.
// It does the same in one pass, because every free of a program comes here.
func (a *Arena) insertFreePlain(b block) {
	s, freeList, m := b.s, &a.freeLists[b.s.kind], &a.domain.meter
	x := s.slot(b.u)
	parts, units := int64(1), int64(x.size) // the increase of InactiveSplit and InactiveSplitBytes
	var old entry                           // the neighbor's entry, which the merged block replaces
	if x.back != 0 {
		p := block{s, b.u - x.back}
		if y := s.slot(p.u); y.place&(isUsed|isPending) == 0 {
			old = entry{uint64(y.size) * unit, p.key()}
			y.size += x.size
			*x = slot{}
			b, x = p, y
			parts--
		}
	}
	if n := b.behind(x); n.s != nil {
		if y := s.slot(n.u); y.place&(isUsed|isPending) == 0 {
			if old.size > 0 {
				freeList.drop(old)
			}
			old = entry{uint64(y.size) * unit, n.key()}
			x.size += y.size
			*y = slot{}
			parts--
			n = b.behind(x)
		}
		if n.s != nil {
			s.slot(n.u).back = x.size
		}
	}
	if x.size == s.units { // the neighbors were free parts, the whole segment is not
		parts, units = parts-1, units-int64(x.size)
	}
	freeList.swap(old, entry{uint64(x.size) * unit, b.key()})
	x.setOver(freeList.searches)
	m.change(s.kind, InactiveSplit, parts)
	m.change(s.kind, InactiveSplitBytes, units*unit)
}

// join merges b, which is on no freeList, with its free neighbors. It returns the number
// of neighbors and their bytes.
func (a *Arena) join(b block) (whole block, joined int, bytes uint64) {
	if p := b.prev(); p.joins(b) {
		bytes, joined = p.size(), 1
		a.pull(p)
		p.swallow(b)
		b = p
	}
	if n := b.next(); b.joins(n) {
		bytes, joined = bytes+n.size(), joined+1
		a.pull(n)
		b.swallow(n)
	}
	return b, joined, bytes
}

// pull removes a free block from its freeList or from the holes.
func (a *Arena) pull(b block) {
	if b.slot().has(isHole) {
		b.s.span.fill(b)
		return
	}
	a.freeLists[b.s.kind].remove(b)
}

// A Gauge is one of torch's statistics.
type Gauge uint8

// The gauges, with torch's names.
const (
	Allocation         Gauge = iota // blocks that callers have
	Segments                        //
	Active                          // blocks that callers or streams may still use
	InactiveSplit                   // free parts of segments
	AllocatedBytes                  //
	ReservedBytes                   //
	ActiveBytes                     //
	InactiveSplitBytes              //
	RequestedBytes                  // requested bytes of Active
	gauges
)

// scopes are small, large, and both together.
const (
	both   = kinds
	scopes = kinds + 1
)

// A reading is one gauge of one scope. now may grow up to cap without a new peak of the
// device. sum is the total of all increases, start the value of now at the last reset;
// both are used for the two kinds only.
type reading struct{ now, sum, start, cap int64 }

// A meter counts for one domain, under its lock. The device's peaks are exact although
// no stream writes to memory of another stream: each domain has caps whose sum over all
// domains is at most the peak. Only a domain that exceeds its cap reads the others.
type meter struct {
	r    [gauges][scopes]reading
	high bool // a cap was exceeded
}

func (m *meter) up(k kind, g Gauge, n int64) {
	r, all := &m.r[g][k], &m.r[g][both]
	r.sum += n
	r.now += n
	all.now += n
	if r.now > r.cap || all.now > all.cap {
		m.high = true
	}
}

// near reports whether n more could be a new peak.
func (m *meter) near(k kind, g Gauge, n int64) bool {
	r, all := &m.r[g][k], &m.r[g][both]
	return r.now+n > r.cap || all.now+n > all.cap
}

func (m *meter) down(k kind, g Gauge, n int64) {
	m.r[g][k].now -= n
	m.r[g][both].now -= n
}

// markAllocated counts an allocation, giveBack a free, and retire a freed block that no stream
// uses any more.
func (m *meter) markAllocated(k kind, size, requested int64) {
	m.up(k, Allocation, 1)
	m.up(k, AllocatedBytes, size)
	m.up(k, Active, 1)
	m.up(k, ActiveBytes, size)
	m.up(k, RequestedBytes, requested)
}

func (m *meter) giveBack(k kind, size int64) {
	m.down(k, Allocation, 1)
	m.down(k, AllocatedBytes, size)
}

func (m *meter) retire(k kind, size, requested int64) {
	m.down(k, Active, 1)
	m.down(k, ActiveBytes, size)
	m.down(k, RequestedBytes, requested)
}

// change calls up or down.
func (m *meter) change(k kind, g Gauge, n int64) {
	if n >= 0 {
		m.up(k, g, n)
	} else {
		m.down(k, g, -n)
	}
}

// adjustCaps updates the peaks and assigns new caps, because a meter has
// exceeded its cap. All domains are locked.
func (d *Device) adjustCaps(domains []*domain) {
	for g := range gauges {
		for s := range scopes {
			d.grant(domains, g, s)
		}
	}
	for _, dom := range domains {
		dom.meter.high = false
	}
}

// grant distributes a peak among the domains. The cap of a domain is at least its
// current value, and is only lowered if another domain needs it.
func (d *Device) grant(domains []*domain, g Gauge, s kind) {
	var now, over, caps int64
	for _, dom := range domains {
		r := &dom.meter.r[g][s]
		now += r.now
		caps += r.cap
		over += max(r.now-r.cap, 0)
	}
	peak := &d.peaks[g][s]
	*peak = max(*peak, now)
	if over == 0 {
		return
	}
	// First use the part of the peak that no domain has, then lower the largest unused
	// caps.
	for available := *peak - caps; available < over; {
		r := slackest(domains, g, s)
		slack := r.cap - r.now
		give := min(slack, over-available)
		r.cap -= give
		available += give
	}
	for _, dom := range domains {
		r := &dom.meter.r[g][s]
		r.cap = max(r.cap, r.now)
	}
}

// slackest returns the reading that is farthest below its cap.
func slackest(domains []*domain, g Gauge, s kind) (most *reading) {
	for _, dom := range domains {
		if r := &dom.meter.r[g][s]; most == nil || r.cap-r.now > most.cap-most.now {
			most = r
		}
	}
	return most
}

// settleAlone is settle for the only domain of a device, under its lock.
func (d *Device) settleAlone(m *meter) {
	for g := range gauges {
		for s := range scopes {
			r := &m.r[g][s]
			if r.now > r.cap {
				r.cap = r.now
				d.peaks[g][s] = r.now
			}
		}
	}
	m.high = false
}

// A Stat is torch's form of a gauge: Allocated and Freed are the sums of all increases
// and decreases since the start or the last reset.
type Stat struct{ Current, Peak, Allocated, Freed int64 }

// A PoolStat is a gauge for both kinds of segments together and for each kind.
type PoolStat struct{ All, Small, Large Stat }

func (d *Device) stat(domains []*domain, g Gauge, s kind) Stat {
	x := Stat{Peak: d.peaks[g][s]}
	for _, dom := range domains {
		r := &dom.meter.r[g]
		x.Current += r[s].now
		for k := range kinds {
			if s == k || s == both {
				x.Allocated += r[k].sum
				x.Freed += r[k].start + r[k].sum - r[k].now
			}
		}
	}
	return x
}

// Read returns the values of a gauge.
func (d *Device) Read(g Gauge) PoolStat {
	domains := d.lockAll()
	defer unlock(domains)
	return PoolStat{All: d.stat(domains, g, both), Small: d.stat(domains, g, small), Large: d.stat(domains, g, large)}
}

// ResetPeaks sets the peaks to the current values.
func (d *Device) ResetPeaks() {
	domains := d.lockAll()
	defer unlock(domains)
	for g := range gauges {
		for s := range scopes {
			d.peaks[g][s] = 0
			for _, dom := range domains {
				r := &dom.meter.r[g][s]
				r.cap = r.now
				d.peaks[g][s] += r.now
			}
		}
	}
	d.oversize.resetPeaks()
}

// ResetSums sets the sums of increases and decreases to zero.
func (d *Device) ResetSums() {
	domains := d.lockAll()
	for _, dom := range domains {
		for g := range gauges {
			for k := range kinds {
				r := &dom.meter.r[g][k]
				r.sum, r.start = 0, r.now
			}
		}
	}
	unlock(domains)
	d.oversize.resetSums()
	for _, c := range []*counter{&d.retries, &d.ooms, &d.syncs, &d.taken, &d.given} {
		c.Store(0)
	}
}

// ReadAll returns all gauges, read at one moment.
func (d *Device) ReadAll() (all [gauges]PoolStat) {
	domains := d.lockAll()
	defer unlock(domains)
	for g := range gauges {
		all[g] = PoolStat{All: d.stat(domains, g, both), Small: d.stat(domains, g, small), Large: d.stat(domains, g, large)}
	}
	return all
}

// oversize counts blocks and segments that are too large to be split.
type oversize struct {
	mu               sync.Mutex
	blocks, segments Stat
}

func (o *oversize) up(s *Stat) {
	o.mu.Lock()
	defer o.mu.Unlock()
	s.Current++
	s.Allocated++
	s.Peak = max(s.Peak, s.Current)
}

func (o *oversize) down(s *Stat) {
	o.mu.Lock()
	defer o.mu.Unlock()
	s.Current--
	s.Freed++
}

func (o *oversize) resetPeaks() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.blocks.Peak, o.segments.Peak = o.blocks.Current, o.segments.Current
}

func (o *oversize) resetSums() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range []*Stat{&o.blocks, &o.segments} {
		s.Allocated, s.Freed = 0, 0
	}
}
