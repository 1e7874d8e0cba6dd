package virtual

import "github.com/gochorus/chorus/internal/cudadrv"

func (d driver) GraphUpload(h cudadrv.GraphExec, sh cudadrv.Stream) cudadrv.Result {
	c, s, _, r := d.beginLaunch("cuGraphUpload", h, sh)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	c.enqueue(s, func(*op) {})
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
		c.enqueue(s, func(*op) {})
	}
	d.m.replay(x, s)
	return cudadrv.Success
}

// beginLaunch is begin for calls that enqueue a graph. A graph within a graph is
// something that CUDA has and virtual devices refuse.
func (d driver) beginLaunch(name string, h cudadrv.GraphExec, sh cudadrv.Stream) (call, *stream, *graphExec, cudadrv.Result) {
	c, s, r := d.beginStream(name, sh)
	if r != cudadrv.Success {
		return c, nil, nil, r
	}
	x := d.m.execs[h]
	switch {
	case x == nil:
		r = cudadrv.ErrorInvalidValue
	case s.capture != nil:
		r = s.refused()
	default:
		for _, lane := range x.lanes {
			if lane.dev.status != cudadrv.Success {
				r = lane.dev.status
			}
		}
	}
	if r != cudadrv.Success {
		c.end()
	}
	return c, s, x, r
}

// replay enqueues the nodes on the lanes, between what the stream has before
// the launch and what it gets after it. m.mu is held.
func (m *Machine) replay(x *graphExec, s *stream) {
	const name = "cuGraphLaunch"
	start := s.mark()
	for _, lane := range x.lanes {
		for _, end := range x.ends {
			lane.wait(name, end)
		}
		lane.wait(name, start)
	}
	awaited := x.graph.awaited()
	done := make([]*mark, len(x.graph.nodes))
	for i, n := range x.graph.nodes {
		lane := x.lanes[n.lane]
		for _, dep := range n.deps {
			if k := done[dep]; k != nil && x.graph.nodes[dep].lane != n.lane {
				lane.wait(name, k)
			}
		}
		n.enqueue(x, lane)
		if awaited[i] {
			done[i] = lane.mark()
		}
	}
	x.ends = x.ends[:0]
	for _, lane := range x.lanes {
		end := lane.mark()
		x.ends = append(x.ends, end)
		s.wait(name, end)
	}
	if g := x.graph; len(g.objects) > 0 {
		g.use(1)
		s.push(&op{name: name, always: true, run: func(*op) {
			m.mu.Lock()
			defer m.mu.Unlock()
			g.use(-1)
		}})
	}
}

// awaited has the nodes that a node of another lane waits for.
func (g *graph) awaited() []bool {
	awaited := make([]bool, len(g.nodes))
	for _, n := range g.nodes {
		for _, dep := range n.deps {
			if g.nodes[dep].lane != n.lane {
				awaited[dep] = true
			}
		}
	}
	return awaited
}

// enqueue issues the node's operation anew. m.mu is held.
func (n *node) enqueue(x *graphExec, lane *stream) {
	if n.works == nil {
		lane.enqueue(n.name, n.run)
		return
	}
	works := make([]*work, len(n.works))
	for i, w := range n.works {
		fresh := *w
		fresh.s = x.lanes[n.lanes[i]]
		works[i] = &fresh
	}
	lane.dev.m.enqueueWork(works)
}
