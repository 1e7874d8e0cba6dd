package rng

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func refuse(op, name string, v float64, want string) error {
	return fmt.Errorf("rng: %s: %s = %v: want %s", op, name, v, want)
}

func checkUniform(f *format, from, to float64) error {
	for _, b := range []struct {
		name string
		v    float64
	}{{"from", from}, {"to", to}} {
		if !(math.Abs(b.v) <= f.most) {
			return fmt.Errorf("rng: uniform: %s = %v is out of bounds for %s", b.name, b.v, f.dtype)
		}
	}
	if from > to {
		return fmt.Errorf("rng: uniform: from = %v, to = %v: want from <= to", from, to)
	}
	if to-from > f.most {
		return fmt.Errorf("rng: uniform: from = %v, to = %v: %s cannot hold the difference: want at most %v", from, to, f.dtype, f.most)
	}
	return nil
}

// checkFromTo returns the bounds, moved inward to numbers that the type represents.
func checkFromTo(f *format, from, to int64) (int64, int64, error) {
	if from >= to {
		return 0, 0, fmt.Errorf("rng: random: from = %d, to = %d: want from < to", from, to)
	}
	for _, b := range []struct {
		name string
		v    int64
	}{{"from", from}, {"to - 1", to - 1}} {
		if !f.holds(b.v) {
			return 0, 0, fmt.Errorf("rng: random: %s = %d is out of bounds for %s", b.name, b.v, f.dtype)
		}
	}
	if f.digits == 0 {
		return from, to, nil
	}
	f0, t0 := f.up(from), f.down(to)
	if f0 >= t0 {
		return 0, 0, fmt.Errorf("rng: random: from = %d, to = %d: %s has no number between them", from, to, f.dtype)
	}
	return f0, t0, nil
}

// up returns from or, if rounding to the type could give a number below from, a
// larger number. It implements torch's rule with torch's rounding.
func (f *format) up(from int64) int64 {
	next := whole(f.of(from + 1))
	if next >= from {
		return from
	}
	return next + f.gap(from+1)
}

// down is up for the upper bound.
func (f *format) down(to int64) int64 {
	last := whole(f.of(to - 1))
	if last < to {
		return to
	}
	return last - f.gap(to-1)
}

// gap returns the distance between adjacent numbers of the type near v.
func (f *format) gap(v int64) int64 {
	return 1 << max(bits.Len64(magnitude(v))-f.digits, 0)
}

func magnitude(v int64) uint64 {
	if v < 0 {
		return -uint64(v)
	}
	return uint64(v)
}

// whole converts like x86. torch's bounds depend on that: the result of an
// overflow is the smallest int64.
func whole(v float64) int64 {
	if v >= 1<<63 || v < -1<<63 || v != v {
		return math.MinInt64
	}
	return int64(v)
}

// check validates the arguments of a fill and returns the generator.
func check[T memory.Element](op string, g *Generator, s *stream.Stream, x memory.Slice[T]) (*Generator, error) {
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return nil, err
	}
	if g == nil {
		g = Default(s.Device())
	}
	if g.dev != s.Device() {
		return nil, fmt.Errorf("%s: the generator belongs to %s, the stream to %s: use a generator of the stream's device", op, name(g.dev), s.Device())
	}
	return g, mem.Check(op, x.Buffer(), x.Len(), s.Device())
}

// A region is the memory of a slice.
type region struct {
	name  string // in errors
	dtype memory.DType
	at    uint64
	n     int
}

func regionOf[T memory.Element](name string, x memory.Slice[T]) region {
	return region{name, x.DType(), x.Ptr(), x.Len()}
}

func (r region) end() uint64 { return r.at + uint64(r.n*r.dtype.Size()) }

func (r region) String() string {
	return fmt.Sprintf("%s (%d elements of %s at %#x)", r.name, r.n, r.dtype, r.at)
}

// apart returns an error if the fill would overwrite numbers of in before it has read them. With
// inPlace, in may be the same elements as out: a thread reads element i of in before it
// writes element i of out, and no other thread reads or writes it.
func apart(op string, in, out region, inPlace bool) error {
	if in.n == 0 || out.n == 0 || in.end() <= out.at || out.end() <= in.at {
		return nil
	}
	if !inPlace {
		return fmt.Errorf("%s: %s and %s share memory: want separate memory", op, in, out)
	}
	if in.at == out.at && in.n == out.n && in.dtype.Size() == out.dtype.Size() {
		return nil
	}
	return fmt.Errorf("%s: %s and %s share memory: want the same elements of the same size, or separate memory", op, in, out)
}

func name(dev *device.Device) string {
	if dev == nil {
		return "no device"
	}
	return dev.String()
}
