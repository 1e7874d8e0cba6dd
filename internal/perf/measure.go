package perf

import (
	"context"
	"math"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Measure is one side of a row.
type Measure struct {
	Time  float64 `json:"time"`   // of an operation, in µs, the mean over the ranks
	AlgBW float64 `json:"alg_bw"` // 10^9 bytes a second
	BusBW float64 `json:"bus_bw"`
	P50   float64 `json:"p50"` // of the slowest rank of each operation by itself, in µs
	P99   float64 `json:"p99"`
	Wrong *int64  `json:"nwrong,omitempty"` // elements, over all checks; nil: not checked
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
	InPlace    *Measure `json:"in_place,omitempty"` // nil where an operation cannot
	Strategy   string   `json:"strategy,omitempty"` // where several were measured
	Chosen     bool     `json:"chosen,omitempty"`   // it is the one that the group's tuning chooses, for one call that has all ranks of the process
}

// row measures a job.
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

// describe is a row without its measures.
func (j job) describe() *Row {
	return &Row{
		Operation: j.op.Name, Bytes: j.layout.size() * j.dtype.Size(), Count: j.layout.param,
		Type: dtypeName(j.dtype), Reduction: j.red.String(), Root: j.root,
	}
}

// measure is one side of a row.
func (r *rank) measure(ctx context.Context, p *Plan, j job, inPlace bool) (*Measure, error) {
	calls, err := r.calls(j, inPlace)
	if err != nil {
		return nil, err
	}
	if p.together {
		calls = r.together(ctx, calls)
	}
	issue := func(i int) error { return calls[i%len(calls)]() }
	n, per := p.Iterations, 1
	for i := range max(p.Warmups, 1) { // the first connects the ranks
		if err := issue(i); err != nil {
			return nil, err
		}
	}
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

// sum puts the numbers of all ranks together: times of operations, the mean, and
// what was wrong.
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

// quantile returns the value that a part q of all is at most.
func quantile(all []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}

// mostCalls bounds the places in the buffers that are used in turn.
const mostCalls = 64

// calls are the operation at one place of the buffers after another, so that none
// finds its data in a cache because the one before left it there.
func (r *rank) calls(j job, inPlace bool) (list []func() error, err error) {
	size := j.dtype.Size()
	stride := (j.layout.size()*size + step - 1) / step * step
	for at := 0; at+stride <= r.room[0].Len() && len(list) < mostCalls; at += stride {
		x := call{c: r.c, s: r.s, kind: j.op.kind, op: j.red.raw(), root: j.root, layout: j.layout}
		if j.red == MulSum {
			if x.op, err = r.mulSum(j.dtype); err != nil {
				return nil, err
			}
		}
		x.dst, x.src = r.buffers(j, inPlace, at)
		fn, err := makers[j.dtype](x)
		if err != nil {
			return nil, err
		}
		list = append(list, fn)
	}
	return list, nil
}

// buffers returns the destination and the source of a job at a place.
func (r *rank) buffers(j job, inPlace bool, at int) (dst, src memory.Slice[uint8]) {
	size := j.dtype.Size()
	room, dstAt, srcAt := 1, 0, 0
	if inPlace {
		room = 0
		dstAt, srcAt = j.op.places(j.layout, r.c.Rank())
	}
	dst = r.room[0].Slice(at+dstAt*size, at+(dstAt+j.layout.recv)*size)
	src = r.room[room].Slice(at+srcAt*size, at+(srcAt+j.layout.send)*size)
	return dst, src
}

// verify does a call with known data so many times and returns how many elements of
// the rank's destination were wrong.
func (r *rank) verify(ctx context.Context, times int, j job, call func() error, inPlace bool) (wrong uint64, err error) {
	if times == 0 {
		return 0, nil
	}
	size := j.dtype.Size()
	l, err := r.loom(size)
	if err != nil {
		return 0, err
	}
	c, err := newCloth(r.s, l, newPattern(j.dtype, j.red, r.c.Size()), size)
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
	if err := r.settle(ctx); err != nil {
		return 0, err
	}
	var out [1]uint64
	err = r.wrong.CopyTo(r.s, out[:])
	return out[0], err
}

// checked poisons the destination, fills the source, does the call and counts what
// is wrong.
func (r *rank) checked(c *cloth, j job, call func() error, inPlace bool, seed uint32) error {
	size := j.dtype.Size()
	dst, src := r.buffers(j, inPlace, 0)
	if err := poison(r.s, r.room[0].Slice(0, j.layout.size()*size)); err != nil {
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

// poison fills a buffer with what no result is: not a number for floats, and else
// the largest of the type or -1.
func poison(s *stream.Stream, x memory.Slice[uint8]) error {
	return s.Device().Do("cuMemsetD8Async", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(x.Raw(), 0xff, uintptr(x.Len()), s.Raw())
	})
}
