package strided

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// AddAll enqueues on s the sums of lists[i][k] over all i into dst, concatenated by
// k. dst is contiguous and has the same type and total length as each list. If
// dst or a tensor is not on the device of s, kernels must be able to access it. The sum is
// rounded to the type after each list, as tensor.Add does. One kernel adds as many tensors
// as fit in a launch, dozens of eight lists. The caller has validated the tensors and
// called CanAddAll.
func AddAll[T Tensor](s *stream.Stream, dst T, lists [][]T) error {
	to := dst.array()
	return addAll(s, &to, arrayLists(lists))
}

func addAll(s *stream.Stream, dst *Array, lists [][]Array) error {
	k, err := kernelsOf(s.Device())
	if err != nil {
		return err
	}
	t := sumTables.Get().(*sumTable)
	defer sumTables.Put(t)
	x := summation{s: s, kernel: k.sum, table: t, pack: dst.DType.Size(), room: sumPieces(len(lists))}
	if packable(dst, lists) {
		x.pack, x.kernel = 16, k.sumWide
	}
	t.kind, t.places, t.to = uint32(unsigned(dst.DType)), uint32(len(lists)), dst.Ptr()
	t.n, t.count = 0, 0
	for i := range lists[0] {
		if err := x.add(lists, i); err != nil {
			return err
		}
	}
	return x.launch()
}

// A summation adds arrays of several lists. Each launch continues after the last one.
type summation struct {
	s      *stream.Stream
	kernel *kernel.Kernel
	table  *sumTable
	ends   [2 * sumWords]uint32 // of the pieces in the table
	room   int                  // pieces that fit in a table
	pack   int                  // bytes that a thread adds at once
}

// add adds array i of each list to the table, and launches the kernel if the table is
// full.
func (x *summation) add(lists [][]Array, i int) error {
	t, n := x.table, lists[0][i].Bytes()/x.pack
	for at := 0; at < n; {
		part := min(n-at, math.MaxInt32-int(t.n))
		if int(t.count) == x.room || part == 0 {
			if err := x.launch(); err != nil {
				return err
			}
			continue
		}
		for j := range lists {
			t.words[int(t.count)*len(lists)+j] = lists[j][i].Ptr() + uint64(at)*uint64(x.pack)
		}
		t.n += uint32(part)
		x.ends[t.count] = t.n
		t.count++
		at += part
	}
	return nil
}

// launch adds the arrays of the table, and empties it.
func (x *summation) launch() error {
	t := x.table
	if t.count == 0 {
		return nil
	}
	copy(t.ends(int(t.count), int(t.places)), x.ends[:t.count])
	if err := x.kernel.Launch(x.s, blocks(int(t.n), 1), tableArg(t)); err != nil {
		return err
	}
	gpu.StreamOf(x.s).Uses("kernel of sums", false, func() []cudadrv.Use { return t.uses(x.pack) })
	t.to += uint64(t.n) * uint64(x.pack)
	t.n, t.count = 0, 0
	return nil
}

// CanAddAll reports whether AddAll supports the lists: all of the type of dst, of equal
// and contiguous tensors, together as long as dst, and on devices that kernels on the
// device of s can access.
func CanAddAll[T Tensor](s *stream.Stream, dst T, lists [][]T) (bool, error) {
	to := dst.array()
	return canAddAll(s, &to, arrayLists(lists))
}

func canAddAll(s *stream.Stream, dst *Array, lists [][]Array) (bool, error) {
	if err := gpu.CheckStream("tensor: add all", s, nil); err != nil {
		return false, err
	}
	if len(lists) == 0 || len(lists) > sumWords/2 || !dst.Contiguous() || dst.IsHost() {
		return false, nil
	}
	for _, list := range lists {
		if len(list) != len(lists[0]) {
			return false, nil
		}
		total, on := 0, s.Device()
		for k := range list {
			x := &list[k]
			n := x.Len()
			if x.DType != dst.DType || x.IsHost() || !x.Contiguous() || n != lists[0][k].Len() {
				return false, nil
			}
			if d := x.Device(); d != on {
				if near, err := inside.Reach(s.Device(), d); err != nil || !near {
					return false, err
				}
				on = d
			}
			total += n
		}
		if total != dst.Len() {
			return false, nil
		}
	}
	return inside.Reach(s.Device(), dst.Device())
}

// packable reports whether all elements can be added 16 bytes at a time.
func packable(dst *Array, lists [][]Array) bool {
	if dtype.Of(dst.DType).IsFloat8() {
		return false
	}
	all := dst.Ptr()
	for _, list := range lists {
		for k := range list {
			if all |= list[k].Ptr() | uint64(list[k].Bytes()); all%16 != 0 {
				return false
			}
		}
	}
	return true
}

// unsigned returns the unsigned type of the same size for an integer type. Its sums have
// the same bits, so the kernel implements only one of the two types.
func unsigned(d memory.DType) memory.DType {
	switch d {
	case memory.Int8, memory.Int16, memory.Int32, memory.Int64:
		return d + 1
	}
	return d
}

// addTo adds the elements of x to the elements of sum.
func addTo(d memory.DType, sum, x []byte) {
	for i := range len(sum) / d.Size() {
		a, b := dtype.Of(d).Load(sum, i), dtype.Of(d).Load(x, i)
		if dtype.Of(d).IsFloat() {
			dtype.Of(d).Store(sum, i, dtype.FloatValue(a.Float64()+b.Float64()))
		} else {
			dtype.Of(d).Store(sum, i, dtype.IntValue(a.Int64()+b.Int64()))
		}
	}
}

// Add enqueues dst = a + b on s, for arrays of one shape on the device of s; see
// tensor.Add.
func Add(s *stream.Stream, dst, a, b Array) error {
	const op = "tensor: add"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	for _, x := range []*Array{&dst, &a, &b} {
		if err := x.Check(op, s.Device()); err != nil {
			return err
		}
		if !slices.Equal(x.Shape, dst.Shape) {
			return fmt.Errorf("%s: %s and %s to %s: want one shape", op, a, b, dst)
		}
	}
	sum, err := kernel.Promote(a.DType, b.DType)
	if err == nil && !kernel.CanCast(sum, dst.DType) {
		err = fmt.Errorf("the sum is of %s and cannot be cast to %s", sum, dst.DType)
	}
	if err == nil && dst.Repeats() {
		err = fmt.Errorf("several elements of the destination have one place")
	}
	if err != nil {
		return fmt.Errorf("%s: %s and %s to %s: %w", op, a, b, dst, err)
	}
	if dst.Len() == 0 {
		return nil
	}
	return add(s, dst, a, b)
}

// add adds arrays with one common dense layout; it packs arrays with other layouts.
func add(s *stream.Stream, dst, a, b Array) (err error) {
	strides := LikeStrides(dst.Shape, dst.Strides)
	pack := func(x Array, fill bool) (p Array, packed bool, err error) {
		as := x.DType
		if dtype.Of(as).IsFloat8() {
			as = memory.Float32
		}
		if as == x.DType && sameOrder(x.Shape, x.Strides, strides) {
			return x.Borrow(), false, nil
		}
		p, err = Make(s, as, x.Shape, strides)
		if err == nil && fill {
			err = Copy(s, p, x)
		}
		return p, true, err
	}
	out, packed, errOut := pack(dst, false)
	x, _, errX := pack(a, true)
	y, _, errY := pack(b, true)
	defer func() { err = errors.Join(err, out.Close(), x.Close(), y.Close()) }()
	if err := errors.Join(errOut, errX, errY); err != nil {
		return err
	}
	f, err := adder()
	if err != nil {
		return err
	}
	if err := f.Launch(s, operandsOf[out.DType].out(&out), operandsOf[x.DType].in(&x), operandsOf[y.DType].in(&y)); err != nil {
		return fmt.Errorf("tensor: add: %w", err)
	}
	if packed {
		return Copy(s, dst, out)
	}
	return nil
}

// adder returns the element-wise function, which exists until the process ends.
var adder = sync.OnceValues(func() (*kernel.Elementwise, error) {
	return kernel.NewElementwise("x + y", &kernel.ElementwiseConfig{
		Inputs: []string{"x", "y"},
		Floats: func(in, out []float64) { out[0] = in[0] + in[1] },
		Ints:   func(in, out []int64) { out[0] = in[0] + in[1] },
	})
})

// operandsOf converts dense tensors to operands, for each type that can be added.
var operandsOf = map[memory.DType]operands{
	memory.Bool: typed[bool]{}, memory.Int8: typed[int8]{}, memory.Uint8: typed[uint8]{},
	memory.Int16: typed[int16]{}, memory.Uint16: typed[uint16]{}, memory.Int32: typed[int32]{},
	memory.Uint32: typed[uint32]{}, memory.Int64: typed[int64]{}, memory.Uint64: typed[uint64]{},
	memory.Float16: typed[memory.Float16Bits]{}, memory.BFloat16: typed[memory.BFloat16Bits]{},
	memory.Float32: typed[float32]{}, memory.Float64: typed[float64]{},
}

type operands interface {
	in(x *Array) kernel.Operand
	out(x *Array) kernel.Operand
}

type typed[T memory.Element] struct{}

// The view uses the array's own memory and type, so View cannot fail.
func (typed[T]) in(x *Array) kernel.Operand {
	v, _ := memory.View[T](x.Buffer(), x.Offset, x.Len())
	return kernel.In(v)
}

func (typed[T]) out(x *Array) kernel.Operand {
	v, _ := memory.View[T](x.Buffer(), x.Offset, x.Len())
	return kernel.Out(v)
}
