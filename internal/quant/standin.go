package quant

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below implement the source in Go, for virtual devices. They round where the
// kernels round, so the bits are the same, except those of NaNs.

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
	c            string             // its name in quant.cu
	shift, carry uint32             // the exponent of a block is that of its largest element plus carry, minus shift
	bits         func(float32) byte // rounds to nearest even
	value        func(byte) float32
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
			q[i] = f.code.bits(x * inverse)
		}
	}
}

// read decodes a block. Numbers beyond largest become largest.
func (f *format) read(q []byte, exponent byte, largest float32, block []float32) {
	scale := math.Ldexp(1, int(exponent)-scaleZero)
	for i, x := range q {
		block[i] = float32(math.NaN())
		if exponent != notFinite {
			y := float64(f.code.value(x)) * scale
			block[i] = float32(max(-float64(largest), min(y, float64(largest))))
		}
	}
}

// Operands are the memory of a rank in a launch: N elements at X, and as many errors at Errors, or
// 0. Its methods do what the kernels do with a chunk of elements. Elements beyond the end count
// as 0.
type Operands struct {
	Call      *kernel.Call
	X, Errors uint64
	N         int
	*format
}

// Open returns the operands of a launch for a type and a format.
func Open(c *kernel.Call, t, f memory.DType, x, errors uint64, n int) *Operands {
	return &Operands{c, x, errors, n, &format{&elements[indexOf(elements[:], t)], &codes[indexOf(codes[:], f)]}}
}

// existing returns the number of elements from at on that exist, of so many.
func (o *Operands) existing(at, length int) int { return max(0, min(at+length, o.N)-at) }

// load returns the sums of elements and errors, with zeros beyond the end.
func (o *Operands) load(at, length int) []float32 {
	v := make([]float32, length)
	size, n := o.element.dtype.Size(), o.existing(at, length)
	if n == 0 {
		return v
	}
	b := kernel.ReadAddress[uint8](o.Call, o.X+uint64(at*size), n*size)
	for i := range v[:n] {
		v[i] = o.wide(b[i*size:])
	}
	if o.Errors != 0 {
		for i, e := range kernel.ReadAddress[float32](o.Call, o.Errors+uint64(at)*4, n) {
			v[i] += e
		}
	}
	return v
}

// store writes the elements that exist, and changes v to what they became.
func (o *Operands) store(at int, v []float32) {
	size, n := o.element.dtype.Size(), o.existing(at, len(v))
	var beyond [4]byte
	var b []byte
	if n > 0 {
		b = kernel.UpdateAddress[uint8](o.Call, o.X+uint64(at*size), n*size)
	}
	for i, x := range v {
		to := beyond[:]
		if i < n {
			to = b[i*size:]
		}
		o.narrow(to, x)
		v[i] = o.wide(to)
	}
}

// storeErrors writes the errors: v - y, times a factor. They are 0 in blocks that are not finite.
func (o *Operands) storeErrors(at int, v, y []float32, factor float32) {
	n := o.existing(at, len(v))
	if o.Errors == 0 || n == 0 {
		return
	}
	for i, e := 0, kernel.UpdateAddress[float32](o.Call, o.Errors+uint64(at)*4, n); i < n; i++ {
		if e[i] = 0; y[i] == y[i] {
			e[i] = (v[i] - y[i]) * factor
		}
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
func (f *format) encode(chunk []byte, v []float32, over uint32, largest float32) []float32 {
	for i := 0; i < len(v); i += BlockLen {
		exponent := f.exponentOf(v[i:i+BlockLen], over)
		chunk[len(v)+i/BlockLen] = exponent
		f.write(chunk[i:i+BlockLen], v[i:i+BlockLen], exponent)
	}
	return f.decode(chunk, largest)
}

// decode returns the elements of a chunk.
func (f *format) decode(chunk []byte, largest float32) []float32 {
	y := make([]float32, len(chunk)/(BlockLen+1)*BlockLen)
	for i := 0; i < len(y); i += BlockLen {
		f.read(chunk[i:i+BlockLen], chunk[len(y)+i/BlockLen], largest, y[i:i+BlockLen])
	}
	return y
}

// Decode returns the numbers of a chunk, at most the largest finite element of a type.
func Decode(t, f memory.DType, chunk []byte) []float32 {
	e := &elements[indexOf(elements[:], t)]
	return (&format{e, &codes[indexOf(codes[:], f)]}).decode(chunk, e.largest)
}

// ToBlocks writes elements to a chunk. The rounding errors become the errors.
func (o *Operands) ToBlocks(chunk []byte, at, length int) {
	v := o.load(at, length)
	o.storeErrors(at, v, o.encode(chunk, v, infinite, math.MaxFloat32), 1)
}

// SumToBlocks adds elements to the chunks of the other ranks, by rank; the chunk of the own rank is
// nil. It divides the sums by the number of ranks if mean is set, and writes them as elements and to
// out. The rounding errors become the errors.
func (o *Operands) SumToBlocks(out []byte, at, length int, chunks [][]byte, mean bool) {
	var sum []float32
	factor := float32(1)
	for r, chunk := range chunks {
		var v []float32
		if chunk == nil {
			v = o.load(at, length)
		} else {
			v = o.format.decode(chunk, math.MaxFloat32)
		}
		if r == 0 {
			sum = v
			continue
		}
		for i := range sum {
			sum[i] += v[i]
		}
	}
	if mean {
		factor = float32(len(chunks))
		for i := range sum {
			sum[i] /= factor
		}
	}
	y := o.encode(out, sum, o.over, o.largest)
	o.store(at, y)
	o.storeErrors(at, sum, y, factor)
}

// FromBlocks writes the elements of a chunk.
func (o *Operands) FromBlocks(at int, chunk []byte) {
	o.store(at, o.format.decode(chunk, o.largest))
}

// other returns the rank of the i-th chunk of the other ranks.
func other(i, mine int) int {
	if i < mine {
		return i
	}
	return i + 1
}

// sealed returns the i-th chunk once it has its tag.
func sealed(chunks []byte, i, share int, tag uint64) []byte {
	to := chunks[i*TaggedBytes(share):]
	binary.LittleEndian.PutUint64(to[ChunkBytes(share):], tag)
	clear(to[ChunkBytes(share)+8:][:tagBytes-8])
	return to[:ChunkBytes(share)]
}

// opened returns the i-th chunk, of NaN if it has another tag.
func opened(chunks []byte, i, share int, tag uint64) []byte {
	tagged := chunks[i*TaggedBytes(share):][:TaggedBytes(share)]
	chunk := tagged[:ChunkBytes(share)]
	if binary.LittleEndian.Uint64(tagged[len(chunk):]) == tag {
		return chunk
	}
	chunk = slices.Clone(chunk)
	for k := share; k < len(chunk); k++ {
		chunk[k] = notFinite
	}
	return chunk
}

func quantize(c *kernel.Call, t, f memory.DType) {
	o := Open(c, t, f, c.Address(0), c.Address(1), int(kernel.Get[uint64](c, 3)))
	share, mine, others := int(kernel.Get[uint64](c, 4)), int(kernel.Get[uint32](c, 5)), int(c.Grid().Blocks[1])
	out, tag := kernel.Update[uint8](c, 2, others*TaggedBytes(share)), kernel.Get[uint64](c, 7)
	for i := range others {
		o.ToBlocks(sealed(out, i, share, tag), other(i, mine)*share, share)
	}
}

func reduce(c *kernel.Call, t, f memory.DType) {
	o := Open(c, t, f, c.Address(0), c.Address(1), int(kernel.Get[uint64](c, 4)))
	share, mine, ranks := int(kernel.Get[uint64](c, 5)), int(kernel.Get[uint32](c, 6)), int(kernel.Get[uint32](c, 7))
	in, chunks, tag := kernel.Read[uint8](c, 2, (ranks-1)*TaggedBytes(share)), make([][]byte, ranks), kernel.Get[uint64](c, 10)
	for i := range ranks - 1 {
		chunks[other(i, mine)] = opened(in, i, share, tag)
	}
	o.SumToBlocks(sealed(kernel.Update[uint8](c, 3, TaggedBytes(share)), 0, share, tag), mine*share, share, chunks, kernel.Get[uint32](c, 8) == 1)
}

func dequantize(c *kernel.Call, t, f memory.DType) {
	o := Open(c, t, f, c.Address(0), 0, int(kernel.Get[uint64](c, 2)))
	share, mine, others := int(kernel.Get[uint64](c, 3)), int(kernel.Get[uint32](c, 4)), int(c.Grid().Blocks[1])
	in, tag := kernel.Read[uint8](c, 1, (others+1)*TaggedBytes(share)), kernel.Get[uint64](c, 6)
	for i := range others {
		o.FromBlocks(other(i, mine)*share, opened(in, other(i, mine), share, tag))
	}
}
