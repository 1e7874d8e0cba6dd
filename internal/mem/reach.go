package mem

import (
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
)

// A Way is how a copy goes from one device to another.
type Way int

// The ways.
const (
	Direct Way = iota // in one address space
	Driver            // by the driver, which copies over the host
	Staged            // over the host by Chorus: a direct copy gives wrong data
)

// WayBetween finds the way between two devices and opens it. The first call for two
// devices tests the way, unless a capture is going on, which forbids the test. Then
// WayBetween believes the driver.
func WayBetween(a, b *device.Device) (Way, error) {
	if a == b {
		return Direct, nil
	}
	open := gpu.DeviceOf(a).Local(&openKey, func() any { return new(sync.Map) }).(*sync.Map)
	if _, known := open.Load(b); known {
		return Direct, nil
	}
	by, final, err := findWay(a, b)
	if err == nil && by == Direct && final {
		open.Store(b, true)
	}
	return by, err
}

// openKey is the key of a device's set of peers. The direct way to each peer is open and
// tested.
var openKey kept.Key

// findWay also reports whether the way is final.
func findWay(a, b *device.Device) (by Way, final bool, err error) {
	can, err := a.CanAccessPeer(b)
	if err != nil || !can {
		return Driver, false, err
	}
	works, tested := gpu.DeviceOf(a).PeerTested(gpu.DeviceOf(b))
	if !tested && !gpu.AnyCapture() {
		works, err = a.PeerWorks(b)
		tested = true
	}
	if err != nil || tested && !works {
		return Staged, false, err
	}
	if err := gpu.DeviceOf(a).EnablePeer(gpu.DeviceOf(b)); err != nil {
		return Direct, false, err
	}
	return Direct, tested, gpu.DeviceOf(b).EnablePeer(gpu.DeviceOf(a))
}

// Reach lets kernels and copies on a device and on others use the memory of each other, and
// reports whether they can. The first call for two devices tests the way; see
// device.Device.PeerWorks.
func Reach(on *device.Device, others ...*device.Device) (bool, error) {
	for _, d := range others {
		if d == on {
			continue
		}
		if by, err := WayBetween(on, d); by != Direct || err != nil {
			return false, err
		}
	}
	return true, nil
}
