package memory

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// A Pool keeps the memory of one purpose separate (torch.cuda.MemPool): its freed
// memory is reused only within the pool. A Pool may have its own Allocator.
//
// Use allocates from the pool. Captures of graphs allocate from the pool that
// graph.Config names. Every launch of a graph uses the same addresses, so this memory
// belongs to the graph and not to the stream. Captures that are given the same Pool
// share its memory (torch.cuda.graph_pool_handle): the second capture may reuse memory
// that the first one closed before its end. Graphs that share a pool must be launched
// as they were captured, one after the other, never at the same time.
//
// A Pool has memory of every device that it was used on. The memory is returned to the
// driver after the Pool and the graphs and buffers that use it are closed. Until then
// EmptyCache keeps the free memory of an open Pool, and so does an allocation outside
// the Pool that runs out of memory. An allocation in the Pool that runs out of memory
// returns the Pool's free memory, unless NCCL has registered the Pool. The methods may
// be called at any time by any goroutine.
type Pool struct {
	poolRef
	owner   handle.Owner
	private bool // created by PrivatePool: without a handle
	cfg     PoolConfig
	id      alloc.PoolID

	mu    sync.Mutex
	refs  int // the open handle, and graphs
	parts map[partKey]*alloc.Pool
	busy  string // the capture that allocates here now, or ""
	watch []*watcher
}

type poolRef = handle.Ref[inside.CapturePool]

// A partKey identifies the part of a pool for one device. Captured memory has its own
// part, because it belongs to no stream.
type partKey struct {
	h        *heap
	captured bool
}

// PoolConfig are the properties of a Pool; nil means their zero values.
type PoolConfig struct {
	Allocator Allocator // allocates the pool's segments; nil means the device's allocator
	NoSplit   bool      // each block is a segment
	UseOnOOM  bool      // allocations outside of pools may use its free memory before they fail
	//lint:ignore U1000 internal/inside finds the field by the method that it promotes
	poolOption
}

//lint:ignore U1000 the field above is of this type
type poolOption = handle.Ref[inside.PoolOption]

var lastPool atomic.Uint64

// NewPool returns an empty pool, which allocates nothing until it is used.
func NewPool(cfg *PoolConfig) *Pool {
	p := &Pool{}
	p.poolRef = handle.NewRef[inside.CapturePool]((*capturePool)(p))
	p.cfg = *cmp.Or(cfg, new(PoolConfig))
	if p.private = inside.IsPrivate(&p.cfg); p.private {
		p.id = alloc.PoolID{lastPool.Add(1), 0}
		return p
	}
	p.refs, p.id = 1, alloc.PoolID{0, lastPool.Add(1)}
	handle.Init(p, &p.owner, handle.About{Kind: "memory pool"})
	return p
}

// ID returns the pool's name in snapshots (torch.cuda.MemPool.id).
func (p *Pool) ID() [2]uint64 { return p.id }

// Use calls fn; until fn returns, allocations on s come from the pool
// (torch.cuda.use_mem_pool). That applies to all goroutines that allocate on s, and to
// no other stream. If several pools are in use on one stream, the pool of the latest
// Use applies. Freed memory stays in the pool, whenever it is freed.
func (p *Pool) Use(s *stream.Stream, fn func() error) error {
	const op = "memory: use a pool"
	l, err := streamCacheOf(op, s)
	if err != nil {
		return err
	}
	if err := p.check(op); err != nil {
		return err
	}
	if fn == nil {
		return fmt.Errorf("%s: no function given", op)
	}
	part, err := p.part(l.heap, false)
	if err != nil {
		return err
	}
	u := &poolUse{part: part}
	if gpu.StreamOf(l.s).RefuseCapture(op, "") == nil { // captured memory comes from another part
		if _, err := u.of(l); err != nil {
			return fmt.Errorf("%s on %s: %w", op, l.s, l.heap.because(err))
		}
	}
	defer l.usePool(u)()
	return fn()
}

func (p *Pool) check(op string) error {
	if p == nil {
		return fmt.Errorf("%s: no pool given", op)
	}
	if !p.private && p.owner.Closed() {
		return fmt.Errorf("%s: the pool: %w", op, device.ErrClosed)
	}
	return nil
}

// part returns the pool's part for a device, and creates it if necessary.
func (p *Pool) part(h *heap, captured bool) (*alloc.Pool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := partKey{h, captured}
	if x := p.parts[key]; x != nil {
		return x, nil
	}
	cfg := alloc.PoolConfig{ID: p.id, NoSplit: p.cfg.NoSplit, UseOnOOM: p.cfg.UseOnOOM && !captured, Graphs: captured}
	if p.cfg.Allocator != nil {
		cfg.Source = allocatorSource{p.cfg.Allocator}
	}
	x := h.native.NewPool(cfg)
	for _, w := range p.watch {
		if err := w.add(key, x); err != nil {
			return nil, errors.Join(err, x.Close())
		}
	}
	if captured && p.busy != "" {
		x.Begin()
	}
	if p.parts == nil {
		p.parts = map[partKey]*alloc.Pool{}
	}
	p.parts[key] = x
	return x, nil
}

// captured returns the arena for a capture on the streamCache's stream.
func (p *Pool) captured(l *streamCache) (*alloc.Arena, error) {
	part, err := p.part(l.heap, true)
	if err != nil {
		return nil, err
	}
	a, err := part.Arena(l)
	if err != nil {
		return nil, fmt.Errorf("memory: allocate for a capture of %s: %w", l.s, l.heap.because(err))
	}
	return a, nil
}

// Reserved returns the bytes that the pool has reserved on all devices, used or cached.
func (p *Pool) Reserved() int { return p.sum((*alloc.Pool).Reserved) }

// Allocated returns the bytes of the pool that open buffers use.
func (p *Pool) Allocated() int { return p.sum((*alloc.Pool).Allocated) }

func (p *Pool) sum(of func(*alloc.Pool) uint64) int {
	total := uint64(0)
	for _, x := range p.list() {
		total += of(x)
	}
	return int(total)
}

func (p *Pool) list() (all []*alloc.Pool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.parts {
		all = append(all, x)
	}
	return all
}

// Snapshot describes the pool's memory (torch.cuda.MemPool.snapshot).
func (p *Pool) Snapshot() []Segment {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []Segment
	for key, x := range p.parts {
		for _, s := range x.Segments() {
			list = append(list, segmentOf(key.h.dev.Ordinal(), s))
		}
	}
	slices.SortStableFunc(list, func(a, b Segment) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Address, b.Address))
	})
	return list
}

// Close closes the handle, but graphs and buffers that use the memory keep it.
// Close is idempotent.
func (p *Pool) Close() error {
	if p == nil || !p.owner.Close() {
		return nil
	}
	return p.release()
}

// release drops one reference. After the last one, memory that no buffer uses is freed
// at once, and the remaining memory when its buffers are closed.
func (p *Pool) release() error {
	p.mu.Lock()
	p.refs--
	last := p.refs == 0
	p.mu.Unlock()
	if !last {
		return nil
	}
	var errs []error
	for _, x := range p.list() {
		errs = append(errs, x.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("memory: close a pool: %w", err)
	}
	return nil
}

// A capturePool is a Pool with the methods that captures use (inside.CapturePool).
type capturePool Pool

// Begin lets the capture of a graph allocate from the pool until End.
func (c *capturePool) Begin(graph string) error {
	const op = "memory: allocate from a pool"
	p := (*Pool)(c)
	if err := p.check(op); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy != "" {
		return fmt.Errorf("%s: the capture of %s is using it: captures that share a pool come one after another", op, p.busy)
	}
	p.busy = graph
	for key, x := range p.parts {
		if key.captured {
			x.Begin()
		}
	}
	return nil
}

// End undoes Begin.
func (c *capturePool) End() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.busy = ""
	for key, x := range c.parts {
		if key.captured {
			x.Rejoin()
		}
	}
}

// Hold keeps the memory for a graph.
func (c *capturePool) Hold(gpu.Holder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refs++
}

// LetGo undoes Hold. It ignores an error of the device, which was reported
// before.
func (c *capturePool) LetGo(gpu.Holder) { _ = (*Pool)(c).release() }

// A watcher is a callback for the segments of a pool.
type watcher struct {
	fn    func(d *device.Device, ptr, bytes uint64, taken bool) error
	parts map[partKey]*alloc.Watcher // guarded by the pool's lock
}

// Watch calls fn for the segments of the pool (inside.CapturePool).
func (c *capturePool) Watch(fn func(d *device.Device, ptr, bytes uint64, taken bool) error) (stop func() error, err error) {
	const op = "memory: watch a pool"
	p := (*Pool)(c)
	if err := p.check(op); err != nil {
		return nil, err
	}
	w := &watcher{fn: fn, parts: map[partKey]*alloc.Watcher{}}
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, x := range p.parts {
		if err := w.add(key, x); err != nil {
			return nil, fmt.Errorf("%s: %w", op, errors.Join(err, w.stop(p)))
		}
	}
	p.watch = append(p.watch, w)
	return sync.OnceValue(func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.watch = slices.DeleteFunc(p.watch, func(o *watcher) bool { return o == w })
		return w.stop(p)
	}), nil
}

// add starts to watch a part of the pool. The pool is locked.
func (w *watcher) add(key partKey, x *alloc.Pool) error {
	a := &alloc.Watcher{Segment: func(addr, bytes uint64, taken bool) error { return w.fn(key.h.dev, addr, bytes, taken) }}
	err := x.Watch(a)
	if err == nil {
		w.parts[key] = a
	}
	return err
}

// stop ends the watch of all parts of the pool. The pool is locked.
func (w *watcher) stop(p *Pool) error {
	var errs []error
	for key, a := range w.parts {
		errs = append(errs, p.parts[key].Unwatch(a))
	}
	clear(w.parts)
	return errors.Join(errs...)
}
