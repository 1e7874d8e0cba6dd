package fabric

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An operation is one that a rank enqueues.
type operation struct {
	kind      Kind
	op        Op
	root      int
	algorithm Algorithm

	dtype    memory.DType
	format   int // the place in formats, of those that reduce
	bytes    int // of one rank's part
	dst, src uint64
}

// issue checks an operation and enqueues it.
func issue[T memory.Element](r *Rank, s *stream.Stream, o *operation, dst, src memory.Slice[T]) error {
	if r == nil {
		return fmt.Errorf("fabric: %s: no rank given", o.kind)
	}
	fail := func(err error) error { return r.errorf(o.kind.String(), "%w", err) }
	if err := r.Err(); err != nil {
		return err
	}
	if !s.Open() || s.Device() != r.dev {
		return s.Check("fabric: "+o.kind.String(), r.dev)
	}
	if o.kind == Broadcasts && o.root >= 0 && o.root < r.ranks && r.rank != o.root {
		src = dst
	}
	if err := o.lengths(r, dst.Len(), src.Len(), memory.DTypeOf[T]()); err != nil {
		return fail(err)
	}
	if err := errors.Join(dst.Check("the destination", r.dev), src.Check("the source", r.dev)); err != nil {
		return fail(err)
	}
	o.dst, o.src = dst.Ptr(), src.Ptr()
	if err := o.overlap(r, dst.Bytes(), src.Bytes()); err != nil {
		return fail(err)
	}
	if o.bytes == 0 {
		return nil
	}
	if err := o.room(r); err != nil {
		return fail(err)
	}
	if r.ranks == 1 {
		if o.dst == o.src {
			return nil
		}
		return memory.Copy(s, dst, src)
	}
	if err := r.enqueue(s, o); err != nil {
		return fail(err)
	}
	return nil
}

// lengths checks the lengths, the type and what names a way or a rank.
func (o *operation) lengths(r *Rank, dst, src int, t memory.DType) error {
	wantDst, wantSrc, part := src, src, src
	switch o.kind {
	case AllGathers:
		wantDst = src * r.ranks
	case ReduceScatters:
		wantDst, wantSrc, part = dst, dst*r.ranks, dst
	case AllToAlls:
		part = src / r.ranks
	}
	o.bytes, o.dtype = part*t.Size(), t
	switch {
	case dst != wantDst:
		return fmt.Errorf("the destination has %d elements: want %d", dst, wantDst)
	case src != wantSrc:
		return fmt.Errorf("the source has %d elements: want %d", src, wantSrc)
	case o.kind == AllToAlls && src%r.ranks != 0:
		return fmt.Errorf("the source has %d elements: want a multiple of %d, the number of ranks", src, r.ranks)
	case o.kind == Broadcasts && (o.root < 0 || o.root >= r.ranks):
		return fmt.Errorf("rank %d does not exist", o.root)
	case o.algorithm < Auto || o.algorithm >= algorithms:
		return fmt.Errorf("%s does not exist", o.algorithm)
	}
	if !o.reduces() {
		return nil
	}
	if o.op < 0 || o.op >= ops {
		return fmt.Errorf("%s does not exist: want sum, prod, max, min or avg", o.op)
	}
	if o.format = formatOf[t]; o.format < 0 {
		return fmt.Errorf("%s of %s: want an integer of 8, 32 or 64 bits or a float of at least 16: %w", o.op, t, errors.ErrUnsupported)
	}
	return nil
}

func (o *operation) reduces() bool { return o.kind == AllReduces || o.kind == ReduceScatters }

// overlap refuses buffers that share memory in another way than in place.
func (o *operation) overlap(r *Rank, dst, src int) error {
	if o.dst+uint64(dst) <= o.src || o.src+uint64(src) <= o.dst {
		return nil
	}
	own := uint64(r.rank * o.bytes)
	want := "the same memory"
	switch o.kind {
	case AllReduces, Broadcasts:
		if o.dst == o.src {
			return nil
		}
	case AllGathers:
		if want = "the source to be the rank's part of the destination"; o.src == o.dst+own {
			return nil
		}
	case ReduceScatters:
		if want = "the destination to be the rank's part of the source"; o.dst == o.src+own {
			return nil
		}
	case AllToAlls:
		return errors.New("the destination and the source overlap: want no memory in common")
	}
	return fmt.Errorf("the destination and the source overlap: want %s, or none in common", want)
}

// fits chooses the algorithm and reports whether there is room for the operation, or
// how much there is.
func (o *operation) fits(r *Rank) (most int, ok bool) {
	l := r.Limits()
	most = l.Part
	if o.kind == AllReduces {
		if o.algorithm == Auto && o.bytes <= l.AllReduce() {
			o.algorithm = r.choose(o.bytes)
		}
		most = l.of(o.algorithm)
	}
	return most, r.ranks == 1 || o.bytes <= most
}

// room is fits with an error.
func (o *operation) room(r *Rank) error {
	most, ok := o.fits(r)
	switch {
	case ok:
		return nil
	case o.algorithm == TwoShotLines && r.noLines != "":
		return r.Supports(TwoShotLines)
	case o.kind == AllReduces && o.bytes <= r.Limits().AllReduce():
		return fmt.Errorf("%d bytes: %s takes at most %d", o.bytes, o.algorithm, most)
	}
	return fmt.Errorf("%d bytes a rank: at most %d with this Config.Bytes", o.bytes, most)
}

// enqueue launches the kernel.
func (r *Rank) enqueue(s *stream.Stream, o *operation) error {
	k, g, err := o.kernel(r)
	if err != nil {
		return err
	}
	if err := s.Captured(r); err != nil {
		return err
	}
	var args [rootParam + 1]kernel.Arg
	copy(args[:], r.args[:])
	args[signatureParam] = kernel.Uint64(o.signature())
	args[inParam], args[outParam] = kernel.Address(o.src), kernel.Address(o.dst)
	args[bytesParam], args[alignedParam] = kernel.Uint64(uint64(o.bytes)), kernel.Uint32(o.aligned())
	n := rootParam
	if o.kind == Broadcasts {
		args[rootParam] = kernel.Uint32(uint32(o.root))
		n++
	}
	if err := r.order.Begin(s); err != nil {
		return errors.Join(r.Err(), err)
	}
	defer r.order.End()
	if err := r.Err(); err != nil {
		return err
	}
	return k.Launch(s, kernel.Grid{Blocks: [3]uint32{g.blocks, 1, 1}, Threads: [3]uint32{g.threads, 1, 1}}, args[:n]...)
}

// kernel returns the kernel of the operation and its grid.
func (o *operation) kernel(r *Rank) (k *kernel.Kernel, g grid, err error) {
	t := tools(r.dev, r.ranks)
	switch o.kind {
	case AllReduces:
		k, err = t.reducer(r.dev, allReduceFn+function(o.algorithm)-1, o.format, o.op)
	case ReduceScatters:
		k, err = t.reducer(r.dev, reduceScatterFn, o.format, o.op)
	case AllGathers:
		k, err = t.mover(r.dev, allGatherFn)
	case AllToAlls:
		k, err = t.mover(r.dev, allToAllFn)
	case Broadcasts:
		k, err = t.mover(r.dev, broadcastFn)
	}
	return k, r.grid(o.algorithm.steps(o.bytes, r.ranks)), err
}

// signature is what all that must be alike on the ranks comes to, and hardly anything
// else: packets and signals carry it, so that those of another operation are not taken
// for what is waited for.
func (o *operation) signature() uint64 {
	x := uint64(o.kind) | uint64(o.algorithm)<<8 | uint64(o.dtype)<<16 | uint64(o.root)<<32
	if o.reduces() {
		x |= uint64(o.op) << 24
	}
	return scramble(scramble(x) + uint64(o.bytes))
}

// scramble gives each number another one, with which it has little in common.
func scramble(x uint64) uint64 {
	x = (x ^ x>>30 + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// aligned is 1 if the rank's kernel may take several bytes of its operands as one. The
// others need not be so: what goes over the links is the same.
func (o *operation) aligned() uint32 {
	unit := uint64(8)
	bits := o.dst | o.src
	switch {
	case o.kind == AllReduces && o.algorithm == TwoShot:
		unit = 16
	case o.kind != AllReduces && o.kind != Broadcasts:
		bits |= uint64(o.bytes) // where the parts begin
	}
	if bits%unit == 0 {
		return 1
	}
	return 0
}
