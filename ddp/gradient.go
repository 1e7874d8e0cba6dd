package ddp

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A Gradient is the memory of a gradient: a memory.Slice, or a contiguous tensor.Tensor, whose
// shape a [Hook] can use.
type Gradient interface {
	Buffer() *memory.Buffer
	Offset() int
	Len() int
	DType() memory.DType
}

// A gradient is a Gradient as the reducer keeps it.
type gradient struct {
	buffer  *memory.Buffer
	offset  int // in bytes
	len     int
	dtype   memory.DType
	shape   []int
	dense   bool // without gaps
	address uint64
}

func gradientOf[G Gradient](x G) gradient {
	own := gradient{buffer: x.Buffer(), offset: x.Offset(), len: x.Len(), dtype: x.DType(), shape: []int{x.Len()}, dense: true}
	if t, ok := any(x).(interface {
		Shape() []int
		Contiguous() bool
	}); ok {
		own.shape, own.dense = t.Shape(), t.Contiguous()
	}
	if p, ok := any(x).(interface{ Ptr() uint64 }); ok {
		own.address = p.Ptr()
	}
	return own
}

// sliceOf returns the elements of x, whose type is T.
func sliceOf[T memory.Element](x *gradient) (memory.Slice[T], error) {
	if x.buffer == nil {
		return memory.Slice[T]{}, nil
	}
	return memory.View[T](x.buffer, x.offset, x.len)
}

func (x *gradient) bytes() int { return x.len * x.dtype.Size() }

// gradientsOf checks the gradients of the local ranks.
func gradientsOf[G Gradient](op string, g *comm.Group, grads [][]G) ([][]gradient, error) {
	if len(grads) != g.Locals() || len(grads[0]) == 0 {
		return nil, fmt.Errorf("ddp: %s: %d lists of gradients for %d local ranks: want one list with at least one gradient for each: %w",
			op, len(grads), g.Locals(), comm.ErrMismatch)
	}
	all := make([][]gradient, len(grads))
	for i, list := range grads {
		for j, x := range list {
			if isNil(x) {
				return nil, refuse(op, "gradient %d of local rank %d is nil: want a slice or a tensor", j, i)
			}
			all[i] = append(all[i], gradientOf(x))
		}
		if err := checkGradients(op, g, i, all); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// isNil reports whether a Gradient is no value, or a nil pointer.
func isNil[G Gradient](x G) bool {
	v := reflect.ValueOf(x)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// checkGradients checks the gradients of a local rank.
func checkGradients(op string, g *comm.Group, local int, all [][]gradient) error {
	list := all[local]
	if !slices.Equal(lengths(list), lengths(all[0])) {
		return fmt.Errorf("ddp: %s: the gradients of local ranks 0 and %d have different lengths: %w", op, local, comm.ErrMismatch)
	}
	for j, x := range list {
		if err := inside.CheckBuffer("ddp: "+op, x.buffer, x.len, g.Device(local)); err != nil {
			return unfit(fmt.Errorf("%w (gradient %d of local rank %d)", err, j, local))
		}
		switch first := &all[0][j]; {
		case x.dtype != first.dtype:
			return refuse(op, "gradient %d is %s on local rank 0 and %s on local rank %d: want the same type", j, first.dtype, x.dtype, local)
		case !slices.Equal(x.shape, first.shape):
			return refuse(op, "gradient %d has shape %v on local rank 0 and %v on local rank %d: want the same shape", j, first.shape, x.shape, local)
		case !x.dense:
			return refuse(op, "gradient %d of local rank %d has gaps between its elements: want contiguous memory", j, local)
		}
	}
	if a, b, shared := sharing(list); shared {
		return refuse(op, "gradients %d and %d of local rank %d share some memory: want each to be reduced once", a, b, local)
	}
	return nil
}

// sharing returns two gradients that share some memory, if there are any.
func sharing(xs []gradient) (a, b int, found bool) {
	var order []int
	for i, x := range xs {
		if x.len > 0 {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(xs[i].address, xs[j].address) })
	for k := 1; k < len(order); k++ {
		a, b = order[k-1], order[k]
		if xs[a].address+uint64(xs[a].bytes()) > xs[b].address {
			return min(a, b), max(a, b), true
		}
	}
	return 0, 0, false
}

func lengths(xs []gradient) []int {
	n := make([]int, len(xs))
	for i, x := range xs {
		n[i] = x.len
	}
	return n
}

func dtypes(xs []gradient) []memory.DType {
	ts := make([]memory.DType, len(xs))
	for i, x := range xs {
		ts[i] = x.dtype
	}
	return ts
}

func shapes(xs []gradient) [][]int {
	all := make([][]int, len(xs))
	for i, x := range xs {
		all[i] = x.shape
	}
	return all
}

// isFloat reports whether t is a float of 16 bits or more.
func isFloat(t memory.DType) bool { return dtype.Of(t).IsFloat() && !dtype.Of(t).IsFloat8() }

// compressible reports whether ReducerConfig.Compress applies to gradients of type t.
func compressible(t memory.DType) bool { return t == memory.Float32 || t == memory.Float64 }

// contents are the memory of a bucket on the local ranks: its gradients, and the wire that the
// ranks reduce. nth counts the gradients of the bucket. The methods enqueue.
type contents interface {
	// put brings one gradient into the wire.
	put(s *stream.Stream, local, nth int) error
	// load brings the seen gradients into the wire, unless each is put by itself.
	load(s *stream.Stream, local int, seen []bool) error
	// unload brings the wire into the seen gradients, or into all if seen is nil.
	unload(s *stream.Stream, local int, seen []bool) error
	zero(s *stream.Stream, local, nth int) error
	// save copies a gradient that the wire is about to overwrite. It returns nil if the wire
	// is not the memory of the gradients.
	save(s *stream.Stream, local, nth int) (*memory.Buffer, error)
	// choose sets a gradient to the wire if used is not 0, and to the saved value if it is.
	choose(s *stream.Stream, local, nth int, used memory.Slice[uint8], saved *memory.Buffer) error
	scale(g *comm.Group, factors comm.Shards[float32]) error
	divide(g *comm.Group, by int) error
	reduce(g *comm.Group, op comm.Op) error
	// tensors returns the memory of the wire, by local rank.
	tensors() ([]tensor.Tensor, error)
	apart(local int) bool // each gradient is put by itself
	close() error
}

// holding are the contents of a bucket of type T.
type holding[T memory.Element] struct {
	bucket *bucket
	grads  [][]memory.Slice[T] // by local rank
	wholes []memory.Slice[T]   // by local rank: the memory over the gradients, or none if they lie apart
	wire   wire[T]
}

// newContents returns the contents of a bucket of the type T.
func newContents[T memory.Element](g *comm.Group, c *ReducerConfig, b *bucket, grads [][]gradient) (contents, error) {
	h := &holding[T]{bucket: b, wholes: make([]memory.Slice[T], len(grads)), grads: make([][]memory.Slice[T], len(grads))}
	for i, list := range grads {
		for _, j := range b.grads {
			x, err := sliceOf[T](&list[j])
			if err != nil {
				return nil, err
			}
			h.grads[i] = append(h.grads[i], x)
		}
		h.wholes[i], _ = adjacent[T](b, list)
	}
	var err error
	h.wire, err = newWire(g, c, h.wholes, b.len)
	return h, err
}

// contentsOf returns the contents of a bucket.
func contentsOf(g *comm.Group, c *ReducerConfig, b *bucket, grads [][]gradient) (contents, error) {
	switch b.dtype {
	case memory.Float32:
		return newContents[float32](g, c, b, grads)
	case memory.Float64:
		return newContents[float64](g, c, b, grads)
	case memory.Float16:
		return newContents[memory.Float16Bits](g, c, b, grads)
	case memory.BFloat16:
		return newContents[memory.BFloat16Bits](g, c, b, grads)
	case memory.Float8E4M3:
		return newContents[memory.Float8E4M3Bits](g, c, b, grads)
	case memory.Float8E5M2:
		return newContents[memory.Float8E5M2Bits](g, c, b, grads)
	case memory.Int8:
		return newContents[int8](g, c, b, grads)
	case memory.Uint8:
		return newContents[uint8](g, c, b, grads)
	case memory.Int16:
		return newContents[int16](g, c, b, grads)
	case memory.Uint16:
		return newContents[uint16](g, c, b, grads)
	case memory.Int32:
		return newContents[int32](g, c, b, grads)
	case memory.Uint32:
		return newContents[uint32](g, c, b, grads)
	case memory.Int64:
		return newContents[int64](g, c, b, grads)
	case memory.Uint64:
		return newContents[uint64](g, c, b, grads)
	case memory.Bool:
		return newContents[bool](g, c, b, grads)
	}
	return nil, fmt.Errorf("gradients of %s: want another type", b.dtype)
}

func (h *holding[T]) apart(local int) bool { return h.wholes[local].Buffer() == nil }

func (h *holding[T]) put(s *stream.Stream, local, nth int) error {
	if err := h.wire.record(s, local); err != nil {
		return err
	}
	return h.wire.put(s, local, h.bucket.at[nth], h.grads[local][nth])
}

func (h *holding[T]) load(s *stream.Stream, local int, seen []bool) error {
	if !h.apart(local) {
		if err := h.wholes[local].RecordStream(s); err != nil {
			return err
		}
		return h.runs(local, seen, func(at int, x memory.Slice[T]) error { return h.wire.put(s, local, at, x) })
	}
	for _, x := range h.grads[local] {
		if err := x.RecordStream(s); err != nil {
			return err
		}
	}
	return nil
}

func (h *holding[T]) unload(s *stream.Stream, local int, seen []bool) error {
	return h.runs(local, seen, func(at int, x memory.Slice[T]) error { return h.wire.get(s, local, at, x) })
}

// runs calls fn for the seen gradients, nil is all: for as many at once as lie together, in the
// memory and in the wire.
func (h *holding[T]) runs(local int, seen []bool, fn func(at int, x memory.Slice[T]) error) error {
	b, whole := h.bucket, h.wholes[local]
	for j := 0; j < len(b.grads); j++ {
		if seen != nil && !seen[b.grads[j]] {
			continue
		}
		at, x := b.at[j], h.grads[local][j]
		if !h.apart(local) {
			for j+1 < len(b.grads) && (seen == nil || seen[b.grads[j+1]]) {
				j++
			}
			x = whole.Slice(at, b.at[j]+h.grads[local][j].Len())
		}
		if err := fn(at, x); err != nil {
			return err
		}
	}
	return nil
}

func (h *holding[T]) zero(s *stream.Stream, local, nth int) error {
	return h.wire.zero(s, local, h.bucket.at[nth], h.grads[local][nth].Len())
}

func (h *holding[T]) save(s *stream.Stream, local, nth int) (*memory.Buffer, error) {
	if !h.wire.inPlace(local) {
		return nil, nil
	}
	x := h.grads[local][nth]
	old, err := memory.Make[T](s, x.Len())
	if err != nil {
		return nil, err
	}
	if err := memory.Copy(s, old, x); err != nil {
		return nil, errors.Join(err, old.Close())
	}
	return old.Buffer(), nil
}

func (h *holding[T]) choose(s *stream.Stream, local, nth int, used memory.Slice[uint8], saved *memory.Buffer) error {
	x := h.grads[local][nth]
	old := x
	if saved != nil {
		var err error
		if old, err = memory.View[T](saved, 0, x.Len()); err != nil {
			return err
		}
	}
	return h.wire.choose(s, local, h.bucket.at[nth], x, used, old)
}

func (h *holding[T]) scale(g *comm.Group, factors comm.Shards[float32]) error {
	return h.wire.scale(g, factors)
}

func (h *holding[T]) divide(g *comm.Group, by int) error { return h.wire.divide(g, by) }

func (h *holding[T]) reduce(g *comm.Group, op comm.Op) error { return h.wire.reduce(g, op) }

func (h *holding[T]) tensors() ([]tensor.Tensor, error) { return h.wire.tensors() }

func (h *holding[T]) close() error {
	if h.wire == nil {
		return nil
	}
	return h.wire.close()
}

// A Piece is the run of a parameter's elements that a rank's shard has. The shard of a rank has
// at most one run of each parameter. Gradients and the optimiser's state have the same layout.
type Piece struct {
	Unit  int // the unit of the parameter; 0 of a Sharder
	Param int // the number of the parameter
	Start int // the first element of the parameter
	Len   int // elements
	At    int // the first element in the shard
}

// Pieces returns the elements of parameters that the shard of a local rank has,
// by At. An optimiser with a parameter for each piece has a state that a
// checkpoint stores by the names of the whole parameters, so that any number of
// ranks can load it. Padding and parameters without elements have no piece. If
// there are fewer elements than ranks, some ranks have no piece: their
// optimiser has a group without parameters.
func (sh *Sharder[T]) Pieces(local int) []Piece {
	var all []Piece
	rank := sh.queue.rank(local)
	for k := len(sh.spans) - 1; k >= 0; k-- {
		b, sp := &sh.queue.buckets[k], &sh.spans[k]
		for j, i := range b.grads {
			at, end := b.at[j], b.at[j]+sh.locals[local].params[i].Len() // in the bucket
			from, to := max(at, rank*sp.part), min(end, (rank+1)*sp.part)
			if from < to {
				all = append(all, Piece{Param: i, Start: from - at, Len: to - from, At: sp.at/sh.g.Size() + from - rank*sp.part})
			}
		}
	}
	return all
}

// Powers prepares the norm of gradients that are divided over the ranks, as a Sharder's are. It
// enqueues one all-reduce of one number: the sum of |x|^p over all gradients of all ranks, or the
// largest |x| if p is +Inf. Then Coef of each of the Grads returns the norm over all ranks, and
// the factor that clips it (FSDP's clip_grad_norm_):
//
//	err = ddp.Powers(g, 2, []*optim.Grads{grads}, []*stream.Stream{s})
//	norm, factor, err := grads.Coef(s, 1)
//	err = opt.Step(s, &optim.StepConfig{Clip: factor})
//
// grads[i] has the gradients of local rank i, each of which is on one rank
// only. The stream that has computed them, streams[i], waits for the result,
// but the host does not. Gradients that a Reducer has reduced are the same on
// all ranks and need no Powers. Collective.
//
// p must be the same on all ranks: Powers does not compare it, and norms of different p are wrong.
// After an error, such as closed Grads, the process has enqueued no all-reduce, and the other
// processes wait for it: close the group, so that they get an error.
func Powers(g *comm.Group, p float64, grads []*optim.Grads, streams []*stream.Stream) error {
	const op = "powers"
	if err := checkGroup(g, op); err != nil {
		return err
	}
	if len(grads) != g.Locals() || len(streams) != g.Locals() {
		return refuse(op, "%d gradients and %d streams: want one for each of the %d local ranks", len(grads), len(streams), g.Locals())
	}
	reduction := comm.Sum
	if math.IsInf(p, 1) {
		reduction = comm.Max
	}
	numbers := make([]memory.Slice[float32], len(grads))
	for i, x := range grads {
		var err error
		if numbers[i], err = x.Powers(streams[i], p); err != nil {
			return err
		}
	}
	return g.Between(streams, func() error { return comm.AllReduce(g, reduction, numbers...) })
}
