package virtual

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// trouble is a fault of an operation: it is reported and costs the device.
type trouble struct {
	status cudadrv.Result
	text   string
}

func (t *trouble) Error() string { return t.text }

// touch returns n bytes of memory at p for the running operation, which reads
// or writes them. The trouble is an address that is not valid for the stream's
// device, or a race. m.mu is held.
func (o *op) touch(p cudadrv.DevicePtr, n uint64, write bool) ([]byte, *trouble) {
	if n == 0 {
		return nil, nil
	}
	b, t := o.resolve(p, n, write)
	if t != nil {
		return nil, t
	}
	return o.use(b, uint64(p)-b.addr, n, write)
}

// use is touch for a block that is known to be valid.
func (o *op) use(b *block, offset, n uint64, write bool) ([]byte, *trouble) {
	if t := o.order(b, offset, n, write); t != nil {
		return nil, t
	}
	return o.hold(b, offset, n), nil
}

// hold returns a part of a block that stays mapped until the operation is done.
func (o *op) hold(b *block, offset, n uint64) []byte {
	if b.region != nil && !slices.Contains(o.held, b.region) {
		o.held = append(o.held, b.region)
	}
	return b.bytes(offset, n)
}

// order records the use of a part of a block and finds races.
func (o *op) order(b *block, offset, n uint64, write bool) *trouble {
	if b.space == nil {
		return o.record(&b.history, b, offset, n, write)
	}
	for _, x := range b.space.within(offset, n) {
		lo, hi := max(offset, x.lo), min(offset+n, x.hi)
		x.use(o.access())
		if t := o.record(&x.memory.history, x.memory, lo-x.lo, hi-lo, write); t != nil {
			return t
		}
	}
	return nil
}

func (o *op) access() access {
	return access{slot: o.s.now.slot, epoch: o.s.now.epoch, op: o.name, stream: o.s.handle}
}

// record adds a use of what has the history.
func (o *op) record(h *history, what fmt.Stringer, offset, n uint64, write bool) *trouble {
	m := o.s.dev.m
	by := o.access()
	other, bad := h.add(&o.s.now, m.host, by, offset, offset+n, write)
	if !bad {
		return nil
	}
	remedy := "nothing orders the two streams: record an event behind the first and make the other wait for it"
	if by.stream == theHost || other.stream == theHost {
		remedy = "the one did not wait for the other: what the host does comes after a stream only once the host has waited for that"
	}
	text := fmt.Sprintf("race: %s %s bytes %d to %d of %v, which %v also uses, and %s", by, verb(write), offset, offset+n, what, other, remedy)
	return &trouble{cudadrv.ErrorLaunchFailed, text}
}

func verb(write bool) string {
	if write {
		return "writes"
	}
	return "reads"
}

// resolve finds the block of [p, p+n) and checks that the operation may use it.
func (o *op) resolve(p cudadrv.DevicePtr, n uint64, write bool) (*block, *trouble) {
	illegal := func(format string, args ...any) (*block, *trouble) {
		what := fmt.Sprintf("%s on %v used %d bytes at %#x, ", o.name, o.s, n, uint64(p))
		return nil, &trouble{cudadrv.ErrorIllegalAddress, what + fmt.Sprintf(format, args...)}
	}
	b, near := o.s.dev.m.find(p)
	switch {
	case b == nil && near != nil && near.freedBy == "":
		return illegal("which is %d bytes past the end of %v", uint64(p)-near.addr-near.size, near)
	case b == nil:
		return illegal("which is no device address")
	case b.freedBy != "":
		return illegal("which lies in %v that was freed by %s", b, b.freedBy)
	case n > b.size-(uint64(p)-b.addr):
		return illegal("which runs %d bytes past the end of %v", n-(b.size-(uint64(p)-b.addr)), b)
	case b.space != nil:
		if why := o.barred(b, uint64(p)-b.addr, n, write); why != "" {
			return illegal("%s", why)
		}
	case !o.s.dev.mayUse(b) && !crosses[o.name]:
		return illegal("which lies in %v: device %d was not given access to it", b, o.s.dev.ordinal)
	}
	if why := b.pieces.barred(b, uint64(p)-b.addr, n); why != "" {
		return illegal("%s", why)
	}
	return b, nil
}

// crosses are the copies that need no peer access.
var crosses = nameSet("cuMemcpyDtoDAsync cuMemcpyPeerAsync cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemsetD8Async cuMemFreeAsync")

// mayUse reports whether kernels of the device may use the block.
func (d *device) mayUse(b *block) bool {
	switch {
	case b.dev == nil || b.dev == d || b.public:
		return true
	case b.pool != nil:
		return b.pool.guests[d.ordinal]
	}
	return d.peers[b.dev.ordinal]
}

// fail is lose without m.mu.
func (o *op) fail(t *trouble) {
	m := o.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	o.lose(t)
}

// lose reports a trouble and loses the device to it. m.mu is held.
func (o *op) lose(t *trouble) {
	o.report(t)
	o.s.dev.lose(t.status, t.text)
}

// report adds a trouble to the machine's reports. m.mu is held.
func (o *op) report(t *trouble) {
	o.s.dev.m.report(fmt.Sprintf("virtual device %d: %s (seed %#x)", o.s.dev.ordinal, t.text, o.s.dev.m.seed))
}
