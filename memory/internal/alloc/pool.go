package alloc

import (
	"cmp"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/timeline"
)

// A PoolID is torch's identifier of a pool: {0, 0} is the default pool, {n, 0} a pool
// of a graph, {0, n} a pool of a caller.
type PoolID [2]uint64

// A Pool has the memory of one purpose. The memory is not used for anything else, and
// is returned to the driver only after the pool is closed.
type Pool struct {
	device   *Device
	id       PoolID
	source   Source
	noSplit  bool
	useOnOOM bool // others may use its memory before they fail
	closed   atomic.Bool

	// Only for a pool of graphs: all arenas share one lock, and base has the blocks
	// that any of their streams may use, which are all blocks that are free when a
	// capture begins.
	domain    *domain
	base      *Arena
	capturing bool // guarded by the domain

	arenas   []*Arena   // guarded by the device's growth
	orphans  []*Arena   // the arenas whose stream has ended, which another stream may take over
	watchers []*Watcher // guarded by the device's growth
}

// PoolConfig are the properties of a pool.
type PoolConfig struct {
	ID       PoolID
	Source   Source // nil means the device's
	NoSplit  bool   // each block is a whole segment
	UseOnOOM bool   // others may use its memory before they fail
	// Graphs returns a pool for captures: see Pool.Rejoin.
	Graphs bool
}

// NewPool adds a pool.
func (d *Device) NewPool(cfg PoolConfig) *Pool {
	d.growth.Lock()
	defer d.growth.Unlock()
	return d.newPool(cfg)
}

func (d *Device) newPool(cfg PoolConfig) *Pool {
	if cfg.Source == nil {
		cfg.Source = d.cfg.Source
	}
	p := &Pool{device: d, id: cfg.ID, source: cfg.Source, noSplit: cfg.NoSplit, useOnOOM: cfg.UseOnOOM}
	p.closed.Store(d.closed)
	if cfg.Graphs {
		p.domain = d.newDomain()
		p.base = p.newArena(nil)
	}
	d.pools = append(d.pools, p)
	return p
}

// ID returns the pool's identifier.
func (p *Pool) ID() PoolID { return p.id }

// Arena returns the arena of a stream. A stream without an arena takes over the arena
// of a stream that has ended, if there is one.
func (p *Pool) Arena(s Stream) (*Arena, error) {
	if err := p.device.barred(); err != nil {
		return nil, err
	}
	p.device.growth.Lock()
	defer p.device.growth.Unlock()
	if p.closed.Load() {
		return nil, ErrClosed
	}
	return p.arenaOf(s)
}

// arenaOf is Arena with growth held.
func (p *Pool) arenaOf(s Stream) (*Arena, error) {
	for _, a := range p.arenas {
		if a.stream == s {
			return a, nil
		}
	}
	if s.Ended() {
		return nil, ErrEnded
	}
	n := len(p.orphans)
	if n == 0 {
		return p.newArena(s), nil
	}
	a := p.orphans[n-1]
	if a.ended != nil {
		if err := s.Wait(a.ended); err != nil {
			return nil, err
		}
	}
	p.orphans = p.orphans[:n-1]
	a.domain.lock()
	a.forgetEnd()
	a.stream = s
	for _, seg := range a.segments {
		seg.stream = s
	}
	a.reportPostponed()
	a.domain.mu.Unlock()
	return a, nil
}

// forgetEnd closes the event after the last operation of the arena's previous stream.
func (a *Arena) forgetEnd() {
	if a.ended != nil {
		a.ended.Close()
		a.ended = nil
	}
}

func (p *Pool) newArena(s Stream) *Arena {
	dom := p.domain
	if dom == nil {
		dom = p.device.newDomain()
	}
	a := &Arena{device: p.device, pool: p, domain: dom, stream: s}
	a.audits = p.device.cfg.Auditor != nil && p.domain == nil
	dom.mu.Lock()
	dom.arenas = append(dom.arenas, a)
	dom.mu.Unlock()
	p.arenas = append(p.arenas, a)
	return a
}

// End records that a stream is about to be destroyed. Blocks that callers still own may
// be freed later, but must not be used any more.
func (d *Device) End(s Stream) {
	d.growth.Lock()
	defer d.growth.Unlock()
	for _, p := range d.pools {
		for _, a := range p.arenas {
			if a.stream == s {
				a.endStream()
			}
		}
	}
}

func (a *Arena) endStream() {
	s := a.stream
	a.domain.lock()
	if a.pool.base == nil { // a later free comes before the event or has no stream
		a.ended, a.lost = s.Record()
	}
	a.stream = nil
	a.device.unlockDomain(a.domain)
	if a.pool.base != nil {
		return
	}
	if a.ended == nil {
		a.lost = s.Sync()
	}
	if a.lost == nil {
		a.pool.orphans = append(a.pool.orphans, a)
	}
}

// unlessBusy drops ErrBusy, for an operation that can wait until the capture has ended.
func unlessBusy(err error) error {
	if errors.Is(err, ErrBusy) {
		return nil
	}
	return err
}

// sync waits until the stream has completed all operations on the arena's memory. For
// graphs it waits for the device, since they may be launched on any stream.
func (a *Arena) sync() error {
	switch {
	case a.pool.base != nil:
		if wait := a.device.cfg.Sync; wait != nil {
			return wait()
		}
	case a.stream != nil:
		return a.stream.Sync()
	case a.ended != nil:
		return a.ended.Sync()
	}
	return a.lost
}

// Begin records that a capture begins: until Rejoin, memory that a stream frees
// is reused only by that stream.
func (p *Pool) Begin() {
	p.domain.lock()
	p.capturing = true
	p.domain.mu.Unlock()
}

// Rejoin records that the capture has ended and makes all free blocks usable by every
// stream. The graphs of one pool run one after another. The next graph may therefore
// use memory that the capture freed on any stream, or used on another captured stream.
func (p *Pool) Rejoin() {
	d := p.device
	d.growth.Lock()
	defer d.growth.Unlock()
	p.domain.lock()
	p.capturing = false
	for _, r := range p.domain.records {
		release(r.captured)
		r.captured = nil
	}
	for _, a := range p.arenas {
		a.uncapture()
		if a == p.base {
			continue
		}
		for k := range kinds {
			for _, b := range a.blocks(k, unit) {
				p.base.adoptBlock(b)
			}
		}
		if a.stream == nil && !slices.Contains(p.orphans, a) {
			p.orphans = append(p.orphans, a)
		}
	}
	d.unlockDomain(p.domain)
}

// adoptBlock moves a free block from the freeList of its arena to the freeList of a.
func (a *Arena) adoptBlock(b block) {
	k, m := b.s.kind, &a.domain.meter
	b.arena().freeLists[k].remove(b)
	b.setArena(a)
	part := b.split()
	whole, joined, _ := a.join(b)
	a.freeLists[k].add(whole)
	m.change(k, InactiveSplit, -int64(joined))
	if part && !whole.split() {
		m.down(k, InactiveSplit, 1)
		m.down(k, InactiveSplitBytes, int64(whole.size()))
	}
}

// Close frees the unused memory, and makes later allocations from the pool
// fail. The rest is freed when the callers free it.
func (p *Pool) Close() error {
	p.closed.Store(true)
	if p.device.barred() != nil {
		return nil // Empty returns the memory
	}
	return p.device.reclaim(p)
}

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

// History records an ActionSnapshot, and returns the recorded entries in
// chronological order.
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

// An Action is a kind of Entry, with torch's names.
type Action uint8

// The actions.
const (
	ActionAlloc Action = iota
	ActionFreeRequested
	ActionFreeCompleted
	ActionSegmentAlloc
	ActionSegmentFree
	ActionSegmentMap
	ActionSegmentUnmap
	ActionSnapshot
	ActionOOM
)

var actionNames = [...]string{"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
	"segment_map", "segment_unmap", "snapshot", "oom"}

func (a Action) String() string { return actionNames[a] }

// An Entry is one recorded operation. For ActionOOM, Addr is the free memory of the
// device.
type Entry struct {
	Action Action
	Addr   uint64
	Size   uint64
	Stream uint64
	Time   time.Time
	Pool   PoolID
	Stack  *Stack
}

// A Stack is a call stack in the program, innermost call first.
type Stack struct{ PCs []uintptr }

// stackDepth is the maximum depth of a Stack.
const stackDepth = 32

// HistoryConfig configures a History.
type HistoryConfig struct {
	Entries int  // the maximum number; the latest ones are kept. 0 keeps none
	Stacks  bool // record stacks of allocations and frees
}

// A History records the operations on the memory of a device.
type History struct {
	cfg     HistoryConfig
	mu      sync.Mutex
	entries []Entry // a ring, once it is full
	next    int
}

// Record starts a new history, or stops the recording if cfg is nil. Blocks
// keep the stacks that they have.
func (d *Device) Record(cfg *HistoryConfig) {
	if cfg == nil {
		d.history.Store(nil)
		return
	}
	d.history.Store(&History{cfg: *cfg})
}

// stackOf returns the caller's stack if stacks are recorded.
func (d *Device) stackOf() *Stack {
	if h := d.history.Load(); h != nil && h.cfg.Stacks {
		return callers()
	}
	return nil
}

func callers() *Stack {
	var pcs [stackDepth]uintptr
	n := runtime.Callers(3, pcs[:])
	return &Stack{PCs: append([]uintptr(nil), pcs[:n]...)}
}

// note records an entry, at almost no cost while nothing is recorded.
func (d *Device) note(action Action, addr, size uint64, a *Arena, stack *Stack) {
	if h := d.history.Load(); h != nil {
		h.note(action, addr, size, a, stack)
	}
	if t := timeline.Current(); t != nil {
		t.Add(timeline.Record{Kind: timeline.Memory, Name: actionNames[action], Device: d.cfg.Ordinal, Begin: t.Now(), Bytes: size})
	}
}

func (h *History) note(action Action, addr, size uint64, a *Arena, stack *Stack) {
	if h.cfg.Entries > 0 {
		e := Entry{Action: action, Addr: addr, Size: size, Time: time.Now(), Stack: stack}
		if a != nil {
			e.Pool = a.pool.id
			if a.stream != nil {
				e.Stream = a.stream.Number()
			}
		}
		h.add(e)
	}
}

func (h *History) add(e Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.entries) < h.cfg.Entries {
		h.entries = append(h.entries, e)
		return
	}
	h.entries[h.next] = e
	h.next = (h.next + 1) % len(h.entries)
}

// list returns the entries in chronological order.
func (h *History) list() []Entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append(append([]Entry(nil), h.entries[h.next:]...), h.entries[:h.next]...)
}

// last returns the stacks of the last allocation and free of the block at addr.
func (h *History) last(addr uint64) (alloc, freed *Stack) {
	for _, e := range h.list() {
		switch {
		case e.Addr != addr:
		case e.Action == ActionAlloc:
			alloc, freed = e.Stack, nil
		case e.Action == ActionFreeRequested:
			freed = e.Stack
		}
	}
	return alloc, freed
}
