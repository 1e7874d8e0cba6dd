package tensor_test

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

func TestGroupedMatMul(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		rows := []int{3, 0, 5, 1}
		a, av := drawn(t, s, r, memory.Float32, 9, 6)
		b, bv := drawn(t, s, r, memory.Float32, 4, 6, 5)
		c, _ := drawn(t, s, r, memory.Float32, 9, 5)
		require.NoError(t, tensor.GroupedMatMul(s, c, a, b, rows, nil))
		got, at := elementsOf(t, s, c), 0
		for g, n := range rows {
			for i := at; i < at+n; i++ {
				for j := range 5 {
					sum := 0.0
					for k := range 6 {
						sum += av[i*6+k].Float64() * bv[(g*6+k)*5+j].Float64()
					}
					require.Equal(t, sum, got[i*5+j].Float64(), "row %d of group %d", i-at, g) // multiples of 1/64
				}
			}
			at += n
		}
		for want, rows := range map[string][]int{
			"group 3 does not fit": {3, 0, 5, 2}, "sum up to 8": {3, 0, 5, 0}, "group 1 does not fit": {3, -1, 5, 2}, "for 3 groups": {3, 0, 6},
			"group 2 does not fit": {3, 0, math.MaxInt, 1},
		} {
			require.ErrorContains(t, tensor.GroupedMatMul(s, c, a, b, rows, nil), want)
		}
		require.ErrorContains(t, tensor.GroupedMatMul(s, c, a, b, rows, &tensor.MatMulConfig{Bias: c}), "the configuration has the tensor")

		// The product of one group must not change the input of another one.
		both := fromSlice(t, s, make([]float32, 8*4), 8, 4)
		rows = []int{2, 2}
		low, err := both.Narrow(0, 0, 4)
		require.NoError(t, err)
		high, err := both.Narrow(0, 2, 4)
		require.NoError(t, err)
		squares := fromSlice(t, s, make([]float32, 2*4*4), 2, 4, 4)
		require.ErrorContains(t, tensor.GroupedMatMul(s, low, high, squares, rows, nil), "c shares memory with a")
		flat, err := squares.View(8, 4)
		require.NoError(t, err)
		last, err := flat.Narrow(0, 4, 4)
		require.NoError(t, err)
		require.ErrorContains(t, tensor.GroupedMatMul(s, last, low, squares, rows, nil), "c shares memory with b")
		row, err := low.Narrow(0, 0, 1)
		require.NoError(t, err)
		one, err := row.Expand(2, 4)
		require.NoError(t, err)
		two, err := flat.Narrow(0, 0, 2)
		require.NoError(t, err)
		require.ErrorContains(t, tensor.GroupedMatMul(s, one, two, squares, []int{1, 1}, nil), "its elements share memory")

		// A group that is refused lets none of the others begin.
		input, err := row.Expand(4, 4)
		require.NoError(t, err)
		result := fromSlice(t, s, slices.Repeat([]float32{7}, 16), 4, 4)
		require.ErrorContains(t, tensor.GroupedMatMul(s, result, input, squares, []int{1, 3}, nil), "group 1 of 3 rows: ")
		for _, v := range elementsOf(t, s, result) {
			require.Equal(t, 7.0, v.Float64())
		}
	})
}

var grouped = flag.Int("grouped", testhost.Rounds(20, 80), "random products of TestGroupedMatMulAt on each backend, and eight times those of TestGroupedSource")

// A groupedCase is a product of groups whose sizes are on the device.
type groupedCase struct {
	*lab
	inner, separate bool
	groups, m, n, k int
	c, a, b         *operand
	ends            tensor.Tensor
	given           []int32 // the ends
	begin, end      []int   // of each group
	cfg             tensor.MatMulConfig
}

// drawGrouped draws a product. most limits its sides.
func drawGrouped(l *lab, most int) *groupedCase {
	r := l.r
	side := func() int { return 1 + r.IntN([]int{most, most / 4, most / 4}[r.IntN(3)]) }
	x := &groupedCase{lab: l, inner: r.IntN(2) == 0, separate: r.IntN(2) == 0, groups: 1 + r.IntN(5), m: side(), n: side(), k: side()}
	if r.IntN(4) == 0 {
		x.groups = 30 + r.IntN(40) // more than a warp has lanes
		x.m, x.n, x.k = 1+r.IntN(40), 1+r.IntN(20), 1+r.IntN(40)
	}
	if r.IntN(3) == 0 { // sides that are aligned
		x.m, x.n, x.k = (x.m+7)/8*8, (x.n+7)/8*8, (x.k+7)/8*8
	}
	if r.IntN(12) == 0 {
		*[]*int{&x.m, &x.n, &x.k}[r.IntN(3)] = 0
	}
	t := []memory.DType{bf16, f16, f32}[r.IntN(3)]
	out := t
	if r.IntN(3) == 0 {
		out = f32
	}
	form := func(grouped bool) int { // the batch of an operand
		if grouped || x.separate {
			return x.groups
		}
		return 0
	}
	pad := []int{0, 1, 8}[r.IntN(3)]
	repeatable := l.layout(pad)
	repeatable.repeated = r.IntN(6) == 0 && form(!x.inner) > 0
	x.c = l.make(out, form(x.inner), x.m, x.n, l.layout(pad))
	x.a = l.make(t, form(false), x.m, x.k, l.layout(pad))
	x.b = l.make(t, form(!x.inner), x.k, x.n, repeatable)
	if r.IntN(3) == 0 {
		x.cfg.Alpha = new(r.NormFloat64())
	}
	if r.IntN(3) == 0 {
		x.cfg.Beta = new(r.NormFloat64())
	}
	x.drawEnds()
	x.poison()
	return x
}

// drawEnds draws the ends of the groups, and finds their beginnings.
func (x *groupedCase) drawEnds() {
	limit, kind := x.m, x.r.IntN(4)
	if x.inner {
		limit = x.k
	}
	x.given = make([]int32, x.groups)
	for i := range x.given {
		switch {
		case kind == 0 && x.r.IntN(3) == 0: // wrong
			x.given[i] = []int32{-1, math.MinInt32, int32(limit) + 1, math.MaxInt32, -7}[x.r.IntN(5)]
		case kind == 1 && x.r.IntN(2) == 0: // empty, or on a boundary
			x.given[i] = int32(x.r.IntN(2) * limit)
		default:
			x.given[i] = int32(x.r.IntN(limit + 1))
		}
	}
	if kind > 0 && !x.separate {
		slices.Sort(x.given)
		if x.r.IntN(2) == 0 {
			x.given[x.groups-1] = int32(limit)
		}
	}
	x.setEnds(x.given)
}

func (x *groupedCase) setEnds(given []int32) {
	limit := x.m
	if x.inner {
		limit = x.k
	}
	x.given, x.begin, x.end = given, nil, nil
	before := 0
	for _, e := range given {
		begin, end := before, min(max(int(e), 0), limit)
		if end < begin {
			end = begin
		}
		x.begin, x.end = append(x.begin, begin), append(x.end, end)
		if !x.separate {
			before = end
		}
	}
	x.ends = fromSlice(x.t, x.s, given, len(given))
}

// belongs reports whether index i along the dimension of the groups belongs to a group: to the given one, or to any if the
// groups are parts of one matrix.
func (x *groupedCase) belongs(group, i int) bool {
	for g := range x.groups {
		if (g == group || !x.separate) && i >= x.begin[g] && i < x.end[g] {
			return true
		}
	}
	return false
}

// poison fills what must not be read with NaN: around a and b, and what belongs to no group there. With a Beta of 0 it also
// fills all of c.
func (x *groupedCase) poison() {
	set := func(o *operand, wrong func(group, i, j int) bool) {
		shape := o.Shape()
		rows, cols, v := shape[len(shape)-2], shape[len(shape)-1], x.values(o.Tensor)
		for i := range v {
			if wrong(i/(rows*cols), i/cols%rows, i%cols) {
				v[i] = math.NaN()
			}
		}
		nan, err := tensor.OfHost([]float32{float32(math.NaN())}, 1)
		require.NoError(x.t, err)
		flat, err := o.storage.View(o.storage.Len())
		require.NoError(x.t, err)
		all, err := nan.Expand(flat.Len())
		require.NoError(x.t, err)
		require.NoError(x.t, tensor.Copy(x.s, flat, all))
		host, err := tensor.OfHost(v, shape...)
		require.NoError(x.t, err)
		require.NoError(x.t, tensor.Copy(x.s, o.Tensor, host))
	}
	set(x.a, func(g, i, j int) bool {
		if x.inner {
			i = j
		}
		return !x.belongs(g, i)
	})
	if _, repeats := x.repeats(); !repeats {
		set(x.b, func(g, i, _ int) bool { return x.inner && !x.belongs(g, i) || !x.inner && x.begin[g] == x.end[g] })
	}
	if x.cfg.Beta == nil {
		set(x.c, func(int, int, int) bool { return true })
	}
}

func (x *groupedCase) repeats() (stride int, yes bool) {
	strides := x.b.Strides()
	return strides[0], len(strides) == 3 && strides[0] == 0 && x.groups > 1
}

func (x *groupedCase) run(s *stream.Stream) error {
	if x.inner {
		return tensor.GroupedMatMulInner(s, x.c.Tensor, x.a.Tensor, x.b.Tensor, x.ends, &x.cfg)
	}
	return tensor.GroupedMatMulAt(s, x.c.Tensor, x.a.Tensor, x.b.Tensor, x.ends, &x.cfg)
}

func (x *groupedCase) String() string {
	return fmt.Sprintf("inner %v, separate %v, c %s %v, a %s %v, b %s %v, ends %v, alpha %v, beta %v", x.inner, x.separate, x.c, x.c.Strides(), x.a, x.a.Strides(), x.b, x.b.Strides(),
		x.given, x.cfg.Alpha, x.cfg.Beta)
}

// check compares c with float64. c had the values of old before.
func (x *groupedCase) check(old []float64) {
	x.t.Helper()
	got, va, vb := x.values(x.c.Tensor), x.values(x.a.Tensor), x.values(x.b.Tensor)
	want, bound := make([]float64, len(got)), make([]float64, len(got))
	for i := range want { // what is in no group is NaN, or stays
		want[i], bound[i] = old[i], -1
	}
	alpha, beta := 1.0, 0.0
	if x.cfg.Alpha != nil {
		alpha = float64(float32(*x.cfg.Alpha))
	}
	if x.cfg.Beta != nil {
		beta = float64(float32(*x.cfg.Beta))
	}
	for g := range x.groups {
		from, to, lo, hi := x.begin[g], x.end[g], 0, x.k
		if x.inner {
			from, to, lo, hi = 0, x.m, from, to
		}
		for i := from; i < to; i++ {
			for j := range x.n {
				o := i*x.n + j
				if len(x.c.Shape()) == 3 {
					o += g * x.m * x.n
				}
				sum, size := 0.0, 0.0
				for k := lo; k < hi; k++ {
					p := at(va, x.a.Shape(), g, i, k) * at(vb, x.b.Shape(), g, k, j)
					sum, size = sum+p, size+math.Abs(p)
				}
				want[o] = alpha * sum
				bound[o] = math.Abs(alpha) * size * float64(hi-lo+4) * 0x1p-23
				if beta != 0 {
					want[o] += beta * old[o]
					bound[o] += math.Abs(beta*old[o]) * 0x1p-22
				}
			}
		}
	}
	var w, v, b []float64
	for i := range want {
		if bound[i] < 0 {
			require.Equal(x.t, math.Float64bits(old[i]), math.Float64bits(got[i]), "element %d of no group was written: %s", i, x)
			continue
		}
		w, v, b = append(w, want[i]), append(v, got[i]), append(b, bound[i])
	}
	checkClose(x.t, x.c.DType(), w, v, b, "%s", x)
	for i := range v {
		require.False(x.t, math.IsNaN(v[i]), "element %d is NaN: %s", i, x)
	}
}

func TestGroupedMatMulAt(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		seed := rand.Uint64()
		t.Log("seed", seed)
		l := newLab(t, s, seed)
		for range *grouped {
			x := drawGrouped(l, 200)
			before, old := l.bytes(x.c.storage), l.values(x.c.Tensor)
			require.NoError(t, x.run(s), x)
			x.check(old)
			l.requireGaps(x.c, before)
			l.close()
		}
	})
}

// The kernels and the functions that stand in for them give the same results: compiled as C++ for the host, and on
// a GPU.
func TestGroupedSource(t *testing.T) {
	t.Parallel()
	t.Run("host", func(t *testing.T) { groupedAgree(t, 200, kernel.VerifyConfig{Host: true}) })
	t.Run("cuda", func(t *testing.T) { groupedAgree(t, 700, kernel.VerifyConfig{Device: testgpu.CUDA(t, 1)[0]}) })
}

func groupedAgree(t *testing.T, most int, cfg kernel.VerifyConfig) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	l := newLab(t, newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]), seed)
	defer l.close()
	for i := range 2 + max(*grouped/8, 1) {
		var x *groupedCase
		switch i {
		case 0: // pieces that two groups share
			x = &groupedCase{lab: l, inner: true, groups: 4, m: 16, n: 16, k: 64}
			x.c, x.a, x.b = l.make(bf16, 4, 16, 16, layout{}), l.make(bf16, 0, 16, 64, layout{}), l.make(bf16, 0, 64, 16, layout{transposed: true})
			x.setEnds([]int32{3, 21, 42, 61})
		case 1: // ends behind those of the lanes of the first warp
			x = &groupedCase{lab: l, groups: 40, m: 40, n: 16, k: 16}
			x.c, x.a, x.b = l.make(bf16, 0, 40, 16, layout{}), l.make(bf16, 0, 40, 16, layout{}), l.make(bf16, 40, 16, 16, layout{})
			ends := slices.Repeat([]int32{-1}, 40)
			ends[5], ends[32], ends[36], ends[39] = 17, 9, 30, math.MaxInt32
			x.setEnds(ends)
		default:
			x = drawGrouped(l, most)
		}
		src, grid, numbers, err := tensor.GroupedLaunch(l.s, x.c.Tensor, x.a.Tensor, x.b.Tensor, x.ends, &x.cfg, x.inner, 1+l.r.IntN(4))
		require.NoError(t, err, x)
		if x.m == 0 || x.n == 0 {
			continue
		}
		trial := kernel.Trial{Kernel: "grouped", Grid: grid, Args: append([]any{l.elements(x.c), l.elements(x.a), l.elements(x.b), x.given}, numbers...)}
		cfg.Tolerances = nil // float32 is exact
		if x.a.DType() != f32 {
			// Sums have other orders, and are rounded to 8 or 11 bits.
			cfg.Tolerances = map[memory.DType]kernel.Tolerance{bf16: {Abs: 1e-3, Rel: 0x1p-7}, f16: {Abs: 1e-3, Rel: 0x1p-10}, f32: {Abs: 1e-3, Rel: 1e-4}}
		}
		if err = kernel.Verify(testgpu.Context(t), src, []kernel.Trial{trial}, &cfg); errors.Is(err, exec.ErrNotFound) {
			t.Skip(err)
		}
		require.NoError(t, err, x)
		l.close()
	}
}

// elements returns the storage of an operand from its first element on.
func (l *lab) elements(x *operand) any {
	raw := l.bytes(x.storage)
	raw = raw[min(x.Offset()-x.storage.Offset(), len(raw)):]
	switch n := len(raw) / x.DType().Size(); x.DType() {
	case bf16:
		return append([]memory.BFloat16Bits{}, unsafe.Slice((*memory.BFloat16Bits)(unsafe.Pointer(unsafe.SliceData(raw))), n)...)
	case f16:
		return append([]memory.Float16Bits{}, unsafe.Slice((*memory.Float16Bits)(unsafe.Pointer(unsafe.SliceData(raw))), n)...)
	default:
		return append([]float32{}, unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(raw))), n)...)
	}
}

// A graph reads the ends of each launch.
func TestGroupedMatMulInGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		seed := rand.Uint64()
		t.Log("seed", seed)
		l := newLab(t, s, seed)
		defer l.close()
		for _, inner := range []bool{false, true} {
			for _, dt := range []memory.DType{bf16, f32} {
				x := &groupedCase{lab: l, inner: inner, separate: true, groups: 3, m: 40, n: 24, k: 32}
				x.c, x.a, x.b = l.make(dt, 3, x.m, x.n, layout{}), l.make(dt, 3, x.m, x.k, layout{}), l.make(dt, 3, x.k, x.n, layout{})
				x.setEnds([]int32{0, 0, 0})
				ends := x.ends
				g, err := graph.Capture([]*stream.Stream{s}, func() error { return x.run(s) }, nil)
				require.NoError(t, err)
				for range 4 {
					x.drawEnds()
					old := l.values(x.c.Tensor)
					require.NoError(t, tensor.Copy(s, ends, x.ends))
					require.NoError(t, g.Launch(s))
					x.check(old)
				}
				require.NoError(t, s.Sync(t.Context()))
				require.NoError(t, g.Close())
			}
		}
	})
}

// GroupedMatMulAt with the sums of the rows is GroupedMatMul.
func TestGroupedMatMulsAgree(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		seed := rand.Uint64()
		t.Log("seed", seed)
		l := newLab(t, s, seed)
		defer l.close()
		rows, ends := []int{130, 0, 7, 63}, []int32{130, 130, 137, 200}
		for _, dt := range []memory.DType{bf16, f16, f32} {
			a, b := l.make(dt, 0, 200, 72, layout{}), l.make(dt, 4, 72, 136, layout{transposed: true})
			c, d := l.make(f32, 0, 200, 136, layout{}), l.make(f32, 0, 200, 136, layout{})
			require.NoError(t, tensor.GroupedMatMul(s, c.Tensor, a.Tensor, b.Tensor, rows, nil))
			require.NoError(t, tensor.GroupedMatMulAt(s, d.Tensor, a.Tensor, b.Tensor, fromSlice(t, s, ends, 4), nil))
			want, got := l.values(c.Tensor), l.values(d.Tensor)
			require.InDeltaSlice(t, want, got, 1e-4, dt)
		}
	})
}

func TestGroupedMatMulAtRefuses(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s := newStream(t, devs[0])
	l := newLab(t, s, 1)
	defer l.close()
	matrix := func(d memory.DType, shape ...int) tensor.Tensor { return l.vector(d, shape) }
	c, a, b, ends := matrix(f32, 6, 4), matrix(f32, 6, 5), matrix(f32, 2, 5, 4), fromSlice(t, s, []int32{2, 6}, 2)
	grads, x, y := matrix(f32, 2, 5, 4), matrix(f32, 6, 5), matrix(f32, 6, 4)
	wide, err := fromSlice(t, s, []int32{1, 2, 3, 4}, 2, 2).Select(1, 0)
	require.NoError(t, err)
	row, err := c.Narrow(0, 0, 1)
	require.NoError(t, err)
	repeated, err := row.Expand(6, 4)
	require.NoError(t, err)
	part, err := matrix(f32, 12, 4).Narrow(0, 0, 6)
	require.NoError(t, err)
	bits, err := part.ViewDType(memory.Int32)
	require.NoError(t, err)
	flat, err := bits.View(24)
	require.NoError(t, err)
	inside, err := flat.Narrow(0, 3, 2)
	require.NoError(t, err)
	skewed, err := matrix(f32, 6, 10).View(6, 5, 2)
	require.NoError(t, err)
	skewed, err = skewed.Select(2, 0)
	require.NoError(t, err)
	f64 := func(shape ...int) tensor.Tensor { return matrix(memory.Float64, shape...) }
	at := func(c, a, b, ends tensor.Tensor, cfg *tensor.MatMulConfig) error {
		return tensor.GroupedMatMulAt(s, c, a, b, ends, cfg)
	}
	for name, row := range map[string]struct {
		err  error
		want string
	}{
		"no stream":        {tensor.GroupedMatMulAt(nil, c, a, b, ends, nil), "stream"},
		"another device":   {tensor.GroupedMatMulAt(newStream(t, devs[1]), c, a, b, ends, nil), "the tensor is on virtual:0"},
		"no ends":          {at(c, a, b, tensor.Tensor{}, nil), "no tensor given"},
		"type of ends":     {at(c, a, b, fromSlice(t, s, []int64{2, 6}, 2), nil), "want int32 of one dimension, contiguous"},
		"shape of ends":    {at(c, a, b, fromSlice(t, s, []int32{2, 6}, 1, 2), nil), "want int32 of one dimension, contiguous"},
		"strides of ends":  {at(c, a, b, wide, nil), "want int32 of one dimension, contiguous"},
		"number of groups": {at(c, a, b, fromSlice(t, s, []int32{2, 4, 6}, 3), nil), "for 3 groups: want [m k], [g k n] and [m n], or [g m k], [g k n] and [g m n]"},
		"shapes":           {at(c, x, matrix(f32, 2, 4, 4), ends, nil), "for 2 groups: want [m k]"},
		"form":             {at(grads, a.T(), y, ends, nil), "for 2 groups: want [m k]"},
		"inner form":       {tensor.GroupedMatMulInner(s, c, a, b, ends, nil), "for 2 groups: want [m k], [k n] and [g m n]"},
		"types":            {at(c, matrix(bf16, 6, 5), b, ends, nil), "a and b have different types"},
		"type of c":        {at(matrix(f16, 6, 4), a, b, ends, nil), "products of these types are not supported"},
		"float64":          {at(f64(6, 4), f64(6, 5), f64(2, 5, 4), ends, nil), "a of float64: want float16, bfloat16 or float32"},
		"layout":           {at(c, skewed, b, ends, nil), "a has strides [10 2]"},
		"a bias":           {at(c, a, b, ends, &tensor.MatMulConfig{Bias: c}), "the configuration has the tensor"},
		"an epilogue":      {at(c, a, b, ends, &tensor.MatMulConfig{Epilogue: tensor.ReLU}), "want only Alpha, Beta and Settings"},
		"settings":         {at(c, a, b, ends, &tensor.MatMulConfig{Settings: &tensor.MatMulSettings{SMCarveout: -1}}), "SMCarveout is -1"},
		"c repeats":        {at(repeated, a, b, ends, nil), "its elements share memory"},
		"c is a":           {at(c, c, matrix(f32, 2, 4, 4), ends, nil), "c shares memory with a"},
		"c is b":           {tensor.GroupedMatMulInner(s, grads, x.T(), grads.T(), ends, nil), "c shares memory with b"},
		"c is ends":        {at(part, a, b, inside, nil), "c shares memory with ends"},
	} {
		require.ErrorContains(t, row.err, row.want, name)
	}
	require.NoError(t, tensor.GroupedMatMulInner(s, grads, x.T(), y, ends, nil))
	none := fromSlice(t, s, []int32{}, 0)
	require.NoError(t, at(c, a, matrix(f32, 0, 5, 4), none, nil), "no groups")
	require.NoError(t, s.Sync(t.Context()))
}
