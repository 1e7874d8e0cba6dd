package fabric

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A foldTrial is a Fold of random bits, with its operands in one memory: the slots of the ranks,
// then the elements of rank Mine, then the result. Addresses are offsets in the memory.
type foldTrial struct {
	Fold
	mem []byte
}

// newFoldTrial returns a random trial. Its operands are aligned or not.
func newFoldTrial(r *rand.Rand, f *format, op collective.Reduction) foldTrial {
	ranks := 1 + r.IntN(10)
	x := Fold{DType: f.dtype, Op: op, Ranks: ranks, Block: 1 + r.IntN(ranks), Mine: r.IntN(ranks), Count: 1 + r.IntN(200), Stage: Stage(r.IntN(3)), All: 1 + r.IntN(20)}
	if r.IntN(4) == 0 {
		x.Count = 1 + r.IntN(20000) // a thread has several packs
	}
	in, out := x.sizes()
	stride := over(x.Count*in, 16) * 16
	if r.IntN(2) == 0 {
		stride = x.Count * in
	}
	x.Stride, x.Own = uint64(stride), uint64(over(ranks*stride, 16)*16)
	x.Dst = x.Own + uint64(over(x.Count*in, 16)*16)
	if x.Stage == WholeStage && r.IntN(2) == 0 {
		x.Dst = x.Own
	}
	mem := make([]byte, int(x.Dst)+x.Count*out)
	for i := range mem {
		mem[i] = byte(r.Uint32())
	}
	return foldTrial{x, mem}
}

// want returns the memory after the reduction, by the function for virtual devices.
func (x *foldTrial) want(f *format) []byte {
	mem := bytes.Clone(x.mem)
	in, out := x.sizes()
	var ranks [][]byte
	for r := range x.Ranks {
		ranks = append(ranks, x.mem[x.of(r):][:x.Count*in])
	}
	f.pieces(&x.Fold, mem[x.Dst:][:x.Count*out], ranks)
	return mem
}

// same reports whether two memories have the same results. All NaNs are the same.
func (x *foldTrial) same(f *format, a, b []byte) bool {
	t := f.dtype
	if x.Stage == BlockStage && t.Size() < 4 && f.accBytes() == 4 {
		t = memory.Float32
	}
	return bytes.Equal(a[:x.Dst], b[:x.Dst]) && sameNumbers(t, a[x.Dst:], b[x.Dst:])
}

// sameNumbers reports whether two memories have the same numbers.
func sameNumbers(t memory.DType, a, b []byte) bool {
	size := t.Size()
	for i := 0; i+size <= len(a); i += size {
		if x, y := a[i:i+size], b[i:i+size]; !bytes.Equal(x, y) && !(isNaN(t, x) && isNaN(t, y)) {
			return false
		}
	}
	return len(a) == len(b)
}

func isNaN(t memory.DType, b []byte) bool {
	bits := uint64(0)
	for i, x := range b {
		bits |= uint64(x) << (8 * i)
	}
	switch t {
	case memory.Float16:
		return bits&0x7fff > 0x7c00
	case memory.BFloat16:
		return bits&0x7fff > 0x7f80
	case memory.Float32:
		return bits&0x7fffffff > 0x7f800000
	case memory.Float64:
		return bits&(1<<63-1) > 0x7ff<<52
	case memory.Float8E4M3:
		return bits&0x7f == 0x7f
	case memory.Float8E5M2:
		return bits&0x7f > 0x7c
	}
	return false
}

// foldsOnTheHost compiles the kernels for the host.
func foldsOnTheHost(t *testing.T, f *format, op collective.Reduction) *testgpu.HostKernels {
	code := foldSource
	for _, x := range onHost {
		code = regexp.MustCompile(x.cuda).ReplaceAllLiteralString(code, x.host)
	}
	return testgpu.CompileForHost(t, code, []string{"-DCHORUS_TYPE=" + f.c, "-DCHORUS_OP=" + templates[op]}, foldKernels[:]...)
}

// foldKernels are the kernels by stage.
var foldKernels = [...]string{WholeStage: "fold", BlockStage: "fold_block", BlocksStage: "fold_blocks"}

// TestFoldSourceAgreesWithGo compares the kernel, compiled as C++, with the function that
// implements it on virtual devices.
func TestFoldSourceAgreesWithGo(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	drawn := testgpu.Sample(t, testhost.Rounds(30, 15))
	for i := range foldFormats {
		for op := range collective.NumReductions {
			if f := &foldFormats[i]; drawn() || f.dtype == memory.BFloat16 && op == collective.Avg {
				t.Run(fmt.Sprint(op, "/", f.dtype), func(t *testing.T) { agreeOnFolds(t, r, f, op) })
			}
		}
	}
}

func agreeOnFolds(t *testing.T, r *rand.Rand, f *format, op collective.Reduction) {
	h := foldsOnTheHost(t, f, op)
	for range 50 {
		x := newFoldTrial(r, f, op)
		aligned := uint32(0)
		if (x.Stride|x.Own|x.Dst)%16 == 0 {
			aligned = 1
		}
		at := func(offset uint64) cudacc.HostArg { return cudacc.HostArg{Owner: 1, Before: int(offset)} }
		mem := bytes.Clone(x.mem)
		h.Run(foldKernels[x.Stage], 2, foldThreads, mem, x.Stride, at(x.Own), uint32(x.Mine), uint32(x.Ranks), uint32(x.Block), at(x.Dst), uint64(x.Count), aligned, uint32(x.All))
		require.True(t, x.same(f, x.want(f), mem), "%+v", x.Fold)
	}
}

// BenchmarkFold adds what two ranks have of 16 MiB, as Pushed does of 32 MiB.
func BenchmarkFold(b *testing.B) {
	const n = 8 << 20
	s, err := stream.New(testgpu.Ranks(b, 1)[0], nil)
	require.NoError(b, err)
	defer func() { require.NoError(b, s.Close()) }()
	m, err := memory.Make[memory.BFloat16Bits](s, 2*n)
	require.NoError(b, err)
	defer func() { require.NoError(b, m.Close()) }()
	f := Fold{DType: memory.BFloat16, Op: collective.Avg, Block: 2, Ranks: 2, All: 2, Count: n, Base: m.Ptr(), Own: m.Ptr(), Stride: 2 * n, Dst: m.Ptr()}
	b.SetBytes(3 * 2 * n)
	run := func(n int) {
		for range n {
			require.NoError(b, f.Enqueue(s))
		}
		require.NoError(b, s.Sync(b.Context()))
	}
	run(3)
	b.ResetTimer()
	run(b.N)
}

// TestFold compares Fold and Scale on devices with the functions for virtual devices, for all
// types and reductions.
func TestFold(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := rand.New(rand.NewPCG(seed, 1))
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		for i := range foldFormats {
			for op := range collective.NumReductions {
				f := &foldFormats[i]
				x := newFoldTrial(r, f, op)
				m, err := memory.MakeFrom(s, x.mem)
				require.NoError(t, err)
				on := x.Fold
				on.Base, on.Own, on.Dst = m.Ptr(), m.Ptr()+x.Own, m.Ptr()+x.Dst
				require.True(t, CanFold(on.DType, op))
				require.NoError(t, on.Enqueue(s))
				got := make([]byte, len(x.mem))
				require.NoError(t, m.CopyTo(s, got))
				require.True(t, x.same(f, x.want(f), got), "%+v", x.Fold)
				want := bytes.Clone(got)
				n := x.Count * f.dtype.Size()
				f.scale(want[x.Own:][:n], got[x.Own:][:n], seed)
				require.NoError(t, Scale(s, f.dtype, on.Own, on.Own, x.Count, Factor{Bits: seed}))
				require.NoError(t, m.CopyTo(s, got))
				require.True(t, sameNumbers(f.dtype, want[x.Own:], got[x.Own:]), "scale: %+v", x.Fold)
				require.NoError(t, m.Close())
			}
		}
	})
	require.False(t, CanFold(memory.Int16, collective.Sum))
	require.False(t, CanFold(memory.Bool, collective.Sum))
	require.False(t, CanFold(memory.Float32, collective.NumReductions))
}
