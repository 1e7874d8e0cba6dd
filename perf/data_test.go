package perf

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The PTX belongs to pattern.cu.
func TestPTX(t *testing.T) {
	var sources []cudacc.Source
	for _, size := range []int{1, 2, 4, 8} {
		sources = append(sources, cudacc.Source{Name: fmt.Sprint("pattern/", size), CUDA: source, Options: macros(size)})
	}
	testgpu.CheckPTX(t, "pattern.ptx.zst", packed, sources)
}

// number reads bits of a type.
func number(t memory.DType, b uint64) float64 {
	switch t {
	case memory.Float16:
		return float64(memory.Float16Bits(b).Float32())
	case memory.BFloat16:
		return float64(memory.BFloat16Bits(b).Float32())
	case memory.Float8E4M3:
		return float64(memory.Float8E4M3Bits(b).Float32())
	case memory.Float8E5M2:
		return float64(memory.Float8E5M2Bits(b).Float32())
	case memory.Float32:
		return float64(math.Float32frombits(uint32(b)))
	case memory.Float64:
		return math.Float64frombits(b)
	}
	return float64(b)
}

// Whatever codes the ranks have, every partial result in any order is a number of
// the type, and the last one is what the table has.
func TestReductionsAreExact(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, d := range dtypes {
		for op := sum; op <= mulSum; op++ {
			for _, n := range []int{1, 2, 3, 4, 7, 8, 16, 33, 300} {
				p := newPattern(d, op, n)
				for range testhost.Rounds(5, 50) {
					codes, total := 0, 0.0
					low, high, product := math.Inf(1), math.Inf(-1), 1.0
					for _, rank := range r.Perm(n) {
						code := int(codeOf(r.Uint64(), uint32(rank), r.Uint32(), uint32(p.codes), uint32(p.limit)))
						weight := 1 << (p.weights & uint32(rank) & 1)
						codes += code * weight
						x := number(d, p.values[code])
						low, high, product = min(low, x), max(high, x), product*x
						total += x * float64(weight)
						for _, partial := range []float64{total, product} {
							if op != minimum && op != maximum && (partial == product) == (op == prod) {
								require.Equal(t, partial, number(d, bits(d, partial)), "%s %s of %d ranks: a partial result is rounded", typeName(d), op, n)
							}
						}
					}
					want := map[reduction]float64{sum: total, mulSum: total, prod: product, minimum: low, maximum: high, avg: total / float64(n)}[op]
					if op == avg && !dtype.Of(d).IsFloat() {
						want = math.Trunc(want)
					}
					at := codes
					if op == minimum || op == maximum {
						at = int(map[reduction]float64{minimum: low, maximum: high}[op])
					}
					require.Equal(t, number(d, bits(d, want)), number(d, p.results[at]), "%s %s of %d ranks", typeName(d), op, n)
				}
			}
		}
	}
}

// What is filled is found right, and each single wrong element is counted.
func TestCheckFindsEveryElement(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		for _, d := range dtypes {
			size := d.Size()
			l, err := newDataKernels(devs[0], size)
			require.NoError(t, err)
			defer l.module.Close()
			c, err := newDataTables(s, l, newPattern(d, moves, 4), size)
			require.NoError(t, err)
			defer c.close()
			const n = 1000
			x, err := memory.Make[uint8](s, n*size)
			require.NoError(t, err)
			defer x.Close()
			wrong, err := memory.MakeFrom(s, []uint64{0})
			require.NoError(t, err)
			defer wrong.Close()
			count := func(p piece, seed uint32) (total uint64) {
				require.NoError(t, wrong.Zero(s))
				require.NoError(t, c.check(s, x.Slice(p.at*size, (p.at+p.n)*size), p, seed, wrong))
				var out [1]uint64
				require.NoError(t, wrong.CopyTo(s, out[:]))
				return out[0]
			}
			require.NoError(t, c.fill(s, x, n, 2, 7))
			require.Zero(t, count(piece{n: n, first: 2, ranks: 1}, 7), typeName(d))
			require.Zero(t, count(piece{at: 300, n: 700, from: 300, first: 2, ranks: 1}, 7), typeName(d))
			for name, other := range map[string]uint64{
				"another rank": count(piece{n: n, first: 1, ranks: 1}, 7),
				"another seed": count(piece{n: n, first: 2, ranks: 1}, 8),
				"another part": count(piece{n: n, from: 1, first: 2, ranks: 1}, 7),
			} {
				require.Greater(t, other, uint64(n/2), "%s: %s", typeName(d), name)
			}
			for _, at := range []int{0, 511, n - 1} {
				element := x.Slice(at*size, (at+1)*size)
				was := make([]byte, size)
				require.NoError(t, element.CopyTo(s, was))
				require.NoError(t, poison(s, element))
				require.Equal(t, uint64(1), count(piece{n: n, first: 2, ranks: 1}, 7), "%s: element %d", typeName(d), at)
				require.NoError(t, element.CopyFrom(s, was))
			}
		}
	})
}
