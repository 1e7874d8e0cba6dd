package alloc

import (
	"errors"
	"slices"
	"sync/atomic"
)

// A PoolID is torch's identifier of a pool: {0, 0} is the default pool, {n, 0} a pool
// of a graph, {0, n} a pool of a caller.
type PoolID [2]uint64

// A Pool has the memory of one purpose. The memory is not used for anything else, and
// is returned to the driver only after the pool is closed.
type Pool struct {
	device  *Device
	id      PoolID
	source  Source
	noSplit bool
	spare   bool // others may use its memory before they fail
	closed  atomic.Bool

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
	ID      PoolID
	Source  Source // nil means the device's
	NoSplit bool   // each block is a whole segment
	Spare   bool   // others may use its memory before they fail
	// Graphs makes a pool for captures: see Pool.Rejoin.
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
	p := &Pool{device: d, id: cfg.ID, source: cfg.Source, noSplit: cfg.NoSplit, spare: cfg.Spare}
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
	a.payAuditor()
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

// Begin records that a capture begins. Until Rejoin, memory that a stream frees is
// reused only by that stream.
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

// adoptBlock moves a free block from the shelf of its arena to the shelf of a.
func (a *Arena) adoptBlock(b block) {
	k, m := b.s.kind, &a.domain.meter
	b.arena().shelves[k].remove(b)
	b.setArena(a)
	part := b.split()
	whole, joined, _ := a.join(b)
	a.shelves[k].add(whole)
	m.change(k, InactiveSplit, -int64(joined))
	if part && !whole.split() {
		m.down(k, InactiveSplit, 1)
		m.down(k, InactiveSplitBytes, int64(whole.size()))
	}
}

// Close frees the unused memory; the rest is freed when the callers free it. Later
// allocations from the pool fail.
func (p *Pool) Close() error {
	p.closed.Store(true)
	if p.device.barred() != nil {
		return nil // Empty returns the memory
	}
	return p.device.reclaim(p)
}
