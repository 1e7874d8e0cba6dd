package device

import (
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
)

// CanAccessPeer reports whether kernels on d can read and write peer's memory;
// torch.cuda.can_device_access_peer.
func (d *Device) CanAccessPeer(peer *Device) (bool, error) {
	if err := d.sameSystem("ask for peer access", peer); err != nil {
		return false, err
	}
	if d == peer {
		return true, nil
	}
	known := d.Local(&reachKey, func() any { return new(sync.Map) }).(*sync.Map)
	if can, ok := known.Load(peer); ok {
		return can.(bool), nil
	}
	v, r := d.sys.sys.Driver.DeviceCanAccessPeer(d.handle, peer.handle)
	if r == cudadrv.Success {
		known.Store(peer, v != 0)
	}
	return v != 0, d.Check("cuDeviceCanAccessPeer", r)
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

// link asks the driver for an attribute of the link between two devices.
func (d *Device) link(op string, peer *Device, a cudadrv.P2PAttribute) (int32, error) {
	if err := d.sameSystem(op, peer); err != nil {
		return 0, err
	}
	v, r := d.sys.sys.Driver.DeviceGetP2PAttribute(a, d.handle, peer.handle)
	return v, d.Check("cuDeviceGetP2PAttribute", r)
}

// What a device keeps in Local: which peers it can reach, and which are enabled.
var reachKey, peerKey kept.Key

// EnablePeer lets work on d reach the memory of peer, plain and pooled. It does
// nothing where that is enabled already, and where the hardware cannot do it:
// copies then take the way over the host.
func (d *Device) EnablePeer(peer *Device) error {
	ok, err := d.CanAccessPeer(peer)
	if err != nil || !ok || d == peer {
		return err
	}
	peers := d.Local(&peerKey, func() any { return new(sync.Map) }).(*sync.Map)
	if _, done := peers.Load(peer); done {
		return nil
	}
	ctx, err := peer.Context()
	if err != nil {
		return err
	}
	err = d.Do("cuCtxEnablePeerAccess", func(drv cudadrv.Driver) cudadrv.Result {
		if r := drv.CtxEnablePeerAccess(ctx, 0); r != cudadrv.ErrorPeerAccessAlreadyEnabled {
			return r
		}
		return cudadrv.Success
	})
	if err != nil {
		return err
	}
	// Memory of cuMemAllocAsync has an access list of its own.
	pool, r := d.sys.sys.Driver.DeviceGetDefaultMemPool(peer.handle)
	if err := peer.Check("cuDeviceGetDefaultMemPool", r); err != nil {
		return err
	}
	err = peer.DoRelaxed("cuMemPoolSetAccess", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemPoolSetAccess(pool, d.handle) })
	if err != nil {
		return err
	}
	for _, hook := range peer.peerHooks().add(d) {
		if err := hook(d); err != nil {
			return err
		}
	}
	peers.Store(peer, true)
	return nil
}

// peerHooks has the devices that may use a device's memory, and who wants to know.
type peerHooks struct {
	mu     sync.Mutex
	guests []*Device
	hooks  []func(*Device) error
}

var peerHooksKey kept.Key

func (d *Device) peerHooks() *peerHooks {
	return d.Local(&peerHooksKey, func() any { return new(peerHooks) }).(*peerHooks)
}

func (p *peerHooks) add(d *Device) []func(*Device) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.guests, d) {
		p.guests = append(p.guests, d)
	}
	return slices.Clone(p.hooks)
}

// OnPeer calls fn for each device that may use the memory of d from now on, when
// EnablePeer lets it; Guests has those that may already. For Chorus's own packages:
// mapped memory has an access list of its own.
func (d *Device) OnPeer(fn func(peer *Device) error) {
	p := d.peerHooks()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hooks = append(p.hooks, fn)
}

// Guests returns the devices that may use the memory of d. For Chorus's own
// packages.
func (d *Device) Guests() []*Device {
	p := d.peerHooks()
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.guests)
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
