package alloc

import (
	"sync"
	"sync/atomic"
)

// A Device allocates the memory of one device. Its methods may be called by
// several goroutines.
type Device struct {
	cfg      Config
	settings *atomic.Pointer[Settings]
	table    table
	history  atomic.Pointer[History]

	// growth is held by the one that takes memory from the driver or gives it
	// back. Who holds it may lock domains; who has locked one must not wait for it.
	growth   sync.Mutex
	pools    []*Pool // guarded by growth
	closed   bool    // guarded by growth
	reserved uint64  // guarded by growth

	// domains and peaks change under the locks of all domains, and so may be read
	// under any one.
	all     sync.Mutex // held while more than one domain is being locked
	domains []*domain
	unused  []*domain // of pools that are gone, among domains; guarded by growth
	peaks   [gauges][scopes]int64
	alone   atomic.Bool // there is one domain

	def      *Pool
	retries  counter
	ooms     counter
	syncs    counter
	taken    counter // segments and pages
	given    counter
	oversize oversize
	fraction float64 // of SetFraction, or less than 0; guarded by growth
}

type counter = atomic.Int64

// Config says what a Device allocates from.
type Config struct {
	Source  Source
	Pages   PageSource // nil is no expandable segments
	Total   uint64     // bytes of the device, of which fractions are
	Auditor Auditor    // may be nil
	// Barred says why this thread must not wait for the driver nor for who does: it is
	// within a function that a stream calls, for which others may wait. It may be nil.
	Barred func() error
	// Capturing reports whether a graph is being captured. Its nodes may use memory that
	// is free by now, and CUDA makes no graph of nodes whose memory is unmapped.
	Capturing func() bool
	// Low is called without locks when memory is short, to free what it can
	// (torch's FreeMemoryCallback). It may be nil.
	Low func()
	// Sync waits for all work of the device, or returns ErrBusy where it cannot now. It
	// may be nil.
	Sync func() error
	// Free tells how much the driver has left, for the record. It may be nil.
	Free func() uint64
}

// NewDevice returns an allocator that has taken no memory yet. The options may
// change at any time, for what is allocated from then on.
func NewDevice(cfg Config, s *atomic.Pointer[Settings]) *Device {
	d := &Device{cfg: cfg, settings: s, fraction: -1}
	d.def = d.newPool(PoolConfig{})
	return d
}

// Close lets nothing more be allocated: the pools, and those to come, are closed. What
// they have goes back with Empty, or when it is freed.
func (d *Device) Close() {
	d.growth.Lock()
	defer d.growth.Unlock()
	d.closed = true
	for _, p := range d.pools {
		p.closed.Store(true)
	}
}

// barred is Config.Barred.
func (d *Device) barred() error {
	if d.cfg.Barred == nil {
		return nil
	}
	return d.cfg.Barred()
}

// settled reports whether memory of a closed pool may go back to the driver now. If not,
// it goes back with the next memory of a closed pool, or with Empty.
func (d *Device) settled() bool {
	return d.barred() == nil && (d.cfg.Capturing == nil || !d.cfg.Capturing())
}

// Default returns the pool for all that is not allocated in another.
func (d *Device) Default() *Pool { return d.def }

// SetFraction limits what is taken from the driver to a part of the device
// (torch.cuda.set_per_process_memory_fraction); 1 is no limit. Without it the
// options say how much.
func (d *Device) SetFraction(f float64) {
	d.growth.Lock()
	defer d.growth.Unlock()
	d.fraction = f
}

// Fraction returns the part of the device that may be taken.
func (d *Device) Fraction() float64 {
	d.growth.Lock()
	defer d.growth.Unlock()
	if d.fraction >= 0 {
		return d.fraction
	}
	return d.settings.Load().ProcessFraction
}

// limit returns how much may be taken, and whether that is limited at all. growth
// is held.
func (d *Device) limit() (bytes uint64, limited bool) {
	f := d.fraction
	if f < 0 {
		f = d.settings.Load().ProcessFraction
	}
	return uint64(f * float64(d.cfg.Total)), f < 1
}

// allows says whether n bytes more may be taken from the driver. growth is held.
func (d *Device) allows(n uint64) bool {
	limit, limited := d.limit()
	return !limited || n <= limit && d.reserved <= limit-n
}

// newDomain returns a domain for a new pool or arena. growth is held, or d is not in
// use yet.
func (d *Device) newDomain() *domain {
	if n := len(d.unused); n > 0 {
		dom := d.unused[n-1]
		d.unused = d.unused[:n-1]
		return dom
	}
	dom := &domain{}
	d.all.Lock()
	defer d.all.Unlock()
	old := d.domains
	for _, o := range old {
		o.mu.Lock()
	}
	d.domains = append(d.domains[:len(old):len(old)], dom)
	d.alone.Store(len(d.domains) == 1)
	unlock(old)
	return dom
}

// lockAll locks every domain, so that what it counts is of one moment, and the peaks
// are those up to now.
func (d *Device) lockAll() []*domain {
	d.all.Lock()
	for _, dom := range d.domains {
		dom.lock()
	}
	d.all.Unlock()
	for _, dom := range d.domains {
		if dom.meter.high {
			d.settle(d.domains)
			break
		}
	}
	return d.domains
}

func unlock(domains []*domain) {
	for _, dom := range domains {
		dom.mu.Unlock()
	}
}

// leave ends an operation on a domain.
func (d *Device) leave(dom *domain) {
	if dom.meter.high {
		d.leaveHigh(dom)
		return
	}
	dom.mu.Unlock()
}

func (d *Device) leaveHigh(dom *domain) {
	alone := d.alone.Load()
	if alone {
		d.settleAlone(&dom.meter)
	}
	dom.mu.Unlock()
	if !alone {
		unlock(d.lockAll())
	}
}

// Free gives back what an Arena gave out. Work that is on the streams of the
// block may still use it.
func (d *Device) Free(addr uint64) error {
	s := d.table.segment(addr)
	if s == nil {
		return d.foreign(addr)
	}
	dom := s.domain
	dom.mu.Lock()
	b, x := s.block(addr)
	if x == nil || !x.has(isUsed) {
		dom.mu.Unlock()
		return d.foreign(addr)
	}
	a := b.arena()
	pending := a.give(b, x)
	gone := a.pool.closed.Load() && (s.span != nil || s.idle())
	d.leave(dom)
	if pending != nil {
		a.postpone(pending)
	}
	if gone && d.settled() {
		return d.reclaim(a.pool)
	}
	return nil
}

// RecordStream tells that work on s uses the block that addr lies in.
func (d *Device) RecordStream(addr uint64, s Stream) error {
	b, unlock := d.find(addr)
	if b.nothing() {
		return d.foreign(addr)
	}
	defer unlock()
	return b.use(s)
}

// find locks the domain of the used block that addr lies in.
func (d *Device) find(addr uint64) (b block, unlock func()) {
	s := d.table.segment(addr)
	if s == nil {
		return block{}, nil
	}
	s.domain.lock()
	if b := s.holding(addr); b.slot().has(isUsed) {
		return b, s.domain.mu.Unlock
	}
	s.domain.mu.Unlock()
	return block{}, nil
}
