package tensor

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A DLPack is the address of a tensor in DLPack's exchange format: a DLManagedTensorVersioned,
// in Python a capsule "dltensor_versioned", or a DLManagedTensor, a capsule "dltensor".
type DLPack struct {
	Managed     unsafe.Pointer
	Unversioned bool // a DLManagedTensor
}

// The structs of dlpack.h, version 1.
type (
	dlDevice struct{ kind, id int32 }
	dlType   struct {
		code, bits uint8
		lanes      uint16
	}
	dlTensor struct {
		data    uintptr
		device  dlDevice
		dims    int32
		dtype   dlType
		shape   *int64
		strides *int64 // nil: row-major
		offset  uint64 // bytes
	}
	dlManaged struct {
		tensor  dlTensor
		manager uintptr
		deleter uintptr // 0: there is nothing to delete
	}
	dlManagedVersioned struct {
		major, minor uint32
		manager      uintptr
		deleter      uintptr
		flags        uint64
		tensor       dlTensor
	}
)

const (
	dlMajor, dlMinor = 1, 0
	dlCUDA           = 2 // kDLCUDA
	dlMostDims       = 64
)

// dlTypes are the pairs of a type code and its bits that both sides know.
var dlTypes = map[dlType]memory.DType{
	{0, 8, 1}: memory.Int8, {0, 16, 1}: memory.Int16, {0, 32, 1}: memory.Int32, {0, 64, 1}: memory.Int64,
	{1, 8, 1}: memory.Uint8, {1, 16, 1}: memory.Uint16, {1, 32, 1}: memory.Uint32, {1, 64, 1}: memory.Uint64,
	{2, 16, 1}: memory.Float16, {2, 32, 1}: memory.Float32, {2, 64, 1}: memory.Float64,
	{4, 16, 1}: memory.BFloat16, {6, 8, 1}: memory.Bool,
	{10, 8, 1}: memory.Float8E4M3, {12, 8, 1}: memory.Float8E5M2,
}

// callDeleter calls the deleter of a managed tensor, which is its only argument.
func callDeleter(deleter uintptr, managed unsafe.Pointer) {
	if deleter != 0 {
		dl.Get().Ptr(managed).Do(deleter)
	}
}

// FromDLPack returns a tensor that has the memory of p, without a copy
// (torch.from_dlpack), and keeps its shape and strides. The tensor takes p
// over: when it is closed, and s and the streams of RecordStream have completed
// their operations on it, p's deleter is called, on any thread. If FromDLPack
// fails, p still belongs to the caller.
//
// Operations that are enqueued on s from now on may use the memory. The producer orders s
// behind its own work: give s.Handle() to its __dlpack__(stream=...), with 1 instead of 0 for
// the default stream. If p comes by another way, let s wait for the producer's stream.
//
// p must be in memory of the device of s; one of another device, or of the host, is refused.
// So are element types that Chorus does not have, such as complex numbers and vectors, and
// negative strides. Nobody checks that a tensor that the producer flags as read-only is not written.
func FromDLPack(s *stream.Stream, p DLPack) (Tensor, error) {
	const op = "tensor: from DLPack"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return Tensor{}, err
	}
	if p.Managed == nil {
		return Tensor{}, fmt.Errorf("%s: no tensor given", op)
	}
	var x *dlTensor
	var deleter uintptr
	if p.Unversioned {
		m := (*dlManaged)(p.Managed)
		x, deleter = &m.tensor, m.deleter
	} else {
		m := (*dlManagedVersioned)(p.Managed)
		if m.major != dlMajor {
			return Tensor{}, fmt.Errorf("%s: the tensor is of version %d.%d: want version %d: give the producer max_version=(%d, %d)", op, m.major, m.minor, dlMajor, dlMajor, dlMinor)
		}
		x, deleter = &m.tensor, m.deleter
	}
	a, err := x.array(s, func() { callDeleter(deleter, p.Managed) })
	if err != nil {
		return Tensor{}, fmt.Errorf("%s: %w", op, err)
	}
	return of(a, nil)
}

// array adopts the memory of a tensor.
func (x *dlTensor) array(s *stream.Stream, release func()) (none strided.Array, err error) {
	if x.device.kind != dlCUDA {
		return none, fmt.Errorf("the tensor is on a device of DLPack's type %d: want type %d, a CUDA device", x.device.kind, dlCUDA)
	}
	if own := gpu.DeviceOf(s.Device()).Ordinal(); int(x.device.id) != own {
		return none, fmt.Errorf("the tensor is on CUDA device %d, the stream on %s: use a stream of that device: %w", x.device.id, s.Device(), device.ErrorInvalidContext)
	}
	t, ok := dlTypes[x.dtype]
	if !ok {
		return none, fmt.Errorf("elements of DLPack's type code %d with %d bits and %d lanes are not supported", x.dtype.code, x.dtype.bits, x.dtype.lanes)
	}
	if x.dims < 0 || x.dims > dlMostDims || x.dims > 0 && x.shape == nil {
		return none, fmt.Errorf("the tensor has %d dimensions: want 0 to %d, and their lengths", x.dims, dlMostDims)
	}
	shape := ints(x.shape, int(x.dims))
	strides := strided.RowMajor(shape)
	if x.strides != nil {
		strides = ints(x.strides, int(x.dims))
	}
	return strided.Adopt(s, t, uint64(x.data), x.offset, shape, strides, release)
}

func ints(p *int64, n int) []int {
	list := make([]int, n)
	for i, v := range unsafe.Slice(p, n) {
		list[i] = int(v)
	}
	return list
}

// An exported is the memory that ToDLPack has given to a consumer.
type exported struct {
	t   Tensor
	pin runtime.Pinner // of the struct, which has no other pointers than to the shape and the strides
}

// exports has, by the address of the struct, what consumers have.
var exports sync.Map

// exportCount is the number of tensors that consumers have, for tests.
var exportCount atomic.Int64

var exportDeleter = sync.OnceValue(func() uintptr {
	return dl.Callback(func(managed uintptr) {
		if v, ok := exports.LoadAndDelete(managed); ok {
			exportCount.Add(-1)
			x := v.(*exported)
			x.pin.Unpin()
			go func() { _ = x.t.Close() }() // the caller may be in a callback, where the driver must not be called
		}
	})
})

// ToDLPack exports the tensor for another library, without a copy (torch's __dlpack__).
// Operations on consumer from now on come after the operations that are enqueued on the
// stream that the memory was allocated on; consumer may be nil if the caller orders them. The
// result owns a reference to the memory, like the result of Retain. Its deleter, which the
// consumer calls on any thread, releases it. As with Close, the memory is reused behind the
// operations on its own stream. So a consumer on another stream must be recorded by
// RecordStream, or must complete its work before it calls the deleter.
//
// Unless unversioned is set, the struct is a DLManagedTensorVersioned of version 1.0.
//
// The memory must have an owner that counts references: Make, FromDLPack, or Retain of such a
// tensor. A view of a slice is refused, because nothing would keep the slice open.
func (t Tensor) ToDLPack(consumer *stream.Stream, unversioned bool) (DLPack, error) {
	const op = "tensor: to DLPack"
	a := t.at()
	if err := a.Check(op, nil); err != nil {
		return DLPack{}, err
	}
	if a.IsHost() {
		return DLPack{}, fmt.Errorf("%s: the tensor is in host memory: want one of a device", op)
	}
	code, ok := dlCode(a.DType)
	if !ok {
		return DLPack{}, fmt.Errorf("%s: DLPack has no type for %s", op, a.DType)
	}
	if !a.Owned() {
		return DLPack{}, fmt.Errorf("%s: %s borrows the memory of a slice: nothing would keep it for the consumer: export a tensor of Make", op, t)
	}
	if err := a.Follow(op, consumer); err != nil {
		return DLPack{}, err
	}
	x := &exported{t: t.Retain()}
	if x.t.at().Ptr() == 0 && t.Len() > 0 {
		return DLPack{}, errors.Join(fmt.Errorf("%s: %s: %w", op, t, device.ErrClosed), x.t.Close())
	}
	dims := make([]int64, 2*len(a.Shape), 2*len(a.Shape)+1) // the shape, and the strides
	for i, n := range a.Shape {
		dims[i], dims[len(a.Shape)+i] = int64(n), int64(a.Strides[i])
	}
	shape := unsafe.SliceData(dims)
	x.pin.Pin(shape)
	tensor := dlTensor{data: uintptr(a.Ptr()), device: dlDevice{dlCUDA, int32(gpu.DeviceOf(t.Device()).Ordinal())}, dims: int32(len(a.Shape)),
		dtype: code, shape: shape, strides: (*int64)(unsafe.Add(unsafe.Pointer(shape), 8*len(a.Shape)))}
	p := DLPack{Unversioned: unversioned}
	if unversioned {
		m := &dlManaged{tensor: tensor, deleter: exportDeleter()}
		x.pin.Pin(m)
		p.Managed = unsafe.Pointer(m)
	} else {
		m := &dlManagedVersioned{major: dlMajor, minor: dlMinor, deleter: exportDeleter(), tensor: tensor}
		x.pin.Pin(m)
		p.Managed = unsafe.Pointer(m)
	}
	exports.Store(uintptr(p.Managed), x)
	exportCount.Add(1)
	return p, nil
}

func dlCode(t memory.DType) (dlType, bool) {
	for code, known := range dlTypes {
		if known == t {
			return code, true
		}
	}
	return dlType{}, false
}

// Delete calls the deleter of p, which must not be used afterwards, for a
// consumer that does not take it over.
func (p DLPack) Delete() {
	switch {
	case p.Managed == nil:
	case p.Unversioned:
		callDeleter((*dlManaged)(p.Managed).deleter, p.Managed)
	default:
		callDeleter((*dlManagedVersioned)(p.Managed).deleter, p.Managed)
	}
}
