package virtual

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A graph is what a capture recorded. Its nodes are never changed.
type graph struct {
	lanes []*device // the device of each stream that was captured
	names []cudadrv.Stream
	nodes []*node

	objects []*userObject
	users   int // its handle, what was instantiated of it, and launches under way
}

// A graphExec is a graph that can be launched. Each lane is a stream of its own, so
// that operations that the graph does not order run out of step, and race.
type graphExec struct {
	graph *graph
	lanes []*stream
	ends  []*mark // of the last launch: launches of one follow each other
}

func (m *Machine) newGraph(x *capture) cudadrv.Graph {
	g := &graph{nodes: x.nodes, objects: x.objects}
	for _, s := range x.streams {
		g.lanes, g.names = append(g.lanes, s.dev), append(g.names, s.handle)
	}
	m.graphs[x.handle] = g
	g.hold(1)
	return x.handle
}

// hold counts a graph in or out at the communicators that it uses. m.mu is
// held.
func (g *graph) hold(delta int) {
	g.use(delta)
	for _, n := range g.nodes {
		for _, w := range n.works {
			w.c.graphs += delta
		}
	}
}

// beginGraph is begin for calls about a graph.
func (d driver) beginGraph(name string, h cudadrv.Graph) (call, *graph, cudadrv.Result) {
	c, r := d.beginEnding(name)
	if r != cudadrv.Success {
		return c, nil, r
	}
	g := d.m.graphs[h]
	if g == nil {
		c.end()
		return c, nil, cudadrv.ErrorInvalidValue
	}
	return c, g, cudadrv.Success
}

func (d driver) GraphGetNodes(h cudadrv.Graph) (uintptr, cudadrv.Result) {
	c, g, r := d.beginGraph("cuGraphGetNodes", h)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return uintptr(len(g.nodes)), cudadrv.Success
}

func (d driver) GraphDestroy(h cudadrv.Graph) cudadrv.Result {
	c, g, r := d.beginGraph("cuGraphDestroy", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	delete(d.m.graphs, h)
	g.hold(-1)
	return cudadrv.Success
}

func (d driver) GraphInstantiateWithFlags(h cudadrv.Graph, flags uint64) (cudadrv.GraphExec, cudadrv.Result) {
	c, g, r := d.beginGraph("cuGraphInstantiateWithFlags", h)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if flags&^(cudadrv.GraphInstantiateAutoFree|cudadrv.GraphInstantiateNodePriority) != 0 {
		return 0, cudadrv.ErrorInvalidValue
	}
	for _, dev := range g.lanes {
		if dev.status != cudadrv.Success {
			return 0, dev.status
		}
	}
	x := &graphExec{graph: g, lanes: d.m.newLanes(g)}
	eh := cudadrv.GraphExec(d.m.handle())
	d.m.execs[eh] = x
	g.hold(1)
	return eh, cudadrv.Success
}

// newLanes makes the streams that launches of a graph use. m.mu is held.
func (m *Machine) newLanes(g *graph) []*stream {
	lanes := make([]*stream, len(g.lanes))
	for i, dev := range g.lanes {
		lanes[i] = &stream{
			dev: dev, handle: g.names[i], now: m.slots.take(),
			rng: rand.New(rand.NewPCG(m.seed, uint64(m.handle()))), // the delays of this lane
		}
	}
	return lanes
}

func (d driver) GraphExecDestroy(h cudadrv.GraphExec) cudadrv.Result {
	c, r := d.beginEnding("cuGraphExecDestroy")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	x := d.m.execs[h]
	if x == nil {
		return cudadrv.ErrorInvalidValue
	}
	d.m.destroyExec(h, x)
	return cudadrv.Success
}

// destroyExec lets a launch that is under way go on. m.mu is held.
func (m *Machine) destroyExec(h cudadrv.GraphExec, x *graphExec) {
	delete(m.execs, h)
	x.graph.hold(-1)
	x.endLanes()
}

// endLanes gives the streams up: what is on them still runs. m.mu is held.
func (x *graphExec) endLanes() {
	for _, s := range x.lanes {
		s.destroyed = true
		s.release()
	}
}

// resetGraphs takes away what can no longer be launched once the context of a
// device was destroyed. m.mu is held.
func (d *device) resetGraphs() {
	for _, c := range slices.Clone(d.m.captures) {
		if slices.ContainsFunc(c.streams, func(s *stream) bool { return s.dev == d }) {
			c.invalid = true
		}
		if c.origin.dev == d {
			d.m.endCapture(c)
		}
	}
	for h, x := range d.m.execs {
		if slices.Contains(x.graph.lanes, d) {
			d.m.destroyExec(h, x)
		}
	}
	for h, g := range d.m.graphs {
		if slices.Contains(g.lanes, d) {
			delete(d.m.graphs, h)
			g.hold(-1)
		}
	}
}

func (d driver) GraphExecUpdate(h cudadrv.GraphExec, gh cudadrv.Graph) (cudadrv.GraphExecUpdateResult, cudadrv.Result) {
	c, g, r := d.beginGraph("cuGraphExecUpdate", gh)
	if r != cudadrv.Success {
		return cudadrv.GraphUpdateError, r
	}
	defer c.end()
	x := d.m.execs[h]
	if x == nil {
		return cudadrv.GraphUpdateError, cudadrv.ErrorInvalidValue
	}
	if why := x.graph.differs(g); why != cudadrv.GraphUpdateSuccess {
		return why, cudadrv.ErrorGraphExecUpdateFailure
	}
	g.hold(1)
	x.graph.hold(-1)
	x.endLanes()
	x.graph, x.lanes = g, d.m.newLanes(g)
	return cudadrv.GraphUpdateSuccess, cudadrv.Success
}

// differs says what keeps an executable of g from becoming one of o. The streams of
// the captures are not part of a graph: its nodes, their order and their devices are,
// and the priorities of kernels.
func (g *graph) differs(o *graph) cudadrv.GraphExecUpdateResult {
	if len(g.nodes) != len(o.nodes) {
		return cudadrv.GraphUpdateTopologyChanged
	}
	for i, n := range g.nodes {
		p := o.nodes[i]
		switch {
		case !slices.Equal(n.deps, p.deps) || !slices.Equal(g.devices(n), o.devices(p)):
			return cudadrv.GraphUpdateTopologyChanged
		case n.kind() != p.kind():
			return cudadrv.GraphUpdateNodeTypeChanged
		case n.kind() == "kernel" && n.priority != p.priority:
			return cudadrv.GraphUpdateAttributesChanged
		}
	}
	return cudadrv.GraphUpdateSuccess
}

// devices are those that a node works on.
func (g *graph) devices(n *node) []*device {
	list := []*device{g.lanes[n.lane]}
	for _, i := range n.lanes {
		list = append(list, g.lanes[i])
	}
	return list
}

// kind is the name without that of the kernel, which an update may change.
func (n *node) kind() string {
	kind, _, _ := strings.Cut(n.name, " ")
	return kind
}

// GraphDebugDotPrint writes the graph in the language of Graphviz.
func (d driver) GraphDebugDotPrint(h cudadrv.Graph, path string, _ uint32) cudadrv.Result {
	c, g, r := d.beginGraph("cuGraphDebugDotPrint", h)
	if r != cudadrv.Success {
		return r
	}
	text := g.dot()
	c.end()
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		return cudadrv.ErrorOperatingSystem
	}
	return cudadrv.Success
}

func (g *graph) dot() string {
	var b strings.Builder
	b.WriteString("digraph graph_1 {\n")
	for i, n := range g.nodes {
		fmt.Fprintf(&b, "\tn%d [label=\"%d\\n%s\\ndevice %d\"];\n", i, i, n.name, g.lanes[n.lane].ordinal)
		for _, dep := range n.deps {
			fmt.Fprintf(&b, "\tn%d -> n%d;\n", dep, i)
		}
	}
	b.WriteString("}\n")
	return b.String()
}
