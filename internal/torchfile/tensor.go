package torchfile

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/gds/safetensors"
)

// A Tensor describes a tensor in a file of torch.save. Several tensors may share bytes.
type Tensor struct {
	Name    string
	DType   safetensors.DType
	Shape   []int
	Strides []int // in elements, 0 or more
	Offset  int64 // of the first element in the file, in bytes
}

// Size returns the size of an element in bytes.
func (t *Tensor) Size() int { return t.DType.Bits() / 8 }

// Contiguous reports whether the elements follow each other in the file in row-major order.
func (t *Tensor) Contiguous() bool {
	want := 1
	for i := len(t.Shape) - 1; i >= 0; i-- {
		if t.Shape[i] != 1 && t.Strides[i] != want && t.Elements() != 0 {
			return false
		}
		want *= t.Shape[i]
	}
	return true
}

// Elements returns the number of elements.
func (t *Tensor) Elements() int { return elements(t.Shape) }

// mostElements is the maximum number of elements of a tensor, so that its size in bits is a
// number for every type.
const mostElements = math.MaxInt / 64

// Views may repeat the bytes of a storage, such as the ones of Tensor.expand. A program that
// copies the tensors would fill a disk from a few bytes if views were unlimited.
const (
	mostRepeats = 64      // bytes of tensors for each byte of the files
	mostSmall   = 1 << 30 // bytes of tensors that files of any size may have
)

// CheckBytes returns an error if files of a number of bytes have too many bytes of tensors, each
// counted as a whole: more than 64 times their size, and more than 1 GiB.
func CheckBytes(tensors, files int64) error {
	if tensors > mostSmall && (tensors-1)/mostRepeats >= files {
		return fmt.Errorf("it has %d bytes or more of tensors in %d bytes, because views repeat elements: want at most %d times the size, or 1 GiB: save copies of the tensors without expand()",
			tensors, files, mostRepeats)
	}
	return nil
}

// span returns how many elements lie from the first element in the file to the last one.
func span(shape, strides []int) (int, error) {
	n, last := 1, 0
	for i, d := range shape {
		stride := strides[i]
		if d < 0 || stride < 0 {
			return 0, fmt.Errorf("shape %v with strides %v: want numbers of 0 or more", shape, strides)
		}
		if d != 0 && n > mostElements/d {
			return 0, fmt.Errorf("shape %v is larger than any memory", shape)
		}
		n *= d
		if d > 1 && stride > 0 {
			if stride > (math.MaxInt/8-last)/(d-1) {
				return 0, fmt.Errorf("shape %v with strides %v is larger than any file", shape, strides)
			}
			last += (d - 1) * stride
		}
	}
	if n == 0 {
		return 0, nil
	}
	return last + 1, nil
}

// dtypes are the types of torch that safetensors files have, too, by their names in torch.
var dtypes = map[string]safetensors.DType{
	"bool": safetensors.Bool, "uint8": safetensors.U8, "int8": safetensors.I8, "int16": safetensors.I16, "int32": safetensors.I32,
	"int64": safetensors.I64, "uint16": safetensors.U16, "uint32": safetensors.U32, "uint64": safetensors.U64,
	"float16": safetensors.F16, "bfloat16": safetensors.BF16, "float32": safetensors.F32, "float64": safetensors.F64,
	"float8_e4m3fn": safetensors.F8E4M3, "float8_e5m2": safetensors.F8E5M2, "float8_e8m0fnu": safetensors.F8E8M0,
	"float8_e4m3fnuz": safetensors.F8E4M3FNUZ, "float8_e5m2fnuz": safetensors.F8E5M2FNUZ, "complex64": safetensors.C64,
}

// storages are the types of the elements of torch's storages.
var storages = map[string]safetensors.DType{
	"BoolStorage": safetensors.Bool, "ByteStorage": safetensors.U8, "CharStorage": safetensors.I8, "ShortStorage": safetensors.I16,
	"IntStorage": safetensors.I32, "LongStorage": safetensors.I64, "HalfStorage": safetensors.F16, "BFloat16Storage": safetensors.BF16,
	"FloatStorage": safetensors.F32, "DoubleStorage": safetensors.F64, "ComplexFloatStorage": safetensors.C64,
	"UntypedStorage": safetensors.U8,
}
