package rng

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The package documentation describes the common properties of all fills.

// Float is an element type of the continuous distributions.
type Float interface {
	memory.Float16Bits | memory.BFloat16Bits | float32 | float64
}

// Number is an element type with arithmetic in torch.
type Number interface {
	Float | int8 | uint8 | int16 | int32 | int64
}

// Uniform fills x with values in [from, to) (torch.Tensor.uniform_). It requires
// from <= to, and T must represent both and their difference.
func Uniform[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], from, to float64) error {
	f := formatOf[T]()
	if err := checkUniform(f, from, to); err != nil {
		return err
	}
	from, to = f.round(from), f.round(to)
	return run(g, s, x, uniform, number(from), number(to), number(f.minus(to, from)))
}

// Normal fills x with normally distributed values (torch.Tensor.normal_; with a
// slice as mean or std, torch.normal). It requires std >= 0, but does not check
// the numbers of a slice, where a negative std acts like a positive one.
func Normal[T Float, M, S Param[T]](g *Generator, s *stream.Stream, x memory.Slice[T], mean M, std S) error {
	m, d := paramOf[T](mean), paramOf[T](std)
	if !d.isSlice() && !(d.number >= 0) {
		return refuse("normal", "std", d.number, ">= 0")
	}
	if m.isSlice() || d.isSlice() {
		return normalOf(g, s, x, m, d)
	}
	return run(g, s, x, normal, number(m.number), number(d.number), 0)
}

// LogNormal fills x with e to the power of normally distributed values, whose
// std must be > 0 (torch.Tensor.log_normal_).
func LogNormal[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], mean, std float64) error {
	if !(std > 0) {
		return refuse("log-normal", "std", std, "> 0")
	}
	return run(g, s, x, logNormal, number(mean), number(std), 0)
}

// Cauchy fills x with values of the Cauchy distribution, whose sigma must be >
// 0 (torch.Tensor.cauchy_).
func Cauchy[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], median, sigma float64) error {
	if !(sigma > 0) {
		return refuse("cauchy", "sigma", sigma, "> 0")
	}
	return run(g, s, x, cauchy, number(median), number(sigma), 0)
}

// Exponential fills x with exponentially distributed values with mean 1/lambda,
// where lambda must be > 0 (torch.Tensor.exponential_). Values are positive
// unless they are too small for T.
func Exponential[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], lambda float64) error {
	if !(lambda > 0) {
		return refuse("exponential", "lambda", lambda, "> 0")
	}
	// Round the division like the kernel.
	scale := -1 / lambda
	if !formatOf[T]().wide {
		scale = float64(-1 / float32(lambda))
	}
	return run(g, s, x, exponential, number(scale), 0, 0)
}

// Bernoulli fills x with 1 or true with probability p, and otherwise with 0 or
// false, where p must be from 0 to 1 (torch.Tensor.bernoulli_). In a slice,
// which torch checks on the device, smaller numbers and NaN give 0, and larger
// numbers give 1.
func Bernoulli[T Number | bool, P Param[T]](g *Generator, s *stream.Stream, x memory.Slice[T], p P) error {
	q := paramOf[T](p)
	if q.isSlice() {
		return bernoulliOf(g, s, x, q)
	}
	if !(q.number >= 0 && q.number <= 1) {
		return refuse("bernoulli", "p", q.number, "0 <= p <= 1")
	}
	return run(g, s, x, bernoulli, number(q.number), 0, 0)
}

// Geometric fills x with the number of trials up to the first success, if each
// trial succeeds with probability p, which must be above 0 and below 1
// (torch.Tensor.geometric_). If T cannot represent a value, the element is
// undefined.
func Geometric[T Number](g *Generator, s *stream.Stream, x memory.Slice[T], p float64) error {
	if !(p > 0 && p < 1) {
		return refuse("geometric", "p", p, "0 < p < 1")
	}
	return run(g, s, x, geometric, number(p), 0, 0)
}

// Random fills x with integers from 0 to the largest value of an integer type, or
// to 2^d for a floating-point type with d significand bits (torch.Tensor.random_
// without bounds).
func Random[T Number | bool | uint16 | uint32](g *Generator, s *stream.Stream, x memory.Slice[T]) error {
	return run(g, s, x, random, 0, 0, 0)
}

// RandomFromTo fills x with integers in [from, to) (torch.Tensor.random_ with
// bounds). It requires from < to, and T must represent from and to-1. If a
// floating-point type does not represent a bound exactly, the bound moves inward.
func RandomFromTo[T Number | bool | uint16 | uint32 | uint64](g *Generator, s *stream.Stream, x memory.Slice[T], from, to int64) error {
	from, to, err := checkFromTo(formatOf[T](), from, to)
	if err != nil {
		return err
	}
	width := uint64(to) - uint64(from)
	d := randomNear
	if width >= wideRange {
		d = randomFar
	}
	return run(g, s, x, d, width, uint64(from), 0)
}

// wideRange is the minimum range for 64-bit draws. As in torch, smaller ranges use 32
// bits; for larger ones the remainder of 32 bits would not be nearly uniform.
const wideRange = 1 << 28

// number encodes a floating-point parameter.
func number(v float64) uint64 { return math.Float64bits(v) }

// The advances of torch's generator for fills with a parameter in device memory, whatever their
// length. torch rounds the second from 10 up to a multiple of 4.
const (
	poissonAdvance   = 20
	bernoulliAdvance = 12
)

// Poisson fills x with Poisson-distributed counts (torch.poisson). If the rate of an element is
// negative or NaN, which stops the device in torch, its value is NaN.
func Poisson[T Float, R Param[T]](g *Generator, s *stream.Stream, x memory.Slice[T], rate R) error {
	const op = "rng: poisson"
	r := paramOf[T](rate)
	if !r.isSlice() && !(r.number >= 0) {
		return refuse("poisson", "rate", r.number, ">= 0")
	}
	if !r.isSlice() { // torch's rates have the type of the result
		r.number = formatOf[T]().round(r.number)
	}
	return fillBy(op, "poisson_kernel", g, s, x, &r, "rate", poissonAdvance)
}

func bernoulliOf[T Number | bool](g *Generator, s *stream.Stream, x memory.Slice[T], p param) error {
	return fillBy("rng: bernoulli", "bernoulli_kernel", g, s, x, &p, "p", bernoulliAdvance)
}

// fillBy performs a fill by a kernel of draws.cu with one parameter.
func fillBy[T memory.Element](op, name string, g *Generator, s *stream.Stream, x memory.Slice[T], p *param, what string, advance uint64) error {
	g, err := check(op, g, s, x)
	if err != nil {
		return err
	}
	if err := p.check(op, what, regionOf("the filled slice", x), true, s.Device()); err != nil || x.Len() == 0 {
		return err
	}
	l, err := launcherOf[T](op, s, drawsModule)
	if err != nil {
		return err
	}
	at, err := g.draw(s, advance)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return l.each(name, x.Len(), kernel.Ptr(x), count(x.Len()), kernel.Scalar(at.seed), kernel.Scalar(at.offset), at.launch,
		p.at, kernel.Scalar(p.number), p.type32(), kernel.Scalar(p.step()))
}

// normalOf is Normal with a slice as mean or std. Like torch, it draws values with mean 0 and
// multiplies and adds afterwards, and rounds each time.
func normalOf[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], mean, std param) error {
	const op = "rng: normal"
	g, err := check(op, g, s, x)
	if err != nil {
		return err
	}
	out := regionOf("the filled slice", x)
	if err := mean.check(op, "mean", out, false, s.Device()); err != nil {
		return err
	}
	if err := std.check(op, "std", out, false, s.Device()); err != nil || x.Len() == 0 {
		return err
	}
	l, err := launcherOf[T](op, s, drawsModule)
	if err != nil {
		return err
	}
	spread := 1.0
	if !std.isSlice() {
		spread = std.number
	}
	if err := run(g, s, x, normal, number(0), number(spread), 0); err != nil {
		return err
	}
	mean.number = formatOf[T]().round(mean.number)
	return l.each("normal_kernel", x.Len(), kernel.Ptr(x), count(x.Len()),
		mean.at, kernel.Scalar(mean.number), mean.type32(), kernel.Scalar(mean.step()),
		std.at, kernel.Scalar(std.number), std.type32(), kernel.Scalar(std.step()))
}

func refuse(op, name string, v float64, want string) error {
	return fmt.Errorf("rng: %s: %s = %v: want %s", op, name, v, want)
}

func checkUniform(f *format, from, to float64) error {
	for _, b := range []struct {
		name string
		v    float64
	}{{"from", from}, {"to", to}} {
		if !(math.Abs(b.v) <= f.Max) {
			return fmt.Errorf("rng: uniform: %s = %v is out of bounds for %s", b.name, b.v, f.dtype)
		}
	}
	if from > to {
		return fmt.Errorf("rng: uniform: from = %v, to = %v: want from <= to", from, to)
	}
	if to-from > f.Max {
		return fmt.Errorf("rng: uniform: from = %v, to = %v: %s cannot hold the difference: want at most %v", from, to, f.dtype, f.Max)
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
	if !f.IsFloat() {
		return from, to, nil
	}
	f0, t0 := f.up(from), f.down(to)
	if f0 >= t0 {
		return 0, 0, fmt.Errorf("rng: random: from = %d, to = %d: %s has no number between them", from, to, f.dtype)
	}
	return f0, t0, nil
}

// up implements torch's rule with torch's rounding: it returns from or, if
// rounding to the type could give a number below from, a larger number.
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
	return 1 << max(bits.Len64(magnitude(v))-f.Digits, 0)
}

func magnitude(v int64) uint64 {
	if v < 0 {
		return -uint64(v)
	}
	return uint64(v)
}

// whole converts like x86, on which torch's bounds depend: the result of an
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
	return g, inside.CheckBuffer(op, x.Buffer(), x.Len(), s.Device())
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

// A format describes an element type for fills and stand-ins.
type format struct {
	*dtype.Type
	dtype memory.DType
	wide  bool   // torch computes in float64, otherwise in float32
	low   int64  // the smallest value of an integer type
	top   uint64 // the largest value of an integer type
}

func (f *format) holds(v int64) bool {
	if f.IsFloat() {
		return math.Abs(float64(v)) <= f.Max
	}
	return v >= f.low && (v < 0 || uint64(v) <= f.top)
}

// formats are all types but the 8-bit floats.
var formats = func() (list [memory.Float64 + 1]format) {
	for i := range list {
		t := dtype.Of(i)
		f := format{Type: t, dtype: memory.DType(i), wide: i == dtype.Float64, top: 1<<t.Digits - 1}
		if t.Kind == dtype.Signed {
			f.low = -1 << t.Digits
		}
		list[i] = f
	}
	return list
}()

// round rounds to the nearest value of a floating-point type.
func (f *format) round(v float64) float64 { return f.Round(dtype.FloatValue(v)) }

// of returns v rounded to a floating-point type like in torch, through float32
// unless f is wide.
func (f *format) of(v int64) float64 {
	if f.wide {
		return float64(v)
	}
	return f.round(float64(float32(v)))
}

// minus returns a-b as an element of a floating-point type.
func (f *format) minus(a, b float64) float64 {
	if f.wide {
		return a - b
	}
	return f.round(float64(float32(a) - float32(b)))
}

func formatOf[T memory.Element]() *format { return &formats[memory.DTypeOf[T]()] }

// caster returns the conversion from the type that torch computes in.
func caster[T memory.Element]() func(float64) T {
	var f any
	var z T
	switch any(z).(type) {
	case bool:
		f = func(v float64) bool { return v != 0 }
	case int8:
		f = func(v float64) int8 { return int8(int64(v)) }
	case uint8:
		f = func(v float64) uint8 { return uint8(int64(v)) }
	case int16:
		f = func(v float64) int16 { return int16(int64(v)) }
	case int32:
		f = func(v float64) int32 { return int32(int64(v)) }
	case int64:
		f = func(v float64) int64 { return int64(v) }
	case memory.Float16Bits:
		f = func(v float64) memory.Float16Bits { return toHalf(float32(v)) }
	case memory.BFloat16Bits:
		f = func(v float64) memory.BFloat16Bits { return toBFloat(float32(v)) }
	case float32:
		f = func(v float64) float32 { return float32(v) }
	case float64:
		f = func(v float64) float64 { return v }
	}
	return f.(func(float64) T)
}

// counter returns the conversion from an integer.
func counter[T memory.Element]() func(int64) T {
	var f any
	var z T
	switch any(z).(type) {
	case bool:
		f = func(v int64) bool { return v != 0 }
	case int8:
		f = func(v int64) int8 { return int8(v) }
	case uint8:
		f = func(v int64) uint8 { return uint8(v) }
	case int16:
		f = func(v int64) int16 { return int16(v) }
	case uint16:
		f = func(v int64) uint16 { return uint16(v) }
	case int32:
		f = func(v int64) int32 { return int32(v) }
	case uint32:
		f = func(v int64) uint32 { return uint32(v) }
	case int64:
		f = func(v int64) int64 { return v }
	case uint64:
		f = func(v int64) uint64 { return uint64(v) }
	case memory.Float16Bits:
		f = func(v int64) memory.Float16Bits { return toHalf(float32(v)) }
	case memory.BFloat16Bits:
		f = func(v int64) memory.BFloat16Bits { return toBFloat(float32(v)) }
	case float32:
		f = func(v int64) float32 { return float32(v) }
	case float64:
		f = func(v int64) float64 { return float64(v) }
	}
	return f.(func(int64) T)
}

// toHalf rounds as kernels do.
func toHalf(x float32) memory.Float16Bits { return memory.Float16Bits(dtype.Half.EncodeDevice(x)) }

func fromHalf(h memory.Float16Bits) float64 { return float64(h.Float32()) }

// toBFloat rounds as kernels do.
func toBFloat(x float32) memory.BFloat16Bits {
	return memory.BFloat16Bits(dtype.BFloat.EncodeDevice(x))
}

func fromBFloat(b memory.BFloat16Bits) float64 {
	return float64(b.Float32())
}
