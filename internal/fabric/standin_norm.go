package fabric

import (
	"math"
	"unsafe"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// A normFormat computes norms of one element type, as the kernels of norm.cu do: with the same
// order of additions, so that the bits are the same.
type normFormat struct {
	dtype  memory.DType
	index  int
	count  int // elements in a word
	unpack func(word uint64, to []float32)
	pack   func(from []float32) uint64
}

const numNormFormats = 3

var normFormats = [numNormFormats]normFormat{
	normFormatFor(0, memory.Float16, narrowed[memory.Float16Bits]{memory.Float16Bits.Float32, halfOf}),
	normFormatFor(1, memory.BFloat16, narrowed[memory.BFloat16Bits]{memory.BFloat16Bits.Float32, bfloatOf}),
	normFormatFor(2, memory.Float32, native[float32]()),
}

func normFormatFor[T any](index int, dtype memory.DType, x numbers[T, float32]) normFormat {
	return normFormat{
		dtype: dtype, index: index, count: normWord / dtype.Size(),
		unpack: func(word uint64, to []float32) {
			for j, v := range elements[T](unsafe.Slice(&word, 1)) {
				to[j] = x.wide(v)
			}
		},
		pack: func(from []float32) (word uint64) {
			to := elements[T](unsafe.Slice(&word, 1))
			for j := range to {
				to[j] = x.narrow(from[j])
			}
			return word
		},
	}
}

// normFormatOf returns the format of a type, or nil if the kernels do not support it.
func normFormatOf(dtype memory.DType) *normFormat {
	for i := range normFormats {
		if normFormats[i].dtype == dtype {
			return &normFormats[i]
		}
	}
	return nil
}

// A normCall has the operands of a launch.
type normCall struct {
	*normFormat
	rows, words, slots   int
	eps, scale           float32
	small                bool // the output has 8-bit floats
	in, residual, weight []uint64
	out                  []byte
	x, y                 [4]float32
}

// call returns the operands, which begin with parameter at.
func (f *normFormat) call(c *kernel.Call, at int) *normCall {
	n := &normCall{
		normFormat: f, rows: int(kernel.Get[uint32](c, at+normRows)), words: int(kernel.Get[uint32](c, at+normWords)),
		eps: kernel.Get[float32](c, at+normEps), small: c.Address(at+normScale) != 0,
	}
	n.slots = slotsOf(n.words)
	bytes := normWord
	if n.small {
		n.scale, bytes = kernel.Read[float32](c, at+normScale, 1)[0], f.count
	}
	n.in, n.weight = kernel.Read[uint64](c, at+normIn, n.rows*n.words), kernel.Read[uint64](c, at+normWeight, n.words)
	n.residual = kernel.Update[uint64](c, at+normResidual, n.rows*n.words)
	n.out = kernel.Update[uint8](c, at+normOut, n.rows*n.words*bytes)
	return n
}

// add adds words in their order, and rounds.
func (n *normCall) add(words ...uint64) uint64 {
	x, y := n.x[:n.count], n.y[:n.count]
	n.unpack(words[0], x)
	for _, w := range words[1:] {
		n.unpack(w, y)
		for j := range x {
			x[j] += y[j]
		}
	}
	return n.pack(x)
}

// finish normalizes a row of the residual.
func (n *normCall) finish(row int) {
	sums := n.residual[row*n.words:][:n.words]
	factor := n.factor(sums)
	x, w := n.x[:n.count], n.y[:n.count]
	for k, sum := range sums {
		n.unpack(sum, x)
		n.unpack(n.weight[k], w)
		for j := range x {
			x[j] = float32(float32(x[j]*factor) * w[j])
		}
		at := row*n.words + k
		if !n.small {
			setWord(n.out, at, n.pack(x))
			continue
		}
		for j := range x {
			n.out[at*n.count+j] = byte(saturated(x[j] / n.scale))
		}
	}
}

// saturated returns an 8-bit float; numbers out of range become the largest ones.
func saturated(x float32) memory.Float8E4M3Bits {
	const largest = 448
	if x > largest {
		x = largest
	} else if x < -largest {
		x = -largest
	}
	return memory.Float8E4M3Of(x)
}

// factor returns 1 / sqrt(mean of squares + eps). Each slot adds the squares of its words. Then the
// slots of each warp are added, and then the warps.
func (n *normCall) factor(sums []uint64) float32 {
	of := make([]float32, n.slots)
	x := n.x[:n.count]
	for k, sum := range sums {
		n.unpack(sum, x)
		for _, v := range x {
			of[k%n.slots] = element.FMA(v, v, of[k%n.slots])
		}
	}
	var warps [maxSlots / warp]float32
	for w := 0; w < n.slots; w += warp {
		warps[w/warp] = treeSum(of[w : w+warp])
	}
	// The conversion rounds the product: without it, arm64 computes mean + eps by a fused instruction.
	mean := float32(treeSum(warps[:]) * (1 / float32(n.words*n.count)))
	return 1 / float32(math.Sqrt(float64(mean+n.eps)))
}

// treeSum adds the second half of a list to the first one, and so on. It overwrites the list.
func treeSum(list []float32) float32 {
	for by := len(list) / 2; by > 0; by /= 2 {
		for i := range by {
			list[i] += list[i+by]
		}
	}
	return list[0]
}

func (f *normFormat) addNorm(c *kernel.Call) {
	n := f.call(c, 0)
	for i, own := range n.in {
		n.residual[i] = n.add(own, n.residual[i])
	}
	for row := range n.rows {
		n.finish(row)
	}
}

// sum returns the i-th word of all ranks, added, with the residual; own is this rank's word. The
// packets of the other ranks are the from-th ones.
func (n *normCall) sum(p *party, from int, own, residual uint64) uint64 {
	for r := range p.ranks {
		if p.words[r] = own; r != p.rank {
			p.words[r] = p.receive(p.from(0, r), from)
		}
	}
	return n.add(append(p.words[:p.ranks:p.ranks], residual)...)
}

func (f *normFormat) oneShot(c *kernel.Call) {
	p, n := meet(c), f.call(c, inParam)
	for k := 1; k < p.ranks; k++ {
		to := p.from(k, p.rank)
		for i, w := range n.in {
			p.send(to, i, w)
		}
	}
	for i := range n.residual {
		n.residual[i] = n.sum(p, i, n.in[i], n.residual[i])
	}
	for row := range n.rows {
		n.finish(row)
	}
	p.leave()
}

func (f *normFormat) twoShot(c *kernel.Call) {
	p, n := meet(c), f.call(c, inParam)
	share := over(n.words, p.ranks)
	// of calls do for each word of a rank's shares, with its index among them and in the rows.
	of := func(rank int, do func(i, at int)) {
		for row := range n.rows {
			for i := 0; i < share && rank*share+i < n.words; i++ {
				do(row*share+i, row*n.words+rank*share+i)
			}
		}
	}
	for k := 1; k < p.ranks; k++ {
		to := p.from(k, p.rank)
		of(p.after(k), func(i, at int) { p.send(to, i, n.in[at]) })
	}
	of(p.rank, func(i, at int) {
		n.residual[at] = n.sum(p, i, n.in[at], n.residual[at])
		for k := 1; k < p.ranks; k++ {
			p.send(p.gathered(k), at, n.residual[at])
		}
	})
	for k := 1; k < p.ranks; k++ {
		of(p.after(k), func(_, at int) { n.residual[at] = p.receive(p.gathered(0), at) })
	}
	for row := range n.rows {
		n.finish(row)
	}
	p.leave()
}
