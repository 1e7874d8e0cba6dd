package checkpoint

import (
	"context"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// fillScattered reads the local ranks' parts of scattered tensors by the host, and copies them
// to the devices. It comes before the rounds, which tell other processes of failures.
func (m *executor) fillScattered(ctx context.Context, c *Checkpoint, all []*Weights, tensors []*placed) {
	if scatteredBytes(m.peers.locals, tensors) == 0 {
		return
	}
	for i, w := range all {
		d := m.locals[i]
		for _, t := range tensors {
			if t.scattered == nil || !t.cut.holds(d.rank) || t.bytes(d.rank) == 0 || m.failed() {
				continue
			}
			if err := m.fillOne(ctx, c, w, d, t); err != nil {
				m.setError(d, &TensorError{Op: m.op, Path: t.info.File, Tensor: t.info.Name, Offset: c.begin(t.info.Name), Err: err})
			}
		}
		if err := d.stream.Sync(ctx); err != nil {
			m.setError(d, err)
		}
	}
}

// scatteredBytes is how many bytes fillScattered moves.
func scatteredBytes(locals []*local, tensors []*placed) (n int64) {
	for _, t := range tensors {
		for _, l := range locals {
			if t.scattered != nil && t.cut.holds(l.rank) {
				n += int64(t.cut.elements(l.rank) * t.from)
			}
		}
	}
	return n
}

// fillOne fills a rank's part of a tensor. The part is a run of each row of the tensor.
func (m *executor) fillOne(ctx context.Context, c *Checkpoint, w *Weights, d *worker, t *placed) error {
	f := &t.flat
	run := f.ranges[d.rank]
	host := make([]byte, min(verifyChunk/t.from, run.Len*f.outer)*t.from)
	staged, err := tensor.Make(d.stream, memory.Uint8, len(host))
	if err != nil {
		return err
	}
	defer staged.Close()
	// The rows of the part follow each other in memory, so that a chunk may have several.
	total := run.Len * f.outer
	for at := 0; at < total; at += len(host) / t.from {
		n := min(len(host)/t.from, total-at)
		for k := 0; k < n; {
			row, column := (at+k)/run.Len, (at+k)%run.Len
			more := min(run.Len-column, n-k)
			if err := c.gather(ctx, t.scattered, host[k*t.from:(k+more)*t.from], row*f.width+run.Start+column); err != nil {
				return err
			}
			k += more
		}
		if err := d.put(w, t, staged, host[:n*t.from], at, n); err != nil {
			return err
		}
		if m.moved != nil {
			m.moved(n * t.from)
		}
	}
	return nil
}

// put copies n elements on the host to a rank's part, from element at on.
func (d *worker) put(w *Weights, t *placed, staged tensor.Tensor, host []byte, at, n int) error {
	x, err := view(staged, 0, len(host))
	if err == nil {
		err = x.CopyFrom(d.stream, host)
	}
	if err != nil {
		return err
	}
	from, err := cutOut(staged, 0, t.info.DType, n)
	if err != nil {
		return err
	}
	to, err := cutOut(w.slab, t.at[d.rank]+at*t.to.Size(), t.to, n)
	if err != nil {
		return err
	}
	return tensor.Copy(d.stream, to, from)
}
