package gemm

import (
	"errors"
	"math"
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

// needsDeviceFactors reports whether cuBLASLt must not see that alpha is 0. For some products
// of float64 it then returns without writing D, because D = C if beta is 1, although D may be
// another matrix than C and an epilogue may follow.
func (p *Product) needsDeviceFactors() bool {
	return p.Compute == cublasapi.Compute64F && !p.DeviceScalars && p.Factors[0] == 0 &&
		(p.Separate || p.Epilogue != cublasltapi.EpilogueDefault)
}

// moveFactors writes alpha, which is 0, and beta to memory of the stream, which the caller
// frees, and makes the call in progress read them there. The memory is filled byte by byte
// because fills can be captured, and copies from Go memory cannot.
func (q *queue) moveFactors() (room uint64, err error) {
	const size = 8
	room, err = memory.AllocRaw(q.s, 2*size)
	if err != nil {
		return room, err
	}
	at := cudadrv.DevicePtr(room)
	fill := func(p cudadrv.DevicePtr, value uint8, n uintptr) {
		err = errors.Join(err, q.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemsetD8Async(p, value, n, gpu.StreamOf(q.s).Raw())
		}))
	}
	fill(at, 0, 2*size)
	beta := math.Float64bits(q.now.Factors[1])
	for i := range size {
		if b := uint8(beta >> (8 * i)); b != 0 {
			fill(at+cudadrv.DevicePtr(size+i), b, 1)
		}
	}
	q.now.DeviceScalars, q.now.At.Alpha, q.now.At.Beta = true, at, at+size
	return room, err
}
