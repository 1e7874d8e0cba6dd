package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
)

// wire has NCCL's type for each of ours that it knows.
var wire = map[memory.DType]ncclapi.DType{
	memory.Int8: ncclapi.Int8, memory.Uint8: ncclapi.Uint8,
	memory.Int32: ncclapi.Int32, memory.Uint32: ncclapi.Uint32,
	memory.Int64: ncclapi.Int64, memory.Uint64: ncclapi.Uint64,
	memory.Float16T: ncclapi.Float16, memory.BFloat16T: ncclapi.BFloat16,
	memory.Float32: ncclapi.Float32, memory.Float64: ncclapi.Float64,
	memory.Float8E4M3T: ncclapi.Float8E4M3, memory.Float8E5M2T: ncclapi.Float8E5M2,
}

// reducible returns NCCL's type for a reduction.
func reducible[T memory.Element](name string, op Op) (ncclapi.DType, error) {
	if op < Sum || op > Avg {
		return 0, fmt.Errorf("nccl: %s: %s is not a reduction: want sum, prod, max, min or avg", name, op)
	}
	t := memory.DTypeOf[T]()
	if w, ok := wire[t]; ok {
		return w, nil
	}
	return 0, fmt.Errorf("nccl: %s: NCCL cannot reduce %s", name, t)
}

// movable returns a type and a count of the same bytes for operations that
// only move data: bool and 16-bit integers go as bytes.
func movable[T memory.Element](n int) (ncclapi.DType, uintptr) {
	t := memory.DTypeOf[T]()
	if w, ok := wire[t]; ok {
		return w, uintptr(n)
	}
	return ncclapi.Uint8, uintptr(n * t.Size())
}
