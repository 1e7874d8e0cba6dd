package machine

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A Param is the type of a kernel parameter.
type Param int

// The parameter types.
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

// StructParam is a struct passed by value, with the given size in bytes.
func StructParam(bytes int) Param { return structParam | Param(bytes)<<8 }

// size returns the size of a value in bytes.
func (p Param) size() int {
	if p&0xff == structParam {
		return int(p >> 8)
	}
	return params[p].size
}

// MaxParamBytes limits the total size of a kernel's parameters, with structs
// aligned to 16 bytes.
const MaxParamBytes = 4096

// ParamBytes returns the total size of parameters; each is aligned to its size.
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

// A Kernel is the Go implementation of a CUDA kernel: Func runs the whole grid in
// one call. It must access device memory only through the KernelCall.
type Kernel struct {
	Name   string
	Params []Param
	Func   func(*KernelCall)
	Limits Limits
}

// Limits are the known properties of a compiled kernel.
type Limits struct {
	MaxThreads  int // of a block; 0 means the device's limit
	Registers   int // of a thread; 0 means that they limit nothing
	SharedBytes int // static, of a block
	LocalBytes  int // of a thread
	ConstBytes  int // of the module
}

// maxThreads is the largest block that the kernel can be launched with.
func (l *Limits) maxThreads() int {
	most := maxThreadsPerBlock
	if l.MaxThreads > 0 {
		most = min(most, l.MaxThreads)
	}
	if l.Registers > 0 {
		most = min(most, warpSize*(registersPerSM/registersOfWarp(l.Registers)/warpsTogether*warpsTogether))
	}
	return most
}

// registersOfWarp returns the registers that a warp takes: registers are allocated in units of 256.
func registersOfWarp(ofThread int) int {
	return (ofThread*warpSize + registerUnit - 1) / registerUnit * registerUnit
}

// images holds the kernels of all images.
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
	dev     *Device
	kernels []Kernel
}

type function struct {
	dev    *Device
	module cudadrv.Module
	kernel Kernel
	shared int32 // limit of the dynamic shared memory of a launch in bytes
}

// ModuleLoadData waits for the device, because loading code may need memory and a synchronization
// (CUDA guide, Lazy Loading).
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
	if r := d.m.Drain(c.name, c.dev); r != cudadrv.Success {
		return 0, r
	}
	h := cudadrv.Module(d.m.Handle())
	d.m.modules[h] = &module{dev: c.dev, kernels: kernels}
	return h, cudadrv.Success
}

// ModuleUnload waits for the device, whose kernels may be the module's.
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
	d.m.Drain(c.name, c.dev)
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
	fh := cudadrv.Function(d.m.Handle())
	d.m.functions[fh] = &function{dev: c.dev, module: h, kernel: mod.kernels[i],
		shared: max(0, maxSharedPerBlock-int32(mod.kernels[i].Limits.SharedBytes))}
	return fh, cudadrv.Success
}

// A KernelCall is one launch of a kernel, passed to its Func. Parameters are
// numbered from 0. Reading a parameter with the wrong type fails the launch.
type KernelCall struct {
	kernel      *Kernel
	grid, block [3]uint32
	shared      uint32 // bytes
	params      []uint64
	structs     map[int][]byte
	trace       *[]Use
	full        bool // a cooperative grid that needs all multiprocessors
	op          *Op
}

func (k *KernelCall) run(o *Op) {
	call := *k // a graph runs it repeatedly
	call.op, o.call = o, &call
	defer func() {
		switch why := recover().(type) {
		case nil:
		case *Trouble:
			o.Fail(&Trouble{why.Status, why.Text + panicLine()})
		default:
			o.Fail(&Trouble{cudadrv.ErrorLaunchFailed, fmt.Sprintf("%s on %v panicked: %v%s", o.Name, o.s, why, panicLine())})
		}
	}()
	if k.full && !o.awaitMultiprocessors() {
		return
	}
	call.kernel.Func(&call)
}

// panicLine returns the file and the line of a kernel's Go function that has panicked or called what panicked, in a
// deferred function. It returns "" if no function of a user is on the stack.
func panicLine() string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for more, panicking := true, false; more; {
		var f runtime.Frame
		f, more = frames.Next()
		switch {
		case f.Function == "runtime.gopanic":
			panicking = true
		case !panicking || strings.HasPrefix(f.Function, "runtime."):
		case strings.HasPrefix(f.Function, chorus+"/internal/virtual/machine.(*Stream).work"):
			return ""
		case !slices.ContainsFunc(ownPackages, func(p string) bool { return strings.HasPrefix(f.Function, chorus+p) }):
			return fmt.Sprintf(" (%s:%d)", f.File, f.Line)
		}
	}
	return ""
}

const chorus = "github.com/gochorus/chorus"

// ownPackages are between a kernel's Go function and the machine.
var ownPackages = []string{"/kernel.", "/internal/inside.", "/internal/virtual/machine."}

// Name returns the name of the kernel.
func (k *KernelCall) Name() string { return k.kernel.Name }

// Shape returns the number of blocks and of threads of a block in x, y and z, and the bytes
// of dynamic shared memory of a block.
func (k *KernelCall) Shape() (blocks, threads [3]uint32, sharedBytes uint32) {
	return k.grid, k.block, k.shared
}

// Bits returns parameter i, which must be of the given type and not a struct; a
// narrower value is in the low bits.
func (k *KernelCall) Bits(i int, want Param) uint64 {
	if i < 0 || i >= len(k.params) || k.kernel.Params[i] != want {
		panic(fmt.Sprintf("kernel %s has no parameter %d of type %s", k.kernel.Name, i, params[want].name))
	}
	return k.params[i]
}

// Ptr returns parameter i, a PtrParam.
func (k *KernelCall) Ptr(i int) cudadrv.DevicePtr { return cudadrv.DevicePtr(k.Bits(i, PtrParam)) }

// pointsTo reports whether a parameter, or an aligned part of a struct, is an address in [lo, hi).
func (k *KernelCall) pointsTo(lo, hi uint64) bool {
	for i, v := range k.params {
		if k.kernel.Params[i] == PtrParam && v >= lo && v < hi {
			return true
		}
	}
	for _, s := range k.structs {
		for ; len(s) >= 8; s = s[8:] {
			if v := binary.NativeEndian.Uint64(s); v >= lo && v < hi {
				return true
			}
		}
	}
	return false
}

// Struct returns the bytes of parameter i, a StructParam, which the kernel must
// not write.
func (k *KernelCall) Struct(i int) []byte {
	b, ok := k.structs[i]
	if !ok {
		panic(fmt.Sprintf("kernel %s has no struct parameter %d", k.kernel.Name, i))
	}
	return b
}

// Read returns device memory and records that the kernel reads it. The bytes are
// read-only and valid until Func returns. An invalid address stops the kernel and
// loses the device.
func (k *KernelCall) Read(p cudadrv.DevicePtr, bytes uintptr) []byte {
	return k.touch(p, bytes, false)
}

// Write is Read for memory that the kernel writes, or reads and writes.
func (k *KernelCall) Write(p cudadrv.DevicePtr, bytes uintptr) []byte {
	return k.touch(p, bytes, true)
}

// A Use is memory that a kernel used.
type Use struct {
	Ptr   cudadrv.DevicePtr
	Bytes uintptr
	Write bool
}

// Trace sets the list to which Read and Write append what they return.
func (k *KernelCall) Trace(uses *[]Use) { k.trace = uses }

// Peek returns a copy of device memory without recording a use: other streams may be writing it.
// It returns false if the device must not use the memory.
func (k *KernelCall) Peek(p cudadrv.DevicePtr, bytes uintptr) ([]byte, bool) {
	m := k.op.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	b, t := k.op.resolve(p, uint64(bytes), false)
	if t != nil {
		return nil, false
	}
	copied := make([]byte, bytes)
	copyUnordered(copied, k.op.hold(b, uint64(p)-b.addr, uint64(bytes)))
	return copied, true
}

// copyUnordered copies bytes that another goroutine may be writing, which the
// race detector must not report because the caller ignores those bytes.
//
//go:norace
func copyUnordered(to, from []byte) { copy(to, from) }

func (k *KernelCall) touch(p cudadrv.DevicePtr, bytes uintptr, write bool) []byte {
	m := k.op.s.dev.m
	if k.trace != nil {
		*k.trace = append(*k.trace, Use{p, bytes, write})
	}
	m.mu.Lock()
	data, t := k.op.Touch(p, uint64(bytes), write)
	m.mu.Unlock()
	if t != nil {
		panic(t)
	}
	return data
}

// ReadOf is KernelCall.Read for n elements at p, which must be aligned to their
// size.
func ReadOf[T any](k *KernelCall, p cudadrv.DevicePtr, n int) []T {
	return viewOf[T](k, p, n, false)
}

// WriteOf is KernelCall.Write for n elements at p, which must be aligned to
// their size.
func WriteOf[T any](k *KernelCall, p cudadrv.DevicePtr, n int) []T {
	return viewOf[T](k, p, n, true)
}

func viewOf[T any](k *KernelCall, p cudadrv.DevicePtr, n int, write bool) []T {
	var zero T
	checkAligned[T](k, p)
	return View[T](k.touch(p, uintptr(n)*unsafe.Sizeof(zero), write))
}

// checkAligned stops the kernel if p is not a valid address for a T.
func checkAligned[T any](k *KernelCall, p cudadrv.DevicePtr) {
	var zero T
	if uintptr(p)%unsafe.Alignof(zero) != 0 {
		panic(&Trouble{cudadrv.ErrorMisalignedAddress, fmt.Sprintf("%s on %v used elements of %d bytes at the misaligned address %#x",
			k.op.Name, k.op.s, unsafe.Sizeof(zero), uint64(p))})
	}
}

// View converts bytes to elements without a copy.
func View[T any](p []byte) []T {
	if len(p) == 0 {
		return nil
	}
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/int(unsafe.Sizeof(zero)))
}
