package fabric

import (
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/kernel"
)

// packed is the source compiled for every element type and reduction, and without one, for
// any number of ranks; make ptx writes it.
//
//go:embed fabric.ptx.zst
var packed []byte

var archive = ptx.Open(packed)

// These constants must agree with the CUDA source.
const (
	maxRanks    = 8
	maxThreads  = 512 // of a block
	warp        = 32  // block sizes are multiples of warp
	maxBlocks   = 128
	ticks       = 256 // ticks per epoch
	packetBytes = 16
	lineBytes   = 128
	lineWords   = 15 // words of data
	lineLanes   = 8  // threads per line
	sets        = 4  // of buffers: for even and odd epochs, with and without lines
	signalWords = 4  // of each rank for each block
	signalBytes = maxBlocks * maxRanks * signalWords * 8
)

// A function identifies a kernel within its module.
type function int

const (
	reduceScatterFn function = iota
	allReduceFn              // followed by one for each further algorithm
)

const (
	allGatherFn function = iota
	allToAllFn
	broadcastFn
)

// A module has the kernels of a CUDA module, or nil before the first use.
type module = atomic.Pointer[[]*kernel.Kernel]

// A toolbox holds the kernels of a device for a number of ranks.
type toolbox struct {
	ranks  int
	reduce [len(formats)][flight.NumReductions]module
	move   module
	norm   [numNormFormats]module
	fold   [numFoldFormats][flight.NumReductions]module
	mu     sync.Mutex // held while kernels are loaded
}

var toolboxKey kept.Key

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
var templates = [flight.NumReductions]string{"Sum", "Prod", "Max", "Min", "Avg"}

// macros returns the macros that select a module of the source.
func macros(f *format, op flight.Reduction) []string {
	return []string{"--define-macro=CHORUS_TYPE=" + f.c, "--define-macro=CHORUS_OP=" + templates[op]}
}

// kernel returns a kernel of a module of t. The first call loads the module.
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
func (t *toolbox) reducer(dev *device.Device, fn function, format int, op flight.Reduction) (*kernel.Kernel, error) {
	return t.kernel(&t.reduce[format][op], int(fn), func() ([]*kernel.Kernel, error) {
		f := &formats[format]
		fold := f.words(op)
		ks, err := t.load(dev, macros(f, op), []kernel.Def{
			{Name: "reduce_scatter", Params: params(), Go: fold.reduceScatter},
			{Name: "all_reduce_1", Params: params(), Go: fold.oneShot},
			{Name: "all_reduce_2", Params: params(), Go: fold.twoShotPackets},
			{Name: "all_reduce_3", Params: params(), Go: fold.twoShot},
			{Name: "all_reduce_4", Params: params(), Go: fold.twoShotLines},
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
		})
		if err != nil {
			return nil, fmt.Errorf("fabric: %w", err)
		}
		return ks, nil
	})
}

// load loads the module compiled for exactly this number of ranks or, if NVRTC is missing
// or fails, the module for any number. Ranks need not use the same one.
func (t *toolbox) load(dev *device.Device, options []string, defs []kernel.Def) ([]*kernel.Kernel, error) {
	x := kernel.Source{Name: "fabric.cu", CUDA: source, Options: t.exactly(options), Kernels: defs}
	ks, failed := compile(dev, &x)
	if failed == nil {
		return ks, nil
	}
	x.Options = options
	kern.Embed(&x, archive)
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
	kern.MakeResident(x)
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
	rootParam
)

func params(more ...kernel.Param) []kernel.Param {
	ps := make([]kernel.Param, maxRanks, rootParam+1)
	for i := range ps {
		ps[i] = kernel.Pointer
	}
	ps = append(ps, kernel.U32, kernel.U32, kernel.U64, kernel.U64, kernel.Pointer, kernel.Pointer, kernel.U64,
		kernel.Pointer, kernel.Pointer, kernel.U64, kernel.U32)
	return append(ps, more...)
}
