package fabric

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"regexp"
	"strings"
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

// foldHostMain runs trials: a header, then the memory; it writes the memory.
const foldHostMain = `
int main() {
	u64 h[11]; // stride, own, mine, ranks, block, dst, count, aligned, bytes, stage, all
	while (fread(h, sizeof h, 1, stdin) == 1) {
		std::vector<u64> mem((h[8] + 7) / 8 + 1);
		char* const m = (char*)(((u64)mem.data() + 15) & ~(u64)15);
		if (fread(m, 1, h[8], stdin) != h[8]) return 1;
		gridDim.x = 2;
		for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
			for (threadIdx.x = 0; threadIdx.x < FOLDERS; threadIdx.x++)
				(h[9] == 0 ? fold : h[9] == 1 ? fold_block : fold_blocks)(m, h[0], m + h[1], h[2], h[3], h[4], m + h[5], h[6], h[7], h[10]);
		fwrite(m, 1, h[8], stdout);
	}
}
`

// foldProgram compiles the kernels for the host.
func foldProgram(t *testing.T, f *format, op collective.Reduction) string {
	code := foldSource
	for _, x := range onHost {
		code = regexp.MustCompile(x.cuda).ReplaceAllLiteralString(code, x.host)
	}
	shim := strings.Replace(cudacc.HostShim(), "static Dim blockIdx", "static Dim gridDim, blockIdx", 1)
	return testgpu.BuildForHost(t, shim+code+foldHostMain, "-w", "-ffp-contract=off", "-DCHORUS_TYPE="+f.c, "-DCHORUS_OP="+templates[op])
}

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
	program := foldProgram(t, f, op)
	var in bytes.Buffer
	var trials []foldTrial
	for range 50 {
		x := newFoldTrial(r, f, op)
		aligned := uint64(0)
		if (x.Stride|x.Own|x.Dst)%16 == 0 {
			aligned = 1
		}
		require.NoError(t, binary.Write(&in, binary.LittleEndian, []uint64{x.Stride, x.Own, uint64(x.Mine), uint64(x.Ranks), uint64(x.Block), x.Dst, uint64(x.Count), aligned, uint64(len(x.mem)), uint64(x.Stage), uint64(x.All)}))
		in.Write(x.mem)
		trials = append(trials, x)
	}
	cmd := exec.CommandContext(testgpu.Context(t), program)
	cmd.Stdin = &in
	out, err := cmd.Output()
	require.NoError(t, err)
	for _, x := range trials {
		n := len(x.mem)
		require.True(t, x.same(f, x.want(f), out[:n]), "%+v", x.Fold)
		out = out[n:]
	}
	require.Empty(t, out)
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
