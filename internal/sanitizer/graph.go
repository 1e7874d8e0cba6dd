package sanitizer

import (
	"cmp"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

func (d driver) StreamBeginCapture(s cudadrv.Stream, mode cudadrv.CaptureMode) cudadrv.Result {
	ctx := d.t.contextFor(s)
	r := d.Driver.StreamBeginCapture(s, mode)
	if r == cudadrv.Success {
		d.t.mu.Lock()
		defer d.t.mu.Unlock()
		new(capture).join(d.t.queue(ctx, s), nil)
	}
	return r
}

func (d driver) StreamEndCapture(s cudadrv.Stream) (cudadrv.Graph, cudadrv.Result) {
	ctx := d.t.contextFor(s)
	g, r := d.Driver.StreamEndCapture(s)
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	c := d.t.queue(ctx, s).capture
	switch {
	case c == nil, r == cudadrv.ErrorIllegalState, r == cudadrv.ErrorStreamCaptureWrongThread, r == cudadrv.ErrorStreamCaptureUnmatched:
		return g, r // the capture goes on
	}
	c.end()
	if r == cudadrv.Success && g != 0 {
		d.t.graphs[g] = c
	}
	return g, r
}

func (d driver) GraphDestroy(g cudadrv.Graph) cudadrv.Result {
	d.t.mu.Lock()
	delete(d.t.graphs, g)
	d.t.mu.Unlock()
	return d.Driver.GraphDestroy(g)
}

func (d driver) GraphInstantiateWithFlags(g cudadrv.Graph, flags uint64) (cudadrv.GraphExec, cudadrv.Result) {
	h, r := d.Driver.GraphInstantiateWithFlags(g, flags)
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	if c := d.t.graphs[g]; r == cudadrv.Success && c != nil {
		d.t.execs[h] = d.t.instantiate(c)
	}
	return h, r
}

func (d driver) GraphExecUpdate(h cudadrv.GraphExec, g cudadrv.Graph) (cudadrv.GraphExecUpdateResult, cudadrv.Result) {
	why, r := d.Driver.GraphExecUpdate(h, g)
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	c, x := d.t.graphs[g], d.t.execs[h]
	if r == cudadrv.Success && x != nil && c != nil {
		d.t.endBranches(x)
		next := d.t.instantiate(c)
		next.ends = x.ends
		d.t.execs[h] = next
	}
	return why, r
}

func (d driver) GraphExecDestroy(h cudadrv.GraphExec) cudadrv.Result {
	d.t.mu.Lock()
	x := d.t.execs[h]
	delete(d.t.execs, h)
	if x != nil {
		d.t.endBranches(x)
	}
	d.t.mu.Unlock()
	return d.Driver.GraphExecDestroy(h)
}

func (d driver) GraphLaunch(h cudadrv.GraphExec, s cudadrv.Stream) cudadrv.Result {
	ctx, where := d.t.contextFor(s), Here()
	r := d.Driver.GraphLaunch(h, s)
	d.t.mu.Lock()
	defer d.t.unlock()
	x, q := d.t.execs[h], d.t.queue(ctx, s)
	switch {
	case r != cudadrv.Success || x == nil:
	case q.capture != nil:
		d.t.issue(x.nested("cuGraphLaunch", where), q)
	default:
		d.t.launch(x, q)
	}
	return r
}

// A capture is a capture in progress, and later its graph.
type capture struct {
	streams []*queue // that have joined; the index is a branch of the graph
	names   []queue  // the streams of the graph, after the capture
	nodes   []*node
}

// A node is an operation: of a stream, or of a graph.
type node struct {
	name  string
	where *Place
	uses  []cudadrv.Use
	act   func(q *queue) // records an event or waits for it; may be nil
	last  *Stamp         // of the previous operation of the communicator, or nil

	branches []int  // of its captured streams
	deps     []int  // predecessors in the graph, in ascending order
	at       uint64 // when a graph captured it; 0 if none did
}

// An exec is an executable graph. Each branch is a queue, so that operations without an order in
// the graph conflict.
type exec struct {
	graph    *capture
	branches []*queue
	ends     Clock // of the last launch: launches of one executable run in order
}

// add records an operation after the current tails of its streams.
func (c *capture) add(n *node, at uint64, on []*queue) {
	n = &node{name: n.name, where: n.where, uses: n.uses, act: n.act, last: n.last, at: cmp.Or(n.at, at)}
	for _, q := range on {
		branch := slices.Index(c.streams, q)
		if branch < 0 {
			return // NCCL refuses a group with streams outside of the capture
		}
		n.branches = append(n.branches, branch)
		n.deps = union(n.deps, q.tail)
	}
	c.nodes = append(c.nodes, n)
	for _, q := range on {
		q.tail = []int{len(c.nodes) - 1}
	}
}

// join adds a stream to the capture, after the given nodes.
func (c *capture) join(q *queue, behind []int) {
	if !slices.Contains(c.streams, q) {
		c.streams = append(c.streams, q)
	}
	q.capture, q.tail = c, slices.Clone(behind)
}

// end removes the streams from the capture.
func (c *capture) end() {
	for _, q := range c.streams {
		q.capture, q.tail = nil, nil
		c.names = append(c.names, queue{ctx: q.ctx, handle: q.handle})
	}
	c.streams = nil
}

// union merges ascending lists.
func union(a, b []int) []int {
	sum := slices.Concat(a, b)
	slices.Sort(sum)
	return slices.Compact(sum)
}

// instantiate creates the queues of a graph. t.mu is held.
func (t *tracker) instantiate(g *capture) *exec {
	x := &exec{graph: g}
	for _, s := range g.names {
		q := &queue{ctx: s.ctx, handle: s.handle, now: t.slots.Take()}
		t.contexts[q.now.Slot] = q.ctx
		x.branches = append(x.branches, q)
	}
	return x
}

// endBranches forgets the branches of an executable.
func (t *tracker) endBranches(x *exec) {
	for _, q := range x.branches {
		t.ended = append(t.ended, ended{q.ctx, q.now})
	}
	t.reap()
}

// launch performs the nodes of a graph on its branches, after all earlier operations of the
// stream and before all later ones. t.mu is held.
func (t *tracker) launch(x *exec, s *queue) {
	t.forked(s)
	for _, branch := range x.branches {
		branch.now.Seen = branch.now.Seen.Join(x.ends).JoinStamp(s.now)
	}
	done := make([]Stamp, len(x.graph.nodes))
	for i, n := range x.graph.nodes {
		on := make([]*queue, len(n.branches))
		for k, branch := range n.branches {
			on[k] = x.branches[branch]
		}
		for _, dep := range n.deps {
			on[0].now.Seen = on[0].now.Seen.JoinStamp(done[dep])
		}
		t.perform(n, on)
		done[i] = on[0].now
	}
	s.now.Epoch++
	for _, branch := range x.branches {
		x.ends = x.ends.JoinStamp(branch.now)
		s.now.Seen = s.now.Seen.JoinStamp(branch.now)
	}
}

// nested returns the launch of a graph as an operation of a capture.
func (x *exec) nested(name string, where *Place) *node {
	n := &node{name: name, where: where}
	for _, m := range x.graph.nodes {
		n.uses = append(n.uses, m.uses...)
		n.at = max(n.at, m.at)
	}
	return n
}
