package alloc

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// check looks at every block of the device, and at the statistics.
func (d *Device) check(t testing.TB) {
	t.Helper()
	c := checker{t: t, d: d, inFreeList: map[block]bool{}, holes: map[block]bool{}}
	unlock(d.lockAll()) // and empty lastFreed
	for _, p := range d.pools {
		for _, a := range p.arenas {
			c.freeLists(a)
		}
		for _, a := range p.arenas {
			for _, s := range a.segments {
				c.count(s.kind, ReservedBytes, s.size())
				c.count(s.kind, Segments, 1)
				c.segment(s)
			}
			for _, s := range a.spans {
				if s != nil {
					c.span(s)
				}
			}
		}
		if len(c.inFreeList) > 0 {
			t.Fatalf("on a shelf, and in no segment of the pool: %v", c.inFreeList)
		}
	}
	c.gauges()
}

type checker struct {
	t                 testing.TB
	d                 *Device
	want              [gauges][scopes]int64
	inFreeList, holes map[block]bool
}

// must is require.True, which costs more.
func (c *checker) must(ok bool, what string, args ...any) {
	if !ok {
		c.t.Helper()
		c.t.Fatalf("want: "+what, args...)
	}
}

func (c *checker) count(k kind, g Gauge, n uint64) {
	c.want[g][k] += int64(n)
	c.want[g][both] += int64(n)
}

func (c *checker) freeLists(a *Arena) {
	for k := range kinds {
		last := entry{}
		for _, e := range a.freeLists[k].from(unit) {
			b := a.domain.block(k, e.key)
			c.must(last.before(&e), "a shelf is in order")
			c.must(b.slot().isFree() && !b.slot().has(isHole) && b.arena() == a && b.size() == e.size, "what is on a shelf is free")
			c.inFreeList[b] = true
			last = e
		}
		c.must(a.freeLists[k].largest() == last.size, "the last one is the largest")
	}
}

func (c *checker) span(s *segment) {
	c.count(s.kind, ReservedBytes, s.span.bytes+fakePage*uint64(len(s.span.stuck)+len(s.span.loose)))
	c.must(len(s.span.pages) == int(s.span.bytes/fakePage), "pages are counted")
	clear(c.holes)
	for _, h := range s.span.holes {
		c.holes[h] = true
	}
	c.segment(s)
	c.must(len(c.holes) == 0, "each hole is listed once")
}

func (c *checker) segment(s *segment) {
	end := s.addr
	var prev block
	for b := (block{s, 0}); !b.nothing(); b = b.next() {
		c.must(b.addr() == end && b.prev() == prev && b.size() > 0, "the blocks are a chain")
		found, x := s.block(b.addr())
		c.must(found == b && x == b.slot(), "a block is found where it begins")
		c.must(s.holding(b.addr()) == b && s.holding(b.end()-1) == b, "a block is found by what lies in it")
		c.must(!prev.joins(b), "no two free blocks lie side by side: %#x", b.addr())
		c.must((b.record() != nil) == b.slot().has(isRecorded), "a record is kept")
		c.block(b)
		end, prev = b.end(), b
	}
	c.must(end == s.addr+s.size(), "the blocks fill the segment")
	c.must(s.domain.segments[s.number] == s, "the segment has its number")
}

func (c *checker) block(b block) {
	s, x := b.s, b.slot()
	switch {
	case x.has(isUsed):
		c.must(c.d.table.segment(b.addr()) == s && c.d.table.segment(b.end()-1) == s, "a segment is found by its addresses")
		c.count(s.kind, Allocation, 1)
		c.count(s.kind, AllocatedBytes, b.size())
		fallthrough
	case x.has(isPending):
		c.count(s.kind, Active, 1)
		c.count(s.kind, ActiveBytes, b.size())
		c.count(s.kind, RequestedBytes, x.requested())
	case x.has(isHole):
		c.must(c.holes[b], "a hole is listed")
		delete(c.holes, b)
	default:
		c.must(c.inFreeList[b], "a free block is on a shelf")
		delete(c.inFreeList, b)
		if s.span == nil && b.split() {
			c.count(s.kind, InactiveSplit, 1)
			c.count(s.kind, InactiveSplitBytes, b.size())
		}
	}
	if s.span != nil {
		for at := b.addr() / fakePage * fakePage; at < b.end() && at < b.addr()+100*fakePage; at += fakePage {
			_, ok := s.span.pages[at]
			c.must(ok != x.has(isHole), "pages are where blocks are")
		}
	}
}

func (c *checker) gauges() {
	d := c.d
	for g := range gauges {
		for s := range scopes {
			var now, caps int64
			for _, dom := range d.domains {
				now += dom.meter.r[g][s].now
				caps += dom.meter.r[g][s].cap
			}
			c.must(c.want[g][s] == now, "gauge %d of scope %d is %d, not %d", g, s, c.want[g][s], now)
			c.must(now <= d.peaks[g][s] && caps <= d.peaks[g][s], "nothing is above the peak")
		}
	}
	c.must(int64(d.reserved) == c.want[ReservedBytes][both], "reserved is what segments and pages have")
	for _, dom := range d.domains {
		c.must(!slices.Contains(d.unused, dom) || len(dom.records)+len(dom.moved)+len(dom.arenas) == 0, "an unused domain is empty")
	}
}

// A broken invariant is seen: this is the check's own test.
func TestCheckSees(t *testing.T) {
	for name, damage := range map[string]func(d *Device, s *segment){
		"a wrong statistic":     func(d *Device, s *segment) { d.domains[0].meter.up(small, Active, 1) },
		"a lost block":          func(d *Device, s *segment) { s.home.pull(block{s, 1}) },
		"a block of wrong size": func(d *Device, s *segment) { s.slot(0).size++ },
		"a lost segment":        func(d *Device, s *segment) { s.home.segments = nil },
		"a lost address":        func(d *Device, s *segment) { d.table.remove(s, s.addr, s.size()) },
	} {
		var failed failing
		m := newMachine(t, 1<<30)
		d := m.device("")
		a := must(d.Default().Arena(m.stream()))
		addr := must(a.Alloc(512))
		d.check(t)
		s := d.table.segment(addr)
		damage(d, s)
		func() {
			defer func() { _ = recover() }()
			d.check(&failed)
		}()
		require.True(t, failed.failed, name)
	}
}

// failing is a test that may fail.
type failing struct {
	testing.TB
	failed bool
}

func (f *failing) Helper() {}
func (f *failing) Fatalf(string, ...any) {
	f.failed = true
	panic("failed")
}
