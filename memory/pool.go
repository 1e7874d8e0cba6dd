package memory

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/alloc"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/stream"
)

// A Pool keeps the memory of one purpose apart (torch.cuda.MemPool): what is freed
// in it is used again only in it, and it may come from an Allocator of its own.
//
// Use allocates from it. Captures of graphs allocate from the one that
// graph.Config names: each launch of a graph uses the same addresses, so they
// belong to the graph and not to the stream. Captures that are given one Pool share
// its memory (torch.cuda.graph_pool_handle): what the first has closed by its end,
// the second may use. Graphs that share a pool must be launched in the order of
// their captures, never at the same time.
//
// A Pool has memory of every device that it was used on. It is given back when the
// Pool, the graphs and the buffers that use it are closed, and not before: EmptyCache
// leaves what is free in an open Pool there, and so does an allocation of others that
// finds no memory. An allocation of the Pool itself that finds none gives back what is
// free in it, unless NCCL has registered the Pool. Its methods may be
// called at any time by any goroutine.
type Pool struct {
	owner   handle.Owner
	private bool // without a handle that could be closed
	cfg     PoolConfig
	id      alloc.PoolID

	mu    sync.Mutex
	refs  int // the handle while it is open, and graphs
	parts map[partKey]*alloc.Pool
	busy  string // the capture that allocates here now, or ""
	watch []*watcher
}

// A part of a pool is that of one device. What is captured is apart: it belongs to
// no stream.
type partKey struct {
	h        *heap
	captured bool
}

// PoolConfig are the properties of a Pool; nil means their zero values.
type PoolConfig struct {
	Allocator Allocator // gives out the pool's segments; nil is the device's own way
	NoSplit   bool      // each block is a segment
	UseOnOOM  bool      // allocations outside of pools may use what is free in it before they are out of memory
}

var lastPool atomic.Uint64

// NewPool returns an empty pool. It costs nothing before it is used.
func NewPool(cfg *PoolConfig) *Pool {
	p := &Pool{refs: 1, id: alloc.PoolID{0, lastPool.Add(1)}}
	if cfg != nil {
		p.cfg = *cfg
	}
	handle.Init(p, &p.owner, handle.About{Kind: "memory pool"})
	return p
}

// PrivatePool is NewPool without a handle that has to be closed, for one graph.
// For Chorus's own packages.
func PrivatePool() *Pool { return &Pool{private: true, id: alloc.PoolID{lastPool.Add(1), 0}} }

// ID returns the pool's name in snapshots (torch.cuda.MemPool.id).
func (p *Pool) ID() [2]uint64 { return p.id }

// Use calls fn, and lets what is allocated on s meanwhile come from the pool
// (torch.cuda.use_mem_pool). That holds for all goroutines that allocate on s, and
// for no other stream. Where several pools are in use on one stream, it is the one
// whose Use began last. The memory stays with the pool when it is freed, whenever
// that is.
func (p *Pool) Use(s *stream.Stream, fn func() error) error {
	const op = "memory: use a pool"
	l, err := laneOf(op, s)
	if err != nil {
		return err
	}
	if err := p.check(op); err != nil {
		return err
	}
	part, err := p.part(l.heap, false)
	if err != nil {
		return err
	}
	u := &poolUse{part: part}
	if l.s.RefuseCapture(op, "") == nil { // memory of a capture is of another part
		if _, err := u.of(l); err != nil {
			return fmt.Errorf("%s on %s: %w", op, l.s, l.heap.because(err))
		}
	}
	defer l.use(u)()
	return fn()
}

func (p *Pool) check(op string) error {
	if p == nil {
		return fmt.Errorf("%s: no pool given", op)
	}
	if !p.private && p.owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	return nil
}

// part returns what the pool has of a device, making it if there is none.
func (p *Pool) part(h *heap, captured bool) (*alloc.Pool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := partKey{h, captured}
	if x := p.parts[key]; x != nil {
		return x, nil
	}
	cfg := alloc.PoolConfig{ID: p.id, NoSplit: p.cfg.NoSplit, Spare: p.cfg.UseOnOOM && !captured, Graphs: captured}
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

// captured returns the arena for a capture of the lane's stream.
func (p *Pool) captured(l *lane) (*alloc.Arena, error) {
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

// Reserved returns the bytes that the pool holds on all devices, used or not.
func (p *Pool) Reserved() int { return p.sum((*alloc.Pool).Reserved) }

// Allocated returns the bytes of the pool that open buffers have.
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
	return list
}

// Close gives the handle up. Graphs and buffers that use the memory keep it. It
// is idempotent.
func (p *Pool) Close() error {
	if p == nil || !p.owner.Close() {
		return nil
	}
	return p.release()
}

// Begin lets the capture of a graph allocate from the pool, until End. For
// Chorus's own packages.
func (p *Pool) Begin(graph string) error {
	const op = "memory: allocate from a pool"
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

// End ends what Begin began. For Chorus's own packages.
func (p *Pool) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy = ""
	for key, x := range p.parts {
		if key.captured {
			x.Rejoin()
		}
	}
}

// Hold keeps the memory for a graph.
func (p *Pool) Hold(stream.Holder) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refs++
}

// LetGo undoes Hold.
func (p *Pool) LetGo(stream.Holder) { _ = p.release() } // what is lost with the device has been said

// release gives one reference up; with the last one the memory goes back that no
// buffer has, and the rest when those are closed.
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
