package tensor

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gemm"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A multiplication is a product in the terms of the libraries, which are column-major. A
// row-major matrix is the transpose of a column-major one, so that they compute cᵀ = bᵀ·aᵀ:
// their A is b, and their M is the number of columns of c.
type multiplication struct {
	gemm.Product
	s       *stream.Stream
	c, a, b Tensor
	rows    int  // of each matrix of c
	swapped bool // as described above; otherwise c is column-major
}

// elementType returns the type in products, or -1 for a type that products do not have.
func elementType(t memory.DType) cublasapi.DType { return cublasapi.DType(dtype.Of(t).CUDA) }

// empty reports whether c has no elements.
func (m *multiplication) empty() bool { return m.M == 0 || m.N == 0 || m.Batch == 0 }

// set validates the arguments and derives the product.
func (m *multiplication) set(s *stream.Stream, c, a, b *Tensor, cfg *MatMulConfig) error {
	m.s, m.c, m.a, m.b = s, *c, *a, *b
	if err := m.setShape(); err != nil {
		return err
	}
	settings, err := matMulSettings(cfg)
	if err == nil {
		err = m.setTypes(settings)
	}
	if err == nil {
		err = m.setMatrices(cfg)
	}
	if err == nil {
		err = m.setFactors(cfg)
	}
	if err == nil {
		err = m.setEpilogue(cfg)
	}
	if err == nil {
		err = m.setScales(cfg)
	}
	if err == nil {
		err = m.checkOverlap(cfg)
	}
	if err != nil {
		return err
	}
	m.fold()
	return m.checkWhole(cfg)
}

// setShape sets M, N, K and Batch as for a row-major c.
func (m *multiplication) setShape() error {
	rank := len(m.c.at().Shape)
	for i, t := range [...]*Tensor{&m.c, &m.a, &m.b} {
		if _, err := m.extra([...]string{"c", "a", "b"}[i], t); err != nil {
			return err
		}
		if n := len(t.at().Shape); n < 2 || n > 3 || n > rank {
			return fmt.Errorf("want matrices, or batches of three dimensions with a c of three dimensions")
		}
	}
	rows, cols, k := m.c.at().Shape[rank-2], m.c.at().Shape[rank-1], m.a.at().Shape[len(m.a.at().Shape)-1]
	batch := 1
	if rank == 3 {
		batch = m.c.at().Shape[0]
	}
	fits := func(t *Tensor, r, c int) bool {
		n := len(t.at().Shape)
		return t.at().Shape[n-2] == r && t.at().Shape[n-1] == c && (n == 2 || t.at().Shape[0] == batch || t.at().Shape[0] == 1)
	}
	if !fits(&m.a, rows, k) || !fits(&m.b, k, cols) {
		return fmt.Errorf("the shapes do not fit: want [m n] = [m k] · [k n], with the same number of matrices in each batch, or one")
	}
	if max(rows, cols, k, batch) > math.MaxInt32 {
		return fmt.Errorf("a dimension is larger than %d", math.MaxInt32)
	}
	m.rows = rows
	m.M, m.N, m.K, m.Batch = int64(cols), int64(rows), int64(k), int64(batch)
	return nil
}

// setTypes sets the compute type and the options that settings allow for it.
func (m *multiplication) setTypes(settings *MatMulSettings) error {
	in, out := m.a.at().DType, m.c.at().DType
	m.Float8 = float8(in) && float8(m.b.at().DType)
	if in != m.b.at().DType && !m.Float8 {
		return fmt.Errorf("a and b have different types: want one type, or two types of 8-bit floats")
	}
	reduction := ReducedPrecision
	m.Compute = cublasapi.Compute32F
	valid := false
	switch in {
	case memory.Float64:
		m.Compute, valid = cublasapi.Compute64F, out == in
	case memory.Float32:
		if valid = out == in; settings.Float32Precision != Highest {
			m.Compute = cublasapi.Compute32FFastTF32
		}
	case memory.Float16:
		valid, reduction = out == in || out == memory.Float32, settings.FP16Reduction
		if settings.AllowFP16Accumulation {
			m.Compute, valid = cublasapi.Compute16F, out == in
		}
	case memory.BFloat16:
		valid, reduction = out == in || out == memory.Float32, settings.BF16Reduction
	default:
		e5 := memory.Float8E5M2
		valid = m.Float8 && !(in == e5 && m.b.at().DType == e5) && (out == memory.BFloat16 || out == memory.Float16 || out == memory.Float32 ||
			out == memory.Float8E4M3 || out == e5 && (in == e5 || m.b.at().DType == e5))
	}
	if !valid {
		return fmt.Errorf("products of these types are not supported: see the table at MatMul")
	}
	m.Schemes = [...]cublasapi.ReductionScheme{cublasapi.ReductionMask, cublasapi.ReductionComputeType, cublasapi.ReductionNone}[reduction]
	m.NoSplitK = reduction == NoSplitK
	if settings.Deterministic {
		m.Schemes = cublasapi.ReductionNone
	}
	m.Carveout, m.Library = int32(min(settings.SMCarveout, math.MaxInt32)), libraries[settings.Library]
	return nil
}

// A side is one matrix, or a batch, in memory.
type side struct {
	at         cudadrv.DevicePtr
	row, col   bool  // it is row-major, or column-major; both are possible
	ldR, ldC   int64 // the leading dimension of each
	stride     int64
	rows, cols int
}

// sideOf reads a tensor of batch matrices.
func sideOf(name string, t *Tensor, batch int64) (x side, err error) {
	n := len(t.at().Shape)
	rows, cols, rs, cs := t.at().Shape[n-2], t.at().Shape[n-1], t.at().Strides[n-2], t.at().Strides[n-1]
	x = side{at: cudadrv.DevicePtr(t.Ptr()), rows: rows, cols: cols, ldR: int64(max(1, cols)), ldC: int64(max(1, rows))}
	if n == 3 && t.at().Shape[0] > 1 && batch > 1 {
		x.stride = int64(t.at().Strides[0])
	}
	x.row = (cs == 1 || cols <= 1) && (rows <= 1 || rs >= max(1, cols))
	x.col = (rs == 1 || rows <= 1) && (cols <= 1 || cs >= max(1, rows))
	if rows > 1 {
		x.ldR = int64(rs)
	} else {
		x.ldR = max(x.ldR, x.stride) // any is right; this one lets fold join the batch
	}
	if cols > 1 {
		x.ldC = int64(cs)
	} else {
		x.ldC = max(x.ldC, x.stride)
	}
	if !x.row && !x.col {
		return x, fmt.Errorf("%s has strides %v: one of the last two must be 1, and the other at least the number of elements beside it", name, t.at().Strides)
	}
	return x, nil
}

// setMatrices sets the layouts and addresses of the operands.
func (m *multiplication) setMatrices(cfg *MatMulConfig) error {
	c, err := sideOf("c", &m.c, m.Batch)
	if err != nil {
		return err
	}
	if sharesWithin(&m.c) {
		return fmt.Errorf("c has strides %v: its elements share memory", m.c.at().Strides)
	}
	a, err := sideOf("a", &m.a, m.Batch)
	if err != nil {
		return err
	}
	b, err := sideOf("b", &m.b, m.Batch)
	if err != nil {
		return err
	}
	transA, transB := !a.row, !b.row
	if m.Float8 { // which need a column-major b
		transB = b.col
	}
	add, err := m.addSide(cfg)
	if err != nil {
		return err
	}
	if m.swapped = c.row && (add.row || !c.col); m.swapped {
		m.lay(&m.At.A, &m.Problem.A, m.b.at().DType, b, transB)
		m.lay(&m.At.B, &m.Problem.B, m.a.at().DType, a, transA)
		m.TransA, m.TransB = opOf(transB), opOf(transA)
	} else {
		m.M, m.N = m.N, m.M
		m.lay(&m.At.A, &m.Problem.A, m.a.at().DType, a, transA)
		m.lay(&m.At.B, &m.Problem.B, m.b.at().DType, b, transB)
		m.TransA, m.TransB = opOf(!transA), opOf(!transB)
	}
	m.lay(&m.At.D, &m.Problem.D, m.c.at().DType, c, !m.swapped)
	return m.setAdd(cfg, add)
}

// lay sets one operand; col says which of its orders.
func (m *multiplication) lay(at *cudadrv.DevicePtr, l *gemm.Layout, t memory.DType, x side, col bool) {
	*at = x.at
	*l = gemm.Layout{Type: elementType(t), LD: x.ldR, Stride: x.stride}
	if col {
		l.LD = x.ldC
	}
}

func opOf(trans bool) cublasapi.Op {
	if trans {
		return cublasapi.Trans
	}
	return cublasapi.NoTrans
}

// addSide checks and reads Add, without which the result may be row-major or
// column-major.
func (m *multiplication) addSide(cfg *MatMulConfig) (side, error) {
	t := &cfg.Add
	if t.at().DType == memory.Invalid {
		return side{row: true, col: true}, nil
	}
	if _, err := m.extra("Add", t); err != nil {
		return side{}, err
	}
	n, rank := len(t.at().Shape), len(m.c.at().Shape)
	if n < 2 || n > rank || t.at().Shape[n-1] != m.c.at().Shape[rank-1] || t.at().Shape[n-2] != m.rows || n == 3 && t.at().Shape[0] != m.c.at().Shape[0] && t.at().Shape[0] != 1 {
		return side{}, fmt.Errorf("field Add has shape %v: want that of c", t.at().Shape)
	}
	want := m.c.at().DType
	if float8(want) {
		if want = memory.BFloat16; t.at().DType == memory.Float16 && (cfg.Bias.at().DType == memory.Invalid || cfg.Bias.at().DType == t.at().DType) {
			want = t.at().DType
		}
	}
	if t.at().DType != want {
		return side{}, fmt.Errorf("field Add is %s: want %s", t.at().DType, want)
	}
	return sideOf("Add", t, m.Batch)
}

// setAdd sets the matrix that beta multiplies: c, or Add.
func (m *multiplication) setAdd(cfg *MatMulConfig, x side) error {
	m.At.C, m.Problem.C = m.At.D, m.Problem.D
	if float8(m.c.at().DType) { // cuBLASLt has no 8-bit input for beta
		m.At.C, m.Separate = 0, true
		m.Problem.C.Type = cublasapi.R16BF
		if t := cfg.Bias.at().DType; cfg.Bias.at().DType != memory.Invalid && t == memory.Float16 {
			m.Problem.C.Type = cublasapi.R16F
		}
	}
	t := &cfg.Add
	if t.at().DType == memory.Invalid {
		return nil
	}
	if m.swapped && !x.row || !m.swapped && !x.col {
		return fmt.Errorf("field Add has strides %v: want the order of c, whose strides are %v", t.at().Strides, m.c.at().Strides)
	}
	m.lay(&m.At.C, &m.Problem.C, t.at().DType, x, !m.swapped)
	if m.At.C == m.At.D && m.Problem.C == m.Problem.D {
		return nil
	}
	m.Separate = true
	return nil
}

// extra checks a tensor of the configuration and returns its address.
func (m *multiplication) extra(name string, t *Tensor) (cudadrv.DevicePtr, error) {
	if err := t.at().Check(name, nil); err != nil {
		return 0, err
	}
	if t.IsHost() || t.Device() != m.s.Device() {
		return 0, fmt.Errorf("%s is on %s: want it on %s", name, t.at().Place(), m.s.Device())
	}
	return cudadrv.DevicePtr(t.Ptr()), nil
}

// setFactors sets alpha and beta.
func (m *multiplication) setFactors(cfg *MatMulConfig) (err error) {
	m.Factors = [2]float64{1, 0}
	if cfg.Add.at().DType != memory.Invalid {
		m.Factors[1] = 1
	}
	if cfg.Alpha != nil {
		m.Factors[0] = *cfg.Alpha
	}
	if cfg.Beta != nil {
		m.Factors[1] = *cfg.Beta
	}
	if cfg.DeviceAlpha.at().DType == memory.Invalid && cfg.DeviceBeta.at().DType == memory.Invalid {
		if float8(m.c.at().DType) && m.Factors[1] != 0 && cfg.Add.at().DType == memory.Invalid {
			return fmt.Errorf("field Beta is %v, but a c of %s cannot be an input: set Add", m.Factors[1], m.c.at().DType)
		}
		return nil
	}
	if cfg.DeviceAlpha.at().DType == memory.Invalid || cfg.DeviceBeta.at().DType == memory.Invalid || cfg.Alpha != nil || cfg.Beta != nil {
		return fmt.Errorf("set both DeviceAlpha and DeviceBeta, and neither Alpha nor Beta")
	}
	if float8(m.c.at().DType) && cfg.Add.at().DType == memory.Invalid {
		return fmt.Errorf("field DeviceBeta is set, but a c of %s cannot be an input: set Add", m.c.at().DType)
	}
	want := memory.Float32
	switch m.Compute {
	case cublasapi.Compute64F:
		want = memory.Float64
	case cublasapi.Compute16F:
		want = memory.Float16
	}
	m.DeviceScalars = true
	if m.At.Alpha, err = m.scalar("DeviceAlpha", &cfg.DeviceAlpha, want); err == nil {
		m.At.Beta, err = m.scalar("DeviceBeta", &cfg.DeviceBeta, want)
	}
	return err
}

// scalar returns the address of a tensor of one element.
func (m *multiplication) scalar(name string, t *Tensor, want memory.DType) (cudadrv.DevicePtr, error) {
	if t.at().DType == memory.Invalid {
		return 0, nil
	}
	at, err := m.extra(name, t)
	if err != nil {
		return 0, err
	}
	if t.Len() != 1 || t.at().DType != want {
		return 0, fmt.Errorf("%s is %s of shape %v: want one element of %s", name, t.at().DType, t.at().Shape, want)
	}
	return at, nil
}

// fold turns a batch whose products share b into one product, if the rows of a, c and all other
// matrices continue from one product to the next.
func (m *multiplication) fold() {
	p := &m.Problem
	next := func(l gemm.Layout) bool { return l.Stride == p.N*l.LD }
	if p.Batch < 2 || !m.swapped || p.A.Stride != 0 || p.TransB != cublasapi.NoTrans || p.Batch*p.N > math.MaxInt32 ||
		!next(p.B) || !next(p.D) || !next(p.C) || p.Aux.LD != 0 && !next(p.Aux) || p.Bias.Stride != 0 || p.Epilogue == cublasapi.EpilogueBGradB {
		return
	}
	p.N, p.Batch = p.Batch*p.N, 1
	p.A.Stride, p.B.Stride, p.C.Stride, p.D.Stride, p.Aux.Stride = 0, 0, 0, 0, 0
}

// operandNames are the tensors of a product, as checkOverlap numbers them.
var operandNames = [...]string{"c", "BiasGrad", "AMax", "Aux", "a", "b", "Add", "Bias", "DeviceAlpha", "DeviceBeta", "ScaleA", "ScaleB", "ScaleResult"}

// checkOverlap refuses an output that shares memory with another operand,
// except that Add may be c. The names are another array, because tensors beside
// a string of the error would be on the heap.
func (m *multiplication) checkOverlap(cfg *MatMulConfig) error {
	all := [len(operandNames)]*Tensor{&m.c, &cfg.BiasGrad, &cfg.AMax, &cfg.Aux, &m.a, &m.b, &cfg.Add, &cfg.Bias,
		&cfg.DeviceAlpha, &cfg.DeviceBeta, &cfg.ScaleA, &cfg.ScaleB, &cfg.ScaleResult}
	outputs := 4
	if cfg.Epilogue == ReLUGrad || cfg.Epilogue == GELUGrad { // which read Aux
		outputs = 3
	}
	for i, x := range all[:outputs] {
		if x.at().DType == memory.Invalid {
			continue
		}
		for j, y := range all[i+1:] {
			addIsC := x == &m.c && y == &cfg.Add && !m.Separate
			if !addIsC && shares(x, y) {
				return fmt.Errorf("%s shares memory with %s: an output needs its own memory, except that Add may be c itself", operandNames[i], operandNames[i+1+j])
			}
		}
	}
	return nil
}

// shares reports whether two tensors on a device have a byte in common. It may report memory that only interleaves.
func shares(x, y *Tensor) bool { return strided.SharingOf(x.at(), y.at()) != strided.Apart }

// sharesWithin reports whether elements of a tensor may share memory.
func sharesWithin(t *Tensor) bool { return strided.SharesWithin(t.at()) }
