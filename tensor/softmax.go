package tensor

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Softmax enqueues dst = softmax(src) along the last dimension on s
// (torch.softmax with dim=-1, with out). Both have the same shape and type:
// float16, bfloat16, float32 or float64. Sums are in float32, or in float64,
// and results are rounded once. dst must not share memory with src. Tensors,
// streams and the return are as in [IndexSelect].
func Softmax(s *stream.Stream, dst, src Tensor) error {
	return alongRows("tensor: softmax", s, dst, src, func(k *rowKernels, rows, n int, dst Tensor, in []Tensor) error {
		return k.softmax[dst.DType()].Launch(s, gridOfTop(rows, n), pointer(dst), pointer(in[0]), kernel.Scalar(uint64(rows)), kernel.Scalar(uint32(n)))
	})
}

// SoftmaxGrad enqueues the gradient of the source of Softmax on s: dst = out·(grad - Σ grad·out), with
// the sum along the last dimension, for the result out and its gradient grad (aten::_softmax_backward_data).
// Shapes, types and the rest are as in Softmax.
func SoftmaxGrad(s *stream.Stream, dst, grad, out Tensor) error {
	return alongRows("tensor: softmax gradient", s, dst, grad, func(k *rowKernels, rows, n int, dst Tensor, in []Tensor) error {
		return k.softmaxGrad[dst.DType()].Launch(s, gridOfTop(rows, n), pointer(dst), pointer(in[0]), pointer(in[1]), kernel.Scalar(uint64(rows)), kernel.Scalar(uint32(n)))
	}, out)
}

// ScatterAdd enqueues dst[…][index[…][j]] += src[…][j] on s for each j
// (torch.Tensor.scatter_add_ along the last dimension). src and index have the
// same shape, and all dimensions but the last are those of dst. The index is
// int32 or int64, and dst and src have one type of Softmax. Entries that name
// one element are added in their order, and each sum is rounded, so the result
// is reproducible. A thread adds all entries of a row: ScatterAdd is meant for
// few, such as the gradients of what TopK has found. An entry that names no
// element stops the kernel, as in [IndexSelect], which also describes tensors,
// streams and the return.
func ScatterAdd(s *stream.Stream, dst, src, index Tensor) error {
	const op = "tensor: scatter add"
	if err := checkFloats(op, s, dst, src, index); err != nil {
		return err
	}
	last := src.Dims() - 1
	switch from, to := src.Shape(), dst.Shape(); {
	case index.DType() != memory.Int32 && index.DType() != memory.Int64:
		return fmt.Errorf("%s: an index of %s: want int32 or int64", op, index.DType())
	case !slices.Equal(from, index.Shape()):
		return fmt.Errorf("%s: a source of shape %v and an index of shape %v: want the same", op, from, index.Shape())
	case len(to) != last+1 || !slices.Equal(to[:last], from[:last]):
		return fmt.Errorf("%s: shape %v from shape %v: want the same dimensions but the last one", op, to, from)
	case shares(&dst, &index):
		return fmt.Errorf("%s: the destination shares memory with the index", op)
	case src.Len() == 0:
		return nil
	}
	return withPacked(op, s, []Tensor{dst}, true, []Tensor{src, index}, func(k *rowKernels, out, in []Tensor) error {
		n, entries := out[0].Size(last), in[0].Size(last)
		rows := in[0].Len() / entries
		return k.scatter[dst.DType()].Launch(s, gridOf(rows), pointer(out[0]), pointer(in[0]), pointer(in[1]),
			kernel.Scalar(uint64(rows)), kernel.Scalar(uint32(n)), kernel.Scalar(uint32(entries)), is64(in[1]))
	})
}

// alongRows validates a destination and operands of the same shape, and calls fn with contiguous ones,
// rows of n elements.
func alongRows(op string, s *stream.Stream, dst, src Tensor, fn func(k *rowKernels, rows, n int, dst Tensor, in []Tensor) error, more ...Tensor) error {
	in := append([]Tensor{src}, more...)
	for _, x := range in {
		if err := checkFloats(op, s, dst, x); err != nil {
			return err
		}
		if !slices.Equal(dst.Shape(), x.Shape()) {
			return fmt.Errorf("%s: shape %v from shape %v: want the same", op, dst.Shape(), x.Shape())
		}
	}
	if dst.Len() == 0 {
		return nil
	}
	return withPacked(op, s, []Tensor{dst}, false, in, func(k *rowKernels, out, in []Tensor) error {
		n := dst.Size(-1)
		return fn(k, dst.Len()/n, n, out[0], in)
	})
}

// checkFloats validates a destination and a source with rows of floats, and an index.
func checkFloats(op string, s *stream.Stream, dst, src Tensor, index ...Tensor) error {
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	for _, x := range append([]Tensor{dst, src}, index...) {
		if err := x.at().Check(op, s.Device()); err != nil {
			return err
		}
	}
	switch {
	case dst.Dims() == 0 || src.Dims() == 0:
		return fmt.Errorf("%s: %s from %s: want at least one dimension", op, dst, src)
	case dst.DType() != src.DType():
		return fmt.Errorf("%s: %s from %s: want the same type", op, dst, src)
	case adds[dst.DType()] == "" || !dtype.Of(dst.DType()).IsFloat():
		return fmt.Errorf("%s: elements of %s are not supported: want float16, bfloat16, float32 or float64", op, dst.DType())
	case max(dst.Size(-1), src.Size(-1)) > math.MaxInt32:
		return fmt.Errorf("%s: rows of %d elements: want fewer than 2³¹", op, max(dst.Size(-1), src.Size(-1)))
	case sharesWithin(&dst):
		return fmt.Errorf("%s: several elements of the destination %s have one place", op, dst)
	case shares(&dst, &src):
		return fmt.Errorf("%s: the destination shares memory with the source", op)
	}
	return nil
}

// ---- the kernels ----

// floatKernels are the kernels of floats, by type.
type floatKernels struct {
	softmax, softmaxGrad, scatter map[memory.DType]*kernel.Kernel
}

// addFloats adds the kernels of floats to rows.cu's.
func addFloats(add func(name, uses string, standIn func(*kernel.Call), ps ...kernel.Param)) {
	p, u, n := kernel.Pointer, kernel.U32, kernel.U64
	for _, t := range slices.Sorted(maps.Keys(adds)) {
		if !dtype.Of(t).IsFloat() {
			continue
		}
		add("softmax_"+adds[t], "wr--", standInSoftmax(t), p, p, n, u)
		add("softmax_grad_"+adds[t], "wrr--", standInSoftmaxGrad(t), p, p, p, n, u)
		add("scatter_add_"+adds[t], "wrr----", standInScatter(t), p, p, p, n, u, u, u)
	}
}

func (k *floatKernels) find(named func(name string) *kernel.Kernel) {
	k.softmax, k.softmaxGrad, k.scatter = map[memory.DType]*kernel.Kernel{}, map[memory.DType]*kernel.Kernel{}, map[memory.DType]*kernel.Kernel{}
	for t, name := range adds {
		if dtype.Of(t).IsFloat() {
			k.softmax[t], k.softmaxGrad[t], k.scatter[t] = named("softmax_"+name), named("softmax_grad_"+name), named("scatter_add_"+name)
		}
	}
}

// The functions below implement the kernels in Go, for virtual devices. They compute in float64 and
// round once.

func standInSoftmax(t memory.DType) func(*kernel.Call) {
	elem := dtype.Of(t)
	return func(c *kernel.Call) {
		rows, n := int(kernel.Get[uint64](c, 2)), int(kernel.Get[uint32](c, 3))
		dst, src := kernel.Update[byte](c, 0, rows*n*t.Size()), kernel.Read[byte](c, 1, rows*n*t.Size())
		for row := range rows {
			most, sum := math.Inf(-1), 0.
			for i := range n {
				if x := elem.Load(src, row*n+i).Float64(); x > most {
					most = x
				}
			}
			for i := range n {
				sum += math.Exp(elem.Load(src, row*n+i).Float64() - most)
			}
			for i := range n {
				elem.Store(dst, row*n+i, dtype.FloatValue(math.Exp(elem.Load(src, row*n+i).Float64()-most)/sum))
			}
		}
	}
}

func standInSoftmaxGrad(t memory.DType) func(*kernel.Call) {
	elem := dtype.Of(t)
	return func(c *kernel.Call) {
		rows, n := int(kernel.Get[uint64](c, 3)), int(kernel.Get[uint32](c, 4))
		dst, grad, out := kernel.Update[byte](c, 0, rows*n*t.Size()), kernel.Read[byte](c, 1, rows*n*t.Size()), kernel.Read[byte](c, 2, rows*n*t.Size())
		for row := range rows {
			sum := 0.
			for i := row * n; i < (row+1)*n; i++ {
				sum += elem.Load(grad, i).Float64() * elem.Load(out, i).Float64()
			}
			for i := row * n; i < (row+1)*n; i++ {
				elem.Store(dst, i, dtype.FloatValue((elem.Load(grad, i).Float64()-sum)*elem.Load(out, i).Float64()))
			}
		}
	}
}

func standInScatter(t memory.DType) func(*kernel.Call) {
	elem := dtype.Of(t)
	return func(c *kernel.Call) {
		rows, n, k := int(kernel.Get[uint64](c, 3)), int(kernel.Get[uint32](c, 4)), int(kernel.Get[uint32](c, 5))
		dst, src := kernel.Update[byte](c, 0, rows*n*t.Size()), kernel.Read[byte](c, 1, rows*k*t.Size())
		for i, at := range indexOf(c, 2, uint64(rows*k), uint64(n), kernel.Get[uint32](c, 6)) {
			to := i/k*n + at
			elem.Store(dst, to, dtype.FloatValue(elem.Load(dst, to).Float64()+elem.Load(src, i).Float64()))
		}
	}
}
