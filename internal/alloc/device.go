package alloc

import (
	"sync"
	"sync/atomic"
)

// A Device allocates the memory of one device. Its methods may be called by
// several goroutines.
type Device struct {
	cfg      Config
	settings atomic.Pointer[Settings]
	table    table
	history  atomic.Pointer[History]

	// growth is held by the one that takes memory from the driver or gives it
	// back. Who holds it may lock domains; who has locked one must not wait for it.
	growth   sync.Mutex
	pools    []*Pool // guarded by growth
	reserved uint64  // guarded by growth
	limit    uint64  // of reserved; guarded by growth

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
	fraction float64 // guarded by growth
}

type counter = atomic.Int64

// Config says what a Device allocates from.
type Config struct {
	Source  Source
	Pages   PageSource // nil is no expandable segments
	Total   uint64     // bytes of the device, of which fractions are
	Auditor Auditor    // may be nil
	// Low is called without locks when memory is short, to free what it can
	// (torch's FreeMemoryCallback). It may be nil.
	Low func()
	// Free tells how much the driver has left, for the record. It may be nil.
	Free func() uint64
}

// NewDevice returns an allocator that has taken no memory yet.
func NewDevice(cfg Config, s Settings) *Device {
	d := &Device{cfg: cfg, fraction: 1}
	d.settings.Store(&s)
	d.setFraction(s.ProcessFraction)
	d.def = d.newPool(PoolConfig{})
	return d
}

// Default returns the pool for all that is not allocated in another.
func (d *Device) Default() *Pool { return d.def }

// Settings returns the options.
func (d *Device) Settings() Settings { return *d.settings.Load() }

// SetSettings changes the options for what is allocated from now on.
func (d *Device) SetSettings(s Settings) {
	d.growth.Lock()
	defer d.growth.Unlock()
	d.settings.Store(&s)
	d.setFraction(s.ProcessFraction)
}

// SetFraction limits what is taken from the driver to a part of the device
// (torch.cuda.set_per_process_memory_fraction); 1 is no limit.
func (d *Device) SetFraction(f float64) {
	d.growth.Lock()
	defer d.growth.Unlock()
	d.setFraction(f)
}

func (d *Device) setFraction(f float64) {
	d.fraction, d.limit = f, ^uint64(0)
	if f < 1 {
		d.limit = uint64(f * float64(d.cfg.Total))
	}
}

// Fraction returns what SetFraction set.
func (d *Device) Fraction() float64 {
	d.growth.Lock()
	defer d.growth.Unlock()
	return d.fraction
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

// lockAll locks every domain, so that what it counts is of one moment.
func (d *Device) lockAll() []*domain {
	d.all.Lock()
	for _, dom := range d.domains {
		dom.lock()
	}
	d.all.Unlock()
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
		d.settle()
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
	b := s.block(addr)
	if b.nothing() || !b.slot().has(isUsed) {
		dom.mu.Unlock()
		return d.foreign(addr)
	}
	a := b.arena()
	a.give(b)
	d.leave(dom)
	if a.pool.closed.Load() {
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
	b.use(s)
	return nil
}

// find locks the domain of the used block that addr lies in.
func (d *Device) find(addr uint64) (b block, unlock func()) {
	s := d.table.segment(addr)
	if s == nil {
		return block{}, nil
	}
	s.domain.lock()
	if b := s.block(addr); !b.nothing() && b.slot().has(isUsed) {
		return b, s.domain.mu.Unlock
	}
	if b := s.holding(addr); b.slot().has(isUsed) {
		return b, s.domain.mu.Unlock
	}
	s.domain.mu.Unlock()
	return block{}, nil
}
