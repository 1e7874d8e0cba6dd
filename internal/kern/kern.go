// Package kern holds the options of package kernel that only other packages of Chorus need.
// These are precompiled sources, modules that live as long as their device, arguments in the
// memory of other devices, and the strided accesses of stand-ins. Public types embed them.
package kern

import (
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ptx"
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
