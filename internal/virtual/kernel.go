package virtual

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A Param is the type of a kernel's parameter.
type Param int

// The types of parameters.
const (
	PtrParam Param = iota // a device address, 8 bytes
	Int32Param
	Int64Param
	Uint32Param
	Uint64Param
	Float32Param
	Float64Param
	Int8Param
	Uint8Param
	Int16Param
	Uint16Param
	BoolParam
	Float16Param  // its bits
	BFloat16Param // its bits
	structParam
)

// StructParam is a struct by value, of that many bytes.
func StructParam(bytes int) Param { return structParam | Param(bytes)<<8 }

// size is how many bytes a value takes.
func (p Param) size() int {
	if p&0xff == structParam {
		return int(p >> 8)
	}
	return params[p].size
}

// MaxParamBytes is how many bytes the parameters of a kernel take at most, a struct's
// aligned to 16.
const MaxParamBytes = 4096

// ParamBytes is how many bytes parameters take: each is aligned to its size.
func ParamBytes(types []Param) int {
	n := 0
	for _, p := range types {
		size := p.size()
		align := size
		if p&0xff == structParam {
			align = 16
		}
		n = (n+align-1)/align*align + size
	}
	return n
}

var params = [...]struct {
	name string
	size int
}{
	PtrParam: {"PtrParam", 8}, Int32Param: {"Int32Param", 4}, Int64Param: {"Int64Param", 8},
	Uint32Param: {"Uint32Param", 4}, Uint64Param: {"Uint64Param", 8}, Float32Param: {"Float32Param", 4},
	Float64Param: {"Float64Param", 8}, Int8Param: {"Int8Param", 1}, Uint8Param: {"Uint8Param", 1},
	Int16Param: {"Int16Param", 2}, Uint16Param: {"Uint16Param", 2}, BoolParam: {"BoolParam", 1},
	Float16Param: {"Float16Param", 2}, BFloat16Param: {"BFloat16Param", 2},
}

// A Kernel stands in for a CUDA kernel: Func carries out the whole grid in one
// call. It must touch device memory only through the KernelCall.
type Kernel struct {
	Name   string
	Params []Param
	Func   func(*KernelCall)
}

// images has the kernels that were made into images.
type images struct {
	mu  sync.Mutex
	all [][]Kernel
}

var imageMagic = []byte("chorus virtual image\n")

// ModuleImage returns an image for ModuleLoadData of this machine, in which
// ModuleGetFunction finds the kernels by name.
func (m *Machine) ModuleImage(kernels []Kernel) []byte {
	m.images.mu.Lock()
	defer m.images.mu.Unlock()
	m.images.all = append(m.images.all, slices.Clone(kernels))
	return binary.LittleEndian.AppendUint32(slices.Clone(imageMagic), uint32(len(m.images.all)-1))
}

func (i *images) find(image []byte) ([]Kernel, bool) {
	number, ok := bytes.CutPrefix(image, imageMagic)
	if !ok || len(number) < 4 {
		return nil, false
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	n := binary.LittleEndian.Uint32(number)
	if uint64(n) >= uint64(len(i.all)) {
		return nil, false
	}
	return i.all[n], true
}

type module struct {
	dev     *device
	kernels []Kernel
}

type function struct {
	dev    *device
	module cudadrv.Module
	kernel Kernel
	shared int32 // bytes of dynamic shared memory that a launch may have
}

func (d driver) ModuleLoadData(image []byte) (cudadrv.Module, cudadrv.Result) {
	c, r := d.begin("cuModuleLoadData")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	kernels, ok := d.m.images.find(image)
	if !ok {
		return 0, cudadrv.ErrorInvalidImage
	}
	h := cudadrv.Module(d.m.handle())
	d.m.modules[h] = &module{dev: c.dev, kernels: kernels}
	return h, cudadrv.Success
}

func (d driver) ModuleUnload(h cudadrv.Module) cudadrv.Result {
	c, r := d.beginEnding("cuModuleUnload")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	mod := d.m.modules[h]
	if mod == nil || mod.dev != c.dev {
		return cudadrv.ErrorInvalidHandle
	}
	delete(d.m.modules, h)
	for fh, f := range d.m.functions {
		if f.module == h {
			delete(d.m.functions, fh)
		}
	}
	return cudadrv.Success
}

func (d driver) ModuleGetFunction(h cudadrv.Module, name string) (cudadrv.Function, cudadrv.Result) {
	c, r := d.begin("cuModuleGetFunction")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	mod := d.m.modules[h]
	if mod == nil || mod.dev != c.dev {
		return 0, cudadrv.ErrorInvalidHandle
	}
	i := slices.IndexFunc(mod.kernels, func(k Kernel) bool { return k.Name == name })
	if i < 0 {
		return 0, cudadrv.ErrorNotFound
	}
	fh := cudadrv.Function(d.m.handle())
	d.m.functions[fh] = &function{dev: c.dev, module: h, kernel: mod.kernels[i], shared: maxSharedPerBlock}
	return fh, cudadrv.Success
}

// A KernelCall is one launch of a kernel, as its Func sees it. Parameters are
// numbered from 0; asking for one by the wrong type fails the launch.
type KernelCall struct {
	kernel      *Kernel
	grid, block [3]uint32
	params      []uint64
	structs     map[int][]byte
	op          *op
}

func (k *KernelCall) run(o *op) {
	call := *k // a graph runs it many times
	call.op = o
	defer func() {
		switch why := recover().(type) {
		case nil:
		case *trouble:
			o.fail(why)
		default:
			o.fail(&trouble{cudadrv.ErrorLaunchFailed, fmt.Sprintf("%s on %v panicked: %v", o.name, o.s, why)})
		}
	}()
	call.kernel.Func(&call)
}

// Grid is the number of blocks in x, y and z.
func (k *KernelCall) Grid() [3]uint32 { return k.grid }

// Block is the number of threads of a block in x, y and z.
func (k *KernelCall) Block() [3]uint32 { return k.block }

func (k *KernelCall) param(i int, want Param) uint64 {
	if i < 0 || i >= len(k.params) || k.kernel.Params[i] != want {
		panic(fmt.Sprintf("kernel %s has no parameter %d of type %s", k.kernel.Name, i, params[want].name))
	}
	return k.params[i]
}

// Ptr is parameter i, a PtrParam.
func (k *KernelCall) Ptr(i int) cudadrv.DevicePtr { return cudadrv.DevicePtr(k.param(i, PtrParam)) }

// Int32 is parameter i, an Int32Param.
func (k *KernelCall) Int32(i int) int32 { return int32(k.param(i, Int32Param)) }

// Int64 is parameter i, an Int64Param.
func (k *KernelCall) Int64(i int) int64 { return int64(k.param(i, Int64Param)) }

// Uint32 is parameter i, a Uint32Param.
func (k *KernelCall) Uint32(i int) uint32 { return uint32(k.param(i, Uint32Param)) }

// Uint64 is parameter i, a Uint64Param.
func (k *KernelCall) Uint64(i int) uint64 { return k.param(i, Uint64Param) }

// Float32 is parameter i, a Float32Param.
func (k *KernelCall) Float32(i int) float32 {
	return math.Float32frombits(uint32(k.param(i, Float32Param)))
}

// Float64 is parameter i, a Float64Param.
func (k *KernelCall) Float64(i int) float64 { return math.Float64frombits(k.param(i, Float64Param)) }

// Int8 is parameter i, an Int8Param.
func (k *KernelCall) Int8(i int) int8 { return int8(k.param(i, Int8Param)) }

// Uint8 is parameter i, a Uint8Param.
func (k *KernelCall) Uint8(i int) uint8 { return uint8(k.param(i, Uint8Param)) }

// Int16 is parameter i, an Int16Param.
func (k *KernelCall) Int16(i int) int16 { return int16(k.param(i, Int16Param)) }

// Uint16 is parameter i, a Uint16Param.
func (k *KernelCall) Uint16(i int) uint16 { return uint16(k.param(i, Uint16Param)) }

// Bool is parameter i, a BoolParam.
func (k *KernelCall) Bool(i int) bool { return k.param(i, BoolParam) != 0 }

// Float16 is parameter i, a Float16Param.
func (k *KernelCall) Float16(i int) uint16 { return uint16(k.param(i, Float16Param)) }

// BFloat16 is parameter i, a BFloat16Param.
func (k *KernelCall) BFloat16(i int) uint16 { return uint16(k.param(i, BFloat16Param)) }

// Struct is the bytes of parameter i, a StructParam. They must not be written.
func (k *KernelCall) Struct(i int) []byte {
	b, ok := k.structs[i]
	if !ok {
		panic(fmt.Sprintf("kernel %s has no parameter %d that is a struct", k.kernel.Name, i))
	}
	return b
}

// Read returns device memory and records that the kernel reads it. The bytes
// must not be written and are good until Func returns. An address that is not
// valid ends the kernel and loses the device.
func (k *KernelCall) Read(p cudadrv.DevicePtr, bytes uintptr) []byte {
	return k.touch(p, bytes, false)
}

// Write is Read for memory that the kernel writes, or reads and writes.
func (k *KernelCall) Write(p cudadrv.DevicePtr, bytes uintptr) []byte {
	return k.touch(p, bytes, true)
}

func (k *KernelCall) touch(p cudadrv.DevicePtr, bytes uintptr, write bool) []byte {
	m := k.op.s.dev.m
	m.mu.Lock()
	data, t := k.op.touch(p, uint64(bytes), write)
	m.mu.Unlock()
	if t != nil {
		panic(t)
	}
	return data
}

// ReadOf is KernelCall.Read for n elements. p must be a multiple of their size.
func ReadOf[T any](k *KernelCall, p cudadrv.DevicePtr, n int) []T {
	return viewOf[T](k, p, n, false)
}

// WriteOf is KernelCall.Write for n elements. p must be a multiple of their
// size.
func WriteOf[T any](k *KernelCall, p cudadrv.DevicePtr, n int) []T {
	return viewOf[T](k, p, n, true)
}

func viewOf[T any](k *KernelCall, p cudadrv.DevicePtr, n int, write bool) []T {
	var zero T
	checkAligned[T](k, p)
	return view[T](k.touch(p, uintptr(n)*unsafe.Sizeof(zero), write))
}

// checkAligned ends the kernel if p is no address of a T.
func checkAligned[T any](k *KernelCall, p cudadrv.DevicePtr) {
	var zero T
	if uintptr(p)%unsafe.Alignof(zero) != 0 {
		panic(&trouble{cudadrv.ErrorMisalignedAddress, fmt.Sprintf("%s on %v used elements of %d bytes at the misaligned address %#x",
			k.op.name, k.op.s, unsafe.Sizeof(zero), uint64(p))})
	}
}

// view looks at bytes as elements.
func view[T any](p []byte) []T {
	if len(p) == 0 {
		return nil
	}
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/int(unsafe.Sizeof(zero)))
}
