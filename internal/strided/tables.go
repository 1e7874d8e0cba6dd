package strided

import (
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

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
