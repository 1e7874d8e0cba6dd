package device

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// CanAccessPeer reports whether kernels on d can read and write peer's memory;
// torch.cuda.can_device_access_peer.
func (d *Device) CanAccessPeer(peer *Device) (bool, error) {
	if err := d.sameSystem("ask for peer access", peer); err != nil {
		return false, err
	}
	return gpu.DeviceOf(d).CanAccessPeer(gpu.DeviceOf(peer))
}

// PeerRank returns the driver's ranking of the link between two devices: 0 is
// the fastest kind on the machine.
func (d *Device) PeerRank(peer *Device) (int, error) {
	v, err := d.link("rank the link", peer, cudadrv.P2PPerformanceRank)
	return int(v), err
}

// PeerAtomics reports whether the link between two devices carries atomic operations
// (cudaDevP2PAttrNativeAtomicSupported): NVLink does, and PCIe does not.
func (d *Device) PeerAtomics(peer *Device) (bool, error) {
	v, err := d.link("ask for atomics of peers", peer, cudadrv.P2PNativeAtomics)
	return v != 0, err
}

// PeerWorks reports whether a copy between the devices over peer access transfers the data
// correctly: on some machines the driver supports peer access but an IOMMU corrupts it, so
// that zeros arrive. The first call for two devices enables the access, copies a pattern
// in both directions and compares it. That takes some milliseconds and waits for these
// copies only; the result is cached. A corrupted copy is logged once through log/slog.
// PeerWorks also returns false if the devices cannot access each other. CHORUS_P2P set to
// off or force decides without a test. PeerWorks must not be called by a goroutine that
// captures a graph.
func (d *Device) PeerWorks(peer *Device) (bool, error) {
	if err := d.sameSystem("test the peer", peer); err != nil {
		return false, err
	}
	works, err := gpu.DeviceOf(d).PeerWorks(gpu.DeviceOf(peer))
	if err != nil {
		return false, fmt.Errorf("device: test copies between %s and %s: %w", d, peer, err)
	}
	return works, nil
}

// link queries an attribute of the link between two devices.
func (d *Device) link(op string, peer *Device, a cudadrv.P2PAttribute) (int32, error) {
	if err := d.sameSystem(op, peer); err != nil {
		return 0, err
	}
	return ask(d, func(drv cudadrv.Driver, h cudadrv.Device) (int32, cudadrv.Result) {
		return drv.DeviceGetP2PAttribute(a, h, gpu.DeviceOf(peer).Handle())
	})
}

func (d *Device) sameSystem(op string, o *Device) error {
	if o == nil {
		return fmt.Errorf("device: %s: no device given", op)
	}
	if d.sys != o.sys {
		return fmt.Errorf("device: %s: %s and %s belong to two systems", op, d, o)
	}
	return nil
}
