package sanitizer

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A tracker holds the state that the decorators share.
type tracker struct {
	inner cudadrv.Driver

	mu       sync.Mutex // guards the fields below; not held during calls of the driver
	slots    Slots
	ticks    uint64                   // numbers captured operations and allocations in their order
	host     Clock                    // operations that the host has waited for
	contexts map[int]cudadrv.Context  // by slot
	meets    map[cudadrv.Context]bool // contexts whose devices other devices wait for
	legacy   map[cudadrv.Context]*queue
	queues   map[cudadrv.Stream]*queue
	ended    []ended
	events   map[cudadrv.Event]*event
	blocks   blocks
	kernels  map[cudadrv.Function]description
	retained map[cudadrv.Device]cudadrv.Context
	graphs   map[cudadrv.Graph]*capture
	execs    map[cudadrv.GraphExec]*exec

	reports []string
	fresh   []string // reports to log
	known   map[incident]bool
}

// A description tells what a kernel uses.
type description struct {
	name string
	uses func(params unsafe.Pointer) []cudadrv.Use
}

// An incident identifies a report, so that a loop is reported once.
type incident struct {
	at              uint64 // the first byte
	op, other       string
	where, earlier  string
	stream, against cudadrv.Stream
}

// maxReports is the number of reports that are kept.
const maxReports = 1000

// unlock unlocks mu and logs the new reports.
func (t *tracker) unlock() {
	fresh := t.fresh
	t.fresh = nil
	t.mu.Unlock()
	for _, text := range fresh {
		slog.Error("chorus sanitizer: " + text)
	}
}

// current returns the context that is bound to the thread.
func (t *tracker) current() cudadrv.Context {
	ctx, _ := t.inner.CtxGetCurrent()
	return ctx
}

// contextFor returns the bound context if the stream does not tell its own.
func (t *tracker) contextFor(h cudadrv.Stream) cudadrv.Context {
	t.mu.Lock()
	q := t.queues[h]
	t.mu.Unlock()
	if q != nil {
		return q.ctx
	}
	return t.current()
}

// enqueue records an operation that the driver has accepted.
func (t *tracker) enqueue(ctx cudadrv.Context, h cudadrv.Stream, name string, where *Place, uses ...cudadrv.Use) {
	t.mu.Lock()
	defer t.unlock()
	t.issue(&node{name: name, where: where, uses: uses}, t.queue(ctx, h))
}

// issue performs an operation on its streams, or adds it to their capture. t.mu is held.
func (t *tracker) issue(n *node, on ...*queue) {
	if c := on[0].capture; c != nil {
		c.add(n, t.tick(), on)
		return
	}
	t.perform(n, on)
}

// perform records an operation of the first stream, after all earlier operations of the other
// streams and before all later ones. t.mu is held.
func (t *tracker) perform(n *node, on []*queue) {
	q := on[0]
	t.forked(q)
	for _, other := range on[1:] {
		t.forked(other)
		q.now.Seen = q.now.Seen.JoinStamp(other.now)
	}
	if n.last != nil { // operations of a communicator run one at a time
		q.now.Seen = q.now.Seen.JoinStamp(*n.last)
	}
	q.now.Epoch++
	if n.act != nil {
		n.act(q)
	}
	for _, u := range n.uses {
		t.use(q, n, u)
	}
	if n.last != nil {
		*n.last = q.now
	}
	for _, other := range on[1:] {
		other.now.Seen = other.now.Seen.JoinStamp(q.now)
	}
}

// use records a use of memory by the running operation of a queue.
func (t *tracker) use(q *queue, n *node, u cudadrv.Use) {
	b := t.blocks.find(uint64(u.Ptr))
	if b == nil || u.Bytes == 0 {
		return
	}
	by := Access{Slot: q.now.Slot, Epoch: q.now.Epoch, Op: n.name, Stream: q.handle, Where: n.where}
	lo := uint64(u.Ptr) - b.base
	hi := min(lo+u.Bytes, b.size)
	if why := b.barred(lo, hi); why != "" {
		t.report(incident{at: uint64(u.Ptr), op: n.name, stream: q.handle, where: n.where.String(), other: b.freed, earlier: b.freedAt.String()},
			fmt.Sprintf("%v uses %d bytes at %#x, %s: the use must come before the free, or another stream needs RecordStream", by, hi-lo, uint64(u.Ptr), why))
		return
	}
	if why := b.replaced(n.at, lo, hi); why != "" {
		t.report(incident{at: uint64(u.Ptr), op: n.name, stream: q.handle, where: n.where.String(), other: "graph"},
			fmt.Sprintf("%v uses %d bytes at %#x, %s", by, hi-lo, uint64(u.Ptr), why))
		return
	}
	t.order(b, q, Conflict{By: by, Write: u.Write, Lo: lo, Hi: hi})
}

// tick returns the number of the next captured operation or allocation. t.mu is held.
func (t *tracker) tick() uint64 {
	t.ticks++
	return t.ticks
}

// order adds an access to the history of a block and reports a conflict.
func (t *tracker) order(b *block, q *queue, c Conflict) {
	if b.pieces.Unordered(c.Lo) {
		return
	}
	other, bad := b.history.Add(&q.now, t.host, c.By, c.Lo, c.Hi, c.Write)
	if !bad || t.met(c.By.Slot, other.Slot) {
		return
	}
	c.Other, c.Block = other, b
	t.report(incident{at: b.base + c.Lo, op: c.By.Op, other: other.Op, where: c.By.Where.String(), earlier: other.Where.String(),
		stream: c.By.Stream, against: other.Stream}, c.String())
}

// met reports whether collectives may order operations of the two slots, of two devices.
func (t *tracker) met(a, b int) bool {
	x, y := t.contexts[a], t.contexts[b]
	return x != y && t.meets[x] && t.meets[y]
}

// report adds a report, once for each pair of places. t.mu is held.
func (t *tracker) report(i incident, text string) {
	if t.known[i] || len(t.reports) >= maxReports {
		return
	}
	t.known[i] = true
	t.reports = append(t.reports, text)
	t.fresh = append(t.fresh, text)
}

// waited records that the host has waited for a clock.
func (t *tracker) waited(c Clock) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.host = t.host.Join(c)
}

// Reports returns the reports so far, one sentence each.
func (t *tracker) Reports() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.reports)
}
