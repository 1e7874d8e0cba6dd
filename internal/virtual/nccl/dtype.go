package nccl

import (
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A codec converts elements of types that Go does not have to float32 and back.
type codec struct {
	decode func(dst []float32, src []byte)
	encode func(dst []byte, src []float32)
}

// The 8-bit types saturate, like CUDA's conversions.
var codecs = map[ncclapi.DType]codec{
	ncclapi.Float16:    {dtype.Half.DecodeBytes, dtype.Half.EncodeBytes},
	ncclapi.BFloat16:   {dtype.BFloat.DecodeBytes, dtype.BFloat.EncodeBytes},
	ncclapi.Float8E4M3: {dtype.E4M3.DecodeBytes, dtype.E4M3.EncodeBytesSaturated},
	ncclapi.Float8E5M2: {dtype.E5M2.DecodeBytes, dtype.E5M2.EncodeBytesSaturated},
}

var dtypeNames = []string{"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"}

func dtypeName(t ncclapi.DType) string {
	if t.Size() == 0 {
		return "unknown type"
	}
	return dtypeNames[t]
}
