package memory

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/stream"
)

// A Slice is n elements of T in device memory. It is a small value that refers
// to a Buffer; the zero Slice has no elements and no device.
type Slice[T Element] struct {
	buf  *Buffer
	off  uintptr // bytes from the start of buf
	n    int
	root bool // returned by Make: only this slice can be closed
}

// A Slice has the layout of its header: each constant overflows otherwise.
const (
	_ = -uint(unsafe.Sizeof(Slice[byte]{}) ^ unsafe.Sizeof(mem.SliceHeader{}))
	_ = -uint(unsafe.Offsetof(Slice[byte]{}.off) ^ unsafe.Offsetof(mem.SliceHeader{}.Offset))
	_ = -uint(unsafe.Offsetof(Slice[byte]{}.n) ^ unsafe.Offsetof(mem.SliceHeader{}.Len))
)

// Make allocates n elements in the order of s; see Alloc. The contents are
// undefined, as with torch.empty.
func Make[T Element](s *stream.Stream, n int) (Slice[T], error) {
	size := sizeOf[T]()
	if n < 0 || n > math.MaxInt/size {
		return Slice[T]{}, fmt.Errorf("memory: make %d elements of %s: the length is out of range", n, DTypeOf[T]())
	}
	b, err := Alloc(s, n*size)
	if err != nil {
		return Slice[T]{}, err
	}
	return Slice[T]{buf: b, n: n, root: true}, nil
}

// MakeFrom is Make followed by CopyFrom.
func MakeFrom[T Element](s *stream.Stream, src []T) (Slice[T], error) {
	x, err := Make[T](s, len(src))
	if err != nil {
		return x, err
	}
	if err := x.CopyFrom(s, src); err != nil {
		_ = x.Close()
		return Slice[T]{}, err
	}
	return x, nil
}

// MakeFlat allocates one slice that has room for parts of the given lengths, and
// returns it with the parts in order (torch's flattened dense tensors). Each part
// starts at a multiple of 16 bytes.
func MakeFlat[T Element](s *stream.Stream, lens ...int) (flat Slice[T], parts []Slice[T], err error) {
	align := 16 / sizeOf[T]()
	total := 0
	at := make([]int, len(lens))
	for i, n := range lens {
		if n < 0 {
			return flat, nil, fmt.Errorf("memory: make part %d of %d elements: the length is negative", i, n)
		}
		if n > math.MaxInt/sizeOf[T]()-align-total {
			return flat, nil, fmt.Errorf("memory: make parts of %v elements: no memory has as many", lens)
		}
		at[i] = total
		total += (n + align - 1) / align * align
	}
	if flat, err = Make[T](s, total); err != nil {
		return flat, nil, err
	}
	for i, n := range lens {
		parts = append(parts, flat.Slice(at[i], at[i]+n))
	}
	return flat, parts, nil
}

// View returns n elements of T that start at a byte offset of b. The offset
// must be a multiple of the size of T.
func View[T Element](b *Buffer, byteOffset, n int) (Slice[T], error) {
	size := sizeOf[T]()
	switch {
	case b == nil:
		return Slice[T]{}, fmt.Errorf("memory: view: no buffer given")
	case byteOffset < 0 || n < 0 || byteOffset > b.Bytes() || n > (b.Bytes()-byteOffset)/size:
		return Slice[T]{}, fmt.Errorf("memory: view %d elements of %s at byte %d: the buffer has %d bytes",
			n, DTypeOf[T](), byteOffset, b.Bytes())
	case byteOffset%size != 0:
		return Slice[T]{}, fmt.Errorf("memory: view %s at byte %d: misaligned: want a multiple of %d",
			DTypeOf[T](), byteOffset, size)
	}
	return Slice[T]{buf: b, off: uintptr(byteOffset), n: n}, nil
}

// Len returns the number of elements.
func (x Slice[T]) Len() int { return x.n }

// Bytes returns the number of bytes.
func (x Slice[T]) Bytes() int { return x.n * sizeOf[T]() }

// DType returns the element type as a value.
func (x Slice[T]) DType() DType { return DTypeOf[T]() }

// Device returns the device that holds the memory, or nil for the zero Slice.
func (x Slice[T]) Device() *device.Device {
	if x.buf == nil {
		return nil
	}
	return x.buf.Device()
}

// Buffer returns the allocation that x is part of.
func (x Slice[T]) Buffer() *Buffer { return x.buf }

// Offset returns the number of bytes from the start of Buffer.
func (x Slice[T]) Offset() int { return int(x.off) }

// Ptr returns the device address of the first element, for code that calls CUDA
// directly. It is 0 for an empty allocation.
func (x Slice[T]) Ptr() uint64 { return uint64(x.raw()) }

func (x Slice[T]) raw() cudadrv.DevicePtr {
	if x.buf == nil || x.buf.ptr == 0 {
		return 0
	}
	return x.buf.ptr + cudadrv.DevicePtr(x.off)
}

// Slice returns the elements i to j-1. They share x's memory. Like a Go slice
// expression it panics if the bounds are out of range.
func (x Slice[T]) Slice(i, j int) Slice[T] {
	if i < 0 || j < i || j > x.n {
		panic(fmt.Sprintf("memory: slice bounds [%d:%d] out of range of %d elements", i, j, x.n))
	}
	return Slice[T]{buf: x.buf, off: x.off + uintptr(i*sizeOf[T]()), n: j - i}
}

// AsBytes returns the memory of x as bytes.
func (x Slice[T]) AsBytes() Slice[byte] { return Slice[byte]{buf: x.buf, off: x.off, n: x.Bytes()} }

// RecordStream tells that work on s uses the memory; see Buffer.RecordStream.
func (x Slice[T]) RecordStream(s *stream.Stream) error {
	if x.buf == nil {
		return nil
	}
	return x.buf.RecordStream(s)
}

// Close frees the memory; see Buffer.Close. If Make did not return the slice, the error
// matches ErrView.
func (x Slice[T]) Close() error {
	if x.buf == nil {
		return nil
	}
	if !x.root {
		return fmt.Errorf("memory: close a part of a buffer on %s: %w", x.Device(), ErrView)
	}
	return x.buf.Close()
}

// check returns an error if x is closed.
func (x Slice[T]) check(op string) error { return mem.Check(op, x.buf, x.n, nil) }

func sizeOf[T Element]() int {
	var z T
	return int(unsafe.Sizeof(z))
}
