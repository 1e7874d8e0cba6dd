package tensor

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Flatten enqueues, on a stream of their device, the copy of the elements of tensors of
// one type, one after the other, to each of some tensors of one dimension without gaps,
// which have as many (torch._utils._flatten_dense_tensors), on other devices too. Where
// the tensors have no gaps and kernels reach the other devices, one kernel copies up to
// 328 tensors to up to 16 places: it reads once and writes to all. For Chorus's own
// packages, which have checked the tensors.
func Flatten(s *stream.Stream, to, from []Tensor) error {
	direct, err := fanned(s, to, from)
	if err != nil {
		return err
	}
	for ; direct && len(to) > 0; to = to[min(len(to), maxDestinations):] {
		if err := fanOut(s, to[:min(len(to), maxDestinations)], from); err != nil {
			return err
		}
	}
	for _, t := range to {
		parts, err := t.Unflatten(from)
		if err != nil {
			return err
		}
		if err := CopyAll(s, parts, from); err != nil {
			return err
		}
	}
	return nil
}

// fanned checks the tensors and reports whether the kernel takes them.
func fanned(s *stream.Stream, to, from []Tensor) (bool, error) {
	const op = "tensor: flatten"
	if err := s.Check(op, nil); err != nil {
		return false, err
	}
	direct, n := true, 0
	for i := range from {
		f := &from[i]
		if f.dtype != from[0].dtype {
			return false, fmt.Errorf("%s: %s and %s: want one type", op, *f, from[0])
		}
		direct = direct && f.Device() == s.Device() && f.Contiguous()
		n += f.Len()
	}
	for _, t := range to {
		if len(t.shape) != 1 || !t.Contiguous() || t.Len() != n || n > 0 && t.dtype != from[0].dtype {
			return false, fmt.Errorf("%s: %d elements to %s: want as many, of one dimension without gaps and of the same type", op, n, t)
		}
		if near, err := memory.Reach(s.Device(), t.Device()); err != nil {
			return false, err
		} else if !near {
			direct = false
		}
	}
	return direct, nil
}

// fanOut copies by the kernel.
func fanOut(s *stream.Stream, to, from []Tensor) error {
	k, err := kernelsOf(s.Device())
	if err != nil {
		return err
	}
	all := uint64(16)
	for _, t := range to {
		all |= t.Ptr()
	}
	for i := range from {
		if bytes := uint64(from[i].Bytes()); bytes > 0 {
			all |= from[i].Ptr() | bytes
		}
	}
	width := bits.TrailingZeros64(all)
	t := fanTables.Get().(*fanTable)
	defer fanTables.Put(t)
	done := uint64(0) // bytes
	launch := func() error {
		if t.count == 0 {
			return nil
		}
		t.ways = uint32(len(to))
		for i := range to {
			t.to[i] = to[i].Ptr() + done
		}
		done += uint64(t.n) << width
		err := k.fans[width].Launch(s, cover(int(t.n)), tableArg(t))
		t.n, t.count = 0, 0
		return err
	}
	t.n, t.count = 0, 0
	for i := range from {
		p, n := from[i].Ptr(), from[i].Bytes()>>width
		for n > 0 {
			part := min(n, math.MaxInt32-int(t.n))
			if t.count == maxSources || part == 0 {
				if err := launch(); err != nil {
					return err
				}
				continue
			}
			t.n += uint32(part)
			t.from[t.count], t.end[t.count] = p, t.n
			t.count++
			p, n = p+uint64(part)<<width, n-part
		}
	}
	return launch()
}
