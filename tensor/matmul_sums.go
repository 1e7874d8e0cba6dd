package tensor

import (
	"errors"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// sums reports whether the epilogue sums an input.
func (cfg *MatMulConfig) sums() bool { return cfg.Epilogue == SumA || cfg.Epilogue == SumB }

// sumsOfVector reports whether c has one row or one column, and the epilogue sums an input.
// cuBLASLt 13 stores wrong sums for some of these products.
func (m *multiplication) sumsOfVector(cfg *MatMulConfig) bool {
	return cfg.sums() && min(m.M, m.N) == 1
}

// multiplyAndSum enqueues the product without its epilogue, and then the sums: they are the
// product of the input with ones.
func multiplyAndSum(s *stream.Stream, c, a, b Tensor, cfg *MatMulConfig) error {
	chosen, err := matMulSettings(cfg)
	if err != nil {
		return err
	}
	settings := *chosen
	settings.FP16Reduction = max(settings.FP16Reduction, FullPrecision) // as cuBLASLt sums inputs
	settings.BF16Reduction = max(settings.BF16Reduction, FullPrecision)
	plain := *cfg
	plain.Epilogue, plain.BiasGrad = NoEpilogue, Tensor{}
	if err := MatMul(s, c, a, b, &plain); err != nil {
		return err
	}
	if cfg.Epilogue == SumA {
		return sum(s, cfg.BiasGrad, a, -1, &settings)
	}
	return sum(s, cfg.BiasGrad, b, -2, &settings)
}

// sum enqueues to = the sums of x over its last dimension (-1) or its last but one (-2).
func sum(s *stream.Stream, to, x Tensor, dim int, settings *MatMulSettings) error {
	shape := x.Shape()
	k := shape[len(shape)+dim]
	ones, err := makeOnes(s, x.DType(), k)
	if err != nil {
		return err
	}
	sums, err := to.Unsqueeze(dim)
	if err == nil && dim == -1 {
		err = withView(ones, k, 1, func(ones Tensor) error { return MatMul(s, sums, x, ones, &MatMulConfig{Settings: settings}) })
	} else if err == nil {
		err = withView(ones, 1, k, func(ones Tensor) error { return MatMul(s, sums, ones, x, &MatMulConfig{Settings: settings}) })
	}
	return errors.Join(err, ones.Close())
}

func withView(x Tensor, rows, cols int, fn func(Tensor) error) error {
	v, err := x.View(rows, cols)
	if err != nil {
		return err
	}
	return fn(v)
}

// makeOnes returns n ones of a type.
func makeOnes(s *stream.Stream, t memory.DType, n int) (Tensor, error) {
	bytes, err := Make(s, memory.Uint8, n)
	if err != nil {
		return Tensor{}, err
	}
	ones, err := Make(s, t, n)
	if err == nil && n > 0 {
		err = gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemsetD8Async(cudadrv.DevicePtr(bytes.Ptr()), 1, uintptr(n), gpu.StreamOf(s).Raw())
		})
	}
	if err == nil {
		err = Copy(s, ones, bytes)
	}
	if err = errors.Join(err, bytes.Close()); err != nil {
		return Tensor{}, errors.Join(err, ones.Close())
	}
	return ones, nil
}
