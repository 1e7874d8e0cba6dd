// Package kern holds the options of package kernel that only other packages of Chorus need.
// These are precompiled sources, modules that live as long as their device, arguments in the
// memory of other devices, and the strided accesses of stand-ins. Public types embed them.
package kern

import (
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

// A SourceOption has the options of a source. The public type embeds it.
type SourceOption struct {
	archive  *ptx.Archive
	resident bool
	goOnly   bool
	accesses map[string]string
}

func (o *SourceOption) source() *SourceOption { return o }

// HasSourceOption is implemented by the public source that embeds a SourceOption.
type HasSourceOption interface{ source() *SourceOption }

// Embed lets devices load the source from the PTX in a.
func Embed(x HasSourceOption, a *ptx.Archive) { x.source().archive = a }

// Archive returns the archive of Embed, or nil.
func Archive(x HasSourceOption) *ptx.Archive { return x.source().archive }

// MakeResident lets modules of the source live as long as their device. The caller does
// not close them.
func MakeResident(x HasSourceOption) { x.source().resident = true }

// IsResident reports whether MakeResident was called.
func IsResident(x HasSourceOption) bool { return x.source().resident }

// GoOnly lets virtual devices run only the Go functions of the source in tests, too: it is generated,
// and compared with its Go functions elsewhere.
func GoOnly(x HasSourceOption) { x.source().goOnly = true }

// IsGoOnly reports whether GoOnly was called.
func IsGoOnly(x HasSourceOption) bool { return x.source().goOnly }

// Declare tells the sanitizer how the kernels of a source that its parser does not understand
// use the memory at each pointer: for each parameter r for reading, w for writing, or - for
// neither.
func Declare(x HasSourceOption, accesses map[string]string) { x.source().accesses = accesses }

// Accesses returns the accesses of Declare for a kernel, or "".
func Accesses(x HasSourceOption, kernel string) string { return x.source().accesses[kernel] }

// An ArgDevice has the device and the bytes of the memory at an argument. The device is nil if
// every device may use the memory. The public type embeds it.
type ArgDevice struct {
	d     *device.Device
	bytes uint64 // 0 if they are unknown
}

// On returns an ArgDevice of memory of d.
func On(d *device.Device, bytes int) ArgDevice { return ArgDevice{d, uint64(bytes)} }

func (a *ArgDevice) arg() *ArgDevice { return a }

// HasArgDevice is implemented by the public argument that embeds an ArgDevice.
type HasArgDevice interface{ arg() *ArgDevice }

// DeviceOf returns the device of an argument, or nil.
func DeviceOf(x HasArgDevice) *device.Device { return x.arg().d }

// BytesOf returns the size of the memory at an argument, or 0 if it is unknown.
func BytesOf(x HasArgDevice) uint64 { return x.arg().bytes }

// AllowPeers lets a launch on any device use the argument. The caller has opened peer access to
// the memory (mem.Reach). The kernel may use other bytes than the argument's.
func AllowPeers(x HasArgDevice) { *x.arg() = ArgDevice{} }

// A CallRef has a launch of a kernel on a virtual device. The public type embeds it.
type CallRef struct{ k *machine.KernelCall }

// NewCallRef returns the reference of a launch for the public type.
func NewCallRef(k *machine.KernelCall) CallRef { return CallRef{k} }

func (r *CallRef) call() *machine.KernelCall { return r.k }

// HasCall is implemented by the public type that embeds a CallRef.
type HasCall interface{ call() *machine.KernelCall }

// CallOf returns the launch behind a public one.
func CallOf(x HasCall) *machine.KernelCall { return x.call() }

// Steps is one dimension of a strided layout: N elements, Step elements apart. Step is 0
// or more.
type Steps = machine.Steps

// ReadStrided returns the memory at the pointer that is argument i, from the first element
// of a layout to its last one. The function may read the elements of the layout, and must
// not access the memory between them, because other streams may write it at the same time.
// Each element of the layout is width Ts, and a Step counts Ts. Without dimensions the
// layout has one element.
func ReadStrided[T memory.Element](x HasCall, i, width int, dims []Steps) []T {
	return machine.StridedOf[T](x.call(), x.call().Ptr(i), width, dims, false)
}

// UpdateStrided is ReadStrided for elements that the function may read and write.
func UpdateStrided[T memory.Element](x HasCall, i, width int, dims []Steps) []T {
	return machine.StridedOf[T](x.call(), x.call().Ptr(i), width, dims, true)
}

// Shared returns n words that begin the given number of bytes after the pointer that is
// argument i. Kernels of several devices use that memory at the same time, so accesses must
// be atomic operations, or be ordered by the values that atomic operations read there.
func Shared[T uint32 | uint64](x HasCall, i, bytes, n int) []T {
	return machine.SharedOf[T](x.call(), x.call().Ptr(i)+cudadrv.DevicePtr(bytes), n)
}

// Await polls ready, as a kernel polls memory, and returns true once ready returns true.
// It returns false if the device was lost; the function must then return.
func Await(x HasCall, ready func() bool) bool { return x.call().Await(ready) }

// A PerDevice has one value for each device, such as a struct of kernels. The zero PerDevice
// is ready to use.
type PerDevice[T any] struct{ key handle.Key }

type loading[T any] struct {
	once  sync.Once
	value T
	err   error
}

// Of returns the value of dev. The first call loads it, and all calls return its error.
func (p *PerDevice[T]) Of(dev *device.Device, load func(*T, *device.Device) error) (*T, error) {
	l := gpu.DeviceOf(dev).Local(&p.key, func() any { return new(loading[T]) }).(*loading[T])
	l.once.Do(func() { l.err = load(&l.value, dev) })
	return &l.value, l.err
}
