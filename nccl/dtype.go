package nccl

import (
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
)

// sinceFloat8 is the first NCCL that reduces 8-bit floats.
const sinceFloat8 = 22403

// A wireType is the NCCL type for elements of one of Chorus's types.
type wireType struct {
	move   ncclapi.DType // for operations without arithmetic; bytes if some NCCL version lacks the type
	reduce ncclapi.DType
	sums   bool  // NCCL can reduce the type
	since  int32 // the first NCCL version that can
}

var wireTypes = [...]wireType{
	memory.Bool:       {move: ncclapi.Uint8, reduce: ncclapi.Uint8, sums: true},
	memory.Int8:       {move: ncclapi.Int8, reduce: ncclapi.Int8, sums: true},
	memory.Uint8:      {move: ncclapi.Uint8, reduce: ncclapi.Uint8, sums: true},
	memory.Int16:      {move: ncclapi.Uint8},
	memory.Uint16:     {move: ncclapi.Uint8},
	memory.Int32:      {move: ncclapi.Int32, reduce: ncclapi.Int32, sums: true},
	memory.Uint32:     {move: ncclapi.Uint32, reduce: ncclapi.Uint32, sums: true},
	memory.Int64:      {move: ncclapi.Int64, reduce: ncclapi.Int64, sums: true},
	memory.Uint64:     {move: ncclapi.Uint64, reduce: ncclapi.Uint64, sums: true},
	memory.Float16:    {move: ncclapi.Float16, reduce: ncclapi.Float16, sums: true},
	memory.BFloat16:   {move: ncclapi.BFloat16, reduce: ncclapi.BFloat16, sums: true},
	memory.Float32:    {move: ncclapi.Float32, reduce: ncclapi.Float32, sums: true},
	memory.Float64:    {move: ncclapi.Float64, reduce: ncclapi.Float64, sums: true},
	memory.Float8E4M3: {move: ncclapi.Uint8, reduce: ncclapi.Float8E4M3, sums: true, since: sinceFloat8},
	memory.Float8E5M2: {move: ncclapi.Uint8, reduce: ncclapi.Float8E5M2, sums: true, since: sinceFloat8},
}
