package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/memory"
)

// A Difference is a tensor that differs between two checkpoints.
type Difference struct {
	Name string
	A, B *Info // nil if the checkpoint lacks the tensor

	// The elements, if both tensors have the same type and shape.
	Elements int64   // number of elements whose bytes differ
	First    []int   // indices of the first one in row-major order
	MaxAbs   float64 // largest absolute difference; NaN if one is NaN, or the type has no values here
}

func (d *Difference) String() string {
	switch {
	case d.A == nil:
		return fmt.Sprintf("tensor %q: only in the second checkpoint", d.Name)
	case d.B == nil:
		return fmt.Sprintf("tensor %q: only in the first checkpoint", d.Name)
	case d.A.Format != d.B.Format || !slices.Equal(d.A.Shape, d.B.Shape):
		return fmt.Sprintf("tensor %q: %s %v in the first checkpoint, %s %v in the second", d.Name, d.A.Format, d.A.Shape, d.B.Format, d.B.Shape)
	}
	return fmt.Sprintf("tensor %q: %d elements differ, the first at %v, by at most %g", d.Name, d.Elements, d.First, d.MaxAbs)
}

// Compare compares two checkpoints of any formats on the host, without a device: names, types,
// shapes and the bytes of elements. It returns the differences by name. It reads tensors at the
// same time with 8 MiB of memory for each, at most 16.
func Compare(ctx context.Context, a, b *Checkpoint) ([]Difference, error) {
	var list []Difference
	var both []string
	for _, x := range a.infos {
		y, ok := b.Info(x.Name)
		switch {
		case !ok:
			list = append(list, Difference{Name: x.Name, A: &x})
		case x.Format != y.Format || !slices.Equal(x.Shape, y.Shape):
			list = append(list, Difference{Name: x.Name, A: &x, B: &y})
		default:
			both = append(both, x.Name)
		}
	}
	for _, y := range b.infos {
		if _, ok := a.Info(y.Name); !ok {
			list = append(list, Difference{Name: y.Name, B: &y})
		}
	}
	var mu sync.Mutex
	err := each(ctx, both, func(ctx context.Context, name string) error {
		d, err := compareOne(ctx, a, b, name)
		mu.Lock()
		defer mu.Unlock()
		if d.Elements > 0 {
			list = append(list, *d)
		}
		return err
	})
	slices.SortFunc(list, func(x, y Difference) int { return cmp.Compare(x.Name, y.Name) })
	return list, err
}

// compareOne compares the elements of a tensor.
func compareOne(ctx context.Context, a, b *Checkpoint, name string) (*Difference, error) {
	x, _ := a.Info(name)
	y, _ := b.Info(name)
	d := &differ{Difference: Difference{Name: name, A: &x, B: &y}, shape: x.Shape}
	d.dtype, d.size = values(x.Format)
	const chunk = verifyChunk / 2
	p, q := make([]byte, min(chunk, x.Bytes())), make([]byte, min(chunk, x.Bytes()))
	for at := int64(0); at < x.Bytes(); at += chunk {
		n := min(chunk, x.Bytes()-at)
		if err := a.read(ctx, name, p[:n], at); err != nil {
			return &d.Difference, &TensorError{Op: "compare", Path: x.File, Tensor: name, Offset: a.begin(name), Err: err}
		}
		if err := b.read(ctx, name, q[:n], at); err != nil {
			return &d.Difference, &TensorError{Op: "compare", Path: y.File, Tensor: name, Offset: b.begin(name), Err: err}
		}
		if !bytes.Equal(p[:n], q[:n]) {
			d.add(p[:n], q[:n], at)
		}
	}
	return &d.Difference, nil
}

// A differ is a comparison of elements.
type differ struct {
	Difference
	shape []int
	dtype memory.DType // of the values in an element; Invalid if it is unknown
	size  int          // bytes of an element; 0 if an element is smaller than a byte
}

// values returns the type of the values in an element, and the size of the element.
func values(t safetensors.DType) (memory.DType, int) {
	if t == safetensors.C64 {
		return memory.Float32, 8
	}
	return dtypeOf(t), t.Bits() / 8
}

// add compares bytes at an offset of the tensor.
func (d *differ) add(p, q []byte, off int64) {
	size := max(d.size, 1)
	for i := 0; i < len(p); i += size {
		if bytes.Equal(p[i:i+size], q[i:i+size]) {
			continue
		}
		if d.Elements == 0 {
			d.First = d.index(off + int64(i))
		}
		d.Elements++
		if d.dtype == memory.Invalid {
			d.MaxAbs = math.NaN()
			continue
		}
		for k := i; k < i+size; k += d.dtype.Size() {
			d.MaxAbs = math.Max(d.MaxAbs, distance(d.dtype, p[k:], q[k:])) // NaN if one is
		}
	}
}

// index returns the indices of the element at an offset of the tensor.
func (d *differ) index(off int64) []int {
	n := int(off) / max(d.size, 1)
	if d.size == 0 {
		return []int{n} // of the byte
	}
	at := make([]int, len(d.shape))
	for i := len(at) - 1; i >= 0; i-- {
		at[i] = n % d.shape[i]
		n /= d.shape[i]
	}
	return at
}

// distance returns the absolute difference of two values.
func distance(t memory.DType, p, q []byte) float64 {
	x, y := element.Load(t, p, 0), element.Load(t, q, 0)
	if element.IsFloat(t) {
		a, b := x.Round(memory.Float64), y.Round(memory.Float64)
		if a == b { // also infinities
			return 0
		}
		return math.Abs(a - b)
	}
	a, b := x.Int64(), y.Int64()
	if t == memory.Uint64 && uint64(a) < uint64(b) || t != memory.Uint64 && a < b {
		a, b = b, a
	}
	return float64(uint64(a) - uint64(b)) // exact also where a float64 of each is not
}
