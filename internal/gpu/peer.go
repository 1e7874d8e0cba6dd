package gpu

import (
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
)

// The keys of a device's data about its peers: the peers that it can access, the peers
// whose access is enabled, and the peers that may access its memory.
var reachKey, peerKey, guestsKey kept.Key

// CanAccessPeer reports whether kernels on d can read and write peer's memory. Both belong
// to one System.
func (d *Device) CanAccessPeer(peer *Device) (bool, error) {
	if d == peer {
		return true, nil
	}
	known := d.Local(&reachKey, func() any { return new(sync.Map) }).(*sync.Map)
	if can, ok := known.Load(peer); ok {
		return can.(bool), nil
	}
	var v int32
	err := d.Ask(func(drv cudadrv.Driver) (r cudadrv.Result) {
		v, r = drv.DeviceCanAccessPeer(d.handle, peer.handle)
		return r
	})
	if err == nil {
		known.Store(peer, v != 0)
	}
	return v != 0, err
}

// EnablePeer gives work on d access to the memory of peer, plain and pooled. It does
// nothing if the access is enabled already, or if the hardware does not support it; copies
// then go through the host. Both belong to one System.
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
	err = d.Do(func(drv cudadrv.Driver) cudadrv.Result {
		if r := drv.CtxEnablePeerAccess(ctx, 0); r != cudadrv.ErrorPeerAccessAlreadyEnabled {
			return r
		}
		return cudadrv.Success
	})
	if err != nil {
		return err
	}
	// Memory of cuMemAllocAsync has a separate access list.
	pool, err := peer.DefaultPool()
	if err != nil {
		return err
	}
	err = peer.DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemPoolSetAccess(pool, d.handle) })
	if err != nil {
		return err
	}
	for _, hook := range peer.guests().add(d) {
		if err := hook(d); err != nil {
			return err
		}
	}
	peers.Store(peer, true)
	return nil
}

// guests are the devices that may access a device's memory, and the functions to call for
// each new one.
type guests struct {
	mu    sync.Mutex
	list  []*Device
	hooks []func(*Device) error
}

func (d *Device) guests() *guests {
	return d.Local(&guestsKey, func() any { return new(guests) }).(*guests)
}

func (g *guests) add(d *Device) []func(*Device) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.Contains(g.list, d) {
		g.list = append(g.list, d)
	}
	return slices.Clone(g.hooks)
}

// OnPeer makes EnablePeer call fn for each further device that may access the memory of d;
// Guests returns the existing ones. Mapped memory needs it, because it has a separate
// access list.
func (d *Device) OnPeer(fn func(peer *Device) error) {
	g := d.guests()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hooks = append(g.hooks, fn)
}

// Guests returns the devices that may access the memory of d.
func (d *Device) Guests() []*Device {
	g := d.guests()
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.list)
}
