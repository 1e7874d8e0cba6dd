package strided

import (
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/stream"
)

// Flatten enqueues, on a stream of their device, a copy of the concatenated elements of
// tensors of one type to each of several contiguous one-dimensional tensors of the same
// length, which may be on other devices. If the tensors are contiguous and kernels can
// access the other devices, one kernel copies up to 328 tensors to up to 16 destinations:
// it reads once and writes to all. The caller has validated the tensors.
func Flatten[T Tensor](s *stream.Stream, to, from []T) error {
	return flatten(s, arrays(to), arrays(from))
}

func flatten(s *stream.Stream, to, from []Array) error {
	direct, err := fanned(s, to, from)
	if err != nil {
		return err
	}
	for ; direct && len(to) > 0; to = to[min(len(to), maxDestinations):] {
		if err := fanOut(s, to[:min(len(to), maxDestinations)], from); err != nil {
			return err
		}
	}
	for i := range to {
		parts, err := to[i].Unflatten(from)
		if err != nil {
			return err
		}
		if err := copyAll(s, parts, from, smallPiece); err != nil {
			return err
		}
	}
	return nil
}

// fanned validates the tensors and reports whether the kernel supports them.
func fanned(s *stream.Stream, to, from []Array) (bool, error) {
	const op = "tensor: flatten"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return false, err
	}
	direct, n := true, 0
	for i := range from {
		f := &from[i]
		if f.DType != from[0].DType {
			return false, fmt.Errorf("%s: %s and %s: want one type", op, *f, from[0])
		}
		direct = direct && f.Device() == s.Device() && f.Contiguous()
		n += f.Len()
	}
	for i := range to {
		t := &to[i]
		if len(t.Shape) != 1 || !t.Contiguous() || t.Len() != n || n > 0 && t.DType != from[0].DType {
			return false, fmt.Errorf("%s: %d elements to %s: want as many, of one dimension without gaps and of the same type", op, n, *t)
		}
		if near, err := inside.Reach(s.Device(), t.Device()); err != nil {
			return false, err
		} else if !near {
			direct = false
		}
	}
	return direct, nil
}

// fanOut copies with the kernel.
func fanOut(s *stream.Stream, to, from []Array) error {
	k, err := kernelsOf(s.Device())
	if err != nil {
		return err
	}
	t := fanTables.Get().(*fanTable)
	defer fanTables.Put(t)
	t.n, t.count = 0, 0
	width := fanWidth(to, from)
	f := fan{s: s, kernel: k.fans[width], table: t, width: width}
	t.ways = uint32(len(to))
	for i := range to {
		t.to[i] = to[i].Ptr()
	}
	for i := range from {
		if err := f.add(from[i].Ptr(), from[i].Bytes()); err != nil {
			return err
		}
	}
	return f.launch()
}

// fanWidth returns log2 of the widest element that the kernel can use.
func fanWidth(to, from []Array) int {
	all := uint64(16)
	for i := range to {
		all |= to[i].Ptr()
	}
	for i := range from {
		if bytes := uint64(from[i].Bytes()); bytes > 0 {
			all |= from[i].Ptr() | bytes
		}
	}
	return bits.TrailingZeros64(all)
}

// A fan copies memory to several destinations. Each launch continues after the last one.
type fan struct {
	s      *stream.Stream
	kernel *kernel.Kernel
	table  *fanTable
	width  int // log2 of the size of an element
}

// add adds memory to the table, and launches the kernel if the table is full.
func (f *fan) add(p uint64, bytes int) error {
	t := f.table
	for n := bytes >> f.width; n > 0; {
		part := min(n, math.MaxInt32-int(t.n))
		if t.count == maxSources || part == 0 {
			if err := f.launch(); err != nil {
				return err
			}
			continue
		}
		t.n += uint32(part)
		t.from[t.count], t.end[t.count] = p, t.n
		t.count++
		p, n = p+uint64(part)<<f.width, n-part
	}
	return nil
}

// launch enqueues the copies of the table, and empties it.
func (f *fan) launch() error {
	t := f.table
	if t.count == 0 {
		return nil
	}
	if err := f.kernel.Launch(f.s, cover(int(t.n)), tableArg(t)); err != nil {
		return err
	}
	gpu.StreamOf(f.s).Uses("kernel of copies", false, func() []cudadrv.Use { return t.uses(f.width) })
	for i := range t.to[:t.ways] {
		t.to[i] += uint64(t.n) << f.width
	}
	t.n, t.count = 0, 0
	return nil
}

// Unflatten returns contiguous arrays with the shapes of others, one after the
// other from the start of a one-dimensional array, whose memory they borrow.
func (t *Array) Unflatten(like []Array) ([]Array, error) {
	if len(t.Shape) != 1 || !t.Contiguous() {
		return nil, fmt.Errorf("tensor: unflatten shape %v with strides %v: want one dimension without gaps", t.Shape, t.Strides)
	}
	out := make([]Array, len(like))
	at := 0
	for i := range like {
		v := &out[i]
		*v = like[i] // shapes are immutable, so they can be shared
		if !v.Contiguous() {
			v.Strides = RowMajor(v.Shape)
		}
		n := like[i].Len()
		v.mem, v.ref, v.DType, v.Offset = t.mem, nil, t.DType, t.Offset+at*t.DType.Size()
		if at += n; at > t.Shape[0] {
			return nil, fmt.Errorf("tensor: unflatten shape %v as %d tensors: the first %d have %d elements", t.Shape, len(like), i+1, at)
		}
	}
	return out, nil
}

// Unflatten is Array.Unflatten for tensors.
func Unflatten[T Tensor](t T, like []T) ([]T, error) {
	flat := t.array()
	out, err := flat.Unflatten(arrays(like))
	return tensors[T](out), err
}

// UnflattenEach is Unflatten of several tensors of one length, which own their memory.
// Each view owns a reference to that memory, like a tensor of Retain, and must be closed
// too.
func UnflattenEach[T Tensor](flats, like []T) ([][]T, error) {
	out := make([][]T, len(flats))
	for i := range out {
		t, first := &arrays(flats)[i], &arrays(flats)[0]
		var views []Array
		if i == 0 || t.DType != first.DType || t.Offset != first.Offset || !slices.Equal(t.Shape, first.Shape) || !t.Contiguous() {
			var err error
			if views, err = t.Unflatten(arrays(like)); err != nil {
				return nil, err
			}
		} else {
			views = slices.Clone(arrays(out[0])) // the same except for the memory
		}
		t.shareOut(views)
		out[i] = tensors[T](views)
	}
	return out, nil
}

// shareOut gives each view a reference to the memory of t.
func (t *Array) shareOut(views []Array) {
	if t.mem == nil {
		return
	}
	t.mem.mu.Lock()
	defer t.mem.mu.Unlock()
	owned := t.mem.refs > 0
	if owned {
		t.mem.refs += len(views)
	}
	refs := make([]reference, len(views))
	for i := range views {
		v := &views[i]
		v.mem, v.ref = t.mem, nil
		if owned {
			refs[i].mem = t.mem
			v.ref = &refs[i]
		}
	}
}

// RetainAll calls Retain for many tensors.
func RetainAll[T Tensor](ts []T) []T {
	refs, out := make([]reference, len(ts)), slices.Clone(ts)
	for i := range out {
		x := &arrays(out)[i]
		*x = x.retain(&refs[i])
	}
	return out
}
