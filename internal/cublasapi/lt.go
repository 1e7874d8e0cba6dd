package cublasapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// The opaque objects. Descriptors, layouts and preferences are in host memory.
type (
	LtHandle     uintptr // cublasLtHandle_t
	MatmulDesc   uintptr // cublasLtMatmulDesc_t
	MatrixLayout uintptr // cublasLtMatrixLayout_t
	Preference   uintptr // cublasLtMatmulPreference_t
)

// Algo is cublasLtMatmulAlgo_t. It may be copied within a process.
type Algo [8]uint64

// A HeuristicResult is cublasLtMatmulHeuristicResult_t.
type HeuristicResult struct {
	Algo          Algo
	WorkspaceSize uintptr
	State         Result
	WavesCount    float32
	_             [4]int32
}

// An LtMatrix is an operand of Matmul.
type LtMatrix struct {
	Ptr    cudadrv.DevicePtr
	Layout MatrixLayout
}

// LtAPI is the part of cuBLASLt that Chorus uses. Create, the functions that have an LtHandle, and
// MatmulAlgoInit need the context of the handle's device; the other functions need none.
type LtAPI interface {
	// GetVersion returns a number such as 130002 for 13.0.2.
	GetVersion() uintptr
	Create() (LtHandle, Result)
	Destroy(h LtHandle) Result

	MatmulDescCreate(compute ComputeType, scale DType) (MatmulDesc, Result)
	MatmulDescDestroy(d MatmulDesc) Result
	// MatmulDescSetAttribute copies the value at p.
	MatmulDescSetAttribute(d MatmulDesc, a DescAttribute, p unsafe.Pointer, bytes uintptr) Result
	MatrixLayoutCreate(t DType, rows, cols uint64, ld int64) (MatrixLayout, Result)
	MatrixLayoutDestroy(l MatrixLayout) Result
	MatrixLayoutSetAttribute(l MatrixLayout, a LayoutAttribute, p unsafe.Pointer, bytes uintptr) Result
	MatmulPreferenceCreate() (Preference, Result)
	MatmulPreferenceDestroy(p Preference) Result
	MatmulPreferenceSetAttribute(p Preference, a PreferenceAttribute, v unsafe.Pointer, bytes uintptr) Result

	// MatmulAlgoGetHeuristic fills results with at most len(results) algorithms, the
	// fastest first by the library's estimate, and returns their number.
	MatmulAlgoGetHeuristic(h LtHandle, o *Operation, p Preference, results []HeuristicResult) (int32, Result)
	// MatmulAlgoCheck sets the WorkspaceSize of x for the algorithm.
	MatmulAlgoCheck(h LtHandle, o *Operation, algo *Algo, x *HeuristicResult) Result
	MatmulAlgoInit(h LtHandle, t *Types, id int32, algo *Algo) Result
	MatmulAlgoConfigSetAttribute(algo *Algo, a ConfigAttribute, p unsafe.Pointer, bytes uintptr) Result
	MatmulAlgoConfigGetAttribute(algo *Algo, a ConfigAttribute, p unsafe.Pointer, bytes uintptr) (written uintptr, r Result)
	MatmulAlgoCapGetAttribute(algo *Algo, a CapAttribute, p unsafe.Pointer, bytes uintptr) (written uintptr, r Result)

	// Matmul enqueues D = alpha·op(A)·op(B) + beta·C with the descriptor's epilogue on a
	// stream. The workspace is aligned to 256 bytes. Values of alpha and beta on the host are
	// read before Matmul returns.
	Matmul(h LtHandle, d MatmulDesc, alpha Scalar, a, b LtMatrix, beta Scalar, c, out LtMatrix, algo *Algo,
		workspace cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) Result
}

// An Operation has the descriptor and the layouts of a product.
type Operation struct {
	Desc       MatmulDesc
	A, B, C, D MatrixLayout
}

// Types has the types of a product.
type Types struct {
	Compute           ComputeType
	Scale, A, B, C, D DType
}

// fn numbers the functions of libcublasLt that LtLib calls.
type ltFn int

const (
	fnLtGetVersion ltFn = iota
	fnLtCreate
	fnLtDestroy
	fnLtMatmulDescCreate
	fnLtMatmulDescDestroy
	fnLtMatmulDescSetAttribute
	fnLtMatrixLayoutCreate
	fnLtMatrixLayoutDestroy
	fnLtMatrixLayoutSetAttribute
	fnLtMatmulPreferenceCreate
	fnLtMatmulPreferenceDestroy
	fnLtMatmulPreferenceSetAttribute
	fnLtMatmulAlgoGetHeuristic
	fnLtMatmulAlgoCheck
	fnLtMatmulAlgoInit
	fnLtMatmulAlgoConfigSetAttribute
	fnLtMatmulAlgoConfigGetAttribute
	fnLtMatmulAlgoCapGetAttribute
	fnLtMatmul
	numLtFns
)

// symbols has the exported name of each function; all are required.
var ltSymbols = [numLtFns]dl.Func{
	fnLtGetVersion:                   {Name: "cublasLtGetVersion"},
	fnLtCreate:                       {Name: "cublasLtCreate"},
	fnLtDestroy:                      {Name: "cublasLtDestroy"},
	fnLtMatmulDescCreate:             {Name: "cublasLtMatmulDescCreate"},
	fnLtMatmulDescDestroy:            {Name: "cublasLtMatmulDescDestroy"},
	fnLtMatmulDescSetAttribute:       {Name: "cublasLtMatmulDescSetAttribute"},
	fnLtMatrixLayoutCreate:           {Name: "cublasLtMatrixLayoutCreate"},
	fnLtMatrixLayoutDestroy:          {Name: "cublasLtMatrixLayoutDestroy"},
	fnLtMatrixLayoutSetAttribute:     {Name: "cublasLtMatrixLayoutSetAttribute"},
	fnLtMatmulPreferenceCreate:       {Name: "cublasLtMatmulPreferenceCreate"},
	fnLtMatmulPreferenceDestroy:      {Name: "cublasLtMatmulPreferenceDestroy"},
	fnLtMatmulPreferenceSetAttribute: {Name: "cublasLtMatmulPreferenceSetAttribute"},
	fnLtMatmulAlgoGetHeuristic:       {Name: "cublasLtMatmulAlgoGetHeuristic"},
	fnLtMatmulAlgoCheck:              {Name: "cublasLtMatmulAlgoCheck"},
	fnLtMatmulAlgoInit:               {Name: "cublasLtMatmulAlgoInit"},
	fnLtMatmulAlgoConfigSetAttribute: {Name: "cublasLtMatmulAlgoConfigSetAttribute"},
	fnLtMatmulAlgoConfigGetAttribute: {Name: "cublasLtMatmulAlgoConfigGetAttribute"},
	fnLtMatmulAlgoCapGetAttribute:    {Name: "cublasLtMatmulAlgoCapGetAttribute"},
	fnLtMatmul:                       {Name: "cublasLtMatmul"},
}

var ltSpec = &dl.Spec{
	Name:    "cuBLASLt",
	Needed:  "12.0",
	Env:     env.LibCUBLASLt,
	Sonames: []string{"libcublasLt.so.13", "libcublasLt.so.12"},
	Folders: dl.Toolkit,
	Wheels:  []string{"cu13/lib", "cublas/lib"},
}

// LtLib is the loaded cuBLASLt. It implements LtAPI.
type LtLib struct{ dl.Table[ltFn, Result] }

var _ LtAPI = (*LtLib)(nil)

// OpenLt loads cuBLASLt, once per process. The error is a *dl.Error when there is none and a
// *dl.VersionError when it lacks functions; both match errors.ErrUnsupported.
func OpenLt() (*LtLib, error) { return openedLt() }

var openedLt = dl.Once(ltSpec, newLtLib)

func newLtLib(find dl.Resolver, path string) (*LtLib, error) {
	t, err := dl.Require[ltFn](find, path, ltSpec, ltSymbols[:], NotSupported)
	return &LtLib{t}, err
}

// The methods below have no comments: each one calls the C function of the same name.

// GetVersion returns a size_t, whose low half has the number.
func (l *LtLib) GetVersion() uintptr { return uintptr(uint32(l.Call(fnLtGetVersion, dl.Get()))) }

func (l *LtLib) Create() (LtHandle, Result) {
	h, r := l.Call1(fnLtCreate, dl.Get().Out())
	return LtHandle(h), r
}

func (l *LtLib) Destroy(h LtHandle) Result { return l.Call(fnLtDestroy, dl.Get().In(uintptr(h))) }

func (l *LtLib) MatmulDescCreate(compute ComputeType, scale DType) (MatmulDesc, Result) {
	d, r := l.Call1(fnLtMatmulDescCreate, dl.Get().Out().In(uintptr(compute), uintptr(scale)))
	return MatmulDesc(d), r
}

func (l *LtLib) MatmulDescDestroy(d MatmulDesc) Result {
	return l.Call(fnLtMatmulDescDestroy, dl.Get().In(uintptr(d)))
}

func (l *LtLib) MatmulDescSetAttribute(d MatmulDesc, a DescAttribute, p unsafe.Pointer, bytes uintptr) Result {
	return l.Call(fnLtMatmulDescSetAttribute, dl.Get().In(uintptr(d), uintptr(a)).Ptr(p).In(bytes))
}

func (l *LtLib) MatrixLayoutCreate(t DType, rows, cols uint64, ld int64) (MatrixLayout, Result) {
	x, r := l.Call1(fnLtMatrixLayoutCreate, dl.Get().Out().In(uintptr(t), uintptr(rows), uintptr(cols), uintptr(ld)))
	return MatrixLayout(x), r
}

func (l *LtLib) MatrixLayoutDestroy(x MatrixLayout) Result {
	return l.Call(fnLtMatrixLayoutDestroy, dl.Get().In(uintptr(x)))
}

func (l *LtLib) MatrixLayoutSetAttribute(x MatrixLayout, a LayoutAttribute, p unsafe.Pointer, bytes uintptr) Result {
	return l.Call(fnLtMatrixLayoutSetAttribute, dl.Get().In(uintptr(x), uintptr(a)).Ptr(p).In(bytes))
}

func (l *LtLib) MatmulPreferenceCreate() (Preference, Result) {
	p, r := l.Call1(fnLtMatmulPreferenceCreate, dl.Get().Out())
	return Preference(p), r
}

func (l *LtLib) MatmulPreferenceDestroy(p Preference) Result {
	return l.Call(fnLtMatmulPreferenceDestroy, dl.Get().In(uintptr(p)))
}

func (l *LtLib) MatmulPreferenceSetAttribute(p Preference, a PreferenceAttribute, v unsafe.Pointer, bytes uintptr) Result {
	return l.Call(fnLtMatmulPreferenceSetAttribute, dl.Get().In(uintptr(p), uintptr(a)).Ptr(v).In(bytes))
}

// with returns the first arguments of a call for an operation.
func with(h LtHandle, o *Operation) *dl.Frame {
	return dl.Get().In(uintptr(h), uintptr(o.Desc), uintptr(o.A), uintptr(o.B), uintptr(o.C), uintptr(o.D))
}

func (l *LtLib) MatmulAlgoGetHeuristic(h LtHandle, o *Operation, p Preference, results []HeuristicResult) (int32, Result) {
	n, r := l.Call1(fnLtMatmulAlgoGetHeuristic, with(h, o).In(uintptr(p), uintptr(len(results))).
		Ptr(unsafe.Pointer(unsafe.SliceData(results))).Out())
	return int32(n), r
}

func (l *LtLib) MatmulAlgoCheck(h LtHandle, o *Operation, algo *Algo, x *HeuristicResult) Result {
	return l.Call(fnLtMatmulAlgoCheck, with(h, o).Ptr(unsafe.Pointer(algo)).Ptr(unsafe.Pointer(x)))
}

// in appends the types to the arguments of a call.
func (t *Types) in(f *dl.Frame) *dl.Frame {
	return f.In(uintptr(t.Compute), uintptr(t.Scale), uintptr(t.A), uintptr(t.B), uintptr(t.C), uintptr(t.D))
}

func (l *LtLib) MatmulAlgoInit(h LtHandle, t *Types, id int32, algo *Algo) Result {
	return l.Call(fnLtMatmulAlgoInit, t.in(dl.Get().In(uintptr(h))).In(uintptr(id)).Ptr(unsafe.Pointer(algo)))
}

func (l *LtLib) MatmulAlgoConfigSetAttribute(algo *Algo, a ConfigAttribute, p unsafe.Pointer, bytes uintptr) Result {
	return l.Call(fnLtMatmulAlgoConfigSetAttribute, dl.Get().Ptr(unsafe.Pointer(algo)).In(uintptr(a)).Ptr(p).In(bytes))
}

func (l *LtLib) MatmulAlgoConfigGetAttribute(algo *Algo, a ConfigAttribute, p unsafe.Pointer, bytes uintptr) (uintptr, Result) {
	n, r := l.Call1(fnLtMatmulAlgoConfigGetAttribute, dl.Get().Ptr(unsafe.Pointer(algo)).In(uintptr(a)).Ptr(p).In(bytes).Out())
	return uintptr(n), r
}

func (l *LtLib) MatmulAlgoCapGetAttribute(algo *Algo, a CapAttribute, p unsafe.Pointer, bytes uintptr) (uintptr, Result) {
	n, r := l.Call1(fnLtMatmulAlgoCapGetAttribute, dl.Get().Ptr(unsafe.Pointer(algo)).In(uintptr(a)).Ptr(p).In(bytes).Out())
	return uintptr(n), r
}

func (l *LtLib) Matmul(h LtHandle, d MatmulDesc, alpha Scalar, a, b LtMatrix, beta Scalar, c, out LtMatrix, algo *Algo,
	workspace cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) Result {
	f := dl.Get().In(uintptr(h), uintptr(d))
	alpha.Add(f).In(uintptr(a.Ptr), uintptr(a.Layout), uintptr(b.Ptr), uintptr(b.Layout))
	beta.Add(f).In(uintptr(c.Ptr), uintptr(c.Layout), uintptr(out.Ptr), uintptr(out.Layout)).
		Ptr(unsafe.Pointer(algo)).In(uintptr(workspace), bytes, uintptr(s))
	return l.Call(fnLtMatmul, f)
}

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
	DescPointerMode            DescAttribute = 2 // int32: PointerMode
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
