package fabric

import (
	"context"
	_ "embed"
	"fmt"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// packedFold is foldSource compiled for every element type and reduction; make ptx writes it.
//
//go:embed fold.ptx.zst
var packedFold []byte

var foldArchive = cudacc.OpenArchive(packedFold)

// numFoldFormats is the number of types that Fold supports.
const numFoldFormats = len(formats) + 2

// foldFormats are the types that Fold supports: also the 8-bit floats.
var foldFormats = append(formats[:len(formats):len(formats)],
	format{memory.Float8E4M3, "E4M3", narrowed[memory.Float8E4M3Bits]{memory.Float8E4M3Bits.Float32, memory.Float8E4M3Of}},
	format{memory.Float8E5M2, "E5M2", narrowed[memory.Float8E5M2Bits]{memory.Float8E5M2Bits.Float32, memory.Float8E5M2Of}})

var foldFormatOf = indexOf(foldFormats)

// A Fold is a reduction of the elements of all ranks, which are in the memory of one device. It
// joins the elements of each Block ranks in rank order, and then the results of the blocks in
// their order. It computes 16-bit and 8-bit floats as float32, and other types in their own type.
// It rounds once, at the end. A kernel that moves data itself computes the same bits as a Fold
// with one block.
type Fold struct {
	DType memory.DType
	Op    collective.Reduction
	Block int // number of ranks
	Ranks int
	Count int // of each rank's elements
	// Base is the address of rank 0's elements; each further rank's are Stride bytes behind. The
	// elements of rank Mine are at Own instead.
	Base, Stride uint64
	Mine         int
	Own          uint64
	Dst          uint64 // may be one of the ranks' addresses
	// Stage is a part of a reduction that other ranks complete. All is the number of ranks of the
	// whole reduction.
	Stage Stage
	All   int
}

// A Stage says which elements a Fold has: of the type, or results of blocks, which are not
// rounded. These have AccBytes bytes.
type Stage int

// The stages.
const (
	WholeStage  Stage = iota // from elements to elements
	BlockStage               // from elements to the result of a block
	BlocksStage              // from results of blocks to elements
	scaleFn                  // is not a Stage: the kernel that multiplies elements by a factor
)

// AccBytes returns the size of a result of a block, for a type that CanFold supports.
func AccBytes(t memory.DType) int { return foldFormats[foldFormatOf[t]].accBytes() }

// CanFold reports whether there is a kernel for a type and a reduction.
func CanFold(t memory.DType, op collective.Reduction) bool {
	return int(t) < len(foldFormatOf) && foldFormatOf[t] >= 0 && op >= 0 && op < collective.NumReductions
}

// Enqueue enqueues the reduction on s, and requires that CanFold has returned
// true for it.
func (f *Fold) Enqueue(s *stream.Stream) error {
	k, err := foldKernel(s.Device(), f.DType, f.Op, f.Stage)
	if err != nil {
		return err
	}
	aligned := uint32(0)
	if (f.Base|f.Stride|f.Own|f.Dst)%16 == 0 {
		aligned = 1
	}
	err = k.Launch(s, foldGrid(over(f.Count*f.DType.Size(), 16)), kernel.Address(f.Base), kernel.Scalar(f.Stride), kernel.Address(f.Own), kernel.Scalar(uint32(f.Mine)),
		kernel.Scalar(uint32(f.Ranks)), kernel.Scalar(uint32(f.Block)), kernel.Address(f.Dst), kernel.Scalar(uint64(f.Count)), kernel.Scalar(aligned), kernel.Scalar(uint32(f.All)))
	if err != nil {
		return err
	}
	gpu.StreamOf(s).Uses("kernel of a reduction in order", false, f.uses)
	return nil
}

// uses lists the operands, for the sanitizer.
func (f *Fold) uses() (list []cudadrv.Use) {
	in, out := f.sizes()
	for r := range f.Ranks {
		list = append(list, cudadrv.Use{Ptr: cudadrv.DevicePtr(f.of(r)), Bytes: uint64(f.Count * in)})
	}
	return append(list, cudadrv.Use{Ptr: cudadrv.DevicePtr(f.Dst), Bytes: uint64(f.Count * out), Write: true})
}

// sizes returns the bytes of an element of the input and of the output.
func (f *Fold) sizes() (in, out int) {
	in, out = f.DType.Size(), f.DType.Size()
	switch f.Stage {
	case BlockStage:
		out = AccBytes(f.DType)
	case BlocksStage:
		in = AccBytes(f.DType)
	}
	return in, out
}

// of returns the address of a rank's elements.
func (f *Fold) of(rank int) uint64 {
	if rank == f.Mine {
		return f.Own
	}
	return f.Base + uint64(rank)*f.Stride
}

// A Factor multiplies elements: the element at the address At, or in Bits if At is 0.
type Factor struct {
	Bits uint64
	At   uint64
}

// Scale enqueues dst = src * by on s, for count elements. It rounds the products to the type,
// which CanFold must support.
func Scale(s *stream.Stream, t memory.DType, dst, src uint64, count int, by Factor) error {
	k, err := foldKernel(s.Device(), t, collective.Sum, scaleFn)
	if err != nil {
		return err
	}
	err = k.Launch(s, foldGrid(count), kernel.Address(src), kernel.Address(dst), kernel.Scalar(uint64(count)), kernel.Scalar(by.Bits), kernel.Address(by.At))
	if err != nil {
		return err
	}
	gpu.StreamOf(s).Uses("kernel of a product", false, func() []cudadrv.Use {
		n := uint64(count * t.Size())
		return []cudadrv.Use{{Ptr: cudadrv.DevicePtr(src), Bytes: n}, {Ptr: cudadrv.DevicePtr(dst), Bytes: n, Write: true}}
	})
	return nil
}

// The number of threads in a block, which the CUDA source has too, and the maximum number of
// blocks.
const (
	foldThreads = 256
	foldBlocks  = 264 // two for each multiprocessor of an H200: more are not faster, and 2048 are slower
)

// foldGrid returns the grid for so many steps of single threads.
func foldGrid(steps int) kernel.Grid {
	return kernel.Grid{Blocks: [3]uint32{uint32(min(over(steps, foldThreads), foldBlocks)), 1, 1}, Threads: [3]uint32{foldThreads, 1, 1}}
}

var foldParams = []kernel.Param{kernel.Pointer, kernel.U64, kernel.Pointer, kernel.U32, kernel.U32, kernel.U32, kernel.Pointer, kernel.U64, kernel.U32, kernel.U32}

// foldKernel returns a kernel of foldSource.
func foldKernel(dev *device.Device, dtype memory.DType, op collective.Reduction, fn Stage) (*kernel.Kernel, error) {
	t := tools(dev, 0) // these kernels serve any number of ranks
	return t.kernel(&t.fold[foldFormatOf[dtype]][op], int(fn), func() ([]*kernel.Kernel, error) {
		f := &foldFormats[foldFormatOf[dtype]]
		x := kernel.Source{Name: "fold.cu", CUDA: foldSource, Options: macros(f, op), Kernels: []kernel.Def{
			{Name: "fold", Go: f.standInFold(op, WholeStage), Params: foldParams},
			{Name: "fold_block", Go: f.standInFold(op, BlockStage), Params: foldParams},
			{Name: "fold_blocks", Go: f.standInFold(op, BlocksStage), Params: foldParams},
			{Name: "scale", Go: f.standInScale, Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.U64, kernel.U64, kernel.Pointer}},
		}}
		inside.Embed(&x, foldArchive)
		ks, err := compile(dev, &x)
		if err != nil {
			return nil, fmt.Errorf("fabric: the %s of %s in rank order: %w", op, dtype, err)
		}
		return ks, nil
	})
}

// standInFold returns the function that implements the kernel of a stage in Go, for virtual devices.
func (f *format) standInFold(op collective.Reduction, stage Stage) func(*kernel.Call) {
	return func(c *kernel.Call) {
		x := Fold{
			Base: c.Address(0), Stride: kernel.Get[uint64](c, 1), Own: c.Address(2), Mine: int(kernel.Get[uint32](c, 3)),
			Ranks: int(kernel.Get[uint32](c, 4)), Block: int(kernel.Get[uint32](c, 5)), Dst: c.Address(6), Count: int(kernel.Get[uint64](c, 7)),
			DType: f.dtype, Op: op, Stage: stage, All: int(kernel.Get[uint32](c, 9)),
		}
		in, out := x.sizes()
		ranks := make([][]byte, x.Ranks)
		for r := range ranks {
			ranks[r] = kernel.ReadAddress[uint8](c, x.of(r), x.Count*in)
		}
		f.pieces(&x, kernel.UpdateAddress[uint8](c, x.Dst, x.Count*out), ranks)
	}
}

// standInScale implements the kernel scale.
func (f *format) standInScale(c *kernel.Call) {
	size := f.dtype.Size()
	bytes, bits := int(kernel.Get[uint64](c, 2))*size, kernel.Get[uint64](c, 3)
	if c.Address(4) != 0 {
		bits = 0
		for i, b := range kernel.Read[uint8](c, 4, size) {
			bits |= uint64(b) << (8 * i)
		}
	}
	f.scale(kernel.Update[uint8](c, 1, bytes), kernel.Read[uint8](c, 0, bytes), bits)
}

// A Table is the Exchange of ranks in one process.
type Table struct {
	mu     sync.Mutex
	ranks  int
	rounds []*round
}

// A round has the messages of all ranks in one exchange.
type round struct {
	said [][]byte
	left int
	over chan struct{}
}

// NewTable returns a table for the given number of ranks.
func NewTable(ranks int) *Table { return &Table{ranks: ranks} }

// Seat returns the Exchange of a rank.
func (t *Table) Seat(rank int) collective.Exchange {
	next := 0
	return func(ctx context.Context, mine []byte) ([][]byte, error) {
		r := t.say(next, rank, mine)
		next++
		select {
		case <-r.over:
			return r.said, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (t *Table) say(n, rank int, what []byte) *round {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n == len(t.rounds) {
		t.rounds = append(t.rounds, &round{make([][]byte, t.ranks), t.ranks, make(chan struct{})})
	}
	r := t.rounds[n]
	r.said[rank] = what
	if r.left--; r.left == 0 {
		close(r.over)
	}
	return r
}
