package alloc

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// A reference is torch's caching allocator of one stream, written as plainly as can
// be: free blocks are joined at once, and the best one is looked for among all.
type reference struct {
	s        *Settings
	segments []*referenceSegment // in the order in which they were made; nil where one went back
}

type referenceSegment struct {
	kind   kind
	addr   uint64
	blocks []*referenceBlock // side by side
}

type referenceBlock struct {
	addr, size uint64
	used       bool
}

// candidates returns the free blocks that torch's rules allow for a size, best first.
func (r *reference) candidates(k kind, size uint64) (list []*referenceBlock) {
	type found struct {
		*referenceBlock
		order int
	}
	var all []found
	for i, s := range r.segments {
		if s == nil || s.kind != k {
			continue
		}
		order := i // small segments by number, large ones the other way round
		if k == large {
			order = -i
		}
		for _, b := range s.blocks {
			if !b.used && b.size >= size {
				all = append(all, found{b, order})
			}
		}
	}
	slices.SortFunc(all, func(x, y found) int {
		return cmp.Or(cmp.Compare(x.size, y.size), cmp.Compare(x.order, y.order), cmp.Compare(x.addr, y.addr))
	})
	for _, f := range all {
		list = append(list, f.referenceBlock)
	}
	return list
}

func (r *reference) alloc(n uint64, take func(uint64) uint64) (addr, size uint64) {
	size = r.s.round(n)
	k := kindOf(size)
	if list := r.candidates(k, size); len(list) > 0 && r.suits(list[0], size) {
		return r.hand(k, list[0], size)
	}
	bytes := r.s.segment(size)
	b := &referenceBlock{addr: take(bytes), size: bytes}
	s := &referenceSegment{kind: k, addr: b.addr, blocks: []*referenceBlock{b}}
	if i := slices.Index(r.segments, nil); i >= 0 {
		r.segments[i] = s
	} else {
		r.segments = append(r.segments, s)
	}
	return r.hand(k, b, size)
}

func (r *reference) suits(b *referenceBlock, size uint64) bool {
	if size < r.s.MaxSplit {
		return b.size < r.s.MaxSplit || r.s.MaxSplit == DefaultSettings().MaxSplit
	}
	return b.size < size+r.s.MaxNonSplitRounding
}

func (r *reference) hand(k kind, b *referenceBlock, size uint64) (uint64, uint64) {
	b.used = true
	rest := b.size - size
	if k == small && rest >= 512 || k == large && rest > 1<<20 && size < r.s.MaxSplit {
		s, i := r.at(b.addr)
		s.blocks = slices.Insert(s.blocks, i+1, &referenceBlock{addr: b.addr + size, size: rest})
		b.size = size
	}
	return b.addr, b.size
}

func (r *reference) at(addr uint64) (*referenceSegment, int) {
	for _, s := range r.segments {
		if s == nil {
			continue
		}
		if i := slices.IndexFunc(s.blocks, func(b *referenceBlock) bool { return b.addr == addr }); i >= 0 {
			return s, i
		}
	}
	panic("no such block")
}

func (r *reference) free(addr uint64) {
	s, i := r.at(addr)
	s.blocks[i].used = false
	if i+1 < len(s.blocks) && !s.blocks[i+1].used {
		s.blocks[i].size += s.blocks[i+1].size
		s.blocks = slices.Delete(s.blocks, i+1, i+2)
	}
	if i > 0 && !s.blocks[i-1].used {
		s.blocks[i-1].size += s.blocks[i].size
		s.blocks = slices.Delete(s.blocks, i, i+1)
	}
}

func (r *reference) empty() {
	for i, s := range r.segments {
		if s != nil && len(s.blocks) == 1 && !s.blocks[0].used {
			r.segments[i] = nil
		}
	}
}

// inactive returns the free parts of segments, and their bytes.
func (r *reference) inactive() (blocks, bytes int64) {
	for _, s := range r.segments {
		if s == nil || len(s.blocks) == 1 {
			continue
		}
		for _, b := range s.blocks {
			if !b.used {
				blocks, bytes = blocks+1, bytes+int64(b.size)
			}
		}
	}
	return blocks, bytes
}

// Neither the lists nor lastFreed change which block a request gets, nor any peak.
func TestBestFit(t *testing.T) {
	testhost.Serial(t)
	for _, conf := range []string{"", "roundup_power2_divisions:4", "large_segment_size_mb:12", "max_split_size_mb:24", "max_split_size_mb:32,max_non_split_rounding_mb:22"} {
		for range 12 {
			seed := rand.Uint64()
			t.Logf("%q: seed %#x", conf, seed)
			compareWithReference(t, conf, rand.New(rand.NewPCG(seed, 0)))
		}
	}
}

func compareWithReference(t *testing.T, conf string, c *rand.Rand) {
	m := newMachine(t, 1<<40)
	var settings atomic.Pointer[Settings]
	settings.Store(ptr(must(ParseSettings(conf))))
	d := NewDevice(Config{Source: m, Total: m.total}, &settings)
	a := must(d.Default().Arena(m.stream()))
	r := &reference{s: settings.Load()}
	w := world{c: c}
	next := m.next
	take := func(n uint64) uint64 {
		addr := next
		next += roundUp(n, fakePage)
		return addr
	}
	var live []uint64
	var last uint64
	var blocks, bytes int64 // the peaks
	for i := range 4000 {
		switch n := c.IntN(40); {
		case n == 0:
			require.NoError(t, d.Empty())
			r.empty()
		case n < 20+len(live)/10 && len(live) > 0:
			j := c.IntN(len(live))
			if c.IntN(3) == 0 {
				j = len(live) - 1
			}
			last = live[j]
			r.free(last)
			require.NoError(t, d.Free(last))
			live = slices.Delete(live, j, j+1)
		default:
			n := w.size()
			if c.IntN(3) == 0 && last != 0 { // what came back last, or nearly
				n = max(d.sizeAt(last), 1)
			}
			want, size := r.alloc(n, take)
			got := must(a.Alloc(n))
			require.Equal(t, want, got, "step %d: %d bytes", i, n)
			require.Equal(t, size, d.sizeAt(got))
			live = append(live, got)
		}
		n, sum := r.inactive()
		blocks, bytes = max(blocks, n), max(bytes, sum)
		if i%500 == 0 {
			d.check(t)
			require.Equal(t, n, d.Read(InactiveSplit).All.Current)
			require.Equal(t, sum, d.Read(InactiveSplitBytes).All.Current)
		}
	}
	require.Equal(t, blocks, d.Read(InactiveSplit).All.Peak)
	require.Equal(t, bytes, d.Read(InactiveSplitBytes).All.Peak)
}

// sizeAt returns the size of the block that begins at addr, or 0.
func (d *Device) sizeAt(addr uint64) uint64 {
	s := d.table.segment(addr)
	if s == nil {
		return 0
	}
	if b, x := s.block(addr); x != nil {
		return b.size()
	}
	return 0
}
