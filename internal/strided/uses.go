package strided

import (
	"cmp"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

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
