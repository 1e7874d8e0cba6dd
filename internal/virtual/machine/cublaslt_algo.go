package machine

import (
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
)

// The two algorithms. Both compute the same, but only the first can split k, and only the
// second needs a workspace for its own use.
const (
	simple int32 = 6
	warped int32 = 66 // for 16-bit and 8-bit inputs
)

// warpedBytes is the workspace of the second algorithm for outputs of at least warpedRows
// rows and columns.
const (
	warpedBytes = 4096
	warpedRows  = 64
)

// An algo is the contents of a cublasapi.Algo.
type algo struct {
	magic             uint32
	id                int32
	tile              uint32
	splitK            int32
	scheme            uint32
	swizzling, custom uint32
	stages            uint32
	inner, cluster    uint16
	align             [4]uint16 // of A, B, C and D
	_                 [4]uint32
}

const magic = 0x4c744c74

var (
	tiles  = []uint32{15, 18, 20, 24}
	stages = []uint32{11, 15, 36}
)

// open returns the contents of an algorithm, or nil.
func open(x *cublasapi.Algo) *algo {
	if x == nil {
		return nil
	}
	a := (*algo)(unsafe.Pointer(x))
	if a.magic != magic {
		return nil
	}
	return a
}

func newAlgo(id int32, align uint16) algo {
	return algo{magic: magic, id: id, tile: tiles[0], splitK: 1, stages: stages[0], align: [4]uint16{align, align, align, align}}
}

// ids returns the algorithms for a type of inputs.
func ids(a cublasapi.DType) []int32 {
	if SizeOf(a) > 2 {
		return []int32{simple}
	}
	return []int32{warped, simple}
}

// need returns the workspace of an algorithm, and whether it can compute the product.
func (s *shape) need(a *algo) (bytes uintptr, ok bool) {
	split := a.splitK > 1
	switch {
	case !slices.Contains(ids(s.a.t), a.id) || !slices.Contains(tiles, a.tile) || !slices.Contains(stages, a.stages):
		return 0, false
	case a.splitK < 1 || split != (a.scheme != 0) || split && (a.id != simple || s.float8() || a.scheme&(a.scheme-1) != 0):
		return 0, false
	case a.swizzling > 1 || a.custom > 3:
		return 0, false
	}
	parts := uintptr(s.m) * uintptr(s.n) * uintptr(s.o.batch) * uintptr(a.splitK)
	switch cublasapi.ReductionScheme(a.scheme) {
	case cublasapi.ReductionComputeType:
		return parts * uintptr(SizeOf(cublasapi.DType(s.d.scale))), true
	case cublasapi.ReductionOutputType:
		return parts * uintptr(SizeOf(s.o.t)), true
	case cublasapi.ReductionInPlace:
		return uintptr(s.n) * 4, true // counters
	}
	if a.id == warped && s.m >= warpedRows && s.n >= warpedRows {
		return warpedBytes, true
	}
	return 0, true
}

// candidates returns the algorithms for a product, the fastest first.
func (s *shape) candidates(p *preference) (list []algo) {
	for _, id := range ids(s.a.t) {
		list = append(list, newAlgo(id, 16), newAlgo(id, 16))
		list[len(list)-1].tile = tiles[1]
	}
	split := newAlgo(simple, 16)
	split.splitK, split.scheme = 4, uint32(cublasapi.ReductionComputeType)
	if isHalf(s.o.t) && p.mask&uint32(cublasapi.ReductionOutputType) != 0 {
		split.scheme = uint32(cublasapi.ReductionOutputType)
	}
	if s.k >= 512 && s.k >= 4*max(s.m, s.n) {
		list = slices.Insert(list, 0, split)
	} else {
		list = append(list, split)
	}
	for i := range list {
		for j, a := range p.align {
			list[i].align[j] = uint16(min(a, 16))
		}
	}
	return list
}

func (l *ltLib) MatmulAlgoGetHeuristic(h cublasapi.LtHandle, o *cublasapi.Operation, p cublasapi.Preference, results []cublasapi.HeuristicResult) (int32, cublasapi.Result) {
	if _, _, r := l.begin("cublasLtMatmulAlgoGetHeuristic", h); r != cublasapi.Success {
		return 0, r
	}
	l.mu.Lock()
	pref := l.preferences[p]
	l.mu.Unlock()
	if pref == nil || len(results) == 0 {
		return 0, cublasapi.InvalidValue
	}
	s, r := l.shapeOf(o)
	if r != cublasapi.Success {
		return 0, r
	}
	if !s.aligned(pref.align) {
		return 0, cublasapi.NotSupported
	}
	n := 0
	if len(results) > 1 && (s.m+s.n+s.k)%5 == 0 { // the library also returns algorithms that cannot run
		results[0] = cublasapi.HeuristicResult{State: cublasapi.NotSupported}
		n++
	}
	usable := 0
	for _, a := range s.candidates(pref) {
		bytes, ok := s.need(&a)
		if !ok || uint64(bytes) > pref.workspace || a.scheme&^pref.mask != 0 || n == len(results) {
			continue
		}
		results[n] = cublasapi.HeuristicResult{WorkspaceSize: bytes, WavesCount: 1}
		*(*algo)(unsafe.Pointer(&results[n].Algo)) = a
		n++
		usable++
	}
	if usable == 0 {
		return 0, cublasapi.NotSupported
	}
	return int32(n), cublasapi.Success
}

// aligned checks alignments of A, B, C and D in bytes.
func (s *shape) aligned(align [4]uint32) bool {
	for i, t := range []cublasapi.DType{s.a.t, s.b.t, s.c.t, s.o.t} {
		if align[i] == 0 || align[i]&(align[i]-1) != 0 || int(align[i]) < SizeOf(t) || s.float8() && align[i] < 16 {
			return false
		}
	}
	return true
}

func (l *ltLib) MatmulAlgoCheck(h cublasapi.LtHandle, o *cublasapi.Operation, x *cublasapi.Algo, out *cublasapi.HeuristicResult) cublasapi.Result {
	if _, _, r := l.begin("cublasLtMatmulAlgoCheck", h); r != cublasapi.Success {
		return r
	}
	a := open(x)
	if a == nil || out == nil {
		return cublasapi.InvalidValue
	}
	s, r := l.shapeOf(o)
	if r != cublasapi.Success {
		return r
	}
	bytes, ok := s.need(a)
	if !ok {
		return cublasapi.NotSupported
	}
	*out = cublasapi.HeuristicResult{Algo: *x, WorkspaceSize: bytes, WavesCount: 1}
	return cublasapi.Success
}

func (l *ltLib) MatmulAlgoInit(h cublasapi.LtHandle, t *cublasapi.Types, id int32, x *cublasapi.Algo) cublasapi.Result {
	if _, _, r := l.begin("cublasLtMatmulAlgoInit", h); r != cublasapi.Success {
		return r
	}
	if !slices.Contains(ids(t.A), id) || x == nil {
		return cublasapi.InvalidValue
	}
	*(*algo)(unsafe.Pointer(x)) = newAlgo(id, 16)
	return cublasapi.Success
}

// field returns the address and the size of an attribute, or nil.
func (a *algo) field(at cublasapi.ConfigAttribute) (unsafe.Pointer, uintptr) {
	switch at {
	case cublasapi.ConfigID:
		return unsafe.Pointer(&a.id), 4
	case cublasapi.ConfigTileID:
		return unsafe.Pointer(&a.tile), 4
	case cublasapi.ConfigSplitKNum:
		return unsafe.Pointer(&a.splitK), 4
	case cublasapi.ConfigReductionScheme:
		return unsafe.Pointer(&a.scheme), 4
	case cublasapi.ConfigCTASwizzling:
		return unsafe.Pointer(&a.swizzling), 4
	case cublasapi.ConfigCustomOption:
		return unsafe.Pointer(&a.custom), 4
	case cublasapi.ConfigStagesID:
		return unsafe.Pointer(&a.stages), 4
	case cublasapi.ConfigInnerShapeID:
		return unsafe.Pointer(&a.inner), 2
	case cublasapi.ConfigClusterShapeID:
		return unsafe.Pointer(&a.cluster), 2
	}
	return nil, 0
}

func (l *ltLib) MatmulAlgoConfigSetAttribute(x *cublasapi.Algo, at cublasapi.ConfigAttribute, p unsafe.Pointer, bytes uintptr) cublasapi.Result {
	a := open(x)
	if a == nil || p == nil || at == cublasapi.ConfigID {
		return cublasapi.InvalidValue
	}
	to, size := a.field(at)
	if to == nil || size != bytes {
		return cublasapi.InvalidValue
	}
	copy(unsafe.Slice((*byte)(to), size), unsafe.Slice((*byte)(p), size))
	return cublasapi.Success
}

func (l *ltLib) MatmulAlgoConfigGetAttribute(x *cublasapi.Algo, at cublasapi.ConfigAttribute, p unsafe.Pointer, bytes uintptr) (uintptr, cublasapi.Result) {
	a := open(x)
	if a == nil || p == nil {
		return 0, cublasapi.InvalidValue
	}
	from, size := a.field(at)
	if from == nil || size != bytes {
		return 0, cublasapi.InvalidValue
	}
	copy(unsafe.Slice((*byte)(p), size), unsafe.Slice((*byte)(from), size))
	return size, cublasapi.Success
}

func (l *ltLib) MatmulAlgoCapGetAttribute(x *cublasapi.Algo, at cublasapi.CapAttribute, p unsafe.Pointer, bytes uintptr) (uintptr, cublasapi.Result) {
	a := open(x)
	if a == nil {
		return 0, cublasapi.InvalidValue
	}
	var v []uint32
	switch at {
	case cublasapi.CapSplitKSupport:
		v = []uint32{0}
		if a.id == simple {
			v[0] = 1
		}
	case cublasapi.CapReductionSchemeMask:
		v = []uint32{uint32(cublasapi.ReductionMask)}
	case cublasapi.CapTileIDs:
		v = tiles
	case cublasapi.CapStagesIDs:
		v = stages
	case cublasapi.CapCustomOptionMax:
		v = []uint32{3}
	case cublasapi.CapMinAlignmentABytes, cublasapi.CapMinAlignmentBBytes, cublasapi.CapMinAlignmentCBytes, cublasapi.CapMinAlignmentDBytes:
		v = []uint32{16}
	default:
		return 0, cublasapi.InvalidValue
	}
	if p == nil { // asks for the size
		return uintptr(4 * len(v)), cublasapi.Success
	}
	n := min(int(bytes/4), len(v))
	copy(unsafe.Slice((*uint32)(p), n), v)
	return uintptr(4 * n), cublasapi.Success
}
