package memory

import (
	"errors"
	"fmt"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/stream"
)

// A Pool has the memory that is allocated while streams are captured into
// graphs: each launch of a graph uses the same addresses, so they belong to the
// graph and not to the stream. Captures that are given one Pool share its memory
// (torch.cuda.graph_pool_handle): what the first has closed by its end, the
// second may use. Graphs that share a pool must be launched in the order of
// their captures, never at the same time.
//
// A Pool has memory of every device that was captured. It is given back when the
// Pool, the graphs and the buffers that use it are closed. Its methods may be
// called at any time by any goroutine.
type Pool struct {
	owner   handle.Owner
	private bool // without a handle that could be closed

	mu       sync.Mutex
	refs     int // the handle while it is open, graphs, and buffers that are open
	segments []*segment
	deferred []*block // closed in the capture, but used by streams other than their own
	busy     string   // the capture that allocates here now, or ""
}

// NewPool returns an empty pool for graph.Config. It costs nothing.
func NewPool() *Pool {
	p := &Pool{refs: 1}
	handle.Init(p, &p.owner, "memory pool")
	return p
}

// PrivatePool is NewPool without a handle that has to be closed, for one graph.
// For Chorus's own packages.
func PrivatePool() *Pool { return &Pool{private: true} }

// Reserved returns the bytes that the pool holds on all devices, used or not.
func (p *Pool) Reserved() int { return p.sum(func(b *block) bool { return true }) }

// Allocated returns the bytes of the pool that open buffers have.
func (p *Pool) Allocated() int { return p.sum(func(b *block) bool { return b.used }) }

func (p *Pool) sum(counts func(*block) bool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	total := uintptr(0)
	for _, s := range p.segments {
		for b := s.first; b != nil; b = b.next {
			if counts(b) {
				total += b.bytes
			}
		}
	}
	return int(total)
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
	if !p.private && p.owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy != "" {
		return fmt.Errorf("%s: the capture of %s is using it: captures that share a pool come one after another", op, p.busy)
	}
	p.busy = graph
	return nil
}

// End ends what Begin began. For Chorus's own packages.
func (p *Pool) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy = ""
	for _, b := range p.deferred {
		b.used = false
	}
	p.deferred = nil
	// Graphs of one pool run one after another, so that the streams of this
	// capture are nothing to the next.
	for _, s := range p.segments {
		s.forgetStreams()
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

// release gives one reference up; the last one frees the memory, after the work
// that is on the device.
func (p *Pool) release() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refs--; p.refs > 0 {
		return nil
	}
	var errs []error
	for _, s := range p.segments {
		errs = append(errs, s.dev.DoRelaxed("cuMemFree", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFree(s.ptr) }))
	}
	p.segments = nil
	return errors.Join(errs...)
}

// alloc returns a block of at least n bytes for a capture of s.
func (p *Pool) alloc(s *stream.Stream, n uintptr) (*block, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n = roundUp(n, minBlock)
	b := p.best(s, n)
	if b == nil {
		seg, err := newSegment(p, s.Device(), segmentFor(n))
		if err != nil {
			return nil, err
		}
		p.segments = append(p.segments, seg)
		b = seg.first
	}
	b.split(n)
	b.used, b.stream = true, s
	p.refs++
	return b, nil
}

// best returns the smallest free block that has n bytes and that s may use.
func (p *Pool) best(s *stream.Stream, n uintptr) (best *block) {
	for _, seg := range p.segments {
		if seg.dev != s.Device() || seg.small() != (n <= smallMost) {
			continue
		}
		for b := seg.first; b != nil; b = b.next {
			if b.usable(s, n) && (best == nil || b.bytes < best.bytes) {
				best = b
			}
		}
	}
	return best
}

// free gives a block back. While a capture goes on, it is for the stream alone
// that used it, and for nobody if others used it too.
func (p *Pool) free(b *block, shared bool) error {
	p.mu.Lock()
	switch {
	case p.busy != "" && shared:
		p.deferred = append(p.deferred, b)
	case p.busy != "":
		b.used = false
	default:
		b.used, b.stream = false, nil
	}
	b.merge()
	p.mu.Unlock()
	return p.release()
}
