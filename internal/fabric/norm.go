package fabric

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Norm is an all-reduce of rows with the RMS norm of the results, in one kernel. For each row it
// computes:
//   - Residual: the old Residual plus the sum of In over all ranks, rounded
//   - Out: Residual · Weight / sqrt(the mean of Residual² + Eps), rounded
//
// The kernel computes in float32 and adds in rank order. The bits of a row do not depend on the
// other rows, on their number or on the algorithm. All ranks must have the same Residual and
// Weight.
type Norm struct {
	DType      memory.DType // of In, Residual and Weight
	Rows, Cols int
	// The addresses of Rows * Cols elements, and of Cols elements for Weight. Out may be In;
	// otherwise In, Residual and Out overlap no operand.
	In, Residual, Weight, Out uint64
	// Scale is the address of a float32, or 0. If it is not 0, Out has 8-bit floats
	// (memory.Float8E4M3): the results divided by the scale, which saturate.
	Scale     uint64
	Eps       float32
	Algorithm Algorithm // Auto, OneShot or TwoShotPackets
}

// normWord is the unit of the kernels: rows are whole words.
const normWord = 8

// Check returns an error unless kernels support the operands. It does not depend on the rank if
// all ranks have the same shapes and alignments.
func (x *Norm) Check() error {
	if normFormatOf(x.DType) == nil {
		return &device.UnsupportedError{Feature: "a fused norm", Need: "elements of float16, bfloat16 or float32", Have: x.DType.String()}
	}
	out := uint64(normWord)
	if x.Scale != 0 {
		out = uint64(normWord / x.DType.Size())
	}
	switch {
	case x.Rows < 0 || x.Cols < 1:
		return fmt.Errorf("%d rows of %d elements: want at least one element in a row", x.Rows, x.Cols)
	case x.Cols*x.DType.Size()%normWord != 0:
		return fmt.Errorf("rows of %d elements of %s: want a multiple of %d, because the kernel loads %d bytes at once", x.Cols, x.DType, normWord/x.DType.Size(), normWord)
	case x.Rows > math.MaxInt32 || x.Cols > math.MaxInt32:
		return fmt.Errorf("%d rows of %d elements: at most %d of both", x.Rows, x.Cols, math.MaxInt32)
	case (x.In|x.Residual|x.Weight)%normWord != 0 || x.Out%out != 0:
		return fmt.Errorf("an operand is not aligned: want addresses that are multiples of %d bytes", normWord)
	case x.Eps < 0 || x.Eps != x.Eps:
		return fmt.Errorf("eps is %g: want 0 or more", x.Eps)
	case x.Algorithm != Auto && x.Algorithm != OneShot && x.Algorithm != TwoShotPackets:
		return fmt.Errorf("the algorithm is %s: want %s, %s or %s", x.Algorithm, Auto, OneShot, TwoShotPackets)
	}
	return x.checkOverlap()
}

// checkOverlap returns an error if operands overlap that are not only read,
// except that Out may be In. In counts as written, because an all-reduce in
// place replaces it if the one kernel does not run.
func (x *Norm) checkOverlap() error {
	names := [...]string{"the input", "the weight", "the residual", "the output", "the scale"}
	uses := x.uses()
	for i, a := range uses {
		for j, b := range uses[:i] {
			apart := a.Ptr >= b.Ptr+cudadrv.DevicePtr(b.Bytes) || b.Ptr >= a.Ptr+cudadrv.DevicePtr(a.Bytes)
			inPlace := j == 0 && i == 3 && a.Ptr == b.Ptr && a.Bytes == b.Bytes
			if apart || inPlace || !a.Write && !b.Write && j != 0 {
				continue
			}
			return fmt.Errorf("%s and %s overlap: want no memory in common, except that the output may be the input", names[j], names[i])
		}
	}
	return nil
}

// words returns the number of words in a row.
func (x *Norm) words() int { return x.Cols * x.DType.Size() / normWord }

// algorithmOf returns the algorithm for x on r. It returns false if r does not have enough room, or
// if an all-reduce by lines and a separate kernel for the norm are faster. This is so at the
// maxima of spans already: by 4 % at 1 MiB on 2 GPUs.
func (r *Rank) algorithmOf(x *Norm) (Algorithm, bool) {
	words := x.words()
	share := over(words, r.ranks)
	one := x.Rows*words*packetBytes <= r.slot
	two := x.Rows*share*packetBytes <= r.slot && x.Rows*words*packetBytes <= r.whole
	switch {
	case x.Algorithm == OneShot:
		return OneShot, one
	case x.Algorithm == TwoShotPackets:
		return TwoShotPackets, two
	case one && x.Rows*words*normWord < spans[r.ranks][0]:
		return OneShot, true
	}
	return TwoShotPackets, two && x.Rows*words*normWord < spans[r.ranks][1]
}

// TakesNorm reports whether EnqueueNorm supports x, the same on all ranks.
func (r *Rank) TakesNorm(x *Norm) bool {
	_, ok := r.algorithmOf(x)
	return r.ranks > 1 && ok && x.Rows > 0 && x.Check() == nil
}

// LoadNorm loads the kernels of EnqueueNorm for a type, so that a failure comes before an operation is
// enqueued.
func (r *Rank) LoadNorm(t memory.DType) error {
	_, err := tools(r.dev, r.ranks).normer(r.dev, t, addNormFn)
	return err
}

// LoadAddNorm is LoadNorm for AddNorm.
func LoadAddNorm(dev *device.Device, t memory.DType) error {
	_, err := tools(dev, addNormRanks).normer(dev, t, addNormFn)
	return err
}

// EnqueueNorm enqueues x on s, a stream of the rank's device, and fails unless
// TakesNorm returns true for x.
func (r *Rank) EnqueueNorm(s *stream.Stream, x *Norm) error {
	const op = "all-reduce and norm"
	if err := r.Err(); err != nil {
		return err
	}
	if !r.TakesNorm(x) {
		return r.errorf(op, "%d rows of %d elements of %s: there is no kernel for that", x.Rows, x.Cols, x.DType)
	}
	if err := r.enqueueNorm(s, x); err != nil {
		return r.errorf(op, "%w", err)
	}
	return nil
}

func (r *Rank) enqueueNorm(s *stream.Stream, x *Norm) error {
	a, _ := r.algorithmOf(x)
	team := r.teamOf(x)
	k, err := tools(r.dev, r.ranks).normer(r.dev, x.DType, reduceNormFn(a, team))
	if err != nil {
		return err
	}
	if err := gpu.StreamOf(s).Captured(r); err != nil {
		return err
	}
	var args [inParam + normParams]kernel.Arg
	copy(args[:], r.args[:])
	args[signatureParam] = kernel.Scalar(x.signature(a))
	x.put(args[inParam:])
	if err := r.order.Begin(gpu.StreamOf(s)); err != nil {
		return errors.Join(r.Err(), err)
	}
	defer r.order.End()
	if err := r.Err(); err != nil {
		return err
	}
	if err := k.Launch(s, x.grid(team, r.blocks), args[:]...); err != nil {
		return err
	}
	gpu.StreamOf(s).Uses("kernel of an all-reduce and a norm", true, x.uses)
	return nil
}

// AddNorm enqueues x on s without other ranks: In has the sums of all ranks.
func AddNorm(s *stream.Stream, x *Norm) error {
	if err := x.Check(); err != nil || x.Rows == 0 {
		return err
	}
	k, err := tools(s.Device(), addNormRanks).normer(s.Device(), x.DType, addNormFn)
	if err != nil {
		return err
	}
	var args [normParams]kernel.Arg
	x.put(args[:])
	if err := k.Launch(s, x.grid(1, addNormBlocks), args[:]...); err != nil {
		return err
	}
	gpu.StreamOf(s).Uses("kernel of a norm", false, x.uses)
	return nil
}

const (
	addNormRanks  = 2    // the number of ranks whose module has the kernel that AddNorm uses
	addNormBlocks = 4096 // the maximum for AddNorm
	maxSlots      = 2048 // SLOTS in norm.cu
	maxTeam       = 8    // the maximum for a cluster that all GPUs with clusters support
	teamThreads   = 128  // a team gets more blocks only while they have so many threads
)

// slotsOf returns the number of partial sums of the squares of so many words,
// in whole warps, which determines the order of additions.
func slotsOf(words int) int { return min(over(words, warp)*warp, maxSlots) }

// grid returns the grid for teams of so many blocks: one for each row, up to a maximum of blocks.
func (x *Norm) grid(team, blocks int) kernel.Grid {
	threads := min(over(slotsOf(x.words()), team*warp)*warp, maxThreads)
	return kernel.Grid{Blocks: [3]uint32{uint32(team * min(x.Rows, blocks/team)), 1, 1}, Threads: [3]uint32{uint32(threads), 1, 1}}
}

// teamOf returns the number of blocks that handle a row together, as a cluster if it is more than
// one. Several multiprocessors send and poll faster than one, but all rows should be handled at once.
func (r *Rank) teamOf(x *Norm) int {
	team := 1
	for r.clusters && team < maxTeam && 2*team*x.Rows <= r.blocks && 2*team*teamThreads <= slotsOf(x.words()) {
		team *= 2
	}
	return team
}

// signature is operation.signature for x.
func (x *Norm) signature(a Algorithm) uint64 {
	small := uint64(0)
	if x.Scale != 0 {
		small = 1
	}
	h := scramble(uint64(collective.NumKinds) | uint64(a)<<8 | uint64(x.DType)<<16 | small<<24 | uint64(math.Float32bits(x.Eps))<<32)
	return scramble(scramble(h+uint64(x.Rows)) + uint64(x.Cols))
}

// The parameters of the operands, from the first of them.
const (
	normIn = iota
	normResidual
	normWeight
	normOut
	normScale
	normRows
	normWords
	normEps
	normParams
)

func normOperands() []kernel.Param {
	return []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.U32, kernel.U32, kernel.F32}
}

// put writes the arguments of the operands.
func (x *Norm) put(args []kernel.Arg) {
	copy(args, []kernel.Arg{kernel.Address(x.In), kernel.Address(x.Residual), kernel.Address(x.Weight), kernel.Address(x.Out), kernel.Address(x.Scale),
		kernel.Scalar(uint32(x.Rows)), kernel.Scalar(uint32(x.words())), kernel.Scalar(x.Eps)})
}

// uses lists the operands, for the sanitizer.
func (x *Norm) uses() []cudadrv.Use {
	all, row, out := uint64(x.Rows*x.Cols*x.DType.Size()), uint64(x.Cols*x.DType.Size()), x.DType.Size()
	if x.Scale != 0 {
		out = 1
	}
	list := []cudadrv.Use{
		{Ptr: cudadrv.DevicePtr(x.In), Bytes: all}, {Ptr: cudadrv.DevicePtr(x.Weight), Bytes: row},
		{Ptr: cudadrv.DevicePtr(x.Residual), Bytes: all, Write: true}, {Ptr: cudadrv.DevicePtr(x.Out), Bytes: uint64(x.Rows * x.Cols * out), Write: true},
	}
	if x.Scale != 0 {
		list = append(list, cudadrv.Use{Ptr: cudadrv.DevicePtr(x.Scale), Bytes: 4})
	}
	return list
}

// A normFn identifies a kernel of norm.cu.
type normFn int

const addNormFn normFn = 0

// reduceNormFn returns the kernel of an algorithm for teams of 1, 2, 4 or 8 blocks.
func reduceNormFn(a Algorithm, team int) normFn { return normFn(2*(bits.Len(uint(team))-1) + int(a)) }

// normer returns a kernel of norm.cu, which NVRTC compiles.
func (t *toolbox) normer(dev *device.Device, dtype memory.DType, fn normFn) (*kernel.Kernel, error) {
	f := normFormatOf(dtype)
	return t.kernel(&t.norm[f.index], int(fn), func() ([]*kernel.Kernel, error) {
		linked := append(params()[:inParam:inParam], normOperands()...)
		ks, err := compile(dev, &kernel.Source{Name: "norm.cu", CUDA: normSource, Options: t.exactly(macros(&formats[formatOf[dtype]], collective.Sum)), Kernels: []kernel.Def{
			{Name: "add_norm", Params: normOperands(), Go: f.addNorm},
			{Name: "all_reduce_norm_1", Params: linked, Go: f.oneShot},
			{Name: "all_reduce_norm_2", Params: linked, Go: f.twoShot},
			{Name: "all_reduce_norm_1x2", Params: linked, Go: f.oneShot},
			{Name: "all_reduce_norm_2x2", Params: linked, Go: f.twoShot},
			{Name: "all_reduce_norm_1x4", Params: linked, Go: f.oneShot},
			{Name: "all_reduce_norm_2x4", Params: linked, Go: f.twoShot},
			{Name: "all_reduce_norm_1x8", Params: linked, Go: f.oneShot},
			{Name: "all_reduce_norm_2x8", Params: linked, Go: f.twoShot},
		}})
		if err != nil {
			return nil, fmt.Errorf("fabric: the norm of %s: %w", dtype, err)
		}
		return ks, nil
	})
}

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

// factor returns 1 / sqrt(mean of squares + eps). Each slot adds the squares of
// its words, then the slots of each warp are added, and then the warps.
func (n *normCall) factor(sums []uint64) float32 {
	of := make([]float32, n.slots)
	x := n.x[:n.count]
	for k, sum := range sums {
		n.unpack(sum, x)
		for _, v := range x {
			of[k%n.slots] = dtype.FMA(v, v, of[k%n.slots])
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

// treeSum adds the second half of a list, which it overwrites, to the first
// one, and so on.
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
