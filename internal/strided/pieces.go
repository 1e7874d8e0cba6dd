package strided

import (
	"math"
	"math/bits"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A piece is a copy of contiguous rows. All numbers are in bytes.
type piece struct {
	to, from         uint64
	rows, row        int
	toStep, fromStep int // distance from one row to the next
}

func (p *piece) bytes() int { return p.rows * p.row }

// width returns log2 of the widest element that the copy can use, at most 16 bytes.
func (p *piece) width() int {
	all := 16 | p.to | p.from | uint64(p.row)
	if p.rows > 1 {
		all |= uint64(p.toStep) | uint64(p.fromStep)
	}
	return bits.TrailingZeros64(all)
}

// pieceOf returns the copy of src to dst as a piece, and reports whether that is possible:
// the copy must not convert, and must consist of contiguous rows. The tensors have one
// shape.
func pieceOf(dst, src Array) (p piece, ok bool) {
	if dst.DType != src.DType {
		return p, false
	}
	size := dst.DType.Size()
	p = piece{to: dst.Ptr(), from: src.Ptr(), rows: 1, row: dst.Bytes()}
	if dst.Contiguous() && src.Contiguous() {
		return p, true
	}
	loops, _ := loopsOf(dst.Shape, dst.Strides, src.Strides)
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

// RowBytes returns the length of the contiguous rows in a copy of src to dst,
// which must have the same shape. It is the whole size if the copy is
// contiguous, and 0 if a kernel cannot copy rows.
func RowBytes[T Tensor](dst, src T) int {
	p, ok := pieceOf(dst.array(), src.array())
	if !ok {
		return 0
	}
	return p.row
}

// mixed is the maximum size of pieces that share a launch with pieces of other widths. The
// launch uses the narrowest width.
const mixed = 64 << 10

// A sorter collects pieces into as few launches as possible.
type sorter struct {
	s    *stream.Stream
	mix  pieces         // small pieces
	wide [widths]pieces // other pieces, by width
}

// pieces are the copies of one launch.
type pieces struct {
	list  []piece
	width int // log2 of the element size
	bytes int
}

var sorters = sync.Pool{New: func() any { return new(sorter) }}

// sorterOn returns a sorter for copies by s's device; done returns it to the pool.
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

// add adds a piece, and launches the kernel if the table is full. It returns false if the
// piece is too large for a launch.
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

// flush launches all remaining pieces.
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

// launch enqueues the copies of a launch.
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
	width := b.width
	if err := k.pieces[width].Launch(x.s, cover(int(t.n)), tableArg(t)); err != nil {
		return err
	}
	gpu.StreamOf(x.s).Uses("kernel of copies", false, func() []cudadrv.Use { return t.uses(width) })
	return nil
}

// The structs that the kernels of strided.cu for many tensors take by value. strided.cu
// defines the same sizes.
const (
	maxPieces       = 120
	maxSources      = 328
	maxDestinations = 16
	sumWords        = 500
)

// A pieceTable has copies of rows. All numbers except the addresses count elements.
type pieceTable struct {
	to, from                   [maxPieces]uint64
	end, row, toStep, fromStep [maxPieces]uint32
	n, count                   uint32
}

// A fanTable has pieces that are copied to several destinations, concatenated.
type fanTable struct {
	to             [maxDestinations]uint64
	from           [maxSources]uint64
	end            [maxSources]uint32
	n, count, ways uint32
}

// A sumTable is a table of pieces to add: for each piece its address in each of the lists,
// and then the ends of the pieces, two in a word.
type sumTable struct {
	to                     uint64
	words                  [sumWords]uint64
	n, count, places, kind uint32
}

// ends returns the ends of the pieces, which are stored after the addresses.
func (t *sumTable) ends(count, places int) []uint32 {
	if count == 0 {
		return nil
	}
	return unsafe.Slice((*uint32)(unsafe.Pointer(&t.words[count*places])), count)
}

// sumPieces returns how many pieces with that many addresses fit in a sumTable.
func sumPieces(places int) int { return 2 * sumWords / (2*places + 1) }

// A table is an argument of a kernel. Tables are reused, since launch arguments escape to
// the heap.
type table interface {
	pieceTable | fanTable | sumTable
}

var (
	pieceTables = sync.Pool{New: func() any { return new(pieceTable) }}
	fanTables   = sync.Pool{New: func() any { return new(fanTable) }}
	sumTables   = sync.Pool{New: func() any { return new(sumTable) }}
)

func tableParam[T table]() []kernel.Param {
	var t T
	return []kernel.Param{kernel.Struct(int(unsafe.Sizeof(t)))}
}

func tableArg[T table](t *T) kernel.Arg {
	return kernel.Bytes(unsafe.Slice((*byte)(unsafe.Pointer(t)), unsafe.Sizeof(*t)))
}

// tableOf reads the table of a launch.
func tableOf[T table](c *kernel.Call) *T { return (*T)(unsafe.Pointer(unsafe.SliceData(c.Bytes(0)))) }

// The functions below implement the kernels in Go, for virtual devices.

// standInPieces implements copies of elements that are width Ws wide.
func standInPieces[W memory.Element](width int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		t := tableOf[pieceTable](c)
		var z W
		wide := uint64(width) * uint64(unsafe.Sizeof(z))
		begin := uint32(0)
		for i := range t.count {
			for at, r := begin, uint64(0); at < t.end[i]; at, r = at+t.row[i], r+1 {
				n := int(min(t.row[i], t.end[i]-at)) * width
				copy(kernel.UpdateAddress[W](c, t.to[i]+r*uint64(t.toStep[i])*wide, n),
					kernel.ReadAddress[W](c, t.from[i]+r*uint64(t.fromStep[i])*wide, n))
			}
			begin = t.end[i]
		}
	}
}

// standInFan implements the copy to several destinations.
func standInFan[W memory.Element](width int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		t := tableOf[fanTable](c)
		var z W
		wide := uint64(width) * uint64(unsafe.Sizeof(z))
		begin := uint32(0)
		for i := range t.count {
			n := int(t.end[i]-begin) * width
			from := kernel.ReadAddress[W](c, t.from[i], n)
			for _, to := range t.to[:t.ways] {
				copy(kernel.UpdateAddress[W](c, to+uint64(begin)*wide, n), from)
			}
			begin = t.end[i]
		}
	}
}

// standInSum implements sums of packs of the given number of bytes, or of single elements
// if it is 0.
func standInSum(pack int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		t := tableOf[sumTable](c)
		d := memory.DType(t.kind)
		bytes := max(pack, d.Size())
		begin, ends := 0, t.ends(int(t.count), int(t.places))
		for i := range int(t.count) {
			n := (int(ends[i]) - begin) * bytes
			sum := kernel.UpdateAddress[uint8](c, t.to+uint64(begin*bytes), n)
			for k, at := range t.words[i*int(t.places):][:t.places] {
				x := kernel.ReadAddress[uint8](c, at, n)
				if k == 0 {
					copy(sum, x)
					continue
				}
				addTo(d, sum, x)
			}
			begin = int(ends[i])
		}
	}
}
