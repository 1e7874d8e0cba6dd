package sanitizer

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/race"
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
		d.t.endLanes(x)
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
		d.t.endLanes(x)
	}
	d.t.mu.Unlock()
	return d.Driver.GraphExecDestroy(h)
}

func (d driver) GraphLaunch(h cudadrv.GraphExec, s cudadrv.Stream) cudadrv.Result {
	ctx, where := d.t.contextFor(s), race.Here()
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
