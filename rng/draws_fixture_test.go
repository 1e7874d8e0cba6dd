package rng_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// A table is an argument of a recorded call: a tensor that repeats values.
type table struct {
	Table []float64
	N     int    // 0: as many elements as the result
	DType string // "": the type of the call
}

func (r *recorded) isTable(i int) bool {
	return len(r.Args) > i && bytes.HasPrefix(r.Args[i], []byte("{"))
}

// special replays a call that is not a fill by numbers, and reports whether it is one.
func (r *recorded) special(t *testing.T, g *rng.Generator, s *stream.Stream) bool {
	switch {
	case r.Fn == "set_state": // torch refused a call
		b, err := hex.DecodeString(r.State)
		require.NoError(t, err)
		require.NoError(t, g.SetState(b))
	case r.Fn == "randperm":
		replayPermutation(t, g, s, r)
	case r.Fn == "multinomial":
		w := argument[table](r, 0)
		byFloat(t, w.DType, multinomialReplay[float32], multinomialReplay[float64], multinomialReplay[memory.Float16Bits], multinomialReplay[memory.BFloat16Bits])(t, g, s, r, w)
	case r.Fn == "poisson":
		byFloat(t, r.DType, poissonReplay[float32], poissonReplay[float64], poissonReplay[memory.Float16Bits], poissonReplay[memory.BFloat16Bits])(t, g, s, r)
	case r.Fn == "normal" && (r.isTable(0) || r.isTable(1)):
		byFloat(t, r.DType, normalReplay[float32], normalReplay[float64], normalReplay[memory.Float16Bits], normalReplay[memory.BFloat16Bits])(t, g, s, r)
	case r.Fn == "bernoulli" && r.isTable(0):
		bernoulliReplays(t, g, s, r)
	default:
		return false
	}
	return true
}

// byFloat returns the function for a type.
func byFloat[F any](t *testing.T, dtype string, f32, f64, f16, bf16 F) F {
	switch dtype {
	case "float32":
		return f32
	case "float64":
		return f64
	case "float16":
		return f16
	case "bfloat16":
		return bf16
	}
	t.Fatalf("no floating-point type: %q", dtype)
	return f32
}

// repeat returns n elements of a table.
func repeat[T rng.Float](x table, n int) []T {
	out := make([]T, n)
	for i := range out {
		v := x.Table[i%len(x.Table)]
		switch p := any(&out[i]).(type) {
		case *float32:
			*p = float32(v)
		case *float64:
			*p = v
		case *memory.Float16Bits:
			*p = rng.ToHalf(float32(v))
		case *memory.BFloat16Bits:
			*p = rng.ToBFloat(float32(v))
		}
	}
	return out
}

func replayPermutation(t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	switch r.DType {
	case "uint8":
		permutationReplay[uint8](t, g, s, r)
	case "int8":
		permutationReplay[int8](t, g, s, r)
	case "int16":
		permutationReplay[int16](t, g, s, r)
	case "int32":
		permutationReplay[int32](t, g, s, r)
	case "int64":
		permutationReplay[int64](t, g, s, r)
	default:
		byFloat(t, r.DType, permutationReplay[float32], permutationReplay[float64], permutationReplay[memory.Float16Bits], permutationReplay[memory.BFloat16Bits])(t, g, s, r)
	}
}

func permutationReplay[T rng.Number](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	compare(t, g, s, r, nil, func(x memory.Slice[T]) error { return rng.Permutation(g, s, x) })
}

func poissonReplay[T rng.Float](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	rates := upload(t, s, repeat[T](argument[table](r, 0), r.N)...)
	compareMost(t, g, s, r, 0.01, func(x memory.Slice[T]) error { return rng.Poisson(g, s, x, rates) })
}

func normalReplay[T rng.Float](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	fill := func(x memory.Slice[T]) error {
		switch {
		case !r.isTable(0):
			return rng.Normal(g, s, x, r.real(0), upload(t, s, repeat[T](argument[table](r, 1), r.N)...))
		case !r.isTable(1):
			return rng.Normal(g, s, x, upload(t, s, repeat[T](argument[table](r, 0), r.N)...), r.real(1))
		}
		mean, std := upload(t, s, repeat[T](argument[table](r, 0), r.N)...), argument[table](r, 1)
		if std.DType == "float64" {
			return rng.Normal(g, s, x, mean, upload(t, s, repeat[float64](std, r.N)...))
		}
		return rng.Normal(g, s, x, mean, upload(t, s, repeat[T](std, r.N)...))
	}
	compare(t, g, s, r, spread[T], fill)
}

// spread is near for values whose deviation is at most 10 and whose mean is at most 100: the
// fast functions and each rounding are off by units of what is added.
func spread[T memory.Element](r *recorded, got, want T) float64 {
	epsilon := map[string]float64{"float64": 1e-12, "float32": 1e-5, "float16": 0x1p-10, "bfloat16": 0x1p-7}[r.DType]
	return math.Abs(float(got)-float(want)) / (epsilon * (20 + max(math.Abs(float(want)), 100)))
}

// pole is near for Cauchy's values: the error of the fast tangent grows with its square.
func pole[T memory.Element](r *recorded, got, want T) float64 {
	z := (float(want) - r.real(0)) / r.real(1)
	epsilon := map[string]float64{"float64": 1e-12, "float32": 1e-5, "float16": 0x1p-9, "bfloat16": 0x1p-6}[r.DType]
	if math.Abs(z) > 1e4 || math.IsInf(float(want), 0) {
		epsilon *= 1e3
	}
	return math.Abs(float(got)-float(want)) / (epsilon * r.real(1) * (1 + z*z))
}

func bernoulliReplays(t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	switch r.DType {
	case "uint8":
		bernoulliReplay[uint8](t, g, s, r)
	case "int32":
		bernoulliReplay[int32](t, g, s, r)
	case "int64":
		bernoulliReplay[int64](t, g, s, r)
	case "bool":
		bernoulliReplay[bool](t, g, s, r)
	default:
		byFloat(t, r.DType, bernoulliReplay[float32], bernoulliReplay[float64], bernoulliReplay[memory.Float16Bits], bernoulliReplay[memory.BFloat16Bits])(t, g, s, r)
	}
}

func bernoulliReplay[T rng.Number | bool](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	p := argument[table](r, 0)
	dtype := p.DType
	if dtype == "" {
		dtype = r.DType
	}
	fill := map[string]func(memory.Slice[T]) error{
		"float32": func(x memory.Slice[T]) error { return rng.Bernoulli(g, s, x, upload(t, s, repeat[float32](p, r.N)...)) },
		"float64": func(x memory.Slice[T]) error { return rng.Bernoulli(g, s, x, upload(t, s, repeat[float64](p, r.N)...)) },
		"float16": func(x memory.Slice[T]) error {
			return rng.Bernoulli(g, s, x, upload(t, s, repeat[memory.Float16Bits](p, r.N)...))
		},
		"bfloat16": func(x memory.Slice[T]) error {
			return rng.Bernoulli(g, s, x, upload(t, s, repeat[memory.BFloat16Bits](p, r.N)...))
		},
	}[dtype]
	compare(t, g, s, r, nil, fill)
}

func multinomialReplay[T rng.Float](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded, w table) {
	rows, replacement := int(r.whole(1)), r.whole(2) == 1
	weights := upload(t, s, repeat[T](w, w.N)...)
	fill := func(x memory.Slice[int64]) error {
		return rng.Multinomial(g, s, x, weights, w.N/max(rows, 1), replacement)
	}
	single := r.N == max(rows, 1)
	switch half := w.DType == "float16" || w.DType == "bfloat16"; {
	case replacement && !single && rows < 2 && half: // torch's sums of one row have another order, and these types few bits
		compareMost(t, g, s, r, 1, fill)
	case replacement && !single && rows < 2: // here some samples lie between two orders' sums
		compareMost(t, g, s, r, 0.01, fill)
	case (!replacement || single) && half: // equal quotients: torch's order is not specified
		compareMost(t, g, s, r, 0.5, fill)
	case (!replacement || single) && s.Device().System().Backend() != "cuda": // quotients next to each other
		compareMost(t, g, s, r, 0.02, fill)
	default:
		compare(t, g, s, r, nil, fill)
	}
}

// compareMost is compare for draws of which a share of elements may differ: on virtual devices,
// because approximations move some over a bound, and on CUDA if torch's results vary or share is
// for both.
func compareMost[T memory.Element](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded, share float64, fill func(memory.Slice[T]) error) {
	if s.Device().System().Backend() == "cuda" && r.Fn == "poisson" {
		compare(t, g, s, r, nil, fill)
		return
	}
	got := fetch(t, s, r.N, fill)
	require.Equal(t, r.State, state(g), "the state after %v", r)
	if fmt.Sprintf("%x", sha256.Sum256(bytesOf(got))) == r.SHA256 {
		return
	}
	head, tail := decode[T](t, r.Head), decode[T](t, r.Tail)
	differ := 0
	for i, want := range head {
		if got[i] != want {
			differ++
		}
	}
	for i, want := range tail {
		if got[len(got)-len(tail)+i] != want {
			differ++
		}
	}
	n := float64(len(head) + len(tail))
	require.LessOrEqual(t, float64(differ), max(share*n, 1), "elements of the first and last %v of %v differ", n, r)
}
