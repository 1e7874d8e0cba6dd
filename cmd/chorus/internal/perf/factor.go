package perf

import (
	"fmt"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// mulSum returns the reduction that multiplies the elements of odd ranks by two.
// It is created once for each element type.
func (r *rank) mulSum(t memory.DType) (nccl.Op, error) {
	if op, ok := r.factors[t]; ok {
		return op, nil
	}
	make, ok := factorMakers[t]
	if !ok {
		return 0, fmt.Errorf("mulsum is not supported for %s", dtypeName(t))
	}
	p, err := make(r.c, r.c.Rank()%2 == 1)
	if err != nil {
		return 0, err
	}
	r.later(p.Close)
	r.factors[t] = p.Op()
	return p.Op(), nil
}

var factorMakers = map[memory.DType]func(c *nccl.Communicator, two bool) (*nccl.PreMulSum, error){
	memory.Int8: factor[int8](1, 2), memory.Uint8: factor[uint8](1, 2), memory.Int32: factor[int32](1, 2),
	memory.Uint32: factor[uint32](1, 2), memory.Int64: factor[int64](1, 2), memory.Uint64: factor[uint64](1, 2),
	memory.Float32: factor[float32](1, 2), memory.Float64: factor[float64](1, 2),
	memory.Float16:    factor(memory.Float16Of(1), memory.Float16Of(2)),
	memory.BFloat16:   factor(memory.BFloat16Of(1), memory.BFloat16Of(2)),
	memory.Float8E4M3: factor(memory.Float8E4M3Of(1), memory.Float8E4M3Of(2)),
	memory.Float8E5M2: factor(memory.Float8E5M2Of(1), memory.Float8E5M2Of(2)),
}

func factor[T memory.Element](one, two T) func(*nccl.Communicator, bool) (*nccl.PreMulSum, error) {
	return func(c *nccl.Communicator, twice bool) (*nccl.PreMulSum, error) {
		if twice {
			return nccl.NewPreMulSum(c, two)
		}
		return nccl.NewPreMulSum(c, one)
	}
}
