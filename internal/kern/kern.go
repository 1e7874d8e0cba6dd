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

// An ArgDevice has the device of an argument, which is nil if every device may use the
// argument. The public type embeds it.
type ArgDevice struct{ d *device.Device }

// On returns an ArgDevice of d.
func On(d *device.Device) ArgDevice { return ArgDevice{d} }

func (a *ArgDevice) arg() *ArgDevice { return a }

// HasArgDevice is implemented by the public argument that embeds an ArgDevice.
type HasArgDevice interface{ arg() *ArgDevice }

// DeviceOf returns the device of an argument, or nil.
func DeviceOf(x HasArgDevice) *device.Device { return x.arg().d }

// AllowPeers lets a launch on any device use the argument. The caller has opened peer access to
// the memory (mem.Reach).
func AllowPeers(x HasArgDevice) { x.arg().d = nil }
