package machine

import "github.com/gochorus/chorus/internal/cudadrv"

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

// replay enqueues the nodes on the lanes, after all earlier operations of the
// stream and before all later ones. m.mu is held.
func (m *Machine) replay(x *graphExec, s *Stream) {
	const name = "cuGraphLaunch"
	start, ticket := s.Mark(), s.ticket(name, 0)
	for _, lane := range x.lanes {
		lane.launchedBy(s.handle)
		for _, end := range x.ends {
			lane.Wait(name, end)
		}
		lane.Wait(name, start)
	}
	awaited := x.graph.awaited()
	done := make([]*Mark, len(x.graph.nodes))
	for i, n := range x.graph.nodes {
		lane := x.lanes[n.lane]
		for _, dep := range n.deps {
			if k := done[dep]; k != nil && x.graph.nodes[dep].lane != n.lane {
				lane.Wait(name, k)
			}
		}
		n.enqueue(x, lane)
		if awaited[i] {
			done[i] = lane.Mark()
		}
	}
	x.ends = x.ends[:0]
	for _, lane := range x.lanes {
		end := lane.Mark()
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

// launchedBy attributes the operations of a lane that are enqueued from now on to the stream
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

// awaited returns, for each node, whether a node of another lane waits for it.
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

// enqueue enqueues the node's operation. m.mu is held.
func (n *node) enqueue(x *graphExec, lane *Stream) {
	if n.launch == nil {
		lane.enqueueBytes(n.name, n.bytes, n.run)
		return
	}
	on := make([]*Stream, len(n.lanes))
	for i, lane := range n.lanes {
		on[i] = x.lanes[lane]
	}
	n.launch.Enqueue(on)
}
