package device

import (
	"bytes"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/kept"
)

// PeerWorks reports whether a copy between the devices over peer access brings
// what was sent: on some machines the driver offers the way and an IOMMU spoils
// it, so that zeros arrive. The first call for two devices enables the access,
// copies a pattern both ways and compares, which takes some milliseconds and
// waits for these copies only; the result is kept. Where it is false for that
// reason, that is logged once through log/slog. It is false too where the
// devices do not reach each other, and CHORUS_P2P decides without a test if it
// is off or force. It must not be called by a goroutine that captures a graph.
func (d *Device) PeerWorks(peer *Device) (bool, error) {
	if err := d.sameSystem("test the peer", peer); err != nil {
		return false, err
	}
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
		return false, fmt.Errorf("device: test copies between %s and %s: %w", d, peer, err)
	}
	p.works = works
	p.tested.Store(true)
	return works, nil
}

// PeerTested returns what PeerWorks has found before, or false where
// CHORUS_P2P=off decides, without a test.
func (d *Device) PeerTested(peer *Device) (works, tested bool) {
	if peer == nil || d.sys != peer.sys {
		return false, false
	}
	if d == peer {
		return true, true
	}
	if p := d.pairWith(peer); p.tested.Load() {
		return p.works, true
	}
	return false, env.P2P.Value() == "off"
}

// A pair is what is known of two devices.
type pair struct {
	mu     sync.Mutex
	works  bool // written before tested
	tested atomic.Bool
}

var pairKey kept.Key

// pairWith returns the one pair of two devices, which the first of them keeps.
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

// testBytes is enough for each copy engine to be used as for large copies.
const testBytes = 256 << 10

// testPattern is what is copied: no zeros. It is made once, for all pairs.
var testPattern = sync.OnceValue(func() []byte {
	p := make([]byte, testBytes)
	for i := range p {
		p[i] = byte(i*31+i>>8) | 1
	}
	return p
})

// arrives copies a pattern from one device to the other and compares. It waits
// for streams of its own only, and frees in their order: a call that waited for
// the device might wait for work that needs the caller to go on.
func arrives(from, to *Device) (ok bool, err error) {
	want, got := testPattern(), make([]byte, testBytes)
	src, err := newScratch(from)
	if err != nil {
		return false, err
	}
	defer src.close(&err)
	dst, err := newScratch(to)
	if err != nil {
		return false, err
	}
	defer dst.close(&err)
	for _, step := range []struct {
		on   *scratch
		op   string
		call func(cudadrv.Driver) cudadrv.Result
	}{
		{src, "cuMemcpyHtoDAsync", func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyHtoDAsync(src.p, unsafe.Pointer(&want[0]), testBytes, src.s)
		}},
		{dst, "cuMemsetD8Async", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemsetD8Async(dst.p, 0, testBytes, dst.s) }},
		{src, "cuMemcpyDtoDAsync", func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoDAsync(dst.p, src.p, testBytes, src.s)
		}},
		{dst, "cuMemcpyDtoHAsync", func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoHAsync(unsafe.Pointer(&got[0]), dst.p, testBytes, dst.s)
		}},
	} {
		if err := step.on.dev.Do(step.op, step.call); err != nil {
			return false, err
		}
		if err := step.on.wait(); err != nil {
			return false, err
		}
	}
	return bytes.Equal(want, got), nil
}

// A scratch is some memory of a device with a stream.
type scratch struct {
	dev *Device
	s   cudadrv.Stream
	p   cudadrv.DevicePtr
}

func newScratch(d *Device) (*scratch, error) {
	c := &scratch{dev: d}
	err := d.Do("cuStreamCreateWithPriority", func(drv cudadrv.Driver) (r cudadrv.Result) {
		c.s, r = drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
		return r
	})
	if err != nil {
		return nil, err
	}
	err = d.Do("cuMemAllocAsync", func(drv cudadrv.Driver) (r cudadrv.Result) {
		c.p, r = drv.MemAllocAsync(testBytes, c.s)
		return r
	})
	if err == nil {
		err = c.wait() // the other device uses it without an event
	}
	if err != nil {
		c.close(&err)
		return nil, err
	}
	return c, nil
}

func (c *scratch) wait() error {
	return c.dev.Do("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(c.s) })
}

// close gives everything back and stores the first error if there is none yet.
func (c *scratch) close(err *error) {
	var free error
	if c.p != 0 {
		free = c.dev.Do("cuMemFreeAsync", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFreeAsync(c.p, c.s) })
	}
	end := c.dev.Do("cuStreamDestroy", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamDestroy(c.s) })
	for _, e := range []error{free, end} {
		if *err == nil {
			*err = e
		}
	}
}
