package alloc

import (
	"errors"
	"fmt"
	"slices"
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

// NewDevice returns an allocator without memory, whose settings may change at
// any time and then apply to later allocations.
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
// (torch.cuda.set_per_process_memory_fraction). 1 means no limit, and without
// SetFraction the options set it.
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

// Free frees a block of an Arena, which operations already enqueued on the
// streams of the block may still use.
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
	pending := a.freeUsed(b, x)
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

// A domain is the state under one lock: one arena of the default pool, or all arenas of
// a pool of graphs.
type domain struct {
	mu       sync.Mutex
	meter    meter
	arenas   []*Arena
	segments []*segment        // by number; nil if the number is free
	lowest   uint32            // no lower number is free
	moved    map[block]*Arena  // blocks whose arena is not their segment's home
	records  map[block]*record // of the few blocks that have one
}

// lock locks the domain and empties lastFreed, unlike allocations and frees,
// which lock only mu.
func (d *domain) lock() {
	d.mu.Lock()
	for _, a := range d.arenas {
		a.flushLastFreed()
	}
}

// A record has the streams and the stack of a block that other streams use or whose
// stack was recorded.
type record struct {
	users    []Stream // streams whose operations may use the block
	captured []Stream // streams whose captured operations use the block
	stack    *Stack   // stack of the allocation
}

func (d *domain) move(b block, a *Arena) {
	if d.moved == nil {
		d.moved = map[block]*Arena{}
	}
	d.moved[b] = a
}

// record returns the block's record, or nil.
func (b block) record() *record {
	if !b.slot().has(isRecorded) {
		return nil
	}
	return b.s.domain.records[b]
}

// keep returns the block's record and creates it if necessary.
func (b block) keep() *record {
	d := b.s.domain
	if r := b.record(); r != nil {
		return r
	}
	if d.records == nil {
		d.records = map[block]*record{}
	}
	r := &record{}
	d.records[b] = r
	b.slot().place |= isRecorded
	return r
}

// dropRecord removes the block's record and returns it; it may be nil.
func (b block) dropRecord() *record {
	r := b.record()
	if r != nil {
		delete(b.s.domain.records, b)
		b.slot().place &^= isRecorded
	}
	return r
}

// dropUsers removes and returns the users of a freed block, whose stack stays
// until the block is free.
func (b block) dropUsers() (users, captured []Stream) {
	r := b.record()
	users, captured = r.users, r.captured
	r.users, r.captured = nil, nil
	if len(users)+len(captured) == 0 || r.stack == nil {
		b.dropRecord()
	}
	return users, captured
}

// addUser adds a stream to the users of the block.
func (b block) addUser(s Stream) error {
	a := b.arena()
	if s == a.stream {
		return nil
	}
	if !s.Retain() {
		return ErrEnded
	}
	r := b.keep()
	list := &r.users
	if a.pool.capturing && captured(s) {
		list = &r.captured
	}
	if slices.Contains(*list, s) {
		s.Release()
		return nil
	}
	r.users = slices.DeleteFunc(r.users, func(u Stream) bool { // a long-lived block would keep all streams that have ever used it
		done := u.Done()
		if done {
			u.Release()
		}
		return done
	})
	*list = append(*list, s)
	return nil
}

// captured reports whether the stream is being captured into a graph.
func captured(s Stream) bool {
	e, err := s.Record()
	if e != nil {
		e.Close()
	}
	return e == nil && err == nil
}

func (b block) stack() *Stack {
	if r := b.record(); r != nil {
		return r.stack
	}
	return nil
}

// ErrClosed is the error of an allocation from a pool that was closed.
var ErrClosed = errors.New("the memory pool was closed")

// ErrEnded is the error of an allocation on a destroyed stream.
var ErrEnded = errors.New("the stream was destroyed meanwhile")

// A NoMemoryError reports that every step of the fallbacks failed. It matches ErrNoMemory.
type NoMemoryError struct {
	Requested uint64 // bytes
	Wanted    uint64 // bytes requested from the driver; 0 if no device has as much
	Allocated uint64 // bytes in use
	Private   uint64 // the part of Allocated in pools other than the default pool
	PoolFree  uint64 // bytes that pools other than the default pool have reserved and not allocated
	Reserved  uint64 // bytes reserved from the driver
	Largest   uint64 // bytes of the largest free block of the stream
	Limit     uint64 // limit of Reserved, or 0
	Captured  bool   // the stream is captured: free pages of expandable segments stay mapped
	Own       bool   // the pool's own source has no memory, and not the device's
}

func (e *NoMemoryError) Error() string {
	return fmt.Sprintf("%d bytes wanted, %d allocated, %d reserved: %v", e.Requested, e.Allocated, e.Reserved, ErrNoMemory)
}

// Unwrap returns ErrNoMemory.
func (e *NoMemoryError) Unwrap() error { return ErrNoMemory }

// noMemory returns the error with the current sizes. growth is held.
func (a *Arena) noMemory(s *Settings, k kind, size uint64) *NoMemoryError {
	d := a.device
	e := &NoMemoryError{Requested: size, Wanted: s.segment(size), Reserved: d.reserved}
	if limit, limited := d.limit(); limited {
		e.Limit = limit
	}
	domains := d.lockAll()
	defer unlock(domains)
	free := func(dom *domain) uint64 {
		return uint64(dom.meter.r[ReservedBytes][both].now - dom.meter.r[AllocatedBytes][both].now)
	}
	for _, dom := range domains {
		e.PoolFree += free(dom)
		e.Allocated += uint64(dom.meter.r[AllocatedBytes][both].now)
		e.Private += uint64(dom.meter.r[AllocatedBytes][both].now)
	}
	e.Captured = a.pool.capturing
	e.Own = a.pool.source != d.cfg.Source && d.allows(e.Wanted)
	for _, o := range d.def.arenas {
		e.PoolFree -= free(o.domain)
		e.Private -= uint64(o.domain.meter.r[AllocatedBytes][both].now)
	}
	e.Largest = a.freeLists[k].largest()
	if a.pool.base != nil {
		e.Largest = max(e.Largest, a.pool.base.freeLists[k].largest())
	}
	return e
}

// A SourceError reports an invalid address that a Source has returned.
type SourceError struct{ Addr, Bytes uint64 }

func (e *SourceError) Error() string {
	return fmt.Sprintf("the allocator gave %d bytes at %#x: want an address from %#x to %#x that is a multiple of %d, and memory that it has not given out already",
		e.Bytes, e.Addr, unit, addressEnd-e.Bytes, unit)
}

// A PointerError reports an address that is not the start of an allocated block.
type PointerError struct {
	Addr   uint64
	Within uint64 // start of the block that contains Addr, or 0
	Size   uint64 // of that block
	Used   bool   // that block is allocated
	Stack  *Stack // stack of its last allocation, if recorded
	Freed  *Stack // stack of its last free
}

func (e *PointerError) Error() string {
	switch {
	case e.Within == 0:
		return fmt.Sprintf("%#x is not memory of this allocator: it was never allocated here, or was freed and went back to the driver", e.Addr)
	case e.Used:
		return fmt.Sprintf("%#x lies in the block of %d bytes at %#x and is not its beginning", e.Addr, e.Size, e.Within)
	}
	return fmt.Sprintf("%#x was freed before: it lies in a free block of %d bytes at %#x", e.Addr, e.Size, e.Within)
}

// foreign explains why an address cannot be freed or used.
func (d *Device) foreign(addr uint64) error {
	err := &PointerError{Addr: addr}
	if s := d.table.segment(addr); s != nil {
		s.domain.lock()
		b := s.holding(addr)
		err.Within, err.Size, err.Used, err.Stack = b.addr(), b.size(), b.slot().has(isUsed), b.stack()
		s.domain.mu.Unlock()
	}
	if h := d.history.Load(); h != nil {
		alloc, freed := h.last(addr)
		if err.Stack == nil {
			err.Stack = alloc
		}
		err.Freed = freed
	}
	return err
}

// ErrNoMemory is the error of a Source that is out of memory; it may be wrapped. Every
// other error ends the allocation at once.
var ErrNoMemory = errors.New("no memory left")

// ErrBusy is the error of Sync for a stream that is captured into a graph; it may be
// wrapped.
var ErrBusy = errors.New("the stream is captured")

// A Source allocates segments: from the driver, or from a user's Allocator. Each Device
// calls the methods from one goroutine at a time.
type Source interface {
	Alloc(s Stream, bytes uint64) (addr uint64, err error)
	// Free is called when no operation of the device uses the segment any more, or, if
	// Async is false, at any time.
	Free(s Stream, addr, bytes uint64) error
	// Async reports whether Free returns without waiting for the device.
	Async() bool
}

// A PageSource allocates pages of physical memory and maps them to addresses, for
// expandable segments (CUDA's virtual memory management).
type PageSource interface {
	PageSize() uint64
	// Reach is the size of an expandable segment's address range in bytes.
	Reach() uint64
	Reserve(bytes uint64) (addr uint64, err error)
	Unreserve(addr, bytes uint64) error
	Create() (page uint64, err error)
	Release(page uint64) error
	Map(addr uint64, page uint64) error
	// Open gives the device and its peers access to mapped addresses.
	Open(addr, bytes uint64) error
	Unmap(addr, bytes uint64) error
}

// A Stream is a stream of the device. Streams are compared by identity.
type Stream interface {
	// Record returns an event after all operations enqueued so far, or nil if the
	// stream is captured into a graph.
	Record() (Event, error)
	// Wait orders later operations after the event.
	Wait(Event) error
	// Sync waits on the host, or returns ErrBusy if it cannot wait now.
	Sync() error
	// Number identifies the stream in snapshots.
	Number() uint64
	// Ended reports whether the stream is about to be destroyed: Device.End follows, or
	// was called.
	Ended() bool
	// Done reports whether no operation follows, because the stream is closed, and all have completed.
	Done() bool
	// Retain keeps the stream usable until Release. It returns false if the stream is
	// destroyed.
	Retain() bool
	Release()
}

// An Event is a point in a stream.
type Event interface {
	Passed() (bool, error)
	Sync() error
	Close()
}

// An Auditor is informed of every allocation and free, as the stream orders them.
// Virtual devices have one.
type Auditor interface {
	Allocated(s Stream, addr, bytes uint64)
	Freed(s Stream, addr, bytes uint64)
}

// A Watcher is called for each segment that a pool allocates, before its memory is
// used, and for each segment that the pool frees, after the streams have passed it and
// before it is freed. It may use the device, but not the allocator, because an
// allocation waits for it. If it returns an error for a new segment, the allocation
// fails and the segment is freed.
type Watcher struct {
	Segment func(addr, bytes uint64, taken bool) error
}

// ErrExpandable reports that a pool cannot be watched, because its memory changes by
// pages.
var ErrExpandable = errors.New("the pool has expandable segments")

// Watch calls w for the existing segments and then for each change. It fails if
// the pool has expandable segments, which a watched pool must not have. After
// an error w is not called again.
func (p *Pool) Watch(w *Watcher) error {
	p.device.growth.Lock()
	defer p.device.growth.Unlock()
	for _, a := range p.arenas {
		if a.spans != [kinds]*segment{} {
			return ErrExpandable
		}
	}
	for i, s := range p.taken() {
		if err := w.Segment(s.addr, s.size(), true); err != nil {
			return errors.Join(err, w.gone(p.taken()[:i]))
		}
	}
	p.watchers = append(p.watchers, w)
	return nil
}

// Unwatch calls w as if all segments were freed, and ends the calls.
func (p *Pool) Unwatch(w *Watcher) error {
	p.device.growth.Lock()
	defer p.device.growth.Unlock()
	i := slices.Index(p.watchers, w)
	if i < 0 {
		return nil
	}
	p.watchers = slices.Delete(p.watchers, i, i+1)
	return w.gone(p.taken())
}

func (w *Watcher) gone(list []*segment) error {
	var errs []error
	for _, s := range list {
		errs = append(errs, w.Segment(s.addr, s.size(), false))
	}
	return errors.Join(errs...)
}

// taken returns the segments of the pool. growth is held.
func (p *Pool) taken() (list []*segment) {
	for _, a := range p.arenas {
		list = append(list, a.segments...)
	}
	return list
}

// tell calls all watchers for a segment. If one rejects it, the watchers that were
// called before are told that the segment is gone. growth is held.
func (p *Pool) tell(addr, bytes uint64, taken bool) error {
	var errs []error
	for i, w := range p.watchers {
		err := w.Segment(addr, bytes, taken)
		if err != nil && taken {
			for _, o := range p.watchers[:i] {
				err = errors.Join(err, o.Segment(addr, bytes, false))
			}
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// A piece is an address range that was allocated.
type piece struct{ addr, bytes uint64 }

// reportFreed reports a freed piece to the auditor. If the arena has no stream, the
// report is postponed until the arena has one again.
func (a *Arena) reportFreed(addr, bytes uint64) {
	if a.stream == nil {
		a.owed = append(a.owed, piece{addr, bytes})
		return
	}
	a.device.cfg.Auditor.Freed(a.stream, addr, bytes)
}

// reportPostponed sends the postponed reports, ordered on the arena's new stream.
func (a *Arena) reportPostponed() {
	for _, p := range a.owed {
		if a.device.table.segment(p.addr) != nil { // otherwise the segment was returned to the driver
			a.reportFreed(p.addr, p.bytes)
		}
	}
	a.owed = nil
}
