package machine

import (
	"slices"

	"github.com/gochorus/chorus/internal/cublasapi"
)

// A shape is an operation as it was described at the time of a call.
type shape struct {
	d          desc
	a, b, c, o layout // o is D
	m, n, k    int
}

// shapeOf copies the descriptor and the layouts, and checks them.
func (l *ltLib) shapeOf(x *cublasapi.Operation) (*shape, cublasapi.Result) {
	l.mu.Lock()
	d, a, b, c, o := l.descs[x.Desc], l.layouts[x.A], l.layouts[x.B], l.layouts[x.C], l.layouts[x.D]
	if d == nil || a == nil || b == nil || c == nil || o == nil {
		l.mu.Unlock()
		return nil, cublasapi.InvalidValue
	}
	s := &shape{d: *d, a: *a, b: *b, c: *c, o: *o}
	l.mu.Unlock()
	s.m, s.n = int(o.rows), int(o.cols)
	s.k = int(a.cols)
	if s.d.transA != 0 {
		s.k = int(a.rows)
	}
	switch {
	case !s.fits():
		return nil, cublasapi.InvalidValue
	case !s.supported() || s.float8() && !s.float8Fits() || s.sumsWrong():
		return nil, cublasapi.NotSupported
	case !s.epilogueFits():
		return nil, cublasapi.InvalidValue
	}
	return s, cublasapi.Success
}

// sumsWrong reports whether the library may store a wrong sum of an input.
func (s *shape) sumsWrong() bool {
	return min(s.m, s.n) == 1 && s.is(cublasapi.EpilogueBGradA, cublasapi.EpilogueBGradB)
}

// fits checks dimensions, leading dimensions and batches.
func (s *shape) fits() bool {
	if s.d.transA>>1 != 0 || s.d.transB>>1 != 0 || s.d.mode>>1 != 0 || s.d.sms < 0 || s.d.fast>>1 != 0 {
		return false
	}
	rows := func(x layout, trans int32, rows, cols int) bool {
		if trans != 0 {
			rows, cols = cols, rows
		}
		return int(x.rows) == rows && int(x.cols) == cols && x.ld >= int64(rows) && x.batch == s.o.batch && x.batch > 0 && x.stride >= 0
	}
	if !rows(s.a, s.d.transA, s.m, s.k) || !rows(s.b, s.d.transB, s.k, s.n) || !rows(s.c, 0, s.m, s.n) || !rows(s.o, 0, s.m, s.n) {
		return false
	}
	out := ltOperand(0, s.o)
	return out.Disjoint(int(s.o.batch))
}

func isFloat8(t cublasapi.DType) bool {
	return t == cublasapi.R8FE4M3 || t == cublasapi.R8FE5M2
}

func isHalf(t cublasapi.DType) bool { return t == cublasapi.R16F || t == cublasapi.R16BF }

func (s *shape) float8() bool { return isFloat8(s.a.t) }

// supported lists the combinations of types and epilogues.
func (s *shape) supported() bool {
	compute, scale := cublasapi.ComputeType(s.d.compute), cublasapi.DType(s.d.scale)
	if scale != ScaleTypeOf(compute) || !s.epilogueSupported() {
		return false
	}
	if !s.float8() && (s.d.scaleA|s.d.scaleB|s.d.scaleC|s.d.scaleD|s.d.amax != 0 || s.d.modeA|s.d.modeB != 0 || s.d.fast != 0) {
		return false
	}
	switch a, o := s.a.t, s.o.t; compute {
	case cublasapi.Compute64F, cublasapi.Compute32FFastTF32, cublasapi.Compute16F:
		of := map[cublasapi.ComputeType]cublasapi.DType{cublasapi.Compute64F: cublasapi.R64F,
			cublasapi.Compute32FFastTF32: cublasapi.R32F, cublasapi.Compute16F: cublasapi.R16F}[compute]
		return a == of && s.b.t == of && s.c.t == of && o == of
	case cublasapi.Compute32F:
		if s.float8() {
			return s.float8Supported()
		}
		return s.b.t == a && s.c.t == o && (a == cublasapi.R32F && o == a || isHalf(a) && (o == a || o == cublasapi.R32F))
	}
	return false
}

// float8Supported is the table of cublasLtMatmul's documentation.
func (s *shape) float8Supported() bool {
	e5 := cublasapi.R8FE5M2
	if !isFloat8(s.b.t) || s.a.t == e5 && s.b.t == e5 {
		return false
	}
	mixed := s.a.t == e5 || s.b.t == e5
	switch {
	case s.o.t == cublasapi.R32F:
		return s.c.t == cublasapi.R32F
	case isHalf(s.o.t):
		return s.c.t == s.o.t
	}
	return isHalf(s.c.t) && (s.o.t == cublasapi.R8FE4M3 || mixed)
}

// float8Fits checks the rules for 8-bit floats on Hopper.
func (s *shape) float8Fits() bool {
	multiple := func(n int64, t cublasapi.DType) bool { return n*int64(SizeOf(t))%16 == 0 }
	rowwise := int32(cublasapi.ScaleOuterVec32F)
	switch {
	case s.d.transA != 1 || s.d.transB != 0 || s.m%16 != 0 || s.k%16 != 0:
		return false
	case !multiple(s.a.ld, s.a.t) || !multiple(s.b.ld, s.b.t) || !multiple(s.c.ld, s.c.t) || !multiple(s.o.ld, s.o.t):
		return false
	case !multiple(s.a.stride, s.a.t) || !multiple(s.b.stride, s.b.t) || !multiple(s.o.stride, s.o.t):
		return false
	case s.d.scaleD|s.d.amax != 0 && !isFloat8(s.o.t):
		return false
	case s.d.modeA == rowwise && s.d.modeB == rowwise:
		return !isFloat8(s.o.t) && s.d.scaleA != 0 && s.d.scaleB != 0 && s.o.batch == 1
	}
	return s.d.modeA|s.d.modeB == 0
}

func (s *shape) is(list ...cublasapi.Epilogue) bool {
	return slices.Contains(list, cublasapi.Epilogue(s.d.epilogue))
}

func (s *shape) readsBias() bool {
	return s.is(cublasapi.EpilogueBias, cublasapi.EpilogueReLUBias, cublasapi.EpilogueGELUBias,
		cublasapi.EpilogueReLUAuxBias, cublasapi.EpilogueGELUAuxBias)
}

func (s *shape) writesBias() bool {
	return s.is(cublasapi.EpilogueDReLUBGrad, cublasapi.EpilogueDGELUBGrad, cublasapi.EpilogueBGradA, cublasapi.EpilogueBGradB)
}

func (s *shape) writesAux() bool {
	return s.is(cublasapi.EpilogueReLUAux, cublasapi.EpilogueReLUAuxBias, cublasapi.EpilogueGELUAux, cublasapi.EpilogueGELUAuxBias)
}

func (s *shape) readsAux() bool {
	return s.is(cublasapi.EpilogueDReLU, cublasapi.EpilogueDReLUBGrad, cublasapi.EpilogueDGELU, cublasapi.EpilogueDGELUBGrad)
}

// masks reports whether the auxiliary buffer is a bit mask.
func (s *shape) masks() bool {
	return s.is(cublasapi.EpilogueReLUAux, cublasapi.EpilogueReLUAuxBias, cublasapi.EpilogueDReLU, cublasapi.EpilogueDReLUBGrad)
}

func (s *shape) epilogueSupported() bool {
	if s.is(cublasapi.EpilogueDefault, cublasapi.EpilogueReLU, cublasapi.EpilogueBias, cublasapi.EpilogueReLUBias) {
		return true
	}
	if s.a.t == cublasapi.R64F || cublasapi.ComputeType(s.d.compute) == cublasapi.Compute16F {
		return false
	}
	if s.writesAux() && s.float8() {
		return isHalf(s.o.t) || !s.masks() && s.float8StoresInputOfGELU()
	}
	if s.is(cublasapi.EpilogueGELU, cublasapi.EpilogueGELUBias) || s.writesAux() {
		return true
	}
	if s.is(cublasapi.EpilogueBGradA, cublasapi.EpilogueBGradB) {
		return isHalf(s.a.t)
	}
	return s.readsAux() && !s.float8()
}

// float8StoresInputOfGELU reports whether a product of 8-bit floats with an output of 8 bits can
// have the input of GELU as a second output. cuBLASLt 13.1 on an H100 can if the output is e5m2,
// or if the output and both inputs are e4m3.
func (s *shape) float8StoresInputOfGELU() bool {
	e4, e5 := cublasapi.R8FE4M3, cublasapi.R8FE5M2
	return s.o.t == e5 || s.o.t == e4 && s.a.t == e4 && s.b.t == e4
}

// auxType returns the type of the auxiliary buffer of GELU.
func (s *shape) auxType() cublasapi.DType {
	if s.d.auxType == -1 {
		return s.o.t
	}
	return cublasapi.DType(s.d.auxType)
}

func (s *shape) biasType() cublasapi.DType {
	if s.d.biasType == -1 {
		return s.o.t
	}
	return cublasapi.DType(s.d.biasType)
}

// epilogueFits checks the buffers of the epilogue.
func (s *shape) epilogueFits() bool {
	batched := s.o.batch > 1
	if s.readsBias() || s.writesBias() {
		rows := int64(s.m)
		if s.is(cublasapi.EpilogueBGradB) {
			rows = int64(s.n)
		}
		if s.d.bias == 0 || !s.biasTypeFits() || s.d.biasStride < 0 || batched && s.writesBias() && s.d.biasStride < rows {
			return false
		}
	}
	if !s.readsAux() && !s.writesAux() {
		return true
	}
	unit, rows := int64(8), int64(s.m)
	if s.masks() {
		unit = 128
	} else if t := s.auxType(); t != s.o.t && (!s.float8() || t != cublasapi.R16F) {
		return false
	}
	return s.d.aux != 0 && s.d.auxLD%unit == 0 && s.d.auxLD >= rows &&
		(!batched || s.d.auxStride%unit == 0 && s.d.auxStride >= s.d.auxLD*int64(s.n))
}

// biasTypeFits: with 8-bit floats the type must be set.
func (s *shape) biasTypeFits() bool {
	t := s.biasType()
	switch {
	case !s.float8():
		return t == s.o.t
	case s.d.biasType == -1:
		return false
	case s.o.t == cublasapi.R32F:
		return t == cublasapi.R16BF
	}
	return t == s.c.t
}
