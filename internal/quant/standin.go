package quant

import (
	"encoding/binary"
	"math"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below implement the kernels of quant.cu in Go, for virtual devices. They round
// where the kernels round, so the bits are the same, except those of NaNs.

// An element is a type of elements.
type element struct {
	dtype   memory.DType
	c       string  // its name in quant.cu
	largest float32 // the largest finite element
	over    uint32  // a float is rounded to infinity from these bits on
}

var elements = [...]element{
	{memory.Float16, "Half", 65504, 0x477ff000},
	{memory.BFloat16, "BFloat", math.Float32frombits(0x7f7f0000), 0x7f7f8000},
	{memory.Float32, "float", math.MaxFloat32, infinite},
}

// infinite has the bits of an infinity.
const infinite = 0x7f800000

// A code is a format of 8-bit numbers.
type code struct {
	dtype        memory.DType
	c            string // its name in quant.cu
	shift, carry uint32 // the exponent of a block is that of its largest element plus carry, minus shift
	encode       func(float32) byte
	decode       func(byte) float32
}

var codes = [...]code{
	{memory.Float8E4M3, "E4M3", 8, 0x1fffff,
		func(x float32) byte { return byte(dtype.E4M3.EncodeSaturated(x)) },
		func(q byte) float32 { return dtype.E4M3.Decode(uint16(q)) }},
	{memory.Int8, "Int8", 6, 0x1ffff,
		func(x float32) byte { return byte(int8(math.RoundToEven(float64(x)))) },
		func(q byte) float32 { return float32(int8(q)) }},
}

func (e element) typ() memory.DType { return e.dtype }
func (c code) typ() memory.DType    { return c.dtype }

// indexOf returns the index of a type in a table, or -1.
func indexOf[R interface{ typ() memory.DType }](rows []R, t memory.DType) int {
	for i, r := range rows {
		if r.typ() == t {
			return i
		}
	}
	return -1
}

// A format is elements in blocks.
type format struct {
	*element
	*code
}

// exponentOf returns the exponent of the scale of a block. over has the bits of the smallest float
// that counts as infinite.
func (f *format) exponentOf(block []float32, over uint32) byte {
	most := uint32(0)
	for _, x := range block {
		most = max(most, math.Float32bits(x)&^(1<<31))
	}
	if most >= over {
		return notFinite
	}
	return byte(max((most+f.carry)>>23, f.shift) - f.shift)
}

// write rounds a block to q.
func (f *format) write(q []byte, block []float32, exponent byte) {
	inverse := float32(math.Ldexp(1, scaleZero-int(exponent)))
	for i, x := range block {
		if q[i] = 0; exponent != notFinite {
			q[i] = f.code.encode(x * inverse)
		}
	}
}

// read decodes a block. Numbers beyond largest become largest.
func (f *format) read(q []byte, exponent byte, largest float32, block []float32) {
	scale := math.Ldexp(1, int(exponent)-scaleZero)
	for i, x := range q {
		block[i] = float32(math.NaN())
		if exponent != notFinite {
			y := float64(f.code.decode(x)) * scale
			block[i] = float32(max(-float64(largest), min(y, float64(largest))))
		}
	}
}

// A call has the operands of a launch. Slices of elements, errors and chunks are of a part of the
// memory, which the kernel accesses.
type call struct {
	*format
	*kernel.Call
	x, errs  uint64 // addresses
	n, share int
}

// part returns the range of elements of a rank's share that exist.
func (c *call) part(rank int) (begin, end int) {
	return min(rank*c.share, c.n), min((rank+1)*c.share, c.n)
}

// load returns the sums of elements and errors in a rank's share, with zeros beyond the end.
func (c *call) load(rank int) []float32 {
	begin, end := c.part(rank)
	v := make([]float32, c.share)
	size := c.element.dtype.Size()
	if begin == end {
		return v
	}
	b := kernel.ReadAddress[uint8](c.Call, c.x+uint64(begin*size), (end-begin)*size)
	for i := range v[:end-begin] {
		v[i] = c.wide(b[i*size:])
	}
	if c.errs != 0 {
		for i, e := range kernel.ReadAddress[float32](c.Call, c.errs+uint64(begin)*4, end-begin) {
			v[i] += e
		}
	}
	return v
}

// store writes the elements of a rank's share that exist, and changes v to what they became.
func (c *call) store(rank int, v []float32) {
	begin, end := c.part(rank)
	size := c.element.dtype.Size()
	var last [4]byte
	var b []byte
	if begin < end {
		b = kernel.UpdateAddress[uint8](c.Call, c.x+uint64(begin*size), (end-begin)*size)
	}
	for i, x := range v {
		to := last[:]
		if i < end-begin {
			to = b[i*size:]
		}
		c.narrow(to, x)
		v[i] = c.wide(to)
	}
}

// storeErrors writes the errors of a rank's share.
func (c *call) storeErrors(rank int, v []float32) {
	if begin, end := c.part(rank); c.errs != 0 && begin < end {
		copy(kernel.UpdateAddress[float32](c.Call, c.errs+uint64(begin)*4, end-begin), v)
	}
}

// wide returns the element at b.
func (e *element) wide(b []byte) float32 {
	if e.dtype.Size() == 4 {
		return math.Float32frombits(binary.LittleEndian.Uint32(b))
	}
	return dtype.Of(e.dtype).Format.Decode(binary.LittleEndian.Uint16(b))
}

// narrow writes an element to b.
func (e *element) narrow(b []byte, x float32) {
	if e.dtype.Size() == 4 {
		binary.LittleEndian.PutUint32(b, math.Float32bits(x))
		return
	}
	binary.LittleEndian.PutUint16(b, dtype.Of(e.dtype).Format.EncodeDevice(x))
}

// encode rounds v to a chunk, and returns what the chunk has instead of v.
func (c *call) encode(chunk []byte, v []float32, over uint32, largest float32) []float32 {
	y := make([]float32, len(v))
	for i := 0; i < len(v); i += BlockLen {
		block, q := v[i:i+BlockLen], chunk[i:i+BlockLen]
		exponent := c.exponentOf(block, over)
		chunk[c.share+i/BlockLen] = exponent
		c.write(q, block, exponent)
		c.read(q, exponent, largest, y[i:i+BlockLen])
	}
	return y
}

// decode returns the elements of a chunk.
func (c *call) decode(chunk []byte, largest float32) []float32 {
	y := make([]float32, c.share)
	for i := 0; i < c.share; i += BlockLen {
		c.read(chunk[i:i+BlockLen], chunk[c.share+i/BlockLen], largest, y[i:i+BlockLen])
	}
	return y
}

// errorsOf sets y to the errors: v - y, times a factor. They are 0 in blocks that are not finite.
func errorsOf(v, y []float32, factor float32) {
	for i := range y {
		if y[i] != y[i] {
			y[i] = 0
		} else {
			y[i] = (v[i] - y[i]) * factor
		}
	}
}

func (f *format) quantize(k *kernel.Call) {
	c := &call{f, k, k.Address(0), k.Address(1), int(kernel.Get[uint64](k, 3)), int(kernel.Get[uint64](k, 4))}
	others, mine := int(k.Grid().Blocks[1]), int(kernel.Get[uint32](k, 5))
	out := kernel.Update[uint8](k, 2, others*ChunkBytes(c.share))
	for i := range others {
		rank := other(i, mine)
		v := c.load(rank)
		y := c.encode(out[i*ChunkBytes(c.share):][:ChunkBytes(c.share)], v, infinite, math.MaxFloat32)
		errorsOf(v, y, 1)
		c.storeErrors(rank, y)
	}
}

// other returns the rank of the i-th chunk of the other ranks.
func other(i, mine int) int {
	if i < mine {
		return i
	}
	return i + 1
}

func (f *format) reduce(k *kernel.Call) {
	c := &call{f, k, k.Address(0), k.Address(1), int(kernel.Get[uint64](k, 4)), int(kernel.Get[uint64](k, 5))}
	mine, ranks, factor := int(kernel.Get[uint32](k, 6)), int(kernel.Get[uint32](k, 7)), float32(1)
	in, out := kernel.Read[uint8](k, 2, (ranks-1)*ChunkBytes(c.share)), kernel.Update[uint8](k, 3, ChunkBytes(c.share))
	var sum []float32
	for r := range ranks {
		var v []float32
		switch {
		case r == mine:
			v = c.load(mine)
		case r < mine:
			v = c.decode(in[r*ChunkBytes(c.share):], math.MaxFloat32)
		default:
			v = c.decode(in[(r-1)*ChunkBytes(c.share):], math.MaxFloat32)
		}
		if r == 0 {
			sum = v
			continue
		}
		for i := range sum {
			sum[i] += v[i]
		}
	}
	if kernel.Get[uint32](k, 8) == 1 {
		factor = float32(ranks)
		for i := range sum {
			sum[i] /= factor
		}
	}
	y := c.encode(out, sum, c.over, c.largest)
	c.store(mine, y)
	errorsOf(sum, y, factor)
	c.storeErrors(mine, y)
}

func (f *format) dequantize(k *kernel.Call) {
	c := &call{f, k, k.Address(0), 0, int(kernel.Get[uint64](k, 2)), int(kernel.Get[uint64](k, 3))}
	others, mine := int(k.Grid().Blocks[1]), int(kernel.Get[uint32](k, 4))
	in := kernel.Read[uint8](k, 1, (others+1)*ChunkBytes(c.share))
	for i := range others {
		rank := other(i, mine)
		c.store(rank, c.decode(in[rank*ChunkBytes(c.share):], c.largest))
	}
}
