package machine

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A graph is the result of a capture. Its nodes are immutable.
type graph struct {
	branches []*Device // the device of each captured stream
	names    []cudadrv.Stream
	nodes    []*node

	objects []*userObject
	users   int // references: its handle, executables, and launches in progress
}

// A graphExec is an executable graph. Each branch is a separate stream, so that
// operations without an order in the graph run out of step and race.
type graphExec struct {
	graph    *graph
	branches []*Stream
	ends     []*Mark // of the last launch: launches of one executable run in order
}

func (m *Machine) newGraph(x *Capture) cudadrv.Graph {
	g := &graph{nodes: x.nodes, objects: x.objects}
	for _, s := range x.streams {
		g.branches, g.names = append(g.branches, s.dev), append(g.names, s.handle)
	}
	m.graphs[x.handle] = g
	g.hold(1)
	return x.handle
}

// hold adds delta to the references of a graph, and to the graphs of its launches. m.mu is held.
func (g *graph) hold(delta int) {
	g.use(delta)
	for _, n := range g.nodes {
		if n.launch != nil {
			n.launch.Hold(delta)
		}
	}
}

// beginGraph is begin for calls on a graph.
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
	for _, dev := range g.branches {
		if dev.status != cudadrv.Success {
			return 0, dev.status
		}
	}
	if !d.m.mappedAll(g) {
		return 0, cudadrv.ErrorInvalidValue
	}
	x := &graphExec{graph: g, branches: d.m.newBranches(g)}
	eh := cudadrv.GraphExec(d.m.Handle())
	d.m.execs[eh] = x
	g.hold(1)
	return eh, cudadrv.Success
}

// mappedAll reports whether the memory of all copies and fills of a graph is mapped. m.mu is held.
func (m *Machine) mappedAll(g *graph) bool {
	return !slices.ContainsFunc(g.nodes, func(n *node) bool { return !m.usesMapped(n) })
}

// updatable reports whether the memory of the copies and fills with other addresses in the graph
// to than in from is mapped. CUDA does not check nodes that stay the same. m.mu is held.
func (m *Machine) updatable(from, to *graph) bool {
	for i, n := range to.nodes {
		if n.uses != from.nodes[i].uses && !m.usesMapped(n) {
			return false
		}
	}
	return true
}

// usesMapped reports whether the memory of a copy or a fill is mapped. m.mu is held.
func (m *Machine) usesMapped(n *node) bool { return m.mapped(n.uses[0]) && m.mapped(n.uses[1]) }

// mapped reports whether device memory is mapped at p. CUDA requires this for the copies and
// the fills of a graph, but not for its kernels. p = 0 means that there is no address. m.mu is
// held.
func (m *Machine) mapped(p cudadrv.DevicePtr) bool {
	if p == 0 {
		return true
	}
	b, _ := m.Find(p)
	return b != nil && !b.freeing && (b.space == nil || len(b.space.within(uint64(p)-b.addr, 1)) > 0)
}

// newBranches creates the streams for launches of a graph. m.mu is held.
func (m *Machine) newBranches(g *graph) []*Stream {
	branches := make([]*Stream, len(g.branches))
	for i, dev := range g.branches {
		branches[i] = &Stream{
			dev: dev, handle: g.names[i], now: m.slots.Take(), branch: true,
			rng: rand.New(rand.NewPCG(m.seed, uint64(m.Handle()))), // for the delays of this branch
		}
	}
	return branches
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

// destroyExec removes an executable, but a launch in progress continues. m.mu
// is held.
func (m *Machine) destroyExec(h cudadrv.GraphExec, x *graphExec) {
	delete(m.execs, h)
	x.graph.hold(-1)
	x.endBranches()
}

// endBranches destroys the streams. Enqueued operations still run. m.mu is held.
func (x *graphExec) endBranches() {
	for _, s := range x.branches {
		s.destroyed = true
		s.release()
	}
}

// resetGraphs removes graphs that can no longer be launched after the context of
// a device was destroyed. m.mu is held.
func (d *Device) resetGraphs() {
	for _, c := range slices.Clone(d.m.captures) {
		if slices.ContainsFunc(c.streams, func(s *Stream) bool { return s.dev == d }) {
			c.invalid = true
		}
		if c.origin.dev == d {
			d.m.endCapture(c)
		}
	}
	for h, x := range d.m.execs {
		if slices.Contains(x.graph.branches, d) {
			d.m.destroyExec(h, x)
		}
	}
	for h, g := range d.m.graphs {
		if slices.Contains(g.branches, d) {
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
	if !d.m.updatable(x.graph, g) {
		return cudadrv.GraphUpdateParametersChanged, cudadrv.ErrorGraphExecUpdateFailure
	}
	g.hold(1)
	x.graph.hold(-1)
	x.endBranches()
	x.graph, x.branches = g, d.m.newBranches(g)
	return cudadrv.GraphUpdateSuccess, cudadrv.Success
}

// differs returns the difference that prevents an update of an executable from
// g to o. It compares the nodes, their order, their devices and the priorities
// of kernels, but not the captured streams.
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
		case n.kind() == "kernel" && (n.priority != p.priority || n.cooperative != p.cooperative):
			return cudadrv.GraphUpdateAttributesChanged
		}
	}
	return cudadrv.GraphUpdateSuccess
}

// devices returns the devices of a node.
func (g *graph) devices(n *node) []*Device {
	list := []*Device{g.branches[n.branch]}
	for _, i := range n.branches {
		list = append(list, g.branches[i])
	}
	return list
}

// kind returns the node's name without the name of the kernel, which an update may change.
func (n *node) kind() string {
	kind, _, _ := strings.Cut(n.name, " ")
	return kind
}

// GraphDebugDotPrint writes the graph in the format of Graphviz.
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
		fmt.Fprintf(&b, "\tn%d [label=\"%d\\n%s\\ndevice %d\"];\n", i, i, n.name, g.branches[n.branch].ordinal)
		for _, dep := range n.deps {
			fmt.Fprintf(&b, "\tn%d -> n%d;\n", dep, i)
		}
	}
	b.WriteString("}\n")
	return b.String()
}

func (d driver) GraphUpload(h cudadrv.GraphExec, sh cudadrv.Stream) cudadrv.Result {
	c, s, _, r := d.beginLaunch("cuGraphUpload", h, sh)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	c.enqueue(s, func(*Op) {})
	return cudadrv.Success
}

func (d driver) GraphLaunch(h cudadrv.GraphExec, sh cudadrv.Stream) cudadrv.Result {
	c, s, x, r := d.beginLaunch("cuGraphLaunch", h, sh)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	for _, n := range x.graph.nodes {
		if n.check == nil {
			continue
		}
		if r := n.check(); r != cudadrv.Success {
			return r
		}
	}
	if c.hang {
		c.enqueue(s, func(*Op) {})
	}
	d.m.replay(x, s)
	return cudadrv.Success
}

// beginLaunch is begin for calls that enqueue a graph. Unlike CUDA, virtual
// devices do not support graphs within graphs.
func (d driver) beginLaunch(name string, h cudadrv.GraphExec, sh cudadrv.Stream) (call, *Stream, *graphExec, cudadrv.Result) {
	c, s, r := d.beginStream(name, sh)
	if r != cudadrv.Success {
		return c, nil, nil, r
	}
	x := d.m.execs[h]
	switch {
	case x == nil:
		r = cudadrv.ErrorInvalidValue
	case s.capture != nil:
		r = s.Refused()
	default:
		for _, branch := range x.branches {
			if branch.dev.status != cudadrv.Success {
				r = branch.dev.status
			}
		}
	}
	if r != cudadrv.Success {
		c.end()
	}
	return c, s, x, r
}

// replay enqueues the nodes on the branches, after all earlier operations of the
// stream and before all later ones. m.mu is held.
func (m *Machine) replay(x *graphExec, s *Stream) {
	const name = "cuGraphLaunch"
	start, ticket := s.Mark(), s.ticket(name, 0)
	for _, branch := range x.branches {
		branch.launchedBy(s.handle)
		for _, end := range x.ends {
			branch.Wait(name, end)
		}
		branch.Wait(name, start)
	}
	awaited := x.graph.awaited()
	done := make([]*Mark, len(x.graph.nodes))
	for i, n := range x.graph.nodes {
		branch := x.branches[n.branch]
		for _, dep := range n.deps {
			if k := done[dep]; k != nil && x.graph.nodes[dep].branch != n.branch {
				branch.Wait(name, k)
			}
		}
		n.enqueue(x, branch)
		if awaited[i] {
			done[i] = branch.Mark()
		}
	}
	x.ends = x.ends[:0]
	for _, branch := range x.branches {
		end := branch.Mark()
		x.ends = append(x.ends, end)
		s.Wait(name, end)
	}
	s.timeSince(name, start, ticket)
	if g := x.graph; len(g.objects) > 0 {
		g.use(1)
		s.push(&Op{Name: name, always: true, run: func(*Op) {
			m.mu.Lock()
			defer m.mu.Unlock()
			g.use(-1)
		}})
	}
}

// launchedBy attributes the operations of a branch that are enqueued from now on to the stream
// that launches the graph, in reports. m.mu is held.
func (s *Stream) launchedBy(launch cudadrv.Stream) {
	if s.lastLauncher == launch {
		return
	}
	s.lastLauncher = launch
	if len(s.queue) == 0 && !s.working {
		s.launcher = launch
	} else {
		s.Enqueue("cuGraphLaunch", func(*Op) {
			s.dev.m.mu.Lock()
			defer s.dev.m.mu.Unlock()
			s.launcher = launch
		})
	}
}

// awaited returns, for each node, whether a node of another branch waits for it.
func (g *graph) awaited() []bool {
	awaited := make([]bool, len(g.nodes))
	for _, n := range g.nodes {
		for _, dep := range n.deps {
			if g.nodes[dep].branch != n.branch {
				awaited[dep] = true
			}
		}
	}
	return awaited
}

// enqueue enqueues the node's operation. m.mu is held.
func (n *node) enqueue(x *graphExec, branch *Stream) {
	if n.launch == nil {
		branch.captured = n.at
		branch.enqueueBytes(n.name, n.bytes, n.run)
		branch.captured = 0
		return
	}
	on := make([]*Stream, len(n.branches))
	for i, branch := range n.branches {
		on[i] = x.branches[branch]
		on[i].captured = n.at
	}
	n.launch.Enqueue(on)
	for _, branch := range on {
		branch.captured = 0
	}
}
