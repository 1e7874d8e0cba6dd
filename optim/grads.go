package optim

import (
	"cmp"
	"errors"
	"math"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// Grads is a list of gradients of any floating-point types on one device. Each operation is
// one kernel, or two, for all gradients.
type Grads struct {
	owner  handle.Owner
	graphs gpu.Graphs // that have captured operations
	dev    *device.Device
	list   []tensor.Tensor
	norms  table[list]  // for Powers
	table  table[list]  // for the other operations
	dtype  memory.DType // of the norm
	parts  memory.Slice[float64]
	values memory.Slice[float32]
	done   memory.Slice[uint32]
	order  float64 // of the last norm; 0 is infinite
	raised bool    // Powers was called
}

// The places in values.
const (
	placePowers = iota // the sum of the powers of all elements, or the largest
	placeNorm
	placeCoef
	placeCount
)

// NewGrads prepares operations on gradients, which share no memory and stay the caller's. It
// allocates a table on s, which a graph cannot capture.
func NewGrads(s *stream.Stream, gradients ...tensor.Tensor) (*Grads, error) {
	const op = "new gradients"
	if s == nil {
		return nil, refuse(op, "no stream given")
	}
	rows := make([]list, len(gradients))
	for i := range gradients {
		x := &gradients[i]
		if err := checkTensor(*x, s.Device()); err != nil {
			return nil, refuse(op, "gradient %d: %w", i, err)
		}
		rows[i] = list{at: x.Ptr(), n: uint64(x.Len()), dtype: uint32(x.DType())}
	}
	return newGrads(s, gradients, rows)
}

// newGrads prepares operations on gradients, whose rows have no first block yet.
func newGrads(s *stream.Stream, gradients []tensor.Tensor, rows []list) (*Grads, error) {
	const op = "new gradients"
	g := &Grads{dev: s.Device(), list: slices.Clone(gradients)}
	if err := apart(op, gradients); err != nil {
		return nil, err
	}
	elements := 0
	for i := range rows {
		elements += int(rows[i].n)
	}
	chunk, err := chunkOf(g.dev, elements)
	if err != nil {
		return nil, refuse(op, "%w", err)
	}
	for _, row := range rows {
		row.first = uint32(len(g.norms.blocks))
		g.norms.add(row, int(row.n), mostChunk)
		g.table.add(row, int(row.n), chunk)
		g.dtype = wider(g.dtype, memory.DType(row.dtype))
	}
	if _, err := kernelsOf(g.dev); err != nil {
		return nil, refuse(op, "%w", err)
	}
	handle.Init(g, &g.owner, handle.About{Kind: "gradients", On: g.dev})
	if err := g.allocate(s); err != nil {
		return nil, errors.Join(refuse(op, "%w", err), g.Close())
	}
	return g, nil
}

func (g *Grads) allocate(s *stream.Stream) (err error) {
	if g.parts, err = memory.Make[float64](s, len(g.norms.blocks)); err != nil {
		return err
	}
	if g.values, err = memory.MakeFrom(s, make([]float32, placeCount)); err != nil {
		return err
	}
	if g.done, err = memory.MakeFrom(s, []uint32{0}); err != nil {
		return err
	}
	if err = g.norms.upload(s); err != nil {
		return err
	}
	return g.table.upload(s)
}

// wider returns the type that torch gives the norm of gradients of both types. The norm of
// float64 has torch's type, but is stored as float32.
func wider(a, b memory.DType) memory.DType {
	if a == memory.Invalid || a == b {
		return b
	}
	return memory.Float32
}

func (g *Grads) check(op string) error {
	for i := range g.list {
		if g.list[i].DType() == memory.Invalid {
			return refuse(op, "gradient %d: its parameter has none yet: call SetGradients before", i)
		}
		if err := checkTensor(g.list[i], g.dev); err != nil {
			return refuse(op, "gradient %d: %w", i, err)
		}
	}
	return nil
}

// enter returns the kernels for an operation on s.
func (g *Grads) enter(op string, s *stream.Stream) (*kernels, error) {
	switch {
	case g == nil || g.owner.Closed():
		return nil, refuse(op, "the gradients: %w", device.ErrClosed)
	case s == nil:
		return nil, refuse(op, "no stream given")
	case s.Device() != g.dev:
		return nil, refuse(op, "a stream on %s: the gradients are on %s", s.Device(), g.dev)
	}
	if err := g.check(op); err != nil {
		return nil, err
	}
	if err := g.graphs.Add(gpu.StreamOf(s)); err != nil {
		return nil, refuse(op, "%w", err)
	}
	return kernelsOf(g.dev)
}

func (g *Grads) value(place int) memory.Slice[float32] { return g.values.Slice(place, place+1) }

// Powers enqueues on s the sum of |x|^p over all elements, or the largest |x|
// if p is +Inf, and returns the number. Before the next call of Coef, ranks
// with different parts of a model add these numbers over all ranks, or compute
// their maximum. Sums are of float64, and the norm of each gradient is rounded
// to its type, as in torch. The returned number is rounded to float32, also for
// gradients of float64, where torch keeps float64, with a relative error of up
// to 2^-24. A number above 3.4e38 is infinite: for p = 2, that is a norm above
// 1.8e19.
func (g *Grads) Powers(s *stream.Stream, p float64) (memory.Slice[float32], error) {
	const op = "norm"
	k, err := g.enter(op, s)
	if err != nil {
		return memory.Slice[float32]{}, err
	}
	if !(p > 0) {
		return memory.Slice[float32]{}, refuse(op, "order %v: want a number above 0, or +Inf", p)
	}
	if g.order = p; math.IsInf(p, 0) {
		g.order = 0
	}
	g.raised = true
	rows, blocks := g.norms.parts()
	if len(g.list) == 0 {
		return g.value(placePowers), g.value(placePowers).Zero(s)
	}
	err = k.norm.Launch(s, grid(len(g.norms.blocks)), kernel.Ptr(rows), kernel.Ptr(blocks), kernel.Ptr(g.parts),
		kernel.Ptr(g.value(placePowers)), kernel.Ptr(g.done), kernel.Scalar[uint32](uint32(len(g.list))), kernel.Scalar[float64](g.order))
	return g.value(placePowers), watched(s, "kernel sum_powers", err, g.reads)
}

// Coef enqueues on s the norm of order p of all elements, from the result of Powers, and the
// factor min(1, limit/(norm+1e-6)), as torch's clip_grad_norm_ computes them. norm and factor
// are one element each; StepConfig.Clip takes the factor. For gradients of float64, too, limit,
// norm and factor are rounded to float32, and so is each step of the computation. A norm of NaN
// gives the factor NaN, and an infinite norm gives 0. Coef without a call of Powers before
// is refused.
func (g *Grads) Coef(s *stream.Stream, limit float64) (norm, factor memory.Slice[float32], err error) {
	const op = "clip"
	k, err := g.enter(op, s)
	if err != nil {
		return norm, factor, err
	}
	if !(limit >= 0) {
		return norm, factor, refuse(op, "a norm of at most %v: want 0 or more", limit)
	}
	if !g.raised {
		return norm, factor, refuse(op, "the gradients have no norm yet: call Powers before Coef")
	}
	norm, factor = g.value(placeNorm), g.value(placeCoef)
	return norm, factor, k.coefficient.Launch(s, one, kernel.Ptr(g.value(placePowers)), kernel.Ptr(norm), kernel.Ptr(factor),
		kernel.Scalar[float64](g.order), kernel.Scalar[float32](float32(limit)), kernel.Scalar[uint32](uint32(g.dtype)))
}

// ClipNorm enqueues on s torch.nn.utils.clip_grad_norm_ with foreach=True: it
// multiplies all gradients so that their norm of order p is at most limit, and
// returns the norm before. Nothing waits for the device. A norm of NaN makes
// all gradients NaN, and an infinite norm makes infinite gradients NaN, and the
// others 0.
func (g *Grads) ClipNorm(s *stream.Stream, limit, p float64) (norm memory.Slice[float32], err error) {
	if _, err := g.Powers(s, p); err != nil {
		return norm, err
	}
	norm, factor, err := g.Coef(s, limit)
	if err != nil {
		return norm, err
	}
	return norm, g.Scale(s, factor)
}

// Scale enqueues on s the product of all gradients with a device number, rounded to the type
// of each gradient first, as in torch.
func (g *Grads) Scale(s *stream.Stream, factor memory.Slice[float32]) error {
	const op = "scale"
	k, err := g.enter(op, s)
	if err != nil || len(g.list) == 0 {
		return err
	}
	if factor.Len() != 1 {
		return refuse(op, "a device number of %d elements: want 1", factor.Len())
	}
	rows, blocks := g.table.parts()
	err = k.scale.Launch(s, grid(len(g.table.blocks)), kernel.Ptr(rows), kernel.Ptr(blocks), kernel.Ptr(factor))
	return watched(s, "kernel multiply", err, g.writes)
}

// ClipValue enqueues on s torch.nn.utils.clip_grad_value_: elements below
// -limit become -limit, and elements above limit become limit, while NaN stays.
func (g *Grads) ClipValue(s *stream.Stream, limit float64) error {
	const op = "clip values"
	k, err := g.enter(op, s)
	if err != nil || len(g.list) == 0 {
		return err
	}
	if !(limit >= 0) {
		return refuse(op, "at most %v: want 0 or more", limit)
	}
	rows, blocks := g.table.parts()
	err = k.clamp.Launch(s, grid(len(g.table.blocks)), kernel.Ptr(rows), kernel.Ptr(blocks), kernel.Scalar[float32](float32(limit)))
	return watched(s, "kernel limit_size", err, g.writes)
}

// Unscale enqueues on s torch's _amp_foreach_non_finite_check_and_unscale_: it
// multiplies all gradients by *inverse, and sets *found to 1 if an element was
// infinite or NaN; otherwise *found stays. Both are slices of one element. With
// the zero Slice as inverse, Unscale only checks.
func (g *Grads) Unscale(s *stream.Stream, inverse, found memory.Slice[float32]) error {
	const op = "unscale"
	k, err := g.enter(op, s)
	if err != nil || len(g.list) == 0 {
		return err
	}
	by, err := number(op, inverse)
	if err != nil {
		return err
	}
	if found.Len() != 1 {
		return refuse(op, "found is %d elements: want 1", found.Len())
	}
	rows, blocks := g.table.parts()
	err = k.unscale.Launch(s, grid(len(g.table.blocks)), kernel.Ptr(rows), kernel.Ptr(blocks), by, kernel.Ptr(found))
	if inverse.Len() == 0 {
		return watched(s, "kernel unscale", err, g.reads)
	}
	return watched(s, "kernel unscale", err, g.writes)
}

// Close frees the table, but not the gradients, once pending work on its stream
// has finished. While a graph that has captured operations of g is open, Close
// fails and g stays open. Close does nothing if g is nil or closed.
func (g *Grads) Close() error {
	if g == nil || g.owner.Closed() {
		return nil
	}
	if err := g.graphs.Refuse("optim: close the gradients on " + g.dev.String()); err != nil {
		return err
	}
	if !g.owner.Close() {
		return nil
	}
	return errors.Join(g.norms.close(), g.table.close(), g.parts.Close(), g.values.Close(), g.done.Close())
}

// A span is the memory of a contiguous tensor, from a first address up to, and without, an end.
type span struct {
	from, end uint64
	name      string
}

type spans []span

func (x *spans) add(t *tensor.Tensor, name string) {
	if t.Len() > 0 {
		*x = append(*x, spanOf(t, name))
	}
}

func spanOf(t *tensor.Tensor, name string) span {
	return span{t.Ptr(), t.Ptr() + uint64(t.Bytes()), name}
}

// apart returns an error that names two spans with common memory, if there are such.
func (x spans) apart(op string) error {
	slices.SortStableFunc(x, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	for i := 1; i < len(x); i++ {
		if a, b := x[i-1], x[i]; b.from < a.end {
			return refuse(op, "%s and %s share memory: give each its own", a.name, b.name)
		}
	}
	return nil
}

// apartFrom returns an error if y has memory in common with a span of x, which
// must be sorted, as apart leaves it.
func (x spans) apartFrom(op string, y span) error {
	i, _ := slices.BinarySearchFunc(x, y.from, func(s span, from uint64) int { return cmp.Compare(s.end, from+1) })
	if i < len(x) && x[i].from < y.end {
		return refuse(op, "%s and %s share memory: give each its own", x[i].name, y.name)
	}
	return nil
}

// watched tells the sanitizer, if there is one, which tensors a launch found in
// its table, and returns err, the error of the launch.
func watched(s *stream.Stream, name string, err error, list func() []cudadrv.Use) error {
	if err == nil {
		gpu.StreamOf(s).Uses(name, false, list)
	}
	return err
}

// useOf returns the use of a contiguous tensor.
func useOf(x *tensor.Tensor, write bool) cudadrv.Use {
	return cudadrv.Use{Ptr: cudadrv.DevicePtr(x.Ptr()), Bytes: uint64(x.Bytes()), Write: write}
}

// uses lists the memory that a step finds in its table.
func (o *Optimizer) uses() (uses []cudadrv.Use) {
	for i := range o.params {
		p := &o.params[i]
		uses = append(uses, useOf(&p.Value, true), useOf(&p.Grad, false), useOf(&p.Copy, true))
		for k := range p.states {
			uses = append(uses, useOf(&p.states[k], true))
		}
	}
	return uses
}

// reads lists the gradients as read.
func (g *Grads) reads() []cudadrv.Use { return g.uses(false) }

// writes lists the gradients as written.
func (g *Grads) writes() []cudadrv.Use { return g.uses(true) }

func (g *Grads) uses(write bool) (uses []cudadrv.Use) {
	for i := range g.list {
		uses = append(uses, useOf(&g.list[i], write))
	}
	return uses
}
