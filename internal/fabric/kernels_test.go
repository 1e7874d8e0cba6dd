package fabric

import (
	_ "embed"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/testgpu"
)

//go:embed testdata/host.h
var hostPrelude string

//go:embed testdata/host.cc
var hostMain string

// onHost says what the assembly of the source is in C++, and makes threads let others go first when they
// have polled for a while.
var onHost = []struct{ cuda, host string }{
	{`asm volatile\("st\.volatile\.global\.v4[^\n]*`, `atom(p)[0] = a | (u64)b << 32; atom(p)[1] = c | (u64)d << 32;`},
	{`asm volatile\("ld\.global\.v2[^\n]*`, `ticks = *atom(&me.control->ticks); gaveUp = *atom(&me.control->gaveUp);`},
	{`asm volatile\("st\.volatile\.global\.v2[^\n]*`, `put_line(p, v.a, v.b);`},
	{`asm volatile\("\{\.reg \.pred on; setp\.ne\.u32 on, %3[^\n]*`, `if (on) get_line(p, &v.a);`},
	{`asm volatile\("\{\.reg \.pred on; setp\.ne\.u32 on, %5[^\n]*`, `if (!on) return; u64 x = atom(p)[0], y = atom(p)[1]; a = (u32)x; b = (u32)(x >> 32); c = (u32)y; d = (u32)(y >> 32);`},
	{`asm volatile\("st\.release[^\n]*`, `*atom(p) = v;`},
	{`asm volatile\("ld\.acquire[^\n]*`, `v = *atom(p);`},
	{`asm volatile\("ld\.relaxed[^\n]*`, `v = *(std::atomic<u32>*)p;`},
	{`asm\("cvt\.f32\.f16[^\n]*`, `x = half_value(h.bits);`},
	{`asm\("cvt\.rn\.f16[^\n]*`, `h.bits = half_bits(x);`},
	{`return me\.over;\n`, "if (!me.over) wait_a_moment();\n\treturn me.over;\n"},
	{`typedef CHORUS_OP<Acc> Op;`, `typedef CHORUS_OP<Acc> Op; typedef Op Reduction;`},
}

//go:embed testdata/norm.h
var normPrelude string

//go:embed testdata/norm.cc
var normMain string

// forHost returns a source as C++.
func forHost(t *testing.T, code string) string {
	for _, x := range onHost {
		re := regexp.MustCompile(x.cuda)
		require.Len(t, re.FindAllString(code, -1), 1, "%s in the source", x.cuda)
		code = re.ReplaceAllLiteralString(code, x.host)
	}
	return code
}

// hostShim returns the shim for blocks that run concurrently.
func hostShim() string {
	return strings.Replace(cudacc.HostShim(), "static Dim blockIdx", "static thread_local Dim gridDim, blockDim, blockIdx", 1)
}

// normOnHost replaces the parts of the source of norms that use clusters. The first half of a
// cluster's barrier becomes nothing and the second half a complete barrier, so the host does not
// check that a block zeroes its sums before its first half. Only GPUs check that.
var normOnHost = []struct{ cuda, host string }{
	{"__shared__ u64 sums[2 * SUMS];", "u64* sums = block->sums;"},
	{`asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");`, ""},
	{`asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");`, "block->cluster->sync();"},
	{`asm volatile("{.reg .u64 a; mapa.u64 a, %0, %1; st.relaxed.cluster.u64 [a], %2;}" :: "l"(at), "r"(r), "l"(sum) : "memory");`, "putOther(at, r, sum);"},
	{"return (u32)(sum >> 32) == turn;", "if ((u32)(sum >> 32) == turn) return true; wait_a_moment(); return false;"},
}

// NormSourceOnHost returns the source of norms as a program of the host.
func NormSourceOnHost(t *testing.T) string {
	code := forHost(t, normSource)
	for _, x := range normOnHost {
		require.Equal(t, 1, strings.Count(code, x.cuda), "%s in the source", x.cuda)
		code = strings.Replace(code, x.cuda, x.host, 1)
	}
	return hostShim() + normPrelude + code + normMain
}

//go:embed testdata/quantized.cc
var quantizedMain string

// QuantizedSourceOnHost returns the source of quantized all-reduces as a program of the host, without the
// instructions that convert 8-bit floats, which only GPUs check.
func QuantizedSourceOnHost() string { return blocksOnHost(quantizedSource) + quantizedMain }

//go:embed testdata/experts.cc
var expertsMain string

// ExpertsSourceOnHost is QuantizedSourceOnHost for dispatch and combine. Blocks count the rows of few experts together, so
// that they do so several times.
func ExpertsSourceOnHost(t *testing.T) string {
	code := expertsSource
	for _, x := range []struct {
		cuda, host string
		times      int
	}{{"__shared__ u32 rows[COUNTED];", "u32* const rows = block->rows;", 4}, {"#define COUNTED 1024", "#define COUNTED 3", 1}} {
		require.Equal(t, x.times, strings.Count(code, x.cuda), "%s in the source", x.cuda)
		code = strings.ReplaceAll(code, x.cuda, x.host)
	}
	return blocksOnHost(code) + expertsMain
}

func blocksOnHost(code string) string {
	for _, x := range onHost {
		code = regexp.MustCompile(x.cuda).ReplaceAllLiteralString(code, x.host)
	}
	return hostShim() + normPrelude + "#undef __CUDA_ARCH__\nusing std::max;\n" + code
}

// The kernels themselves, compiled for the host with a thread for each of theirs, give
// every element: with ranks that are out of step, at any alignment, in place or not, and
// where epochs wrap around. A block has 8 threads, and the first one is its first warp.
func TestSourceOnTheHost(t *testing.T) {
	code, shim := strings.Replace(forHost(t, source), "#define SENTRIES 32", "#define SENTRIES 1", 1), hostShim()
	drawn := testgpu.Draw(t, 2, 4)
	for i, m := range []struct {
		element, op string
		ranks       int // or any
	}{{}, {ranks: 8}, {"Half", "Avg", 0}, {"i8", "Prod", 0}, {"double", "Min", 8}, {"float", "Max", 2}} {
		if !drawn(i) { // one of the first two modules, whose kernels have no reduction, and one of the others
			continue
		}
		t.Run(fmt.Sprintf("module %+v", m), func(t *testing.T) {
			flags, operations := []string{"-pthread", "-w", fmt.Sprint("-DSETS=", sets)}, 160
			if m.element != "" {
				flags = append(flags, "-DCHORUS_TYPE="+m.element, "-DCHORUS_OP="+m.op)
			}
			if m.ranks != 0 {
				flags, operations = append(flags, fmt.Sprint("-DCHORUS_RANKS=", m.ranks)), 40
			}
			program := testgpu.BuildForHost(t, shim+hostPrelude+code+hostMain, flags...)
			out, err := exec.CommandContext(testgpu.Context(t), program).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Equal(t, fmt.Sprintln(operations, "operations"), string(out))
		})
	}
}

// Every file is part of a source.
func TestFiles(t *testing.T) {
	all, err := folder.ReadDir("cuda")
	require.NoError(t, err)
	var names []string
	for _, f := range all {
		names = append(names, f.Name())
	}
	both := slices.Concat(files, foldFiles, normFiles, quantizedFiles, expertsFiles)
	slices.Sort(both)
	require.Equal(t, slices.Compact(both), names)
}
