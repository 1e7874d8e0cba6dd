package inside

import (
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A SourceOption has the options of a source.
type SourceOption struct {
	archive  *cudacc.Archive
	resident bool
	goOnly   bool
	accesses map[string]string
}

// Embed lets devices load the source from the PTX in a.
func Embed(x handle.Has[SourceOption], a *cudacc.Archive) { handle.Of(x).archive = a }

// Archive returns the archive of Embed, or nil.
func Archive(x handle.Has[SourceOption]) *cudacc.Archive { return handle.Of(x).archive }

// MakeResident lets modules of the source live as long as their device. The caller does
// not close them.
func MakeResident(x handle.Has[SourceOption]) { handle.Of(x).resident = true }

// IsResident reports whether MakeResident was called.
func IsResident(x handle.Has[SourceOption]) bool { return handle.Of(x).resident }

// GoOnly lets virtual devices run only the Go functions of the source in tests, too: it is generated,
// and compared with its Go functions elsewhere.
func GoOnly(x handle.Has[SourceOption]) { handle.Of(x).goOnly = true }

// IsGoOnly reports whether GoOnly was called.
func IsGoOnly(x handle.Has[SourceOption]) bool { return handle.Of(x).goOnly }

// Declare tells the sanitizer how the kernels of a source that its parser does not understand
// use the memory at each pointer: for each parameter r for reading, w for writing, or - for
// neither.
func Declare(x handle.Has[SourceOption], accesses map[string]string) {
	handle.Of(x).accesses = accesses
}

// Accesses returns the accesses of Declare for a kernel, or "".
func Accesses(x handle.Has[SourceOption], kernel string) string { return handle.Of(x).accesses[kernel] }

// An ArgDevice has the device and the bytes of the memory at an argument. The device is nil if
// every device may use the memory. The public type embeds it.
type ArgDevice struct {
	d     *device.Device
	bytes uint64 // 0 if they are unknown
}

// ArgOn returns an ArgDevice of memory of d.
func ArgOn(d *device.Device, bytes int) ArgDevice { return ArgDevice{d, uint64(bytes)} }

func (a *ArgDevice) arg() *ArgDevice { return a }

// HasArgDevice is implemented by the public argument that embeds an ArgDevice.
type HasArgDevice interface{ arg() *ArgDevice }

// ArgDeviceOf returns the device of an argument, or nil.
func ArgDeviceOf(x HasArgDevice) *device.Device { return x.arg().d }

// ArgBytesOf returns the size of the memory at an argument, or 0 if it is unknown.
func ArgBytesOf(x HasArgDevice) uint64 { return x.arg().bytes }

// AllowPeers lets a launch on any device use the argument. The caller has opened peer access to
// the memory (Reach). The kernel may use other bytes than the argument's.
func AllowPeers(x HasArgDevice) { *x.arg() = ArgDevice{} }

// A Call is a launch of a kernel on a virtual device.
type Call = *machine.KernelCall

// CallOf returns the launch behind a public one.
func CallOf(x handle.Has[Call]) *machine.KernelCall { return *handle.Of(x) }

// Steps is one dimension of a strided layout: N elements, Step elements apart. Step is 0
// or more.
type Steps = machine.Steps

// ReadStrided returns the memory at the pointer that is argument i, from the first element
// of a layout to its last one. The function may read the elements of the layout, and must
// not access the memory between them, because other streams may write it at the same time.
// Each element of the layout is width Ts, and a Step counts Ts. Without dimensions the
// layout has one element.
func ReadStrided[T any](x handle.Has[Call], i, width int, dims []Steps) []T {
	return machine.StridedOf[T](CallOf(x), CallOf(x).Ptr(i), width, dims, false)
}

// UpdateStrided is ReadStrided for elements that the function may read and write.
func UpdateStrided[T any](x handle.Has[Call], i, width int, dims []Steps) []T {
	return machine.StridedOf[T](CallOf(x), CallOf(x).Ptr(i), width, dims, true)
}

// Shared returns n words that begin the given number of bytes after the pointer that is
// argument i. Kernels of several devices use that memory at the same time, so accesses must
// be atomic operations, or be ordered by the values that atomic operations read there.
func Shared[T uint32 | uint64](x handle.Has[Call], i, bytes, n int) []T {
	return machine.SharedOf[T](CallOf(x), CallOf(x).Ptr(i)+cudadrv.DevicePtr(bytes), n)
}

// Await polls ready, as a kernel polls memory, and returns true once ready returns true.
// It returns false if the device was lost; the function must then return.
func Await(x handle.Has[Call], ready func() bool) bool { return CallOf(x).Await(ready) }

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
