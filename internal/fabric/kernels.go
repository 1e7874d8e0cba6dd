package fabric

import (
	"embed"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/quant"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// packed is the source compiled for every element type and reduction, and without one, for
// any number of ranks; make ptx writes it.
//
//go:embed fabric.ptx.zst
var packed []byte

var archive = cudacc.OpenArchive(packed)

// These constants must agree with the CUDA source.
const (
	maxRanks    = 8
	maxThreads  = 512 // of a block
	warp        = 32  // block sizes are multiples of warp
	maxBlocks   = 128
	ticks       = 256 // ticks per epoch
	packetBytes = 16
	cellBytes   = 16
	lineBytes   = 128
	lineWords   = 15 // words of data
	lineLanes   = 8  // threads per line
	sets        = 4  // of buffers: for even and odd epochs, with and without lines
	signalWords = 4  // of each rank for each block
	signalBytes = maxBlocks * maxRanks * signalWords * 8
)

// setsFor returns the number of sets of buffers. A rank of experts needs fewer,
// because it has no whole and no lines.
func setsFor(whole int) int {
	if whole == 0 {
		return sets / 2
	}
	return sets
}

// A function identifies a kernel within its module.
type function int

const (
	reduceScatterFn     function = iota
	allReduceFn                  // followed by one for each further algorithm
	longReduceScatterFn = allReduceFn + function(algorithms) - 1
)

const (
	allGatherFn function = iota
	allToAllFn
	broadcastFn
	longAllGatherFn
	longAllToAllFn
)

// A module has the kernels of a CUDA module, or nil before the first use.
type module = atomic.Pointer[[]*kernel.Kernel]

// A toolbox holds the kernels of a device for a number of ranks.
type toolbox struct {
	ranks  int
	reduce [len(formats)][collective.NumReductions]module
	move   module
	norm   [numNormFormats]module
	fold   [numFoldFormats][collective.NumReductions]module
	// quantized has the kernels by element type, and by whether the 8-bit numbers are integers.
	quantized [numNormFormats][2]module
	experts   [numNormFormats]module
	mu        sync.Mutex // held while kernels are loaded
}

var toolboxKey handle.Key

func tools(dev *device.Device, ranks int) *toolbox {
	all := gpu.DeviceOf(dev).Local(&toolboxKey, func() any {
		var all [maxRanks + 1]toolbox
		for n := range all {
			all[n].ranks = n
		}
		return &all
	}).(*[maxRanks + 1]toolbox)
	return &all[ranks]
}

// exactly adds the options for this number of ranks only.
func (t *toolbox) exactly(options []string) []string {
	return append(options[:len(options):len(options)], fmt.Sprint("--define-macro=CHORUS_RANKS=", t.ranks))
}

// templates has the names of the reductions in the source. Avg divides integers toward zero.
// Of a number and a NaN, Max and Min take the number.
var templates = [collective.NumReductions]string{"Sum", "Prod", "Max", "Min", "Avg"}

// macros returns the macros that select a module of the source.
func macros(f *format, op collective.Reduction) []string {
	return []string{"--define-macro=CHORUS_TYPE=" + f.c, "--define-macro=CHORUS_OP=" + templates[op]}
}

// kernel returns a kernel of a module of t, which the first call loads.
func (t *toolbox) kernel(at *module, index int, load func() ([]*kernel.Kernel, error)) (*kernel.Kernel, error) {
	if ks := at.Load(); ks != nil {
		return (*ks)[index], nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if at.Load() == nil {
		ks, err := load()
		if err != nil {
			return nil, err
		}
		at.Store(&ks)
	}
	return (*at.Load())[index], nil
}

// reducer returns a kernel that reduces.
func (t *toolbox) reducer(dev *device.Device, fn function, format int, op collective.Reduction) (*kernel.Kernel, error) {
	return t.kernel(&t.reduce[format][op], int(fn), func() ([]*kernel.Kernel, error) {
		f := &formats[format]
		fold := f.words(op)
		ks, err := t.load(dev, macros(f, op), []kernel.Def{
			{Name: "reduce_scatter", Params: params(), Go: fold.reduceScatter},
			{Name: "all_reduce_1", Params: params(), Go: fold.oneShot},
			{Name: "all_reduce_2", Params: params(), Go: fold.twoShotPackets},
			{Name: "all_reduce_3", Params: params(), Go: fold.twoShot},
			{Name: "all_reduce_4", Params: params(), Go: fold.twoShotLines},
			{Name: "all_reduce_5", Params: params(kernel.U32), Go: fold.allReduceChunks},
			{Name: "reduce_scatter_2", Params: params(kernel.U32), Go: fold.reduceScatterChunks},
		})
		if err != nil {
			return nil, fmt.Errorf("fabric: the %s of %s: %w", op, f.dtype, err)
		}
		return ks, nil
	})
}

// mover returns a kernel that moves bytes.
func (t *toolbox) mover(dev *device.Device, fn function) (*kernel.Kernel, error) {
	return t.kernel(&t.move, int(fn), func() ([]*kernel.Kernel, error) {
		ks, err := t.load(dev, nil, []kernel.Def{
			{Name: "all_gather", Params: params(), Go: gatherAll},
			{Name: "all_to_all", Params: params(), Go: exchangeAll},
			{Name: "broadcast", Params: params(kernel.U32), Go: broadcastOne},
			{Name: "all_gather_2", Params: params(kernel.U32), Go: gatherChunks},
			{Name: "all_to_all_2", Params: params(kernel.U32), Go: exchangeChunks},
		})
		if err != nil {
			return nil, fmt.Errorf("fabric: %w", err)
		}
		return ks, nil
	})
}

// load loads the module compiled for exactly this number of ranks or, if NVRTC
// is missing or fails, the module for any number. The ranks need not use the
// same module.
func (t *toolbox) load(dev *device.Device, options []string, defs []kernel.Def) ([]*kernel.Kernel, error) {
	x := kernel.Source{Name: "fabric.cu", CUDA: source, Options: t.exactly(options), Kernels: defs}
	ks, failed := compile(dev, &x)
	if failed == nil {
		return ks, nil
	}
	x.Options = options
	inside.Embed(&x, archive)
	ks, err := compile(dev, &x)
	switch missing := errors.Is(failed, errors.ErrUnsupported); {
	case err != nil && missing: // the other error is more important
		return nil, err
	case err != nil:
		return nil, errors.Join(failed, err)
	case !missing:
		slog.Warn("chorus: cannot load the kernels for this number of ranks: using the kernels for any number",
			"ranks", t.ranks, "device", dev.String(), "error", failed)
	}
	return ks, nil
}

// compile loads a source, and returns its kernels in their order.
func compile(dev *device.Device, x *kernel.Source) ([]*kernel.Kernel, error) {
	inside.MakeResident(x)
	m, err := kernel.Compile(dev, x)
	if err != nil {
		return nil, err
	}
	ks := make([]*kernel.Kernel, len(x.Kernels))
	for i, d := range x.Kernels {
		if ks[i], err = m.Kernel(d.Name); err != nil {
			return nil, err
		}
	}
	return ks, nil
}

// The parameters of all kernels: the properties of the rank, and the operation's input,
// output, size and alignment.
const (
	peerParam = 0 // maxRanks parameters
	rankParam = maxRanks + iota - 1
	ranksParam
	slotParam
	wholeParam
	controlParam
	hostParam
	signatureParam
	inParam
	outParam
	bytesParam
	alignedParam
	lastParam // the root of a broadcast, or the number of cells of a rank's part of a chunk
)

func params(more ...kernel.Param) []kernel.Param {
	ps := make([]kernel.Param, maxRanks, lastParam+1)
	for i := range ps {
		ps[i] = kernel.Pointer
	}
	ps = append(ps, kernel.U32, kernel.U32, kernel.U64, kernel.U64, kernel.Pointer, kernel.Pointer, kernel.U64,
		kernel.Pointer, kernel.Pointer, kernel.U64, kernel.U32)
	return append(ps, more...)
}

//go:embed cuda
var folder embed.FS

// files are the parts of the source; each may use the previous ones.
var files = []string{
	"prelude.cuh", "memory.cuh", "rank.cuh", "wait.cuh", "packet.cuh", "word.cuh", "move.cu",
	"element.cuh", "values.cuh", "reduce.cu", "cell.cu", "line.cu", "pipeline.cu",
}

// foldFiles are the parts of the source of Fold.
var foldFiles = []string{"prelude.cuh", "element.cuh", "float8.cuh", "fold.cu"}

// normFiles are the parts of the source of norms.
var normFiles = []string{
	"prelude.cuh", "memory.cuh", "rank.cuh", "wait.cuh", "packet.cuh", "word.cuh", "element.cuh", "float8.cuh", "values.cuh", "norm.cu",
}

// quantizedFiles are the parts of the source of quantized all-reduces, which also has the blocks of package quant.
var quantizedFiles = []string{"prelude.cuh", "memory.cuh", "rank.cuh", "wait.cuh", "quantized.cu"}

// expertsFiles are the parts of the source of dispatch and combine, which also has these blocks.
var expertsFiles = []string{"prelude.cuh", "memory.cuh", "rank.cuh", "wait.cuh", "experts.cu"}

// source, foldSource, normSource, quantizedSource and expertsSource are the complete sources for compilers. Their messages
// name the file and its line.
var (
	source, foldSource, normSource = joined(files), joined(foldFiles), joined(normFiles)

	quantizedSource, expertsSource = withBlocks(quantizedFiles), withBlocks(expertsFiles)
)

// withBlocks returns a source whose last file uses the blocks of package quant.
func withBlocks(files []string) string {
	n := len(files) - 1
	return joined(files[:n]) + "#line 1 \"block.cuh\"\n" + quant.Blocks + joined(files[n:])
}

func joined(files []string) string {
	var all strings.Builder
	for _, name := range files {
		text, _ := folder.ReadFile("cuda/" + name) // the directory is embedded, so reading cannot fail
		fmt.Fprintf(&all, "#line 1 %q\n%s", name, text)
	}
	return all.String()
}

// Version identifies the kernels: measurements with one version are not valid for another.
func Version() string { return cudacc.Digest(source, nil)[:12] }

// A format is an element type that can be reduced.
type format struct {
	dtype memory.DType
	c     string // name of the type in the source
	arithmetic
}

// formats are the types of the kernels that move data themselves.
var formats = [...]format{
	{memory.Int8, "i8", native[int8]()}, {memory.Uint8, "u8", native[uint8]()},
	{memory.Int32, "i32", native[int32]()}, {memory.Uint32, "u32", native[uint32]()},
	{memory.Int64, "i64", native[int64]()}, {memory.Uint64, "u64", native[uint64]()},
	{memory.Float16, "Half", narrowed[memory.Float16Bits]{memory.Float16Bits.Float32, halfOf}},
	{memory.BFloat16, "BFloat", narrowed[memory.BFloat16Bits]{memory.BFloat16Bits.Float32, bfloatOf}},
	{memory.Float32, "float", native[float32]()}, {memory.Float64, "double", native[float64]()},
}

// formatOf has the index of each type in formats, or -1.
var formatOf = indexOf(formats[:])

// indexOf returns the index of each type in a list, or -1.
func indexOf(list []format) (at [dtype.Count]int) {
	for t := range at {
		at[t] = -1
	}
	for i := range list {
		at[list[i].dtype] = i
	}
	return at
}

// A fold reduces words of 8 bytes, one from each rank, in rank order.
type fold func(words []uint64) uint64

// An arithmetic computes on elements of one type, as the kernels do.
type arithmetic interface {
	// words returns the fold of a reduction.
	words(collective.Reduction) fold
	// pieces computes a Fold of the elements of all ranks.
	pieces(x *Fold, dst []byte, ranks [][]byte)
	// accBytes returns the size of a result that is not rounded.
	accBytes() int
	// scale multiplies elements by a factor, which is the first bytes of bits.
	scale(dst, src []byte, bits uint64)
}

// A number is a type that reductions compute in.
type number interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64 | float32 | float64
}

// numbers are elements T that are reduced as A.
type numbers[T any, A number] struct {
	wide   func(T) A
	narrow func(A) T
}

// narrowed are elements that are reduced as float32.
type narrowed[T any] = numbers[T, float32]

func native[T number]() numbers[T, T] {
	same := func(x T) T { return x }
	return numbers[T, T]{same, same}
}

func halfOf(x float32) memory.Float16Bits {
	if x != x {
		return 0x7fff // the NaN of the GPU
	}
	return memory.Float16Of(x)
}

func bfloatOf(x float32) memory.BFloat16Bits {
	if x != x {
		return 0x7fff
	}
	return memory.BFloat16Of(x)
}

func (x numbers[T, A]) words(op collective.Reduction) fold {
	join := joining[A](op)
	return func(words []uint64) (out uint64) {
		ranks := len(words)
		to := elements[T](unsafe.Slice(&out, 1))
		from := elements[T](words)
		for j := range to {
			a := x.wide(from[j])
			for r := 1; r < ranks; r++ {
				a = join(a, x.wide(from[r*len(to)+j]))
			}
			to[j] = x.finish(op, a, ranks)
		}
		return out
	}
}

// finish returns the result of a reduction over all ranks.
func (x numbers[T, A]) finish(op collective.Reduction, a A, ranks int) T {
	if op == collective.Avg {
		a /= A(ranks)
	}
	return x.narrow(a)
}

func (x numbers[T, A]) pieces(f *Fold, dst []byte, ranks [][]byte) {
	same := func(a A) A { return a }
	finish := func(a A) T { return x.finish(f.Op, a, f.All) }
	switch f.Stage {
	case BlockStage:
		foldPieces(f, dst, ranks, x.wide, same)
	case BlocksStage:
		foldPieces(f, dst, ranks, same, finish)
	default:
		foldPieces(f, dst, ranks, x.wide, finish)
	}
}

func (x numbers[T, A]) accBytes() int {
	var a A
	return int(unsafe.Sizeof(a))
}

// foldPieces computes a Fold with elements In and results Out.
func foldPieces[In, Out any, A number](f *Fold, dst []byte, ranks [][]byte, get func(In) A, put func(A) Out) {
	join := joining[A](f.Op)
	to, from := elementsOf[Out](dst), make([][]In, len(ranks))
	for r := range ranks {
		from[r] = elementsOf[In](ranks[r])
	}
	for j := range to {
		var sum, total A
		for r := range from {
			a := get(from[r][j])
			switch {
			case r%f.Block != 0:
				a = join(sum, a)
			case r > f.Block:
				total = join(total, sum)
			default:
				total = sum
			}
			sum = a
		}
		if len(from) > f.Block {
			sum = join(total, sum)
		}
		to[j] = put(sum)
	}
}

func (x numbers[T, A]) scale(dst, src []byte, bits uint64) {
	to, from := elementsOf[T](dst), elementsOf[T](src)
	by := x.wide(elements[T](unsafe.Slice(&bits, 1))[0])
	for j := range to {
		to[j] = x.narrow(x.wide(from[j]) * by)
	}
}

func joining[A number](op collective.Reduction) func(a, b A) A {
	switch op {
	case collective.Prod:
		return func(a, b A) A { return a * b }
	case collective.Max:
		return func(a, b A) A {
			if a != a || b > a {
				return b
			}
			return a
		}
	case collective.Min:
		return func(a, b A) A {
			if a != a || b < a {
				return b
			}
			return a
		}
	}
	return func(a, b A) A { return a + b }
}

// elements reinterprets words as elements.
func elements[T any](words []uint64) []T {
	var z T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(words))), len(words)*8/int(unsafe.Sizeof(z)))
}

// elementsOf reinterprets bytes as elements.
func elementsOf[T any](b []byte) []T {
	var z T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(z)))
}
