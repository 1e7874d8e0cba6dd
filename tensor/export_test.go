package tensor

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/stream"
)

// Shares reports whether two operands of a product share memory.
func Shares(x, y Tensor) bool { return shares(&x, &y) }

// MustShare reports whether two tensors are known to share memory.
func MustShare(x, y Tensor) bool { return strided.SharingOf(x.at(), y.at()) == strided.Shared }

// SharesWithin reports whether elements of a tensor may share memory.
func SharesWithin(x Tensor) bool { return sharesWithin(&x) }

// Owned reports whether the memory is freed by Close of the last reference, and does not
// belong to a slice.
func (t Tensor) Owned() bool { return t.at().Owned() }

// Exported returns the number of tensors that consumers of ToDLPack have.
func Exported() int64 { return exportCount.Load() }

// A Managed is a tensor of another library in DLPack's format.
type Managed struct {
	v       dlManagedVersioned
	m       dlManaged
	shape   []int64
	strides []int64
}

// NewManaged returns the struct of a producer. change may damage it.
func NewManaged(unversioned bool, ptr uint64, id int32, code, bits uint8, shape, strides []int64, deleter uintptr, change func(kind *int32, dims *int32, lanes *uint16, offset *uint64, major *uint32)) (*Managed, DLPack) {
	x := &Managed{shape: shape, strides: strides}
	tensor := dlTensor{data: uintptr(ptr), device: dlDevice{dlCUDA, id}, dims: int32(len(shape)), dtype: dlType{code, bits, 1}, shape: unsafe.SliceData(shape), strides: unsafe.SliceData(strides)}
	x.v = dlManagedVersioned{major: dlMajor, deleter: deleter}
	if change != nil {
		change(&tensor.device.kind, &tensor.dims, &tensor.dtype.lanes, &tensor.offset, &x.v.major)
	}
	x.v.tensor, x.m = tensor, dlManaged{tensor: tensor, deleter: deleter}
	if unversioned {
		return x, DLPack{unsafe.Pointer(&x.m), true}
	}
	return x, DLPack{unsafe.Pointer(&x.v), false}
}

// The kernels for rows, and the shapes of their grids.
var (
	RowSource  = rowSourceOf
	GridOf     = gridOf
	GridOfRows = gridOfRows
	GridOfTop  = gridOfTop
)

// GroupedLaunch returns the kernel, the grid for a number of resident blocks, and the arguments behind the pointers of a
// grouped product.
func GroupedLaunch(s *stream.Stream, c, a, b, ends Tensor, cfg *MatMulConfig, inner bool, resident int) (*kernel.Source, kernel.Grid, []any, error) {
	var g groupedLaunch
	if err := g.set(s, c, a, b, ends, cfg, inner); err != nil {
		return nil, kernel.Grid{}, nil, err
	}
	return g.kind.source(), g.grid(resident), g.numbers(), nil
}
