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

	// growth is held while memory is allocated from the driver or returned to it. A
	// goroutine that holds growth may lock domains; a goroutine that holds the lock of
	// a domain must not lock growth.
	growth   sync.Mutex
	pools    []*Pool // guarded by growth
	closed   bool    // guarded by growth
	reserved uint64  // guarded by growth

	// domains and peaks change under the locks of all domains, and so may be read under
	// any one of these locks.
	all     sync.Mutex // held while more than one domain is being locked
	domains []*domain
	unused  []*domain // of closed pools, in domains; guarded by growth
	peaks   [gauges][scopes]int64
	alone   atomic.Bool // domains has one element

	def      *Pool
	retries  counter
	ooms     counter
	syncs    counter
	taken    counter // segments and pages allocated
	given    counter
	oversize oversize
	fraction float64 // of SetFraction, or negative if unset; guarded by growth
}

type counter = atomic.Int64

// Config configures a Device.
type Config struct {
	Ordinal int // of the device, for timelines
	Source  Source
	Pages   PageSource // nil disables expandable segments
	Total   uint64     // the device's memory, the base of fractions
	Auditor Auditor    // may be nil
	// Barred returns an error if this thread must not wait for the driver, nor for a
	// goroutine that does: the thread runs a host callback of a stream, and other
	// goroutines may wait for that stream. It may be nil.
	Barred func() error
	// Capturing reports whether a graph is being captured or instantiated. The graph's
	// nodes may use memory that was freed during the capture. That memory stays mapped,
	// because CUDA does not instantiate copies and fills of unmapped memory. It may be
	// nil.
	Capturing func() bool
	// Low is called without locks when memory is short. It frees memory of other
	// packages (torch's FreeMemoryCallback). It may be nil.
	Low func()
	// Sync waits for all work of the device, or returns ErrBusy if it cannot wait now.
	// It may be nil.
	Sync func() error
	// Free returns the free memory of the device, for the history. It may be nil.
	Free func() uint64
}

// NewDevice returns an allocator without memory. The settings may change at any time
// and then apply to later allocations.
func NewDevice(cfg Config, s *atomic.Pointer[Settings]) *Device {
	d := &Device{cfg: cfg, settings: s, fraction: -1}
	d.def = d.newPool(PoolConfig{})
	return d
}

// Close closes all pools, existing and future, so that allocations fail. Empty returns
// their memory to the driver, or the last free does.
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

// capturing is Config.Capturing.
func (d *Device) capturing() bool { return d.cfg.Capturing != nil && d.cfg.Capturing() }

// Default returns the default pool.
func (d *Device) Default() *Pool { return d.def }

// SetFraction limits the memory from the driver to a part of the device
// (torch.cuda.set_per_process_memory_fraction). 1 means no limit. Without SetFraction
// the options set the limit.
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

// limit returns the limit of the reserved memory, if there is one. growth is held.
func (d *Device) limit() (bytes uint64, limited bool) {
	f := d.fraction
	if f < 0 {
		f = d.settings.Load().ProcessFraction
	}
	return uint64(f * float64(d.cfg.Total)), f < 1
}

// allows reports whether the limit permits n more bytes from the driver. growth is
// held.
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

// lockAll locks every domain, so that the values of all gauges are of one moment and
// the peaks are current.
func (d *Device) lockAll() []*domain {
	d.all.Lock()
	for _, dom := range d.domains {
		dom.lock()
	}
	d.all.Unlock()
	for _, dom := range d.domains {
		if dom.meter.high {
			d.adjustCaps(d.domains)
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

// unlockDomain ends an operation on a domain and unlocks it.
func (d *Device) unlockDomain(dom *domain) {
	if dom.meter.high {
		d.unlockHigh(dom)
		return
	}
	dom.mu.Unlock()
}

func (d *Device) unlockHigh(dom *domain) {
	alone := d.alone.Load()
	if alone {
		d.settleAlone(&dom.meter)
	}
	dom.mu.Unlock()
	if !alone {
		unlock(d.lockAll())
	}
}

// Free frees a block of an Arena. Operations that are already enqueued on the streams
// of the block may still use it.
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
	if d.capturing() {
		s.captured = true
	}
	pending := a.give(b, x)
	gone := a.pool.closed.Load() && (s.span != nil || s.idle())
	d.unlockDomain(dom)
	if pending != nil {
		a.postpone(pending)
	}
	if gone && d.barred() == nil { // otherwise the next release or Empty returns it
		return d.reclaim(a.pool)
	}
	return nil
}

// RecordStream records that operations on s use the block that contains addr.
func (d *Device) RecordStream(addr uint64, s Stream) error {
	b, unlock := d.usedAt(addr)
	if b.nothing() {
		return d.foreign(addr)
	}
	defer unlock()
	return b.addUser(s)
}

// usedAt returns the used block that contains addr, and locks its domain.
func (d *Device) usedAt(addr uint64) (b block, unlock func()) {
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
