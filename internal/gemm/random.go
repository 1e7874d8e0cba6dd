package gemm

import (
	"context"
	"errors"
	"math/rand/v2"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/minifloat"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A random has a product with random operands, which it frees.
type random struct {
	s      *stream.Stream
	blocks []uint64
}

// tuneRandom tunes a problem on random operands.
func tuneRandom(ctx context.Context, s *stream.Stream, p *Problem, o *TuneOptions) (r Result, err error) {
	x := &random{s: s}
	product := &Product{Problem: *p, Factors: [2]float64{1, 0}}
	if err = x.operands(product); err == nil {
		err = x.values(product)
	}
	if err == nil {
		r, err = Tune(ctx, s, product, o)
	}
	return r, errors.Join(err, x.free())
}

func (x *random) free() error {
	var errs []error
	for _, b := range x.blocks {
		errs = append(errs, memory.FreeRaw(x.s.Device(), b))
	}
	return errors.Join(errs...)
}

// alloc returns random numbers at an address whose alignment has the given logarithm.
func (x *random) alloc(bytes int64, align uint8, t cublasapi.DType) (cudadrv.DevicePtr, error) {
	b, err := memory.AllocRaw(x.s, int(bytes)+alignUp)
	if err != nil {
		return 0, err
	}
	x.blocks = append(x.blocks, b)
	p := cudadrv.DevicePtr(b)
	if align < 8 {
		p += 1 << align
	}
	return p, fillRandom(x.s, p, bytes, t)
}

// operands makes the matrices, the bias and the auxiliary buffer.
func (x *random) operands(product *Product) (err error) {
	p, at := &product.Problem, &product.At
	// Every operand that the problem has gets an address, so that spans lists it.
	at.A, at.B, at.D = 1, 1, 1
	if p.Separate && !narrow(p.D.Type) {
		at.C = 1
	}
	if p.Aux != (Layout{}) {
		at.Aux = 1
	}
	if p.Bias != (Layout{}) {
		at.Bias = 1
	}
	t := &tuning{product: *product}
	list, sizes := t.spans(at)
	for i, ptr := range list {
		align, ty := p.align[alignD], p.D.Type
		if ptr == &at.D && !p.Separate {
			align = p.align[alignC] // without the bias
		}
		switch ptr {
		case &at.A:
			align, ty = p.align[alignA], p.A.Type
		case &at.B:
			align, ty = p.align[alignB], p.B.Type
		case &at.C:
			align, ty = p.align[alignC], p.C.Type
		}
		if *ptr, err = x.alloc(sizes[i], align, ty); err != nil {
			return err
		}
	}
	if !p.Separate {
		at.C = at.D
	}
	return nil
}

// values makes the factors and scales on the device.
func (x *random) values(product *Product) (err error) {
	p, at := &product.Problem, &product.At
	const align = 8
	if p.DeviceScalars {
		if at.Alpha, err = x.alloc(8, align, p.scaleType()); err == nil {
			at.Beta, err = x.alloc(8, align, p.scaleType())
		}
	}
	if p.RowScales && err == nil {
		if at.ScaleA, err = x.alloc(4*p.M, align, cublasapi.R32F); err == nil {
			at.ScaleB, err = x.alloc(4*p.N, align, cublasapi.R32F)
		}
	}
	return err
}

func narrow(t cublasapi.DType) bool { return t == cublasapi.R8FE4M3 || t == cublasapi.R8FE5M2 }

// pattern is the number of random bytes that are repeated.
const pattern = 1 << 20

// fillRandom writes numbers between -1 and 1. Zeros would make products faster than real
// data.
func fillRandom(s *stream.Stream, to cudadrv.DevicePtr, bytes int64, t cublasapi.DType) error {
	n := min(bytes, pattern)
	host := randomBytes(int(n/sizeOf(t)), t)
	dev, raw := gpu.DeviceOf(s.Device()), gpu.StreamOf(s).Raw()
	n = int64(len(host))
	if n == 0 {
		return nil
	}
	err := dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(to, unsafe.Pointer(&host[0]), uintptr(n), raw)
	})
	for have := n; err == nil && have < bytes; {
		more := min(have, bytes-have)
		err = dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoDAsync(to+cudadrv.DevicePtr(have), to, uintptr(more), raw)
		})
		have += more
	}
	if err == nil {
		err = gpu.StreamOf(s).Sync() // the host's bytes are read until then
	}
	return err
}

func randomBytes(n int, t cublasapi.DType) []byte {
	b := make([]byte, n*int(sizeOf(t)))
	r := rand.New(rand.NewPCG(1, 2))
	v := make([]float32, n)
	for i := range v {
		v[i] = 2*r.Float32() - 1
	}
	switch t {
	case cublasapi.R64F:
		for i, x := range v {
			*(*float64)(unsafe.Pointer(&b[8*i])) = float64(x)
		}
	case cublasapi.R32F:
		for i, x := range v {
			*(*float32)(unsafe.Pointer(&b[4*i])) = x
		}
	case cublasapi.R16F:
		minifloat.Float16.EncodeBytes(b, v)
	case cublasapi.R16BF:
		minifloat.BFloat16.EncodeBytes(b, v)
	case cublasapi.R8FE4M3:
		minifloat.Float8E4M3.EncodeBytes(b, v)
	default:
		minifloat.Float8E5M2.EncodeBytes(b, v)
	}
	return b
}
