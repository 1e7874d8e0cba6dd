package tensor

import (
	"math"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// AddAll enqueues on s the sums of lists[i][k] over all i, one after the other by k, in
// dst, which has one type with all of them, as many elements, and no gaps. Where it is
// not on the device of s, or a tensor is not, kernels must reach it. The sum of one list
// after the other is rounded to the type each time, as Add does. One kernel adds as many
// tensors as a launch has room for, dozens of eight lists. For Chorus's own packages,
// which have checked the tensors and asked CanAddAll.
func AddAll(s *stream.Stream, dst Tensor, lists [][]Tensor) error {
	k, err := kernelsOf(s.Device())
	if err != nil {
		return err
	}
	pack, add := dst.dtype.Size(), k.sum
	if packable(dst, lists) {
		pack, add = 16, k.sumWide
	}
	t := sumTables.Get().(*sumTable)
	defer sumTables.Put(t)
	t.kind, t.places, t.to = uint32(unsigned(dst.dtype)), uint32(len(lists)), dst.Ptr()
	room := sumPieces(len(lists))
	var ends [2 * sumWords]uint32
	launch := func() error {
		if t.count == 0 {
			return nil
		}
		copy(t.ends(int(t.count), len(lists)), ends[:t.count])
		if err := add.Launch(s, blocks(int(t.n), 1), tableArg(t)); err != nil {
			return err
		}
		t.to += uint64(t.n) * uint64(pack)
		t.n, t.count = 0, 0
		return nil
	}
	t.n, t.count = 0, 0
	for i := range lists[0] {
		n := lists[0][i].Bytes() / pack
		for at := 0; at < n; {
			part := min(n-at, math.MaxInt32-int(t.n))
			if int(t.count) == room || part == 0 {
				if err := launch(); err != nil {
					return err
				}
				continue
			}
			for j := range lists {
				t.words[int(t.count)*len(lists)+j] = lists[j][i].Ptr() + uint64(at)*uint64(pack)
			}
			t.n += uint32(part)
			ends[t.count] = t.n
			t.count++
			at += part
		}
	}
	return launch()
}

// CanAddAll reports whether AddAll takes the lists: all of the type of dst, as many and as
// long, together as long as dst, without gaps, and on devices that kernels of that of s
// reach.
func CanAddAll(s *stream.Stream, dst Tensor, lists [][]Tensor) (bool, error) {
	if err := s.Check("tensor: add all", nil); err != nil {
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
			if x.dtype != dst.dtype || x.IsHost() || !x.Contiguous() || n != lists[0][k].Len() {
				return false, nil
			}
			if d := x.Device(); d != on {
				if near, err := memory.Reach(s.Device(), d); err != nil || !near {
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
	return memory.Reach(s.Device(), dst.Device())
}

// packable reports whether all can be added 16 bytes at a time.
func packable(dst Tensor, lists [][]Tensor) bool {
	if element.IsFloat8(dst.dtype) {
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

// unsigned is the type whose sums are the same bits as those of a type, where there are
// two such: the kernel has one of them.
func unsigned(d memory.DType) memory.DType {
	switch d {
	case memory.Int8, memory.Int16, memory.Int32, memory.Int64:
		return d + 1
	}
	return d
}

// addTo adds the elements of x to those of sum.
func addTo(d memory.DType, sum, x []byte) {
	for i := range len(sum) / d.Size() {
		a, b := element.Load(d, sum, i), element.Load(d, x, i)
		if element.IsFloat(d) {
			element.Store(d, sum, i, element.Float(a.Round(memory.Float64)+b.Round(memory.Float64)))
		} else {
			element.SetInt(d, sum, i, a.Int64()+b.Int64())
		}
	}
}
