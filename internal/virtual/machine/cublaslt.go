package machine

import (
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// cublasLtVersion is the version of the virtual library, 13.0.2.
const cublasLtVersion = 130002

// ltLib implements cublasapi.LtAPI.
type ltLib struct {
	m           *Machine
	mu          sync.Mutex
	handles     map[cublasapi.LtHandle]*Device
	descs       map[cublasapi.MatmulDesc]*desc
	layouts     map[cublasapi.MatrixLayout]*layout
	preferences map[cublasapi.Preference]*preference
	loaded      map[ltKernel]bool // kernels that were used; guarded by the machine's lock
}

// An ltKernel is what products with one kernel have in common.
type ltKernel struct {
	dev            *Device
	algo           algo
	a, b, o        cublasapi.DType
	transA, transB int32
}

// NewCublasLt returns the cuBLASLt of a machine.
func NewCublasLt(m *Machine) cublasapi.LtAPI {
	return &ltLib{m: m, handles: map[cublasapi.LtHandle]*Device{}, descs: map[cublasapi.MatmulDesc]*desc{},
		layouts: map[cublasapi.MatrixLayout]*layout{}, preferences: map[cublasapi.Preference]*preference{}, loaded: map[ltKernel]bool{}}
}

// A desc is a cublasLtMatmulDesc_t. The fields have the widths of the attributes.
type desc struct {
	compute, scale, mode, transA, transB int32
	epilogue                             uint32
	bias, aux                            cudadrv.DevicePtr
	biasStride, auxLD, auxStride         int64
	sms                                  int32
	scaleA, scaleB, scaleC, scaleD, amax cudadrv.DevicePtr
	auxType, biasType                    int32
	fast                                 int8
	modeA, modeB                         int32
}

// A layout is a cublasLtMatrixLayout_t.
type layout struct {
	t          cublasapi.DType
	rows, cols uint64
	ld         int64
	batch      int32
	stride     int64
}

// A preference is a cublasLtMatmulPreference_t.
type preference struct {
	workspace uint64
	mask      uint32
	align     [4]uint32 // of A, B, C and D
}

// begin begins a call that needs a handle of the current context.
func (l *ltLib) begin(name string, h cublasapi.LtHandle) (dev *Device, x Fault, r cublasapi.Result) {
	dev, x, r = Begin(l.m, name)
	if r != cublasapi.Success {
		return nil, x, r
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.handles[h] != dev {
		return nil, x, cublasapi.NotInitialized
	}
	return dev, x, cublasapi.Success
}

// free begins a call that needs no context: it consults the fault plan.
func (l *ltLib) free(name string) cublasapi.Result { return cublasapi.Result(l.m.Fault(name).Status) }

// newHandle returns a number for an object.
func (l *ltLib) newHandle() uintptr {
	l.m.Lock()
	defer l.m.Unlock()
	return l.m.Handle()
}

func (l *ltLib) GetVersion() uintptr { return cublasLtVersion }

func (l *ltLib) Create() (cublasapi.LtHandle, cublasapi.Result) {
	dev, _, r := Begin(l.m, "cublasLtCreate")
	if r != cublasapi.Success {
		return 0, r
	}
	h := cublasapi.LtHandle(l.newHandle())
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handles[h] = dev
	return h, cublasapi.Success
}

func (l *ltLib) Destroy(h cublasapi.LtHandle) cublasapi.Result {
	_ = l.m.Unbind()
	return remove(l, "cublasLtDestroy", l.handles, h)
}

func (l *ltLib) MatmulDescCreate(compute cublasapi.ComputeType, scale cublasapi.DType) (cublasapi.MatmulDesc, cublasapi.Result) {
	return add(l, "cublasLtMatmulDescCreate", l.descs, &desc{compute: int32(compute), scale: int32(scale),
		epilogue: uint32(cublasapi.EpilogueDefault), auxType: -1, biasType: -1})
}

func (l *ltLib) MatmulDescDestroy(d cublasapi.MatmulDesc) cublasapi.Result {
	return remove(l, "cublasLtMatmulDescDestroy", l.descs, d)
}

func (l *ltLib) MatrixLayoutCreate(t cublasapi.DType, rows, cols uint64, ld int64) (cublasapi.MatrixLayout, cublasapi.Result) {
	if SizeOf(t) == 0 || rows == 0 || cols == 0 || ld <= 0 {
		return 0, cublasapi.InvalidValue
	}
	return add(l, "cublasLtMatrixLayoutCreate", l.layouts, &layout{t: t, rows: rows, cols: cols, ld: ld, batch: 1})
}

func (l *ltLib) MatrixLayoutDestroy(x cublasapi.MatrixLayout) cublasapi.Result {
	return remove(l, "cublasLtMatrixLayoutDestroy", l.layouts, x)
}

func (l *ltLib) MatmulPreferenceCreate() (cublasapi.Preference, cublasapi.Result) {
	return add(l, "cublasLtMatmulPreferenceCreate", l.preferences, &preference{
		mask: uint32(cublasapi.ReductionMask), align: [4]uint32{256, 256, 256, 256}})
}

func (l *ltLib) MatmulPreferenceDestroy(p cublasapi.Preference) cublasapi.Result {
	return remove(l, "cublasLtMatmulPreferenceDestroy", l.preferences, p)
}

func (l *ltLib) MatmulDescSetAttribute(d cublasapi.MatmulDesc, a cublasapi.DescAttribute, p unsafe.Pointer, bytes uintptr) cublasapi.Result {
	return set(l, "cublasLtMatmulDescSetAttribute", l.descs, d, func(x *desc) (unsafe.Pointer, uintptr) {
		return x.field(a), cublasapi.Attributes[a]
	}, p, bytes)
}

// field returns the address of an attribute, or nil.
func (d *desc) field(a cublasapi.DescAttribute) unsafe.Pointer {
	return map[cublasapi.DescAttribute]unsafe.Pointer{
		cublasapi.DescPointerMode: unsafe.Pointer(&d.mode), cublasapi.DescTransA: unsafe.Pointer(&d.transA),
		cublasapi.DescTransB: unsafe.Pointer(&d.transB), cublasapi.DescEpilogue: unsafe.Pointer(&d.epilogue),
		cublasapi.DescBiasPointer: unsafe.Pointer(&d.bias), cublasapi.DescBiasBatchStride: unsafe.Pointer(&d.biasStride),
		cublasapi.DescEpilogueAuxPointer: unsafe.Pointer(&d.aux), cublasapi.DescEpilogueAuxLD: unsafe.Pointer(&d.auxLD),
		cublasapi.DescEpilogueAuxBatchStride: unsafe.Pointer(&d.auxStride), cublasapi.DescSMCountTarget: unsafe.Pointer(&d.sms),
		cublasapi.DescAScalePointer: unsafe.Pointer(&d.scaleA), cublasapi.DescBScalePointer: unsafe.Pointer(&d.scaleB),
		cublasapi.DescCScalePointer: unsafe.Pointer(&d.scaleC), cublasapi.DescDScalePointer: unsafe.Pointer(&d.scaleD),
		cublasapi.DescAMaxDPointer: unsafe.Pointer(&d.amax), cublasapi.DescEpilogueAuxDataType: unsafe.Pointer(&d.auxType),
		cublasapi.DescFastAccum: unsafe.Pointer(&d.fast), cublasapi.DescBiasDataType: unsafe.Pointer(&d.biasType),
		cublasapi.DescAScaleMode: unsafe.Pointer(&d.modeA), cublasapi.DescBScaleMode: unsafe.Pointer(&d.modeB),
	}[a]
}

func (l *ltLib) MatrixLayoutSetAttribute(x cublasapi.MatrixLayout, a cublasapi.LayoutAttribute, p unsafe.Pointer, bytes uintptr) cublasapi.Result {
	return set(l, "cublasLtMatrixLayoutSetAttribute", l.layouts, x, func(x *layout) (unsafe.Pointer, uintptr) {
		switch a {
		case cublasapi.LayoutBatchCount:
			return unsafe.Pointer(&x.batch), 4
		case cublasapi.LayoutStridedBatchOffset:
			return unsafe.Pointer(&x.stride), 8
		}
		return nil, 0
	}, p, bytes)
}

func (l *ltLib) MatmulPreferenceSetAttribute(x cublasapi.Preference, a cublasapi.PreferenceAttribute, p unsafe.Pointer, bytes uintptr) cublasapi.Result {
	return set(l, "cublasLtMatmulPreferenceSetAttribute", l.preferences, x, func(x *preference) (unsafe.Pointer, uintptr) {
		switch i := a - cublasapi.PreferenceMinAlignmentABytes; {
		case a == cublasapi.PreferenceMaxWorkspaceBytes:
			return unsafe.Pointer(&x.workspace), 8
		case a == cublasapi.PreferenceReductionSchemeMask:
			return unsafe.Pointer(&x.mask), 4
		case i >= 0 && i < 4:
			return unsafe.Pointer(&x.align[i]), 4
		}
		return nil, 0
	}, p, bytes)
}

// add gives an object a number.
func add[H ~uintptr, T any](l *ltLib, name string, objects map[H]T, x T) (H, cublasapi.Result) {
	if r := l.free(name); r != cublasapi.Success {
		return 0, r
	}
	h := H(l.newHandle())
	l.mu.Lock()
	defer l.mu.Unlock()
	objects[h] = x
	return h, cublasapi.Success
}

func remove[H ~uintptr, T any](l *ltLib, name string, objects map[H]T, h H) cublasapi.Result {
	if r := l.free(name); r != cublasapi.Success {
		return r
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := objects[h]; !ok {
		return cublasapi.InvalidValue
	}
	delete(objects, h)
	return cublasapi.Success
}

// set copies the value of an attribute, whose size must be exact.
func set[H ~uintptr, T any](l *ltLib, name string, objects map[H]*T, h H, field func(*T) (unsafe.Pointer, uintptr), p unsafe.Pointer, bytes uintptr) cublasapi.Result {
	if r := l.free(name); r != cublasapi.Success {
		return r
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	x := objects[h]
	if x == nil || p == nil {
		return cublasapi.InvalidValue
	}
	to, size := field(x)
	if to == nil || size != bytes {
		return cublasapi.InvalidValue
	}
	copy(unsafe.Slice((*byte)(to), size), unsafe.Slice((*byte)(p), size))
	return cublasapi.Success
}
