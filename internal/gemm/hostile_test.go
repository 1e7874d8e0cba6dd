package gemm

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/env"
)

// recorded is a product as Record writes it: bfloat16, with a bias, ReLU and its mask.
func recorded() *Problem {
	const t = cublasapi.R16BF
	p := &Problem{M: 80, N: 64, K: 96, Batch: 2, A: Layout{t, 80, 80 * 96}, B: Layout{t, 96, 96 * 64}, C: Layout{t, 80, 80 * 64}, D: Layout{t, 80, 80 * 64},
		Aux: Layout{MaskType, 128, 128 * 64}, Bias: Layout{Type: t, Stride: 80}, Compute: cublasapi.Compute32F,
		Epilogue: cublasapi.EpilogueReLUAuxBias, Schemes: cublasapi.ReductionMask}
	p.align = [alignments]uint8{8, 8, 8, 8}
	return p
}

// TestHostileProducts reads products whose operands would be smaller than the memory that
// the library uses.
func TestHostileProducts(t *testing.T) {
	require.NoError(t, recorded().check())
	plain := recorded()
	plain.Aux, plain.Bias, plain.Epilogue = Layout{}, Layout{}, cublasapi.EpilogueDefault
	require.NoError(t, plain.check())
	for name, spoil := range map[string]func(*Problem){
		"bytes that wrap around":     func(p *Problem) { p.Batch, p.D.Stride = 1<<14+1, 1<<50 },
		"rows that wrap around":      func(p *Problem) { p.N, p.A.LD, p.Batch, p.A.Stride = 1<<30, 1<<31-1, 1<<30, 1<<50 },
		"more than a device":         func(p *Problem) { p.K, p.A.LD = 1<<31-1, 1<<31-1 },
		"an epilogue without a mask": func(p *Problem) { p.Aux = Layout{} },
		"an epilogue without a bias": func(p *Problem) { p.Bias = Layout{} },
		"a mask that is not used":    func(p *Problem) { p.Epilogue = cublasapi.EpilogueBias },
		"a bias that is not used":    func(p *Problem) { p.Epilogue = cublasapi.EpilogueReLUAux },
		"a mask in place of numbers": func(p *Problem) { p.Epilogue = cublasapi.EpilogueGELUAuxBias },
		"a mask in parts of bytes":   func(p *Problem) { p.Aux.LD++ },
		"numbers of another type": func(p *Problem) {
			p.Epilogue = cublasapi.EpilogueGELUAuxBias
			p.Aux = Layout{cublasapi.R8FE4M3, 80, 0}
		},
		"numbers in place of a mask":    func(p *Problem) { p.Aux = Layout{cublasapi.R8FE4M3, 80, 0} },
		"an epilogue that is not known": func(p *Problem) { p.Epilogue = 1 << 20 },
	} {
		p := recorded()
		spoil(p)
		again, err := parseProblem(p.Params(), 0)
		require.NoError(t, err, name)
		require.Error(t, again.check(), name)
	}
}

// TestSplitsOfFiles has algorithms of a file that split k, which a product may forbid.
func TestSplitsOfFiles(t *testing.T) {
	for _, tc := range []struct {
		text    string
		allowed cublasapi.ReductionScheme
		ok      bool
	}{
		{"Lt_6_18_1_0_0_0_11_0_0", 0, true},
		{"Lt_6_18_0_0_0_0_11_0_0", 0, true},
		{"Lt_6_18_4_2_0_0_11_0_0", cublasapi.ReductionMask, true},
		{"Lt_6_18_4_2_0_0_11_0_0", 2, true},
		{"Lt_6_18_4_1_0_0_11_0_0", 2, false},
		{"Lt_6_18_4_2_0_0_11_0_0", 0, false},
		{"Lt_6_18_4_0_0_0_11_0_0", 0, false},
		{"Lt_6_18_-1_0_0_0_11_0_0", 0, false},
	} {
		c, err := parseSolution(tc.text)
		require.NoError(t, err)
		require.Equal(t, tc.ok, c.splitsAsAllowed(tc.allowed), "%+v", tc)
	}
}

// TestFastest has measurements of the default and of other algorithms.
func TestFastest(t *testing.T) {
	const ms = time.Millisecond
	for _, tc := range []struct {
		medians []time.Duration
		best    int
	}{
		{[]time.Duration{1000 * ms}, 0},
		{[]time.Duration{1000 * ms, 2000 * ms}, 0},
		{[]time.Duration{1000 * ms, 995 * ms}, 0}, // not clearly faster than the default
		{[]time.Duration{1000 * ms, 985 * ms}, 1},
		{[]time.Duration{1000 * ms, 985 * ms, 984 * ms}, 2},
		{[]time.Duration{1000 * ms, 984 * ms, 985 * ms}, 1},
	} {
		var times [][]time.Duration
		for _, m := range tc.medians {
			times = append(times, []time.Duration{9000 * ms, m, 1})
		}
		var r Result
		require.Equal(t, tc.best, fastest(times, &r), "%v", tc.medians)
		require.Equal(t, Result{Time: tc.medians[tc.best], Default: tc.medians[0]}, r)
	}
}

func TestLongFilesOfResults(t *testing.T) {
	lines, err := readLines(strings.NewReader(strings.Repeat("x\n", maxLines)))
	require.NoError(t, err)
	require.Len(t, lines, maxLines)
	_, err = readLines(strings.NewReader(strings.Repeat("x\n", maxLines+1)))
	require.ErrorContains(t, err, fmt.Sprintf("more than %d lines", maxLines))
	_, err = readLines(strings.NewReader("x\n" + strings.Repeat("x", maxLine+1)))
	require.ErrorContains(t, err, fmt.Sprintf("line 2: it has %d bytes or more", maxLine))
	require.Less(t, len(recorded().Op()+","+recorded().Params()), maxLine/2)
}

// FuzzResults reads lines of files of results and of recorded products.
func FuzzResults(f *testing.F) {
	p := recorded()
	f.Add(p.Op() + "," + p.Params() + ",Lt_6_18_1_0_0_0_11_0_0,0.5")
	f.Add(p.Op() + "," + p.Params() + ",Default")
	f.Add("Validator,FORMAT,1")
	f.Fuzz(func(t *testing.T, text string) {
		lines, err := readLines(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, line := range lines {
			r, err := parseResult(line, 1<<20)
			if err != nil {
				continue
			}
			p, err := parseProblem(r.Params, 1<<20)
			require.NoError(t, err)
			require.Equal(t, r.Params, p.Params())
			require.GreaterOrEqual(t, r.Time, r.Default)
			if p.check() != nil {
				continue
			}
			at := Pointers{A: 1, B: 1, C: 1, D: 1, Aux: 1, Bias: 1}
			_, sizes := (&tuning{product: Product{Problem: *p}}).spans(&at)
			for _, n := range sizes {
				require.Positive(t, n)
				require.Less(t, n, int64(1)<<52)
			}
		}
	})
}

// FuzzWorkspaceConfig reads values of CUBLAS_WORKSPACE_CONFIG.
func FuzzWorkspaceConfig(f *testing.F) {
	for _, s := range []string{"", ":4096:8", ":4096:2:16:8", ":0:0", ":1073741823:1073741823", ":16", "x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if strings.ContainsRune(s, 0) {
			return
		}
		t.Setenv(env.CUBLASWorkspaceConfig.Name, s)
		n, err := workspaceBytes(hopper)
		require.True(t, err != nil || 0 <= n && n <= 1<<40)
	})
}
