package gemm

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/minifloat"
	"github.com/gochorus/chorus/memory"
)

// scalars holds alpha and beta in the scale type.
type scalars struct {
	f64 [2]float64
	f32 [2]float32
	f16 [2]uint16
}

func (c *scalars) set(p *Product) {
	for i, v := range p.Factors {
		c.f64[i], c.f32[i] = v, float32(v)
		if p.Compute == cublasapi.Compute16F {
			c.f16[i] = minifloat.Float16.Encode(float32(v))
		}
	}
}

// of returns the addresses of alpha and beta.
func (c *scalars) of(p *Product) (alpha, beta cublasapi.Scalar) {
	if p.DeviceScalars {
		return cublasapi.Scalar{Device: p.At.Alpha}, cublasapi.Scalar{Device: p.At.Beta}
	}
	at := [2]unsafe.Pointer{unsafe.Pointer(&c.f32[0]), unsafe.Pointer(&c.f32[1])}
	switch p.scaleType() {
	case cublasapi.R64F:
		at = [2]unsafe.Pointer{unsafe.Pointer(&c.f64[0]), unsafe.Pointer(&c.f64[1])}
	case cublasapi.R16F:
		at = [2]unsafe.Pointer{unsafe.Pointer(&c.f16[0]), unsafe.Pointer(&c.f16[1])}
	}
	return cublasapi.Scalar{Host: at[0]}, cublasapi.Scalar{Host: at[1]}
}

// needsNoProduct reports whether cuBLASLt must not see that k is 0, or that alpha is 0. cuBLAS
// accepts a k of 0.
func (p *Product) needsNoProduct() bool {
	if p.K == 0 {
		return !p.plain()
	}
	return p.returnsEarly() && !p.DeviceScalars && p.Factors == [2]float64{0, 1}
}

// returnsEarly reports whether cuBLASLt does not write D if alpha is 0 and beta is 1. It takes
// D = C for granted if C is a vector, even if D is another matrix or an epilogue follows.
func (p *Product) returnsEarly() bool {
	return min(p.M, p.N) == 1 &&
		(p.Separate || p.Epilogue != cublasltapi.EpilogueDefault) &&
		p.Epilogue != cublasltapi.EpilogueBGradA && p.Epilogue != cublasltapi.EpilogueBGradB
}

// replaceProduct replaces the matrices of the call in progress by zeros, in memory
// of the stream that the caller frees, and alpha by 1; on the device by 0, because it may be NaN.
func (q *queue) replaceProduct() (room uint64, err error) {
	p := &q.now
	const k = 16 // 8-bit floats need a multiple of it
	bytes := int(k * max(p.M, p.N) * max(sizeOf(p.A.Type), sizeOf(p.B.Type)))
	room, err = memory.AllocRaw(q.s, bytes)
	if err != nil {
		return room, err
	}
	zeros := cudadrv.DevicePtr(room)
	p.K, p.TransA, p.TransB = k, cublasapi.Trans, cublasapi.NoTrans // the order of 8-bit floats
	p.A.LD, p.A.Stride, p.B.LD, p.B.Stride = k, 0, k, 0
	p.At.A, p.At.B, p.At.Alpha, p.Factors[0] = zeros, zeros, zeros, 1
	return room, q.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(zeros, 0, uintptr(bytes), gpu.StreamOf(q.s).Raw())
	})
}
