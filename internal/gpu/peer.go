package gpu

import (
	"bytes"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/handle"
)

// The keys of a device's data about its peers: the peers that it can access, the peers
// whose access is enabled, and the peers that may access its memory.
var reachKey, peerKey, guestsKey handle.Key

// CanAccessPeer reports whether kernels on d can read and write the memory of
// peer, which must belong to the same System.
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

// EnablePeer gives work on d access to the memory of peer, plain and pooled. It
// does nothing if the access is enabled already, or if the hardware does not
// support it; copies then go through the host. Both devices must belong to one
// System.
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

// OnPeer registers fn, which EnablePeer calls for each further device that may access the memory of d;
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

// PeerWorks reports whether copies between two devices of one System over peer access
// transfer the data correctly. The first call for two devices enables the access and tests
// the copies.
func (d *Device) PeerWorks(peer *Device) (bool, error) {
	if d == peer {
		return true, nil
	}
	p := d.pairWith(peer)
	if p.tested.Load() {
		return p.works, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tested.Load() {
		return p.works, nil
	}
	works, err := d.testPeer(peer)
	if err != nil {
		return false, err
	}
	p.works = works
	p.tested.Store(true)
	return works, nil
}

// PeerTested returns the result of PeerWorks, if it is known. It returns false if
// CHORUS_P2P=off decides, without a test.
func (d *Device) PeerTested(peer *Device) (works, tested bool) {
	if d == peer {
		return true, true
	}
	if p := d.pairWith(peer); p.tested.Load() {
		return p.works, true
	}
	return false, env.P2P.Value() == "off"
}

// A pair caches the test of two devices.
type pair struct {
	mu     sync.Mutex
	works  bool // written before tested
	tested atomic.Bool
}

var pairKey handle.Key

// pairWith returns the pair of two devices, which is stored in the device with the lower
// ordinal.
func (d *Device) pairWith(peer *Device) *pair {
	if d.ordinal > peer.ordinal {
		d, peer = peer, d
	}
	pairs := d.Local(&pairKey, func() any { return new(sync.Map) }).(*sync.Map)
	if p, ok := pairs.Load(peer); ok {
		return p.(*pair)
	}
	p, _ := pairs.LoadOrStore(peer, new(pair))
	return p.(*pair)
}

func (d *Device) testPeer(peer *Device) (bool, error) {
	mode, err := env.P2P.OneOf("auto", "off", "force")
	if err != nil || mode == "off" {
		return false, err
	}
	for _, way := range [][2]*Device{{d, peer}, {peer, d}} {
		can, err := way[0].CanAccessPeer(way[1])
		if err != nil || !can {
			return false, err
		}
		if err := way[0].EnablePeer(way[1]); err != nil {
			return false, err
		}
	}
	if mode == "force" {
		return true, nil
	}
	for _, way := range [][2]*Device{{d, peer}, {peer, d}} {
		ok, err := arrives(way[0], way[1])
		if err != nil {
			return false, err
		}
		if !ok {
			slog.Warn("chorus: direct copies between two GPUs bring wrong data, so they are staged through host memory; "+
				"an IOMMU or ACS is the usual cause, and NCCL may need NCCL_P2P_DISABLE=1",
				"from", way[0].String(), "to", way[1].String())
			return false, nil
		}
	}
	return true, nil
}

// testBytes is large enough that every copy engine behaves as for large copies.
const testBytes = 256 << 10

// testPattern is the test data, without zero bytes. It is made once, for all pairs.
var testPattern = sync.OnceValue(func() []byte {
	p := make([]byte, testBytes)
	for i := range p {
		p[i] = byte(i*31+i>>8) | 1
	}
	return p
})

// arrives copies a pattern from one device to the other and compares it. It uses and waits
// for its own streams only. If it waited for the device, it could wait for work that needs
// the caller to continue.
func arrives(from, to *Device) (ok bool, err error) {
	want, got := testPattern(), make([]byte, testBytes)
	src, err := newScratch(from)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, src.close()) }()
	dst, err := newScratch(to)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, dst.close()) }()
	for _, step := range []struct {
		on   *scratch
		call func(cudadrv.Driver) cudadrv.Result
	}{
		{src, func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyHtoDAsync(src.p, unsafe.Pointer(&want[0]), testBytes, src.s)
		}},
		{dst, func(drv cudadrv.Driver) cudadrv.Result { return drv.MemsetD8Async(dst.p, 0, testBytes, dst.s) }},
		{src, func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoDAsync(dst.p, src.p, testBytes, src.s)
		}},
		{dst, func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoHAsync(unsafe.Pointer(&got[0]), dst.p, testBytes, dst.s)
		}},
	} {
		if err := step.on.dev.Do(step.call); err != nil {
			return false, err
		}
		if err := step.on.dev.SyncStream(step.on.s); err != nil {
			return false, err
		}
	}
	return bytes.Equal(want, got), nil
}

// A scratch is memory of a device with a stream.
type scratch struct {
	dev *Device
	s   cudadrv.Stream
	p   cudadrv.DevicePtr
}

func newScratch(d *Device) (*scratch, error) {
	s, err := d.NewStream(0)
	if err != nil {
		return nil, err
	}
	c := &scratch{dev: d, s: s}
	err = d.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		c.p, r = drv.MemAllocAsync(testBytes, c.s)
		return r
	})
	if err == nil {
		err = d.SyncStream(s) // the other device uses the memory without an event
	}
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// close releases everything.
func (c *scratch) close() error {
	var free error
	if c.p != 0 {
		free = c.dev.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFreeAsync(c.p, c.s) })
	}
	return errors.Join(free, c.dev.DestroyStream(c.s))
}
