package tensor

import (
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// IndexSelect enqueues dst[i] = src[index[i]] on s, for each row i (torch.index_select along
// dimension 0, with out). A row is an element of the first dimension. index has one dimension,
// of int32 or int64, and as many entries as dst has rows; several may name one row. The rows of
// dst and src have the same shape and type.
//
// If an entry names no row of src, the kernel stops as torch's does: the next call that waits
// for the device reports an error, and the process cannot use the device any more.
//
// All tensors are on the device of s, and dst shares no memory with the others. Tensors that
// are not contiguous are copied through temporary memory. IndexSelect returns when the copy is
// enqueued. The first operation on rows on a device compiles the kernels, and the driver may
// wait for all work of the device then, as in Copy.
func IndexSelect(s *stream.Stream, dst, src, index Tensor) error {
	const op = "tensor: index select"
	if err := checkRows(op, s, dst, src, index, dst); err != nil || dst.Len() == 0 {
		return err
	}
	return withPacked(op, s, []Tensor{dst}, false, []Tensor{src, index}, func(k *rowKernels, out, in []Tensor) error {
		dst := out[0]
		src, index := in[0], in[1]
		row := dst.Bytes() / dst.Size(0)
		width := 16 // bytes that a thread copies at once
		for uint64(width) > 1 && (uint64(row)|dst.Ptr()|src.Ptr())%uint64(width) != 0 {
			width /= 2
		}
		return k.selects[bits.TrailingZeros(uint(width))].Launch(s, gridOfRows(dst.Size(0), row/width), pointer(dst), pointer(src), pointer(index),
			kernel.Scalar(uint64(dst.Size(0))), kernel.Scalar(uint64(row/width)), kernel.Scalar(uint64(src.Size(0))), is64(index))
	})
}

// IndexAdd enqueues dst[index[i]] += weights[i]·src[i] on s, for each row i of src
// (torch.Tensor.index_add_ along dimension 0). The rows that one row of dst gets are added in
// index order, in float32 or in the type of wider elements, and the sum is rounded
// once. So the result is reproducible, and rows that no entry names keep their bits. With the
// zero Tensor as weights, all weights are 1.
//
// The elements are float16, bfloat16, float32, float64, int32 or int64. weights has one
// dimension, and is float32 or has the type of the elements. Sums of integers have no weights
// and wrap around. index has as many entries as src has rows, fewer than 2³¹. Its entries, and
// the rest, are as in IndexSelect.
//
// The memory that s needs meanwhile is 8 bytes for each row of dst and 4 for each entry.
func IndexAdd(s *stream.Stream, dst, src, index, weights Tensor) error {
	const op = "tensor: index add"
	if err := checkRows(op, s, dst, src, index, src); err != nil {
		return err
	}
	t := dst.DType()
	in := []Tensor{src, index}
	switch weighted := weights.at().DType != 0; {
	case adds[t] == "":
		return fmt.Errorf("%s: elements of %s are not supported: want float16, bfloat16, float32, float64, int32 or int64", op, t)
	case index.Len() > math.MaxInt32:
		return fmt.Errorf("%s: %d entries: want fewer than 2³¹", op, index.Len())
	case weighted:
		if err := weights.at().Check(op, s.Device()); err != nil {
			return err
		}
		switch w := weights.DType(); {
		case t == memory.Int32 || t == memory.Int64:
			return fmt.Errorf("%s: weights for sums of %s: want none", op, t)
		case w != t && w != memory.Float32:
			return fmt.Errorf("%s: weights of %s for elements of %s: want float32 or the type of the elements", op, w, t)
		case !slices.Equal(weights.Shape(), index.Shape()):
			return fmt.Errorf("%s: weights of shape %v for %d entries of the index: want one for each", op, weights.Shape(), index.Len())
		case shares(&dst, &weights):
			return fmt.Errorf("%s: the destination shares memory with the weights", op)
		}
		in = append(in, weights)
	}
	if src.Len() == 0 {
		return nil
	}
	return withPacked(op, s, []Tensor{dst}, true, in, func(k *rowKernels, out, in []Tensor) (err error) {
		dst := out[0]
		n, rows := in[1].Len(), dst.Size(0)
		ends, err := Make(s, memory.Int32, 2, rows)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, ends.Close()) }()
		next, err := Make(s, memory.Int32, n)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, next.Close()) }()
		first, last := ends.part(0, 0, 1, nil), ends.part(0, 1, 1, nil)
		none, index := kernel.Scalar(uint64(2*rows)), []kernel.Arg{pointer(in[1]), kernel.Scalar(uint64(n)), kernel.Scalar(uint64(rows)), is64(in[1])}
		weight, kind := kernel.Address(0), memory.DType(0)
		if len(in) == 3 {
			weight, kind = pointer(in[2]), in[2].DType()
		}
		width := dst.Len() / rows
		// Each kernel relies on the one before it.
		if err := k.none.Launch(s, gridOf(2*rows), words(ends), none); err != nil {
			return err
		}
		if err := k.ends.Launch(s, gridOf(n), append([]kernel.Arg{words(first), words(last)}, index...)...); err != nil {
			return err
		}
		if err := k.chain.Launch(s, gridOf(n), append([]kernel.Arg{words(next), words(last)}, index...)...); err != nil {
			return err
		}
		return k.adds[t].Launch(s, gridOfRows(rows, width), pointer(dst), pointer(in[0]), words(first), words(next), weight,
			kernel.Scalar(uint64(rows)), kernel.Scalar(uint64(width)), kernel.Scalar(uint32(kind)))
	})
}

// TopK enqueues the search for the k greatest elements of each row of src on s (torch.topk
// along the last dimension). They are stored in values in descending order, and their positions
// in the row in indexes, which are int32 or int64. k is the last dimension of values and
// indexes; their other dimensions are those of src. Among equal elements the first one comes
// first, and NaN is greater than all numbers.
//
// The elements are float16, bfloat16, float32, float64, int32 or int64. A row is read k times:
// TopK is meant for a small k, such as the experts of a token or the candidates of a sample.
// Tensors, streams and the return are as in IndexSelect.
func TopK(s *stream.Stream, values, indexes, src Tensor) error {
	const op = "tensor: top k"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	for _, x := range []Tensor{values, indexes, src} {
		if err := x.at().Check(op, s.Device()); err != nil {
			return err
		}
	}
	last := src.Dims() - 1
	t := src.DType()
	switch out, all := values.Shape(), src.Shape(); {
	case last < 0:
		return fmt.Errorf("%s: the source has no dimensions", op)
	case adds[t] == "":
		return fmt.Errorf("%s: elements of %s are not supported: want float16, bfloat16, float32, float64, int32 or int64", op, t)
	case values.DType() != t:
		return fmt.Errorf("%s: values of %s from %s: want the same type", op, values.DType(), t)
	case indexes.DType() != memory.Int32 && indexes.DType() != memory.Int64:
		return fmt.Errorf("%s: indexes of %s: want int32 or int64", op, indexes.DType())
	case !slices.Equal(out, indexes.Shape()):
		return fmt.Errorf("%s: values of shape %v and indexes of shape %v: want the same", op, out, indexes.Shape())
	case len(out) != last+1 || !slices.Equal(out[:last], all[:last]):
		return fmt.Errorf("%s: values of shape %v from shape %v: want the same dimensions but the last one", op, out, all)
	case out[last] > all[last]:
		return fmt.Errorf("%s: %d elements of rows of %d: want at most as many", op, out[last], all[last])
	case all[last] > math.MaxInt32:
		return fmt.Errorf("%s: rows of %d elements: want fewer than 2³¹", op, all[last])
	case sharesWithin(&values) || sharesWithin(&indexes):
		return fmt.Errorf("%s: several elements of the values or of the indexes have one place", op)
	case shares(&values, &src) || shares(&indexes, &src) || shares(&values, &indexes):
		return fmt.Errorf("%s: the values, the indexes and the source share memory", op)
	}
	if values.Len() == 0 {
		return nil
	}
	return withPacked(op, s, []Tensor{values, indexes}, false, []Tensor{src}, func(k *rowKernels, out, in []Tensor) error {
		n, most := in[0].Size(last), out[0].Size(last)
		rows := out[0].Len() / most
		return k.top.Launch(s, gridOfTop(rows, n), pointer(out[0]), pointer(out[1]), pointer(in[0]), kernel.Scalar(uint64(rows)), kernel.Scalar(uint32(n)),
			kernel.Scalar(uint32(most)), kernel.Scalar(uint32(t)), is64(out[1]))
	})
}

// checkRows validates the operands of IndexSelect and IndexAdd, where listed
// has a row for each entry.
func checkRows(op string, s *stream.Stream, dst, src, index, listed Tensor) error {
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	for _, x := range []Tensor{dst, src, index} {
		if err := x.at().Check(op, s.Device()); err != nil {
			return err
		}
	}
	switch {
	case dst.Dims() == 0 || src.Dims() == 0:
		return fmt.Errorf("%s: %s from %s: want at least one dimension, of rows", op, dst, src)
	case dst.DType() != src.DType():
		return fmt.Errorf("%s: %s from %s: want the same type", op, dst, src)
	case !slices.Equal(dst.Shape()[1:], src.Shape()[1:]):
		return fmt.Errorf("%s: %s from %s: want rows of the same shape", op, dst, src)
	case index.DType() != memory.Int32 && index.DType() != memory.Int64:
		return fmt.Errorf("%s: an index of %s: want int32 or int64", op, index.DType())
	case index.Dims() != 1 || index.Len() != listed.Size(0):
		return fmt.Errorf("%s: an index of shape %v: want [%d], an entry for each row of %s", op, index.Shape(), listed.Size(0), listed)
	case sharesWithin(&dst):
		return fmt.Errorf("%s: several elements of the destination %s have one place", op, dst)
	case shares(&dst, &src):
		return fmt.Errorf("%s: the destination shares memory with the source", op)
	case shares(&dst, &index):
		return fmt.Errorf("%s: the destination shares memory with the index", op)
	case index.Len() > 0 && dst.Len()+src.Len() > 0 && min(dst.Size(0), src.Size(0)) == 0:
		return fmt.Errorf("%s: an index of %d entries for a tensor without rows", op, index.Len())
	}
	return nil
}

// withPacked calls fn with contiguous tensors: out and in, or copies of them. It copies the
// results back to out, and reads out before, too, if fill is set.
func withPacked(op string, s *stream.Stream, out []Tensor, fill bool, in []Tensor, fn func(k *rowKernels, out, in []Tensor) error) (err error) {
	k, err := loadedRows.Of(s.Device(), (*rowKernels).load)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	pack := func(x Tensor, fill bool) Tensor {
		if x.Contiguous() || err != nil {
			return Tensor{strided.New(x.at().Borrow())}
		}
		var p Tensor
		if p, err = Make(s, x.DType(), x.Shape()...); err == nil && fill {
			err = Copy(s, p, x)
		}
		return p
	}
	var packed []Tensor
	for _, x := range out {
		packed = append(packed, pack(x, fill))
	}
	for _, x := range in {
		packed = append(packed, pack(x, true))
	}
	defer func() {
		for _, p := range packed {
			err = errors.Join(err, p.Close())
		}
	}()
	if err == nil {
		err = fn(k, packed[:len(out)], packed[len(out):])
	}
	for i, x := range out {
		if err == nil && !x.Contiguous() {
			err = Copy(s, x, packed[i])
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// pointer returns the memory of a contiguous tensor as an argument. The view is the tensor's
// own memory, so View cannot fail.
func pointer(x Tensor) kernel.Arg {
	v, _ := memory.View[uint8](x.Buffer(), x.Offset(), x.Bytes())
	return kernel.Ptr(v)
}

// words is pointer for a tensor of int32.
func words(x Tensor) kernel.Arg {
	v, _ := memory.View[int32](x.Buffer(), x.Offset(), x.Len())
	return kernel.Ptr(v)
}

// is64 tells a kernel the type of an index.
func is64(index Tensor) kernel.Arg {
	if index.DType() == memory.Int64 {
		return kernel.Scalar(uint32(1))
	}
	return kernel.Scalar(uint32(0))
}

const (
	rowThreads = 256
	mostBlocks = 1 << 16
)

// gridOf returns a grid for n entries.
func gridOf(n int) kernel.Grid {
	return kernel.Grid{Blocks: [3]uint32{uint32(min((n-1)/rowThreads+1, mostBlocks)), 1, 1}, Threads: [3]uint32{rowThreads, 1, 1}}
}

// gridOfRows returns a grid for rows of width parts. A block has several short rows, or a part
// of a long one.
func gridOfRows(rows, width int) kernel.Grid {
	x := rowThreads
	for x > 1 && x/2 >= width {
		x /= 2
	}
	y := rowThreads / x
	across := min((width-1)/(4*x)+1, 1024)
	return kernel.Grid{Blocks: [3]uint32{uint32(min((rows-1)/y+1, mostBlocks)), uint32(across), 1}, Threads: [3]uint32{uint32(x), uint32(y), 1}}
}

// gridOfTop returns a grid for rows of n elements: a block for each row.
func gridOfTop(rows, n int) kernel.Grid {
	x := 32
	for x < 1024 && 8*x < n {
		x *= 2
	}
	return kernel.Grid{Blocks: [3]uint32{uint32(min(rows, mostBlocks)), 1, 1}, Threads: [3]uint32{uint32(x), 1, 1}}
}

// ---- the kernels ----

//go:embed rows.cu
var rowSource string

// rowKernels are the kernels of a device.
type rowKernels struct {
	selects                [5]*kernel.Kernel // for parts of 1, 2, 4, 8 and 16 bytes
	none, ends, chain, top *kernel.Kernel
	adds                   map[memory.DType]*kernel.Kernel
	floatKernels
}

var loadedRows inside.PerDevice[rowKernels]

// adds has the types whose rows can be added and compared, and their names in rows.cu.
var adds = map[memory.DType]string{memory.Float16: "f16", memory.BFloat16: "bf16", memory.Float32: "f32", memory.Float64: "f64", memory.Int32: "i32", memory.Int64: "i64"}

// rowSourceOf returns rows.cu with its kernels.
func rowSourceOf() *kernel.Source {
	p, u, n := kernel.Pointer, kernel.U32, kernel.U64
	src, accesses := &kernel.Source{Name: "rows.cu", CUDA: rowSource}, map[string]string{}
	add := func(name, uses string, standIn func(*kernel.Call), ps ...kernel.Param) {
		src.Kernels = append(src.Kernels, kernel.Def{Name: name, Params: ps, Go: standIn})
		accesses[name] = uses
	}
	for i := range 5 {
		add(fmt.Sprint("select", 1<<i), "wrr----", standInSelect(1<<i), p, p, p, n, n, n, u)
	}
	add("none", "w-", standInNone, p, n)
	add("ends", "wwr---", standInEnds, p, p, p, n, n, u)
	add("chain", "wrr---", standInChain, p, p, p, n, n, u)
	add("top", "wwr-----", standInTop, p, p, p, n, u, u, u, u)
	for _, t := range slices.Sorted(maps.Keys(adds)) {
		add("add_"+adds[t], "wrrrr---", standInAdd(t), p, p, p, p, p, n, n, u)
	}
	addFloats(add)
	inside.Declare(src, accesses)
	return src
}

func (k *rowKernels) load(dev *device.Device) error {
	src := rowSourceOf()
	inside.MakeResident(src)
	m, err := kernel.Compile(dev, src)
	if err != nil {
		return err
	}
	return k.find(m)
}

// find finds the kernels in their module.
func (k *rowKernels) find(m *kernel.Module) (err error) {
	k.adds = map[memory.DType]*kernel.Kernel{}
	named := func(name string) (found *kernel.Kernel) {
		if err == nil {
			found, err = m.Kernel(name)
		}
		return found
	}
	for i := range k.selects {
		k.selects[i] = named(fmt.Sprint("select", 1<<i))
	}
	k.none, k.ends, k.chain, k.top = named("none"), named("ends"), named("chain"), named("top")
	for t, name := range adds {
		k.adds[t] = named("add_" + name)
	}
	k.floatKernels.find(named)
	return err
}
