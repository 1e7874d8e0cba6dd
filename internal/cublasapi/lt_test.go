package cublasapi

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

// signatures has the arguments of each C function as cublasLt.h declares them.
var ltSignatures = dltest.Signatures{
	"cublasLtGetVersion":                   "#",
	"cublasLtCreate":                       "o8",
	"cublasLtDestroy":                      "w",
	"cublasLtMatmulDescCreate":             "o8 i i",
	"cublasLtMatmulDescDestroy":            "w",
	"cublasLtMatmulDescSetAttribute":       "w i p4 w",
	"cublasLtMatrixLayoutCreate":           "o8 i w w w",
	"cublasLtMatrixLayoutDestroy":          "w",
	"cublasLtMatrixLayoutSetAttribute":     "w i p8 w",
	"cublasLtMatmulPreferenceCreate":       "o8",
	"cublasLtMatmulPreferenceDestroy":      "w",
	"cublasLtMatmulPreferenceSetAttribute": "w i p8 w",
	"cublasLtMatmulAlgoGetHeuristic":       "w w w w w w w i O192 o4=1",
	"cublasLtMatmulAlgoCheck":              "w w w w w w p64 o96",
	"cublasLtMatmulAlgoInit":               "w i i i i i i i o64",
	"cublasLtMatmulAlgoConfigSetAttribute": "p64 i p4 w",
	"cublasLtMatmulAlgoConfigGetAttribute": "p64 i o4 w o8=4",
	"cublasLtMatmulAlgoCapGetAttribute":    "p64 i o8 w o8=8",
	"cublasLtMatmul":                       "w w p4 w w w w p4 w w w w p64 w w w",
}

func TestLtRecordedCalls(t *testing.T) {
	rec := dltest.NewRecorder(t, ltSignatures, 0x1234_0000_0001) // the upper half is noise
	lib, err := newLtLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	c := dltest.NewCalls(rec, Compute32F, DescBiasDataType, LayoutStridedBatchOffset, PreferenceMaxWorkspaceBytes, ConfigStagesID, CapTileIDs)
	dltest.Methods[LtAPI](c, lib)
	c.Call("MatmulAlgoInit, constants", lib.MatmulAlgoInit, LtHandle(1), &Types{Compute32F, R32F, R16F, R16BF, R64F, R8FE4M3}, int32(2), new(Algo))
	dltest.Golden(t, "testdata/record_lt.golden", c.Text())
	one, algo := Scalar{Host: unsafe.Pointer(&alpha)}, new(Algo)
	require.Zero(t, testing.AllocsPerRun(200, func() {
		lib.Matmul(1, 2, one, LtMatrix{3, 4}, LtMatrix{5, 6}, one, LtMatrix{7, 8}, LtMatrix{9, 10}, algo, 11, 12, 13)
	}))
}

func TestLtOpenRefusesOtherLibrary(t *testing.T) {
	lib := dltest.Load(t, "int cublasLtCreate(void **h) { return 0; }")
	_, err := newLtLib(lib.Symbol, "/lib/libcublasLt.so.12")
	var e *dl.VersionError
	require.ErrorAs(t, err, &e)
	require.Len(t, e.Missing, len(ltSymbols)-1)
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

func TestLtTables(t *testing.T) {
	ltSignatures.Require(t, ltSymbols[:])
	require.Equal(t, uintptr(64), unsafe.Sizeof(Algo{}))
	var x HeuristicResult
	require.Equal(t, []uintptr{96, 64, 72, 76}, []uintptr{unsafe.Sizeof(x), unsafe.Offsetof(x.WorkspaceSize), unsafe.Offsetof(x.State), unsafe.Offsetof(x.WavesCount)})
}

// names has the C names of the constants, without a common prefix.
var ltNames = map[string]map[string]int64{
	"CUBLASLT_MATMUL_DESC_": {
		"COMPUTE_TYPE": int64(DescComputeType), "SCALE_TYPE": int64(DescScaleType), "POINTER_MODE": int64(DescPointerMode),
		"TRANSA": int64(DescTransA), "TRANSB": int64(DescTransB), "EPILOGUE": int64(DescEpilogue),
		"BIAS_POINTER": int64(DescBiasPointer), "BIAS_BATCH_STRIDE": int64(DescBiasBatchStride),
		"EPILOGUE_AUX_POINTER": int64(DescEpilogueAuxPointer), "EPILOGUE_AUX_LD": int64(DescEpilogueAuxLD),
		"EPILOGUE_AUX_BATCH_STRIDE": int64(DescEpilogueAuxBatchStride), "SM_COUNT_TARGET": int64(DescSMCountTarget),
		"A_SCALE_POINTER": int64(DescAScalePointer), "B_SCALE_POINTER": int64(DescBScalePointer),
		"C_SCALE_POINTER": int64(DescCScalePointer), "D_SCALE_POINTER": int64(DescDScalePointer),
		"AMAX_D_POINTER": int64(DescAMaxDPointer), "EPILOGUE_AUX_DATA_TYPE": int64(DescEpilogueAuxDataType),
		"FAST_ACCUM": int64(DescFastAccum), "BIAS_DATA_TYPE": int64(DescBiasDataType),
		"A_SCALE_MODE": int64(DescAScaleMode), "B_SCALE_MODE": int64(DescBScaleMode),
	},
	"CUBLASLT_MATRIX_LAYOUT_": {
		"BATCH_COUNT": int64(LayoutBatchCount), "STRIDED_BATCH_OFFSET": int64(LayoutStridedBatchOffset),
	},
	"CUBLASLT_MATMUL_PREF_": {
		"MAX_WORKSPACE_BYTES": int64(PreferenceMaxWorkspaceBytes), "REDUCTION_SCHEME_MASK": int64(PreferenceReductionSchemeMask),
		"MIN_ALIGNMENT_A_BYTES": int64(PreferenceMinAlignmentABytes), "MIN_ALIGNMENT_B_BYTES": int64(PreferenceMinAlignmentBBytes),
		"MIN_ALIGNMENT_C_BYTES": int64(PreferenceMinAlignmentCBytes), "MIN_ALIGNMENT_D_BYTES": int64(PreferenceMinAlignmentDBytes),
	},
	"CUBLASLT_ALGO_CONFIG_": {
		"ID": int64(ConfigID), "TILE_ID": int64(ConfigTileID), "SPLITK_NUM": int64(ConfigSplitKNum),
		"REDUCTION_SCHEME": int64(ConfigReductionScheme), "CTA_SWIZZLING": int64(ConfigCTASwizzling),
		"CUSTOM_OPTION": int64(ConfigCustomOption), "STAGES_ID": int64(ConfigStagesID),
		"INNER_SHAPE_ID": int64(ConfigInnerShapeID), "CLUSTER_SHAPE_ID": int64(ConfigClusterShapeID),
	},
	"CUBLASLT_ALGO_CAP_": {
		"SPLITK_SUPPORT": int64(CapSplitKSupport), "REDUCTION_SCHEME_MASK": int64(CapReductionSchemeMask),
		"TILE_IDS": int64(CapTileIDs), "CUSTOM_OPTION_MAX": int64(CapCustomOptionMax), "STAGES_IDS": int64(CapStagesIDs),
		"MIN_ALIGNMENT_A_BYTES": int64(CapMinAlignmentABytes), "MIN_ALIGNMENT_B_BYTES": int64(CapMinAlignmentBBytes),
		"MIN_ALIGNMENT_C_BYTES": int64(CapMinAlignmentCBytes), "MIN_ALIGNMENT_D_BYTES": int64(CapMinAlignmentDBytes),
	},
	"CUBLASLT_EPILOGUE_": {
		"DEFAULT": int64(EpilogueDefault), "RELU": int64(EpilogueReLU), "BIAS": int64(EpilogueBias), "RELU_BIAS": int64(EpilogueReLUBias),
		"GELU": int64(EpilogueGELU), "GELU_BIAS": int64(EpilogueGELUBias), "RELU_AUX": int64(EpilogueReLUAux),
		"RELU_AUX_BIAS": int64(EpilogueReLUAuxBias), "DRELU": int64(EpilogueDReLU), "DRELU_BGRAD": int64(EpilogueDReLUBGrad),
		"GELU_AUX": int64(EpilogueGELUAux), "GELU_AUX_BIAS": int64(EpilogueGELUAuxBias), "DGELU": int64(EpilogueDGELU),
		"DGELU_BGRAD": int64(EpilogueDGELUBGrad), "BGRADA": int64(EpilogueBGradA), "BGRADB": int64(EpilogueBGradB),
	},
	"CUBLASLT_REDUCTION_SCHEME_": {
		"NONE": int64(ReductionNone), "INPLACE": int64(ReductionInPlace), "COMPUTE_TYPE": int64(ReductionComputeType),
		"OUTPUT_TYPE": int64(ReductionOutputType), "MASK": int64(ReductionMask),
	},
	"CUBLASLT_MATMUL_MATRIX_SCALE_": {"SCALAR_32F": int64(ScaleScalar32F), "OUTER_VEC_32F": int64(ScaleOuterVec32F)},
}

func TestLtHeader(t *testing.T) {
	h := dltest.FindHeader(t, "cublasLt.h", "cuda_runtime.h")
	h.RequirePrototypes(ltSignatures)
	values := map[string]int64{
		"sizeof(cublasLtMatmulAlgo_t)": 64, "sizeof(cublasLtMatmulHeuristicResult_t)": 96,
		"offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize)": 64, "offsetof(cublasLtMatmulHeuristicResult_t, state)": 72,
		"offsetof(cublasLtMatmulHeuristicResult_t, wavesCount)": 76,
	}
	for prefix, group := range ltNames {
		for name, v := range group {
			if h.Mentions(prefix + name) { // a header may be older than the newest attributes
				values[prefix+name] = v
			}
		}
	}
	require.Greater(t, len(values), 60)
	h.RequireValues(values)
}

// Without a GPU the library still makes descriptors and checks the sizes of attributes.
func TestLtInstalledLibrary(t *testing.T) {
	lib, err := OpenLt()
	if err != nil {
		t.Skip(err)
	}
	t.Log(lib.Path(), lib.GetVersion())
	require.GreaterOrEqual(t, lib.GetVersion(), uintptr(120000))
	d, r := lib.MatmulDescCreate(Compute32F, R32F)
	require.Equal(t, Success, r)
	defer func() { require.Equal(t, Success, lib.MatmulDescDestroy(d)) }()
	v := [16]byte{1} // which is valid for all of them
	for a, size := range Attributes {
		if a >= DescAScaleMode && lib.GetVersion() < 120800 || a == DescComputeType || a == DescScaleType {
			continue
		}
		require.Equal(t, Success, lib.MatmulDescSetAttribute(d, a, unsafe.Pointer(&v), size), "attribute %d", a)
		require.Equal(t, InvalidValue, lib.MatmulDescSetAttribute(d, a, unsafe.Pointer(&v), size+1), "attribute %d", a)
	}
}
