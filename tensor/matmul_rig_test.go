package tensor_test

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var (
	products     = flag.Int("products", testhost.Rounds(80, 400), "random products of TestMatMulRandom on each backend")
	productsSeed = flag.Uint64("productsseed", 0, "the seed of TestMatMulRandom; 0 means a new one")
)

// A numeric is what a test knows of a type.
type numeric struct {
	unit  float64 // the largest relative error of rounding
	least float64 // the largest error of rounding near 0
	most  float64 // 8-bit floats saturate here
}

var numerics = map[memory.DType]numeric{
	memory.Float64: {0x1p-53, 0, math.MaxFloat64}, memory.Float32: {0x1p-24, 0, math.MaxFloat32},
	memory.BFloat16: {0x1p-8, 0, math.MaxFloat32}, memory.Float16: {0x1p-11, 0x1p-25, 65504},
	memory.Float8E4M3: {0x1p-4, 0x1p-10, 448}, memory.Float8E5M2: {0x1p-3, 0x1p-17, 57344},
}

// A lab makes operands for products on a stream and closes them.
type lab struct {
	t    *testing.T
	s    *stream.Stream
	r    *rand.Rand
	cuda bool
	open []tensor.Tensor
}

func newLab(t *testing.T, s *stream.Stream, seed uint64) *lab {
	return &lab{t: t, s: s, r: rand.New(rand.NewPCG(seed, 1)), cuda: s.Device().System().Backend() == "cuda"}
}

func (l *lab) close() {
	for _, x := range l.open {
		require.NoError(l.t, x.Close())
	}
	l.open = nil
}

// An operand is a view of a storage.
type operand struct {
	tensor.Tensor
	storage tensor.Tensor
	view    func(tensor.Tensor) tensor.Tensor
}

// A layout says how matrices lie in memory. The paddings are in elements.
type layout struct {
	transposed  bool
	repeated    bool // one matrix for the whole batch, expanded
	interleaved bool // the batch is between rows and columns
	before      int  // columns before the view
	after       int  // columns after it
	above       int  // rows above it
}

func (l *lab) layout(padding int) layout {
	pad := func() int { return padding * l.r.IntN(3) * l.r.IntN(2) }
	return layout{transposed: l.r.IntN(2) == 0, interleaved: l.r.IntN(3) == 0, before: pad(), after: pad(), above: l.r.IntN(2)}
}

// make returns a batch of matrices; a batch of 0 means one matrix of two dimensions.
func (l *lab) make(t memory.DType, batch, rows, cols int, y layout) *operand {
	l.t.Helper()
	do := func(x tensor.Tensor, err error) tensor.Tensor { l.t.Helper(); require.NoError(l.t, err); return x }
	stored := max(1, batch)
	if y.repeated {
		stored = 1
	}
	in, out := rows, cols
	if y.transposed {
		in, out = cols, rows
	}
	shape := []int{stored, in + y.above, y.before + out + y.after}
	if y.interleaved {
		shape = []int{in + y.above, stored, y.before + out + y.after}
	}
	x := &operand{storage: do(tensor.Make(l.s, t, shape...))}
	l.open = append(l.open, x.storage)
	x.view = func(v tensor.Tensor) tensor.Tensor {
		if y.interleaved {
			v = do(v.Transpose(0, 1))
		}
		v = do(v.Narrow(1, y.above, in))
		v = do(v.Narrow(2, y.before, out))
		if y.transposed {
			v = v.T()
		}
		if y.repeated && batch > 0 {
			v = do(v.Expand(batch, rows, cols))
		}
		if batch == 0 {
			v = do(v.Select(0, 0))
		}
		return v
	}
	x.Tensor = x.view(x.storage)
	l.fill(x.storage)
	return x
}

// fill writes random numbers around 0.
func (l *lab) fill(x tensor.Tensor) {
	l.t.Helper()
	v := make([]float32, x.Len())
	for i := range v {
		v[i] = float32(l.r.NormFloat64())
	}
	host, err := tensor.OfHost(v, x.Shape()...)
	require.NoError(l.t, err)
	require.NoError(l.t, tensor.Copy(l.s, x, host))
}

// vector returns a tensor of the given shape with given or random values.
func (l *lab) vector(t memory.DType, shape []int, v ...float32) tensor.Tensor {
	l.t.Helper()
	x, err := tensor.Make(l.s, t, shape...)
	require.NoError(l.t, err)
	l.open = append(l.open, x)
	if v == nil {
		l.fill(x)
		return x
	}
	host, err := tensor.OfHost(v, shape...)
	require.NoError(l.t, err)
	require.NoError(l.t, tensor.Copy(l.s, x, host))
	return x
}

// values returns the elements in row-major order.
func (l *lab) values(x tensor.Tensor) []float64 {
	l.t.Helper()
	v := make([]float64, x.Len())
	host, err := tensor.OfHost(v, x.Shape()...)
	require.NoError(l.t, err)
	require.NoError(l.t, tensor.Copy(l.s, host, x))
	return v
}

// bytes returns all bytes of a storage.
func (l *lab) bytes(x tensor.Tensor) []byte {
	l.t.Helper()
	v, err := memory.View[uint8](x.Buffer(), x.Offset(), x.Bytes())
	require.NoError(l.t, err)
	b := make([]byte, v.Len())
	require.NoError(l.t, v.CopyTo(l.s, b))
	return b
}

// requireGaps checks that the elements of the storage outside of the view did not change.
func (l *lab) requireGaps(x *operand, before []byte) {
	l.t.Helper()
	index := make([]int32, x.storage.Len())
	for i := range index {
		index[i] = int32(i)
	}
	host, err := tensor.OfHost(index, x.storage.Shape()...)
	require.NoError(l.t, err)
	view := x.view(host)
	inside := make([]int32, view.Len())
	packed, err := tensor.OfHost(inside, view.Shape()...)
	require.NoError(l.t, err)
	require.NoError(l.t, tensor.Copy(l.s, packed, view))
	after := l.bytes(x.storage)
	slices.Sort(inside)
	size := x.DType().Size()
	for i := range index {
		if _, in := slices.BinarySearch(inside, int32(i)); !in {
			require.Equal(l.t, before[i*size:(i+1)*size], after[i*size:(i+1)*size], "element %d outside of the view was written", i)
		}
	}
}

// A reference is a product in float64.
type reference struct {
	batch, m, n, k int
	sum, size      []float64 // the sum, and the sum of the absolute values
	rounded        float64   // the relative error of a sum that was rounded before the bias was added
	early          []float64 // those sums
}

// at returns element (b, i, j) of a tensor whose batch may repeat.
func at(v []float64, shape []int, b, i, j int) float64 {
	rank := len(shape)
	rows, cols := shape[rank-2], shape[rank-1]
	if rank == 2 || shape[0] == 1 {
		b = 0
	}
	return v[(b*rows+i)*cols+j]
}

// multiply computes scale·a·b, with scales of rows and columns.
func (l *lab) multiply(c, a, b tensor.Tensor, rowScales, colScales []float64) *reference {
	l.t.Helper()
	rank := len(c.Shape())
	ref := &reference{batch: 1, m: c.Size(rank - 2), n: c.Size(rank - 1), k: a.Size(-1)}
	if rank == 3 {
		ref.batch = c.Size(0)
	}
	va, vb, sa, sb := l.values(a), l.values(b), a.Shape(), b.Shape()
	ref.sum, ref.size = make([]float64, c.Len()), make([]float64, c.Len())
	for z := range ref.batch {
		for i := range ref.m {
			for j := range ref.n {
				o := (z*ref.m+i)*ref.n + j
				for p := range ref.k {
					x := at(va, sa, z, i, p) * at(vb, sb, z, p, j)
					ref.sum[o] += x
					ref.size[o] += math.Abs(x)
				}
				s := rowScales[min(i, len(rowScales)-1)] * colScales[min(j, len(colScales)-1)]
				ref.sum[o], ref.size[o] = s*ref.sum[o], math.Abs(s)*ref.size[o]
			}
		}
	}
	return ref
}

// combine adds factor·v, where v has n elements that repeat, or one for each.
func (r *reference) combine(factor float64, v []float64) {
	for i := range r.sum {
		x := factor * v[i%len(v)]
		r.sum[i] += x
		r.size[i] += math.Abs(x)
	}
}

func gelu(x float64) float64 {
	return 0.5 * x * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
}

// geluSlope is the derivative, by a difference.
func geluSlope(x float64) float64 {
	const h = 1e-5
	return (gelu(x+h) - gelu(x-h)) / (2 * h)
}

// checkClose compares with a bound for each element, after rounding to the type. It does not
// end the test, so that a run reports all products that are wrong.
func checkClose(t *testing.T, d memory.DType, want, got, bound []float64, format string, args ...any) {
	t.Helper()
	x := numerics[d]
	for i := range want {
		w := want[i]
		if d == memory.Float8E4M3 || d == memory.Float8E5M2 {
			w = max(-x.most, min(x.most, w))
		}
		limit := bound[i]*(1+x.unit) + x.unit*math.Abs(w) + x.least
		if math.Abs(w-got[i]) <= limit {
			continue
		}
		t.Errorf("a product is wrong: %s: element %d is %v: want %v within %v", fmt.Sprintf(format, args...), i, got[i], w, limit)
		return
	}
}
