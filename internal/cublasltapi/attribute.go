package cublasltapi

// The kinds of attributes.
type (
	DescAttribute       int32 // cublasLtMatmulDescAttributes_t
	LayoutAttribute     int32 // cublasLtMatrixLayoutAttribute_t
	PreferenceAttribute int32 // cublasLtMatmulPreferenceAttributes_t
	ConfigAttribute     int32 // cublasLtMatmulAlgoConfigAttributes_t
	CapAttribute        int32 // cublasLtMatmulAlgoCapAttributes_t
)

// Attributes of a MatmulDesc. The numbers 9 and 16 do not exist.
const (
	DescComputeType            DescAttribute = 0 // int32: ComputeType
	DescScaleType              DescAttribute = 1 // int32: DType
	DescPointerMode            DescAttribute = 2 // int32: cublasapi.PointerMode
	DescTransA                 DescAttribute = 3 // int32: Op
	DescTransB                 DescAttribute = 4 // int32: Op
	DescEpilogue               DescAttribute = 7 // uint32: Epilogue
	DescBiasPointer            DescAttribute = 8
	DescBiasBatchStride        DescAttribute = 10 // int64, elements
	DescEpilogueAuxPointer     DescAttribute = 11
	DescEpilogueAuxLD          DescAttribute = 12 // int64: elements, or bits of a mask
	DescEpilogueAuxBatchStride DescAttribute = 13 // int64, as the LD
	DescSMCountTarget          DescAttribute = 15 // int32; 0 means all
	DescAScalePointer          DescAttribute = 17
	DescBScalePointer          DescAttribute = 18
	DescCScalePointer          DescAttribute = 19
	DescDScalePointer          DescAttribute = 20
	DescAMaxDPointer           DescAttribute = 21
	DescEpilogueAuxDataType    DescAttribute = 22 // int32: DType
	DescFastAccum              DescAttribute = 25 // int8
	DescBiasDataType           DescAttribute = 26 // int32: DType
	DescAScaleMode             DescAttribute = 31 // int32: ScaleMode; from 12.8
	DescBScaleMode             DescAttribute = 32 // int32: ScaleMode; from 12.8
)

// Attributes has the size of each attribute of a MatmulDesc in bytes.
var Attributes = map[DescAttribute]uintptr{
	DescComputeType: 4, DescScaleType: 4, DescPointerMode: 4, DescTransA: 4, DescTransB: 4, DescEpilogue: 4,
	DescBiasPointer: 8, DescBiasBatchStride: 8, DescEpilogueAuxPointer: 8, DescEpilogueAuxLD: 8, DescEpilogueAuxBatchStride: 8,
	DescSMCountTarget: 4, DescAScalePointer: 8, DescBScalePointer: 8, DescCScalePointer: 8, DescDScalePointer: 8, DescAMaxDPointer: 8,
	DescEpilogueAuxDataType: 4, DescFastAccum: 1, DescBiasDataType: 4, DescAScaleMode: 4, DescBScaleMode: 4,
}

// Attributes of a MatrixLayout.
const (
	LayoutBatchCount         LayoutAttribute = 5 // int32
	LayoutStridedBatchOffset LayoutAttribute = 6 // int64, elements
)

// Attributes of a Preference.
const (
	PreferenceMaxWorkspaceBytes   PreferenceAttribute = 1 // uint64; default 0
	PreferenceReductionSchemeMask PreferenceAttribute = 3 // uint32: ReductionScheme; default: all
	PreferenceMinAlignmentABytes  PreferenceAttribute = 5 // uint32; default 256
	PreferenceMinAlignmentBBytes  PreferenceAttribute = 6 // uint32; default 256
	PreferenceMinAlignmentCBytes  PreferenceAttribute = 7 // uint32; default 256
	PreferenceMinAlignmentDBytes  PreferenceAttribute = 8 // uint32; default 256
)

// Attributes of an Algo that may be changed, except for its number.
const (
	ConfigID              ConfigAttribute = 0 // int32, read only
	ConfigTileID          ConfigAttribute = 1 // uint32
	ConfigSplitKNum       ConfigAttribute = 2 // int32
	ConfigReductionScheme ConfigAttribute = 3 // uint32: ReductionScheme
	ConfigCTASwizzling    ConfigAttribute = 4 // uint32
	ConfigCustomOption    ConfigAttribute = 5 // uint32
	ConfigStagesID        ConfigAttribute = 6 // uint32
	ConfigInnerShapeID    ConfigAttribute = 7 // uint16
	ConfigClusterShapeID  ConfigAttribute = 8 // uint16
)

// Attributes of what an Algo supports.
const (
	CapSplitKSupport       CapAttribute = 0  // int32
	CapReductionSchemeMask CapAttribute = 1  // uint32
	CapTileIDs             CapAttribute = 6  // uint32[]
	CapCustomOptionMax     CapAttribute = 7  // int32
	CapStagesIDs           CapAttribute = 13 // uint32[]
	CapMinAlignmentABytes  CapAttribute = 16 // uint32
	CapMinAlignmentBBytes  CapAttribute = 17 // uint32
	CapMinAlignmentCBytes  CapAttribute = 18 // uint32
	CapMinAlignmentDBytes  CapAttribute = 19 // uint32
)

// Epilogue is cublasLtEpilogue_t.
type Epilogue uint32

// The epilogues.
const (
	EpilogueDefault     Epilogue = 1
	EpilogueReLU        Epilogue = 2
	EpilogueBias        Epilogue = 4
	EpilogueReLUBias    Epilogue = 6
	EpilogueGELU        Epilogue = 32
	EpilogueGELUBias    Epilogue = 36
	EpilogueReLUAux     Epilogue = 130
	EpilogueReLUAuxBias Epilogue = 134
	EpilogueDReLU       Epilogue = 136
	EpilogueDReLUBGrad  Epilogue = 152
	EpilogueGELUAux     Epilogue = 160
	EpilogueGELUAuxBias Epilogue = 164
	EpilogueDGELU       Epilogue = 192
	EpilogueDGELUBGrad  Epilogue = 208
	EpilogueBGradA      Epilogue = 256
	EpilogueBGradB      Epilogue = 512
)

// ReductionScheme is cublasLtReductionScheme_t: how the parts of a sum over k are added.
type ReductionScheme uint32

// The schemes, which are bits of a mask.
const (
	ReductionNone        ReductionScheme = 0
	ReductionInPlace     ReductionScheme = 1
	ReductionComputeType ReductionScheme = 2
	ReductionOutputType  ReductionScheme = 4
	ReductionMask        ReductionScheme = 7
)

// ScaleMode is cublasLtMatmulMatrixScale_t: the granularity of scales.
type ScaleMode int32

// The modes that Chorus uses.
const (
	ScaleScalar32F   ScaleMode = 0
	ScaleOuterVec32F ScaleMode = 3 // one scale for each row of op(A), or column of op(B); from 12.9
)
