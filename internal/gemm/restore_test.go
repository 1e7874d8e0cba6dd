package gemm_test

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/gemm"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/tensor"
)

// picky is a library whose algorithms need an alignment and a workspace.
type picky struct {
	cublasapi.LtAPI
	operand   cublasapi.CapAttribute // that needs the alignment
	alignment uint32
	workspace int64
}

func (p *picky) MatmulAlgoCapGetAttribute(a *cublasapi.Algo, at cublasapi.CapAttribute, to unsafe.Pointer, bytes uintptr) (uintptr, cublasapi.Result) {
	*(*uint32)(to) = 1
	if at == p.operand {
		*(*uint32)(to) = p.alignment
	}
	return 4, cublasapi.Success
}

func (p *picky) MatmulAlgoCheck(_ cublasapi.LtHandle, _ *cublasapi.Operation, _ *cublasapi.Algo, x *cublasapi.HeuristicResult) cublasapi.Result {
	x.WorkspaceSize = uintptr(p.workspace)
	return cublasapi.Success
}

// tuneOne tunes c = a·b of 64 rows and columns with a at an offset, and returns the file of results.
func (b *bench) tuneOne(offset int, tune *tensor.TuneConfig) string {
	m := b.shifted(offset)
	r, err := tensor.TuneMatMul(testgpu.Context(b.t), b.s, m[0], m[1], m[2], nil, tune)
	require.NoError(b.t, err)
	var file bytes.Buffer
	require.NoError(b.t, tensor.WriteTuneResults(b.dev, &file))
	return strings.Replace(file.String(), ","+r.Solution+",", ",Lt_6_18_1_0_0_0_11_0_0,", 1)
}

// shifted returns the operands of square(64), with a that begins at an element.
func (b *bench) shifted(offset int) [3]tensor.Tensor {
	m := b.square(64)
	a, err := tensor.Of(b.x[1].Slice(offset, offset+64*64), 64, 64)
	require.NoError(b.t, err)
	m[1] = a
	return m
}

var short = &tensor.TuneConfig{MaxDuration: time.Microsecond, MaxIterations: 1, Candidates: 1, RotatingBytes: -1}

// An algorithm of a file is used if the operands have its alignments and the stream has its
// workspace. Otherwise cuBLASLt is asked for another one. A plan that exists uses the file, too.
func TestRestoredAlgorithms(t *testing.T) {
	const workspace = 32 << 20 // of a stream
	for _, tc := range []struct {
		offset    int // of a, in elements of 2 bytes; the matrix of the library is B
		alignment uint32
		workspace int64
		used      bool
	}{
		{0, 256, 0, true}, {0, 512, 0, false},
		{8, 16, 0, true}, {8, 32, 0, false},
		{0, 1, workspace, true}, {0, 1, workspace + 1, false},
	} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
		from, to := newBench(t, devs[0]), newBench(t, devs[1])
		file := from.tuneOne(tc.offset, short)
		m := to.shifted(tc.offset)
		run := func() { require.NoError(t, tensor.MatMul(to.s, m[0], m[1], m[2], nil)) }
		run()
		require.NoError(t, gemm.Replace(to.s, func(api cublasapi.LtAPI) cublasapi.LtAPI {
			return &picky{api, cublasapi.CapMinAlignmentABytes + 1, tc.alignment, tc.workspace}
		}))
		require.NoError(t, tensor.ReadTuneResults(devs[1], strings.NewReader(file)))
		calls := to.counted(run)
		require.Equal(t, 1, calls["cublasLtMatmulAlgoInit"], "%+v: the plan is made again", tc)
		require.Equal(t, tc.used, calls["cublasLtMatmulAlgoGetHeuristic"] == 0, "%+v: %v", tc, calls)
		from.close()
		to.close()
	}
}

// watched is a library that looks at the products of a stream while cuBLASLt suggests algorithms.
type watched struct {
	cublasapi.LtAPI
	look func()
}

func (w *watched) MatmulAlgoGetHeuristic(h cublasapi.LtHandle, o *cublasapi.Operation, p cublasapi.Preference, results []cublasapi.HeuristicResult) (int32, cublasapi.Result) {
	w.look()
	return w.LtAPI.MatmulAlgoGetHeuristic(h, o, p, results)
}

// Products of other goroutines on the stream wait until a tuning ends.
func TestTuneExcludesProducts(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	var seen []bool
	require.NoError(t, gemm.Replace(b.s, func(api cublasapi.LtAPI) cublasapi.LtAPI {
		return &watched{api, func() { seen = append(seen, gemm.Locked(b.s)) }}
	}))
	b.tuneOne(0, short)
	require.Equal(t, []bool{true, true}, seen, "for the plan and for the tuning")
	require.False(t, gemm.Locked(b.s))
	b.close()
}
