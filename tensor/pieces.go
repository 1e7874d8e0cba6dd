package tensor

import (
	"math"
	"math/bits"
	"sync"

	"github.com/gochorus/chorus/stream"
)

// A piece is a copy of rows of neighbours. All is in bytes.
type piece struct {
	to, from         uint64
	rows, row        int
	toStep, fromStep int // from one row to the next
}

func (p *piece) bytes() int { return p.rows * p.row }

// width returns of how many bytes the elements can be that the copy moves, at most 16, as
// a power of two.
func (p *piece) width() int {
	all := 16 | p.to | p.from | uint64(p.row)
	if p.rows > 1 {
		all |= uint64(p.toStep) | uint64(p.fromStep)
	}
	return bits.TrailingZeros64(all)
}

// pieceOf returns the copy of src to dst, which have one shape, as a piece, and reports
// whether it is one: it converts nothing and is rows.
func pieceOf(dst, src Tensor) (p piece, ok bool) {
	if dst.dtype != src.dtype {
		return p, false
	}
	size := dst.dtype.Size()
	p = piece{to: dst.Ptr(), from: src.Ptr(), rows: 1, row: dst.Bytes()}
	if dst.Contiguous() && src.Contiguous() {
		return p, true
	}
	loops, _ := loopsOf(dst.shape, dst.strides, src.strides)
	if n := len(loops); n > 0 && loops[n-1].dst == 1 && loops[n-1].src == 1 {
		p.row = loops[n-1].n * size
		loops = loops[:n-1]
	} else {
		p.row = size
	}
	switch len(loops) {
	case 0:
		return p, true
	case 1:
		l := loops[0]
		p.rows, p.toStep, p.fromStep = l.n, l.dst*size, l.src*size
		most := math.MaxUint32 << p.width()
		return p, p.toStep <= most && p.fromStep <= most
	}
	return p, false
}

// RowBytes returns how long the runs of neighbours are in a copy of src to dst, which have
// one shape: all of it where it is one run, and 0 where a kernel makes no rows of it. For
// Chorus's own packages.
func RowBytes(dst, src Tensor) int {
	p, ok := pieceOf(dst, src)
	if !ok {
		return 0
	}
	return p.row
}

// mixed is up to how many bytes a piece does not mind to be copied in narrower elements
// than it could, together with others.
const mixed = 64 << 10

// A sorter collects pieces for as few launches as there can be.
type sorter struct {
	s    *stream.Stream
	mix  pieces         // small ones
	wide [widths]pieces // others, by width
}

// pieces are those of one launch.
type pieces struct {
	list  []piece
	width int // of all of them
	bytes int
}

var sorters = sync.Pool{New: func() any { return new(sorter) }}

// sorterOn returns a sorter of copies that s's device makes; done gives it back.
func sorterOn(s *stream.Stream) *sorter {
	x := sorters.Get().(*sorter)
	x.s = s
	return x
}

func (x *sorter) done() {
	x.s = nil
	x.mix.clear()
	for i := range x.wide {
		x.wide[i].clear()
	}
	sorters.Put(x)
}

func (b *pieces) clear() { b.list, b.bytes = b.list[:0], 0 }

// add takes a piece, and launches what there is where that has no more room. It reports
// false for one that is too large for a launch.
func (x *sorter) add(p piece) (ok bool, err error) {
	width := p.width()
	b := &x.wide[width]
	if p.bytes() <= mixed {
		b = &x.mix
	}
	if p.bytes()>>width > math.MaxInt32 {
		return false, nil
	}
	if len(b.list) == maxPieces || len(b.list) > 0 && (b.bytes+p.bytes())>>width > math.MaxInt32 {
		if err := x.launch(b); err != nil {
			return true, err
		}
	}
	if len(b.list) == 0 {
		b.width = width
	}
	b.list = append(b.list, p)
	b.width = min(b.width, width)
	b.bytes += p.bytes()
	return true, nil
}

// flush launches all that is left.
func (x *sorter) flush() error {
	if err := x.launch(&x.mix); err != nil {
		return err
	}
	for i := range x.wide {
		if err := x.launch(&x.wide[i]); err != nil {
			return err
		}
	}
	return nil
}

// launch makes the copies of a launch.
func (x *sorter) launch(b *pieces) error {
	if len(b.list) == 0 {
		return nil
	}
	k, err := kernelsOf(x.s.Device())
	if err != nil {
		return err
	}
	t := pieceTables.Get().(*pieceTable)
	defer pieceTables.Put(t)
	t.fill(b)
	b.clear()
	return k.pieces[b.width].Launch(x.s, cover(int(t.n)), tableArg(t))
}
