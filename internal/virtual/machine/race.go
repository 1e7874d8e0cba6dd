package machine

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
)

// A Trouble is an error of an operation. It is reported, and the device is lost.
type Trouble struct {
	Status cudadrv.Result
	Text   string
}

func (t *Trouble) Error() string { return t.Text }

// Touch returns n bytes of memory at p, which the running operation reads or
// writes. It fails if the address is not valid for the stream's device, or on a
// race. m.mu is held.
func (o *Op) Touch(p cudadrv.DevicePtr, n uint64, write bool) ([]byte, *Trouble) {
	if n == 0 {
		return nil, nil
	}
	b, t := o.resolve(p, n, write)
	if t != nil {
		return nil, t
	}
	return o.use(b, uint64(p)-b.addr, n, write)
}

// use is touch for a valid block.
func (o *Op) use(b *Block, offset, n uint64, write bool) ([]byte, *Trouble) {
	if t := o.order(b, offset, n, write); t != nil {
		return nil, t
	}
	return o.hold(b, offset, n), nil
}

// overwrite is touch for a fill with one value: it returns the parts of the memory that the
// operation fills.
func (o *Op) overwrite(p cudadrv.DevicePtr, n uint64, value byte) ([][]byte, *Trouble) {
	if n == 0 {
		return nil, nil
	}
	b, t := o.resolve(p, n, true)
	if t != nil {
		return nil, t
	}
	offset := uint64(p) - b.addr
	if t := o.order(b, offset, n, true); t != nil {
		return nil, t
	}
	o.keep(b)
	return b.overwrite(offset, n, value), nil
}

// hold returns a part of a block that stays mapped until the operation is done.
func (o *Op) hold(b *Block, offset, n uint64) []byte {
	o.keep(b)
	return b.bytes(offset, n)
}

// keep keeps a block mapped until the operation is done.
func (o *Op) keep(b *Block) {
	if b.region != nil && !slices.Contains(o.held, b.region) {
		o.held = append(o.held, b.region)
	}
}

// order records the use of a part of a block and detects races.
func (o *Op) order(b *Block, offset, n uint64, write bool) *Trouble {
	if b.pieces.Unordered(offset) {
		return nil
	}
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

func (o *Op) access() sanitizer.Access {
	return sanitizer.Access{Slot: o.s.now.Slot, Epoch: o.s.now.Epoch, Op: o.Name, Stream: o.s.reported()}
}

// record adds a use to the history h of what.
func (o *Op) record(h *sanitizer.History, what fmt.Stringer, offset, n uint64, write bool) *Trouble {
	m := o.s.dev.m
	by := o.access()
	other, bad := h.Add(&o.s.now, m.host, by, offset, offset+n, write)
	if !bad {
		return nil
	}
	c := sanitizer.Conflict{By: by, Other: other, Write: write, Lo: offset, Hi: offset + n, Block: what}
	return &Trouble{cudadrv.ErrorLaunchFailed, c.String()}
}

// resolve returns the block of [p, p+n) and checks that the operation may use it.
func (o *Op) resolve(p cudadrv.DevicePtr, n uint64, write bool) (*Block, *Trouble) {
	illegal := func(format string, args ...any) (*Block, *Trouble) {
		what := fmt.Sprintf("%s on %v used %d bytes at %#x, ", o.Name, o.s, n, uint64(p))
		return nil, &Trouble{cudadrv.ErrorIllegalAddress, what + fmt.Sprintf(format, args...)}
	}
	b, near := o.s.dev.m.Find(p)
	switch {
	case b == nil && near != nil && near.freedBy == "":
		return illegal("which is %d bytes past the end of %v", uint64(p)-near.addr-near.size, near)
	case b == nil:
		return illegal("which is not a device address")
	case b.freedBy != "":
		return illegal("which lies in %v that was freed by %s", b, b.freedBy)
	case n > b.size-(uint64(p)-b.addr):
		return illegal("which runs %d bytes past the end of %v", n-(b.size-(uint64(p)-b.addr)), b)
	case b.space != nil:
		if why := o.barred(b, uint64(p)-b.addr, n, write); why != "" {
			return illegal("%s", why)
		}
	case !o.s.dev.mayUse(b) && !crosses[o.Name]:
		return illegal("which lies in %v: device %d was not given access to it", b, o.s.dev.ordinal)
	}
	if why := b.pieces.Barred(b, b.addr, uint64(p)-b.addr, uint64(p)-b.addr+n); why != "" {
		return illegal("%s", why)
	}
	if why := o.replaced(b, uint64(p)-b.addr, n); why != "" {
		return illegal("%s", why)
	}
	return b, nil
}

// replaced returns the reason why the operation must not use bytes that were allocated after a graph captured it or, if they
// are page-locked, after it was enqueued, or "". A kernel may use them if none of its arguments points there, because it
// can read addresses from memory that is written before each launch.
func (o *Op) replaced(b *Block, offset, n uint64) string {
	at := o.captured
	if at == 0 && b.dev == nil {
		at = o.at
	}
	if at == 0 {
		return ""
	}
	piece, found := b.pieces.AllocatedAfter(at, offset, offset+n)
	switch {
	case !found || o.call != nil && !o.call.pointsTo(b.addr+min(piece.Lo, offset), b.addr+max(piece.Hi, offset+n)):
		return ""
	case o.captured != 0:
		return piece.Replaced(b, b.addr)
	}
	return fmt.Sprintf("which lies in %d bytes at %#x of %v that were closed and have another owner since the operation was enqueued: "+
		"call RecordStream for the memory, or keep it open until the operation has ended", piece.Hi-piece.Lo, b.addr+piece.Lo, b)
}

// crosses lists the copies that do not need peer access.
var crosses = callSet("cuMemcpyDtoDAsync cuMemcpyPeerAsync cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemsetD8Async cuMemFreeAsync")

// mayUse reports whether kernels of the device may use the block.
func (d *Device) mayUse(b *Block) bool {
	switch {
	case b.dev == nil || b.dev == d || b.public:
		return true
	case b.pool != nil:
		return b.pool.guests[d.ordinal]
	}
	return d.peers[b.dev.ordinal]
}

// Fail is lose without m.mu held.
func (o *Op) Fail(t *Trouble) {
	m := o.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	o.Lose(t)
}

// Lose reports a trouble and loses the device, whose sticky error is then the
// trouble's status. m.mu is held.
func (o *Op) Lose(t *Trouble) {
	o.Report(t)
	o.s.dev.lose(t.Status, t.Text)
}

// Report adds a trouble, with the device and the machine's seed, to the
// machine's reports. m.mu is held.
func (o *Op) Report(t *Trouble) {
	o.s.dev.m.Report(fmt.Sprintf("virtual device %d: %s (seed %#x)", o.s.dev.ordinal, t.Text, o.s.dev.m.seed))
}
