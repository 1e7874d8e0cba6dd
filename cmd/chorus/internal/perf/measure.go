package perf

import (
	"context"
	"math"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Measure holds the results of one side of a row.
type Measure struct {
	Time  float64 `json:"time"`   // of one operation in µs, mean over the ranks
	AlgBW float64 `json:"alg_bw"` // 10^9 bytes a second
	BusBW float64 `json:"bus_bw"`
	P50   float64 `json:"p50"` // of single operations in µs, each timed on its slowest rank
	P99   float64 `json:"p99"`
	Wrong *int64  `json:"nwrong,omitempty"` // wrong elements in all checks; nil: not checked
}

// A Row is one size of one operation.
type Row struct {
	Operation  string   `json:"operation"`
	Bytes      int      `json:"size"`
	Count      int      `json:"count"`
	Type       string   `json:"type"`
	Reduction  string   `json:"redop"`
	Root       int      `json:"root"`
	OutOfPlace *Measure `json:"out_of_place"`
	InPlace    *Measure `json:"in_place,omitempty"` // nil if the operation cannot run in place
	Strategy   string   `json:"strategy,omitempty"` // set if several strategies were measured
	Chosen     bool     `json:"chosen,omitempty"`   // the group's tuning chooses this strategy if one call issues for all ranks of the process
}

// row measures both sides of a job.
func (r *rank) row(ctx context.Context, p *Plan, j job) (*Row, error) {
	row := j.describe()
	var err error
	if row.OutOfPlace, err = r.measure(ctx, p, j, false); err != nil {
		return nil, err
	}
	if j.op.inPlace {
		row.InPlace, err = r.measure(ctx, p, j, true)
	}
	return row, err
}

// describe returns a row without measurements.
func (j job) describe() *Row {
	return &Row{
		Operation: j.op.Name, Bytes: j.layout.size() * j.dtype.Size(), Count: j.layout.param,
		Type: dtypeName(j.dtype), Reduction: j.red.String(), Root: j.root,
	}
}

// measure measures one side of a row.
func (r *rank) measure(ctx context.Context, p *Plan, j job, inPlace bool) (*Measure, error) {
	calls, err := r.warmUp(ctx, p, j, inPlace)
	if err != nil {
		return nil, err
	}
	issue := func(i int) error { return calls[i%len(calls)]() }
	n, per := p.Iterations, 1
	if p.Launches > 0 {
		x, err := r.capture(ctx, p, calls)
		if err != nil {
			return nil, err
		}
		defer x.close()
		issue = func(int) error { return x.launch(ctx) }
		n, per = p.Launches, p.Iterations
	}
	mean, err := r.timed(ctx, n, issue)
	if err != nil {
		return nil, err
	}
	times, err := r.each(ctx, n, issue)
	if err != nil {
		return nil, err
	}
	wrong, err := r.verify(ctx, p.Checks, j, calls[0], inPlace)
	if err != nil {
		return nil, err
	}
	all, err := r.share(ctx, append(times, micros(mean), float64(wrong))...)
	if err != nil {
		return nil, err
	}
	return j.sum(all, per, p.Checks > 0), nil
}

// warmUp issues the warm-up calls of a job, and returns all calls of the job.
func (r *rank) warmUp(ctx context.Context, p *Plan, j job, inPlace bool) ([]func() error, error) {
	own, err := r.calls(j, inPlace)
	if err != nil {
		return nil, err
	}
	calls := unbatched(own)
	if p.together {
		calls = r.batched(ctx, own)
	}
	for i := range max(p.Warmups, 1) { // the first one connects the ranks
		if err := calls[i%len(calls)](); err != nil {
			return nil, err
		}
	}
	return calls, nil
}

// sum combines the numbers of all ranks: it averages the times and adds the wrong
// elements.
func (j job) sum(all [][]float64, per int, checked bool) *Measure {
	n := len(all[0]) - 2
	slowest := make([]float64, n)
	m := &Measure{}
	wrong := int64(0)
	for _, one := range all {
		for i := range slowest {
			slowest[i] = max(slowest[i], one[i]/float64(per))
		}
		m.Time += one[n] / float64(per) / float64(len(all))
		wrong += int64(one[n+1])
	}
	if checked {
		m.Wrong = &wrong
	}
	m.P50, m.P99 = quantile(slowest, 0.5), quantile(slowest, 0.99)
	m.AlgBW = float64(j.layout.moved*j.dtype.Size()) / 1e3 / m.Time
	m.BusBW = m.AlgBW * j.op.factor(float64(len(all)))
	return m
}

// quantile returns the smallest value with at least a fraction q of all values at or below it.
func quantile(all []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}

// mostCalls limits the number of buffer positions used in turn.
const mostCalls = 64

// calls returns the operation at successive positions of the buffers, so that an
// operation does not find its data in a cache.
func (r *rank) calls(j job, inPlace bool) (list []issue, err error) {
	size := j.dtype.Size()
	stride := (j.layout.size()*size + step - 1) / step * step
	batch := groups.Of(r.group).NewBatch()
	for at := 0; at+stride <= r.bufs[0].Len() && len(list) < mostCalls; at += stride {
		x := call{batch: batch, c: r.c, s: r.s, kind: j.op.kind, op: j.red.raw(), root: j.root, layout: j.layout}
		if j.red == MulSum {
			if x.op, err = r.mulSum(j.dtype); err != nil {
				return nil, err
			}
		}
		x.dst, x.src = r.buffers(j, inPlace, at)
		fn, err := newIssues[j.dtype](x)
		if err != nil {
			return nil, err
		}
		list = append(list, fn)
	}
	return list, nil
}

// buffers returns the destination and the source of a job at a position.
func (r *rank) buffers(j job, inPlace bool, at int) (dst, src memory.Slice[uint8]) {
	size := j.dtype.Size()
	room, dstAt, srcAt := 1, 0, 0
	if inPlace {
		room = 0
		dstAt, srcAt = j.op.offsets(j.layout, r.c.Rank())
	}
	dst = r.bufs[0].Slice(at+dstAt*size, at+(dstAt+j.layout.recv)*size)
	src = r.bufs[room].Slice(at+srcAt*size, at+(srcAt+j.layout.send)*size)
	return dst, src
}

// verify runs a call with known data and returns the number of wrong elements in
// the rank's destination.
func (r *rank) verify(ctx context.Context, times int, j job, call func() error, inPlace bool) (wrong uint64, err error) {
	if times == 0 {
		return 0, nil
	}
	size := j.dtype.Size()
	l, err := r.kernelsFor(size)
	if err != nil {
		return 0, err
	}
	c, err := newDataTables(r.s, l, newPattern(j.dtype, j.red, r.c.Size()), size)
	if err != nil {
		return 0, err
	}
	defer c.close()
	if err := r.wrong.Zero(r.s); err != nil {
		return 0, err
	}
	for i := range times {
		if err := r.checked(c, j, call, inPlace, uint32(i)*0x9E3779B9+uint32(j.layout.size())); err != nil {
			return 0, err
		}
	}
	if err := r.waitIdle(ctx); err != nil {
		return 0, err
	}
	var out [1]uint64
	err = r.wrong.CopyTo(r.s, out[:])
	return out[0], err
}

// checked poisons the destination, fills the source, runs the call and counts
// wrong elements.
func (r *rank) checked(c *dataTables, j job, call func() error, inPlace bool, seed uint32) error {
	size := j.dtype.Size()
	dst, src := r.buffers(j, inPlace, 0)
	if err := poison(r.s, r.bufs[0].Slice(0, j.layout.size()*size)); err != nil {
		return err
	}
	if err := c.fill(r.s, src, j.layout.send, r.c.Rank(), seed); err != nil {
		return err
	}
	if err := call(); err != nil {
		return err
	}
	for _, p := range j.op.pieces(j.layout, r.c.Rank(), r.c.Size(), j.root) {
		if err := c.check(r.s, dst.Slice(p.at*size, (p.at+p.n)*size), p, seed, r.wrong); err != nil {
			return err
		}
	}
	return nil
}

// poison fills a buffer with a value that is never a result: NaN for floats, the
// largest value or -1 for integers.
func poison(s *stream.Stream, x memory.Slice[uint8]) error {
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(cudadrv.DevicePtr(x.Ptr()), 0xff, uintptr(x.Len()), gpu.StreamOf(s).Raw())
	})
}
