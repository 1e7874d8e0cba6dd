package virtual

import (
	"fmt"
	"slices"
	"sort"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// An access is the use of some bytes by one operation.
type access struct {
	slot   int
	epoch  uint64
	op     string
	stream cudadrv.Stream
}

func (a access) String() string { return fmt.Sprintf("%s on stream %#x", a.op, uintptr(a.stream)) }

// A span is a range of a block's bytes with the same accesses: the last write,
// and the reads since, at most one for each stream.
type span struct {
	lo, hi uint64
	write  access // op is "" when there was none
	reads  []access
}

// A history has the spans of a block in order; bytes in none were not used.
type history struct{ spans []span }

// The most spans that a block remembers. Beyond it the ones are forgotten that
// the host has waited for, and then the first: a race may be missed, none is
// made up.
const maxSpans = 256

// add records an access to [lo, hi) and returns an earlier one that conflicts
// with it and that now does not come after.
func (h *history) add(now *stamp, by access, lo, hi uint64, write bool) (conflict access, found bool) {
	h.split(lo)
	h.split(hi)
	first := sort.Search(len(h.spans), func(i int) bool { return h.spans[i].lo >= lo })
	fresh := make([]span, 0, 4)
	last, at := first, lo
	for ; last < len(h.spans) && h.spans[last].lo < hi; last++ {
		s := h.spans[last]
		if c, bad := s.conflict(now, write); bad {
			conflict, found = c, true
		}
		if s.lo > at {
			fresh = appendSpan(fresh, span{lo: at, hi: s.lo}.with(now, by, write))
		}
		fresh = appendSpan(fresh, s.with(now, by, write))
		at = s.hi
	}
	if at < hi {
		fresh = appendSpan(fresh, span{lo: at, hi: hi}.with(now, by, write))
	}
	h.spans = slices.Replace(h.spans, first, last, fresh...)
	return conflict, found
}

// split makes a border at p.
func (h *history) split(p uint64) {
	i := sort.Search(len(h.spans), func(i int) bool { return h.spans[i].hi > p })
	if i == len(h.spans) || h.spans[i].lo >= p {
		return
	}
	right := h.spans[i]
	right.lo, right.reads = p, slices.Clone(right.reads)
	h.spans[i].hi = p
	h.spans = slices.Insert(h.spans, i+1, right)
}

func appendSpan(list []span, s span) []span {
	if n := len(list); n > 0 && list[n-1].hi == s.lo && list[n-1].write == s.write && slices.Equal(list[n-1].reads, s.reads) {
		list[n-1].hi = s.hi
		return list
	}
	return append(list, s)
}

func (s span) conflict(now *stamp, write bool) (access, bool) {
	if s.write.op != "" && !now.after(s.write.slot, s.write.epoch) {
		return s.write, true
	}
	if write {
		for _, r := range s.reads {
			if !now.after(r.slot, r.epoch) {
				return r, true
			}
		}
	}
	return access{}, false
}

func (s span) with(now *stamp, by access, write bool) span {
	if write {
		return span{lo: s.lo, hi: s.hi, write: by}
	}
	// Reads that this one comes after need not be remembered: what comes after
	// this one comes after them.
	reads := make([]access, 0, len(s.reads)+1)
	for _, r := range s.reads {
		if !now.after(r.slot, r.epoch) {
			reads = append(reads, r)
		}
	}
	s.reads = append(reads, by)
	return s
}

// bound keeps the history small.
func (h *history) bound(host clock) {
	if len(h.spans) <= maxSpans {
		return
	}
	h.spans = slices.DeleteFunc(h.spans, func(s span) bool { return s.before(host) })
	if n := len(h.spans) - maxSpans/2; n > 0 {
		h.spans = slices.Delete(h.spans, 0, n)
	}
}

func (s span) before(host clock) bool {
	if s.write.op != "" && host.at(s.write.slot) < s.write.epoch {
		return false
	}
	return !slices.ContainsFunc(s.reads, func(r access) bool { return host.at(r.slot) < r.epoch })
}

// unfinished returns an access that the host has not waited for.
func (h *history) unfinished(host clock) (access, bool) {
	for _, s := range h.spans {
		if s.write.op != "" && host.at(s.write.slot) < s.write.epoch {
			return s.write, true
		}
		for _, r := range s.reads {
			if host.at(r.slot) < r.epoch {
				return r, true
			}
		}
	}
	return access{}, false
}

// trouble is a fault of an operation: it costs the device.
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
	if b.region != nil && !slices.Contains(o.held, b.region) {
		o.held = append(o.held, b.region)
	}
	return b.bytes(offset, n), nil
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
	other, bad := h.add(&o.s.now, by, offset, offset+n, write)
	h.bound(m.host)
	if !bad {
		return nil
	}
	text := fmt.Sprintf("race: %s %s bytes %d to %d of %v, which %v also uses, and nothing orders the two streams: "+
		"record an event behind the first and make the other wait for it",
		by, verb(write), offset, offset+n, what, other)
	m.report(fmt.Sprintf("virtual device %d: %s (seed %#x)", o.s.dev.ordinal, text, m.seed))
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

// fail loses the device to a trouble.
func (o *op) fail(t *trouble) {
	m := o.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	o.s.dev.lose(t.status, t.text)
}
