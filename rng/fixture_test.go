package rng_test

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// A recording has calls that PyTorch made in order on one generator for each
// seed, and what came of them.
type recording struct {
	Meta struct {
		Torch, Device string
		SM            int `json:"sm"`
		ThreadsPerSM  int `json:"max_threads_per_sm"`
	}
	Public, Cases []sequence
}

type sequence struct {
	Seed, Offset uint64
	Calls        []recorded
}

type recorded struct {
	Fn     string
	Args   []json.RawMessage // numbers, or tables that a tensor repeats
	DType  string
	N      int
	SHA256 string
	Head   string `json:"head_hex"`
	Tail   string `json:"tail_hex"`
	State  string `json:"state_after_hex"`
	Varies bool   // torch's result differs between runs
}

func (r *recorded) String() string { return fmt.Sprintf("%s(%s) of %d %s", r.Fn, r.Args, r.N, r.DType) }

func (r *recorded) real(i int) float64 { return argument[float64](r, i) }
func (r *recorded) whole(i int) int64  { return argument[int64](r, i) }

func argument[T any](r *recorded, i int) (v T) {
	if err := json.Unmarshal(r.Args[i], &v); err != nil {
		panic(fmt.Sprintf("argument %d of %v: %v", i, r, err))
	}
	return v
}

// What PyTorch recorded is what the fills give: every byte on the model of GPU
// that it was recorded on; on virtual devices every byte of what is exact, and
// the recorded values of the rest within the error of the GPU's fast functions.
func TestRecordings(t *testing.T) {
	files, err := filepath.Glob("testdata/rng*.json.gz")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	if path := env.Fixtures.Value(); path != "" {
		files = append(files, fixtures(t, path)...)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			rec := load(t, file)
			t.Run("virtual", func(t *testing.T) {
				rec.play(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualMultiprocessors: rec.Meta.SM})[0])
			})
			t.Run("cuda", func(t *testing.T) { rec.play(t, testgpu.CUDA(t, 1)[0]) })
		})
	}
}

// fixtures are the recordings in a folder, or the one file.
func fixtures(t *testing.T, path string) []string {
	info, err := os.Stat(path)
	require.NoError(t, err, env.Fixtures.Name)
	if !info.IsDir() {
		return []string{path}
	}
	files, err := filepath.Glob(filepath.Join(path, "*rng*.json.gz"))
	require.NoError(t, err)
	require.NotEmpty(t, files, "%s: there is no *rng*.json.gz in %s", env.Fixtures.Name, path)
	return files
}

func (rec *recording) play(t *testing.T, dev *device.Device) {
	p, err := dev.Properties()
	require.NoError(t, err)
	if p.Multiprocessors != rec.Meta.SM || p.ThreadsPerMultiproc != rec.Meta.ThreadsPerSM {
		t.Skipf("recorded on a device with %d multiprocessors of %d threads, this has %d of %d",
			rec.Meta.SM, rec.Meta.ThreadsPerSM, p.Multiprocessors, p.ThreadsPerMultiproc)
	}
	drawn := testgpu.SampleRaced(t, 12)
	for _, seq := range append(rec.Public, rec.Cases...) {
		if !drawn() {
			continue
		}
		t.Run(fmt.Sprint("seed ", seq.Seed, " from ", seq.Offset), func(t *testing.T) {
			t.Parallel()
			s, g := newStream(t, dev), rng.New(dev, seq.Seed)
			require.NoError(t, g.SetOffset(seq.Offset))
			for i := range seq.Calls {
				if replay(t, g, s, &seq.Calls[i]); t.Failed() {
					t.Fatalf("that was call %d", i)
				}
			}
		})
	}
}

func load(t *testing.T, file string) (rec recording) {
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	require.NoError(t, json.NewDecoder(z).Decode(&rec))
	require.NotEmpty(t, append(rec.Public, rec.Cases...), "no calls in %s", file)
	return rec
}

func replay(t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	if r.special(t, g, s) {
		return
	}
	switch r.DType {
	case "float32":
		floating[float32](t, g, s, r)
	case "float64":
		floating[float64](t, g, s, r)
	case "float16":
		floating[memory.Float16Bits](t, g, s, r)
	case "bfloat16":
		floating[memory.BFloat16Bits](t, g, s, r)
	case "int8":
		number[int8](t, g, s, r)
	case "uint8":
		number[uint8](t, g, s, r)
	case "int16":
		number[int16](t, g, s, r)
	case "int32":
		number[int32](t, g, s, r)
	case "int64":
		number[int64](t, g, s, r)
	case "bool":
		discrete[bool](t, g, s, r)
	case "uint16":
		integer[uint16](t, g, s, r)
	case "uint32":
		integer[uint32](t, g, s, r)
	case "uint64":
		bounded[uint64](t, g, s, r)
	default:
		t.Fatalf("%v: no such dtype", r)
	}
}

// floating, number, discrete, integer and bounded replay what their types have.
func floating[T rng.Float](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	switch r.Fn {
	case "cauchy":
		compare(t, g, s, r, pole[T], func(x memory.Slice[T]) error { return rng.Cauchy(g, s, x, r.real(0), r.real(1)) })
	case "uniform":
		compare(t, g, s, r, nil, func(x memory.Slice[T]) error { return rng.Uniform(g, s, x, r.real(0), r.real(1)) })
	case "normal":
		compare(t, g, s, r, near[T], func(x memory.Slice[T]) error { return rng.Normal(g, s, x, r.real(0), r.real(1)) })
	case "log_normal":
		compare(t, g, s, r, near[T], func(x memory.Slice[T]) error { return rng.LogNormal(g, s, x, r.real(0), r.real(1)) })
	case "exponential":
		compare(t, g, s, r, near[T], func(x memory.Slice[T]) error { return rng.Exponential(g, s, x, r.real(0)) })
	default:
		number[T](t, g, s, r)
	}
}

func number[T rng.Number](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	if r.Fn == "geometric" {
		compare(t, g, s, r, next[T], func(x memory.Slice[T]) error { return rng.Geometric(g, s, x, r.real(0)) })
		return
	}
	discrete[T](t, g, s, r)
}

func discrete[T rng.Number | bool](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	if r.Fn == "bernoulli" {
		compare(t, g, s, r, nil, func(x memory.Slice[T]) error { return rng.Bernoulli(g, s, x, r.real(0)) })
		return
	}
	integer[T](t, g, s, r)
}

func integer[T rng.Number | bool | uint16 | uint32](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	if r.Fn == "random" {
		compare(t, g, s, r, nil, func(x memory.Slice[T]) error { return rng.Random(g, s, x) })
		return
	}
	bounded[T](t, g, s, r)
}

func bounded[T rng.Number | bool | uint16 | uint32 | uint64](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded) {
	if r.Fn != "random_from_to" {
		t.Fatalf("%v: no such function", r)
	}
	compare(t, g, s, r, nil, func(x memory.Slice[T]) error { return rng.RandomFromTo(g, s, x, r.whole(0), r.whole(1)) })
}

// compare checks the bytes and the state after one call. On virtual devices it
// compares by off, which returns the difference of two elements in units of what
// is allowed; nil is for fills that are exact.
func compare[T memory.Element](t *testing.T, g *rng.Generator, s *stream.Stream, r *recorded,
	off func(r *recorded, got, want T) float64, fill func(memory.Slice[T]) error) {
	got := fetch(t, s, r.N, fill)
	require.Equal(t, r.State, state(g), "the state after %v", r)
	head, tail := decode[T](t, r.Head), decode[T](t, r.Tail)
	if off == nil || s.Device().System().Backend() == "cuda" {
		// Values before digests: they say more.
		require.Equal(t, head, got[:len(head)], "the first elements of %v", r)
		require.Equal(t, tail, got[len(got)-len(tail):], "the last elements of %v", r)
		require.Equal(t, r.SHA256, fmt.Sprintf("%x", sha256.Sum256(bytesOf(got))), "the digest of %v", r)
		return
	}
	for i, want := range slices.Concat(head, tail) {
		at := i
		if i >= len(head) {
			at = len(got) - len(tail) + i - len(head)
		}
		if by := off(r, got[at], want); !(by <= 1) {
			t.Errorf("element %d of %v is %v: want %v; %.3g times what is allowed", at, r, float(got[at]), float(want), by)
		}
	}
}

func decode[T memory.Element](t *testing.T, text string) []T {
	b, err := hex.DecodeString(text)
	require.NoError(t, err)
	var z T
	out := make([]T, len(b)/int(unsafe.Sizeof(z)))
	copy(bytesOf(out), b)
	return out
}

// next is for geometric values, which the smallest error moves by one.
func next[T memory.Element](_ *recorded, got, want T) float64 {
	return math.Abs(float(got) - float(want))
}

// near is for continuous values: 1e-5 of the value or of 1 in float32, 1e-12 in
// float64, and one unit in the last place in the others, unless the value is so
// small that the GPU's fast functions are off by more.
func near[T memory.Element](r *recorded, got, want T) float64 {
	a, b := float(got), float(want)
	if a == b {
		return 0 // infinities too
	}
	var unit float64
	switch any(want).(type) {
	case float64:
		return math.Abs(a-b) / (1e-12 * max(1, math.Abs(b)))
	case float32:
		return math.Abs(a-b) / (1e-5 * max(1, math.Abs(b)))
	case memory.Float16Bits:
		unit = math.Ldexp(1, max(math.Ilogb(b), -14)-10)
	default:
		unit = math.Ldexp(1, max(math.Ilogb(b), -126)-7)
	}
	return math.Abs(a-b) / max(unit, fast(r))
}

// fast returns how far a value may be off however small it is. The CUDA
// programming guide gives the fast sine and the fast logarithm next to 1 an error
// of 2^-21.41; the radius that the sine is multiplied by is at most
// sqrt(-2 log(2^-33)).
func fast(r *recorded) float64 {
	err := math.Exp2(-21.41)
	switch r.Fn {
	case "normal":
		return err * math.Sqrt(66*math.Ln2) * r.real(1)
	case "exponential":
		return err / r.real(0)
	}
	return 0
}
