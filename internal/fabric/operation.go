package fabric

import (
	"errors"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An operation is an operation of one rank.
type operation struct {
	kind      flight.Kind
	op        flight.Reduction
	root      int
	algorithm Algorithm

	dtype    memory.DType
	format   int // index in formats, for reductions
	bytes    int // of one rank's part
	dst, src uint64
}

// hasKernel has the collectives that have Chorus kernels.
var hasKernel = [flight.NumKinds]bool{
	flight.AllReduce: true, flight.Broadcast: true, flight.AllGather: true, flight.ReduceScatter: true, flight.AllToAll: true,
}

func (o *operation) reduces() bool {
	return o.kind == flight.AllReduce || o.kind == flight.ReduceScatter
}

// fits chooses the algorithm and reports whether there is room for the operation; most is
// the maximum size.
func (o *operation) fits(r *Rank) (most int, ok bool) {
	l := r.Limits()
	most = l.Part
	if o.kind == flight.AllReduce {
		if o.algorithm == Auto && o.bytes <= l.AllReduce() {
			o.algorithm = r.choose(o.bytes)
		}
		most = l.of(o.algorithm)
	}
	return most, r.ranks == 1 || o.bytes <= most
}

// enqueue launches the kernel.
func (r *Rank) enqueue(s *stream.Stream, o *operation) error {
	k, g, err := o.kernel(r)
	if err != nil {
		return err
	}
	if err := gpu.StreamOf(s).Captured(r); err != nil {
		return err
	}
	var args [rootParam + 1]kernel.Arg
	copy(args[:], r.args[:])
	args[signatureParam] = kernel.Scalar(o.signature())
	args[inParam], args[outParam] = kernel.Address(o.src), kernel.Address(o.dst)
	args[bytesParam], args[alignedParam] = kernel.Scalar(uint64(o.bytes)), kernel.Scalar(o.aligned())
	n := rootParam
	if o.kind == flight.Broadcast {
		args[rootParam] = kernel.Scalar(uint32(o.root))
		n++
	}
	if err := r.order.Begin(gpu.StreamOf(s)); err != nil {
		return errors.Join(r.Err(), err)
	}
	defer r.order.End()
	if err := r.Err(); err != nil {
		return err
	}
	if err := k.Launch(s, kernel.Grid{Blocks: [3]uint32{g.blocks, 1, 1}, Threads: [3]uint32{g.threads, 1, 1}}, args[:n]...); err != nil {
		return err
	}
	gpu.StreamOf(s).Uses("kernel of "+o.kind.String(), r.ranks > 1, func() []cudadrv.Use { return o.uses(r) })
	return nil
}

// uses lists the operands of this rank, for the sanitizer.
func (o *operation) uses(r *Rank) []cudadrv.Use {
	in, out := 1, 1
	switch o.kind {
	case flight.AllGather:
		out = r.ranks
	case flight.ReduceScatter:
		in = r.ranks
	case flight.AllToAll:
		in, out = r.ranks, r.ranks
	case flight.Broadcast:
		if in = 0; o.root == r.rank {
			in = 1
		}
	}
	return []cudadrv.Use{{Ptr: cudadrv.DevicePtr(o.src), Bytes: uint64(in * o.bytes)}, {Ptr: cudadrv.DevicePtr(o.dst), Bytes: uint64(out * o.bytes), Write: true}}
}

// kernel returns the kernel of the operation and its grid.
func (o *operation) kernel(r *Rank) (k *kernel.Kernel, g grid, err error) {
	t := tools(r.dev, r.ranks)
	switch o.kind {
	case flight.AllReduce:
		k, err = t.reducer(r.dev, allReduceFn+function(o.algorithm)-1, o.format, o.op)
	case flight.ReduceScatter:
		k, err = t.reducer(r.dev, reduceScatterFn, o.format, o.op)
	case flight.AllGather:
		k, err = t.mover(r.dev, allGatherFn)
	case flight.AllToAll:
		k, err = t.mover(r.dev, allToAllFn)
	case flight.Broadcast:
		k, err = t.mover(r.dev, broadcastFn)
	}
	return k, r.grid(o.algorithm.steps(o.bytes, r.ranks)), err
}

// signature is a hash of all properties that must be the same on all ranks. Packets and
// signals carry it, so that a rank does not accept the data of another operation.
func (o *operation) signature() uint64 {
	x := uint64(o.kind) | uint64(o.algorithm)<<8 | uint64(o.dtype)<<16 | uint64(o.root)<<32
	if o.reduces() {
		x |= uint64(o.op) << 24
	}
	return scramble(scramble(x) + uint64(o.bytes))
}

// scramble is a bijective hash of a number.
func scramble(x uint64) uint64 {
	x = (x ^ x>>30 + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// aligned is 1 if the rank's kernel may access several bytes of its operands at once. The
// other ranks' operands may be aligned differently, because the data on the links is the
// same.
func (o *operation) aligned() uint32 {
	unit := uint64(8)
	bits := o.dst | o.src
	switch {
	case o.kind == flight.AllReduce && o.algorithm == TwoShot:
		unit = 16
	case o.kind != flight.AllReduce && o.kind != flight.Broadcast:
		bits |= uint64(o.bytes) // the offset of each part
	}
	if bits%unit == 0 {
		return 1
	}
	return 0
}
