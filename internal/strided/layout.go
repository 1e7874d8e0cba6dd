package strided

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// RowMajor returns the strides of a contiguous array.
func RowMajor(shape []int) []int {
	strides := make([]int, len(shape))
	stride := 1
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = stride
		stride *= max(1, shape[i])
	}
	return strides
}

// Contiguous reports whether the elements are in row-major order without gaps.
func (t *Array) Contiguous() bool { return contiguous(t.Shape, t.Strides) }

func contiguous(shape, strides []int) bool {
	want, gaps := 1, false
	for i := len(shape) - 1; i >= 0; i-- {
		n := shape[i]
		if n == 0 {
			return true
		}
		gaps = gaps || n > 1 && strides[i] != want
		want *= n
	}
	return !gaps
}

// dense reports whether the elements fill their memory without gaps or overlaps, in any
// order (torch's is_non_overlapping_and_dense).
func dense(shape, strides []int) bool {
	if contiguous(shape, strides) {
		return true
	}
	var dims []int
	for i, n := range shape {
		if n > 1 {
			dims = append(dims, i)
		}
	}
	slices.SortFunc(dims, func(a, b int) int { return strides[a] - strides[b] })
	want := 1
	for _, d := range dims {
		if strides[d] != want {
			return false
		}
		want *= shape[d]
	}
	return true
}

// LikeStrides returns the strides of a new array like another one: the same strides if it
// is dense, and otherwise dense strides with the dimensions in the same order. The order
// is torch's: a dimension of stride 0 keeps its place.
func LikeStrides(shape, strides []int) []int {
	if dense(shape, strides) {
		return strides
	}
	order := make([]int, len(shape)) // from the innermost dimension
	for i := range order {
		order[i] = len(shape) - 1 - i
	}
	for i := 1; i < len(order); i++ {
		at := i
		for j := i - 1; j >= 0; j-- {
			c := outerness(shape, strides, order[j], order[at])
			if c < 0 {
				break
			}
			if c > 0 {
				order[j], order[at] = order[at], order[j]
				at = j
			}
		}
	}
	like := make([]int, len(shape))
	stride := 1
	for _, d := range order {
		like[d] = stride
		stride *= max(1, shape[d])
	}
	return like
}

// outerness is positive if dimension a lies outside of b in memory, negative if inside,
// and 0 if the strides do not determine it.
func outerness(shape, strides []int, a, b int) int {
	switch {
	case strides[a] == 0 || strides[b] == 0:
		return 0
	case strides[a] != strides[b]:
		return strides[a] - strides[b]
	case shape[a] > shape[b]:
		return 1
	}
	return 0
}

// A loop is an iteration over one dimension of two tensors.
type loop struct{ n, dst, src int } // iterations, and the strides in elements

// loopsOf returns the smallest list of loops, from the outermost in dst, that go over all
// elements of two tensors of one shape. The list is empty if the tensors have one element;
// empty reports that they have none.
func loopsOf(shape, dst, src []int) (loops []loop, empty bool) {
	for i, n := range shape {
		if n == 0 {
			return nil, true
		}
		if n > 1 {
			loops = append(loops, loop{n, dst[i], src[i]})
		}
	}
	slices.SortStableFunc(loops, func(a, b loop) int {
		if a.dst != b.dst {
			return b.dst - a.dst
		}
		return b.src - a.src
	})
	out := loops[:0]
	for _, l := range loops {
		if k := len(out) - 1; k >= 0 && out[k].dst == l.n*l.dst && out[k].src == l.n*l.src {
			out[k] = loop{out[k].n * l.n, l.dst, l.src}
			continue
		}
		out = append(out, l)
	}
	return out, false
}

// sameOrder reports whether the elements of an array with these strides are ordered
// like those with other, dense strides.
func sameOrder(shape, strides, as []int) bool {
	loops, empty := loopsOf(shape, as, strides)
	return empty || flat(loops)
}

// flat reports whether the loops are one contiguous run in both tensors.
func flat(loops []loop) bool {
	return len(loops) == 0 || len(loops) == 1 && loops[0].dst == 1 && loops[0].src == 1
}

// Repeats reports whether several elements share an address, so that the array
// is read-only.
func (t *Array) Repeats() bool {
	if t.Len() == 0 {
		return false
	}
	for i, n := range t.Shape {
		if n > 1 && t.Strides[i] == 0 {
			return true
		}
	}
	return false
}

// overlaps reports whether two arrays share memory. It returns false for arrays that
// interleave in many dimensions, as torch does for all that are not dense.
func overlaps(a, b *Array) bool {
	switch {
	case a.Len() == 0 || b.Len() == 0 || a.Device() != b.Device():
		return false
	case !dense(a.Shape, a.Strides) || !dense(b.Shape, b.Strides):
		return SharingOf(a, b) == Shared
	}
	p, q := a.Ptr(), b.Ptr()
	return p < q+uint64(b.Bytes()) && q < p+uint64(a.Bytes())
}

// same reports whether two arrays have the same elements in the same order.
func same(a, b *Array) bool {
	return a.Ptr() == b.Ptr() && a.Device() == b.Device() && a.DType == b.DType &&
		slices.Equal(a.Shape, b.Shape) && slices.Equal(a.Strides, b.Strides)
}

// turnBytes is the minimum length of the parts into which pieces of one launch are
// divided.
var turnBytes = 1 << 20

// turns returns the number of parts into which each piece is divided. The blocks of a
// kernel start in element order: if one piece stays on the device and others come from
// other devices, memory and links would otherwise wait for each other.
func (b *pieces) turns() int {
	each := len(b.list) * turnBytes
	return max(1, min(maxPieces/len(b.list), b.bytes/each))
}

// part returns part i of a piece with elements of 1<<width bytes. The part is empty if
// there are fewer rows, or elements of a contiguous piece, than parts.
func (p piece) part(i, of, width int) piece {
	if p.rows > 1 {
		lo, hi := p.rows*i/of, p.rows*(i+1)/of
		p.to, p.from, p.rows = p.to+uint64(lo*p.toStep), p.from+uint64(lo*p.fromStep), hi-lo
		return p
	}
	n := p.row >> width
	lo, hi := n*i/of<<width, n*(i+1)/of<<width
	p.to, p.from, p.row = p.to+uint64(lo), p.from+uint64(lo), hi-lo
	return p
}

// fill fills a table with pieces, divided into alternating parts.
func (t *pieceTable) fill(b *pieces) {
	t.n, t.count = 0, 0
	for turn, turns := 0, b.turns(); turn < turns; turn++ {
		for _, p := range b.list {
			if p = p.part(turn, turns, b.width); p.bytes() > 0 {
				t.add(p, b.width)
			}
		}
	}
}

func (t *pieceTable) add(p piece, width int) {
	i := t.count
	t.n += uint32(p.bytes() >> width)
	t.count++
	t.to[i], t.from[i], t.end[i] = p.to, p.from, t.n
	t.row[i], t.toStep[i], t.fromStep[i] = uint32(p.row>>width), uint32(p.toStep>>width), uint32(p.fromStep>>width)
}

// This file lists the memory that launches use, for the sanitizer.

// maxRuns is the number of runs of adjacent elements that are listed for a layout. Layouts with
// more runs are not listed, because bytes between the runs may belong to others.
const maxRuns = 1 << 14

// A usesList collects uses.
type usesList []cudadrv.Use

func (u *usesList) add(p, bytes uint64, write bool) {
	*u = append(*u, cudadrv.Use{Ptr: cudadrv.DevicePtr(p), Bytes: bytes, Write: write})
}

// layout adds the elements of a layout, of the given width in bytes: a use for each run of
// adjacent elements.
func (u *usesList) layout(p uint64, width int, dims []dim, write bool) {
	slices.SortFunc(dims, func(a, b dim) int { return cmp.Compare(a.step, b.step) })
	run, runs := 1, 1
	var outer []dim
	for _, d := range dims {
		switch {
		case d.n == 1:
		case d.step <= run && len(outer) == 0:
			run += (d.n - 1) * d.step
		default:
			outer = append(outer, d)
			runs = min(runs*d.n, maxRuns+1)
		}
	}
	if runs <= maxRuns {
		u.runs(p, uint64(width), uint64(run), outer, write)
	}
}

func (u *usesList) runs(p, width, run uint64, outer []dim, write bool) {
	if len(outer) == 0 {
		u.add(p, run*width, write)
		return
	}
	for i := range outer[0].n {
		u.runs(p+uint64(i*outer[0].step)*width, width, run, outer[1:], write)
	}
}

// Uses appends the uses of all elements of an array, for the sanitizer.
func Uses(list []cudadrv.Use, t *Array, write bool) []cudadrv.Use {
	if t.Len() == 0 {
		return list
	}
	dims := make([]dim, len(t.Shape))
	for i, n := range t.Shape {
		dims[i] = dim{n, t.Strides[i]}
	}
	u := usesList(list)
	u.layout(t.Ptr(), t.DType.Size(), dims, write)
	return u
}

// A dim is a dimension of a layout: its size and the distance of its elements.
type dim struct{ n, step int }

// uses lists the memory of a copy.
func (j *job) uses(loops []loop, to, from uint64) []cudadrv.Use {
	var u usesList
	dst, src := make([]dim, len(loops)), make([]dim, len(loops))
	for i, l := range loops {
		dst[i], src[i] = dim{l.n, l.dst}, dim{l.n, l.src}
	}
	u.layout(from, j.from, src, false)
	u.layout(to, j.to, dst, true)
	return u
}

// uses lists the rows of the copies.
func (t *pieceTable) uses(width int) []cudadrv.Use {
	var u usesList
	begin := uint32(0)
	for i := range t.count {
		if n := t.end[i] - begin; t.row[i] > 0 && n/t.row[i] <= maxRuns {
			for at, r := uint32(0), uint64(0); at < n; at, r = at+t.row[i], r+1 {
				bytes := uint64(min(t.row[i], n-at)) << width
				u.add(t.from[i]+r*uint64(t.fromStep[i])<<width, bytes, false)
				u.add(t.to[i]+r*uint64(t.toStep[i])<<width, bytes, true)
			}
		}
		begin = t.end[i]
	}
	return u
}

// uses lists the sources, and the parts of the destinations that this table fills.
func (t *fanTable) uses(width int) []cudadrv.Use {
	var u usesList
	begin := uint32(0)
	for i := range t.count {
		bytes := uint64(t.end[i]-begin) << width
		u.add(t.from[i], bytes, false)
		for _, to := range t.to[:t.ways] {
			u.add(to+uint64(begin)<<width, bytes, true)
		}
		begin = t.end[i]
	}
	return u
}

// uses lists the pieces and their sums.
func (t *sumTable) uses(pack int) []cudadrv.Use {
	var u usesList
	begin, ends := 0, t.ends(int(t.count), int(t.places))
	for i := range int(t.count) {
		bytes := uint64((int(ends[i]) - begin) * pack)
		u.add(t.to+uint64(begin*pack), bytes, true)
		for _, at := range t.words[i*int(t.places):][:t.places] {
			u.add(at, bytes, false)
		}
		begin = int(ends[i])
	}
	return u
}

// WrapDim returns the dimension that dim means of n dimensions: a negative dim counts from
// the end (torch's maybe_wrap_dim). A tensor without dimensions counts as one with one.
func WrapDim(dim, n int) (int, error) {
	n = max(1, n)
	if dim < -n || dim >= n {
		return 0, fmt.Errorf("dimension out of range (expected to be in range of [%d, %d], but got %d)", -n, n-1, dim)
	}
	if dim < 0 {
		dim += n
	}
	return dim, nil
}
