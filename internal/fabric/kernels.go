package fabric

import (
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/kernel"
)

// packed has the source compiled for every element type and reduction, and without, all
// for any number of ranks; make ptx writes it.
//
//go:embed fabric.ptx.zst
var packed []byte

var archive = ptx.Open(packed)

// What the source says too.
const (
	maxRanks    = 8
	maxThreads  = 512 // of a block
	warp        = 32  // of which blocks are multiples
	maxBlocks   = 128
	ticks       = 256 // of an epoch
	packetBytes = 16
	lineBytes   = 128
	lineWords   = 15 // of data
	lineLanes   = 8  // threads that a line needs
	sets        = 4  // of slots and a whole: for even and odd epochs, without lines and with
	signalWords = 4  // of each rank for each block
	signalBytes = maxBlocks * maxRanks * signalWords * 8
)

// A function is a kernel of the source, within its module.
type function int

const (
	reduceScatterFn function = iota
	allReduceFn              // and one more for each further algorithm
	reducing        = allReduceFn + function(algorithms) - 1
)

const (
	allGatherFn function = iota
	allToAllFn
	broadcastFn
	moving
)

// A toolbox has the kernels of a device, for a number of ranks.
type toolbox struct {
	ranks  int
	reduce [len(formats)][ops]atomic.Pointer[[reducing]*kernel.Kernel]
	move   atomic.Pointer[[moving]*kernel.Kernel]
	mu     sync.Mutex // held while they are loaded
}

var toolboxKey kept.Key

func tools(dev *device.Device, ranks int) *toolbox {
	all := dev.Local(&toolboxKey, func() any {
		var all [maxRanks + 1]toolbox
		for n := range all {
			all[n].ranks = n
		}
		return &all
	}).(*[maxRanks + 1]toolbox)
	return &all[ranks]
}

// exactly are the options for no other number of ranks.
func (t *toolbox) exactly(options []string) []string {
	return append(options[:len(options):len(options)], fmt.Sprint("--define-macro=CHORUS_RANKS=", t.ranks))
}

// macros say which module the source is compiled to.
func macros(f *format, op Op) []string {
	return []string{"--define-macro=CHORUS_TYPE=" + f.c, "--define-macro=CHORUS_OP=" + templates[op]}
}

// reducer returns a kernel that reduces, whose module the first call loads.
func (t *toolbox) reducer(dev *device.Device, fn function, format int, op Op) (*kernel.Kernel, error) {
	at := &t.reduce[format][op]
	if ks := at.Load(); ks != nil {
		return ks[fn], nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if ks := at.Load(); ks != nil {
		return ks[fn], nil
	}
	f := &formats[format]
	fold := f.folds(op)
	var ks [reducing]*kernel.Kernel
	err := t.load(dev, macros(f, op), ks[:], []kernel.Def{
		{Name: "reduce_scatter", Params: params(), Go: fold.reduceScatter},
		{Name: "all_reduce_1", Params: params(), Go: fold.oneShot},
		{Name: "all_reduce_2", Params: params(), Go: fold.twoShotPackets},
		{Name: "all_reduce_3", Params: params(), Go: fold.twoShot},
		{Name: "all_reduce_4", Params: params(), Go: fold.twoShotLines},
	})
	if err != nil {
		return nil, fmt.Errorf("fabric: the %s of %s: %w", op, f.dtype, err)
	}
	at.Store(&ks)
	return ks[fn], nil
}

// mover returns a kernel that moves bytes, whose module the first call loads.
func (t *toolbox) mover(dev *device.Device, fn function) (*kernel.Kernel, error) {
	if ks := t.move.Load(); ks != nil {
		return ks[fn], nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if ks := t.move.Load(); ks != nil {
		return ks[fn], nil
	}
	var ks [moving]*kernel.Kernel
	err := t.load(dev, nil, ks[:], []kernel.Def{
		{Name: "all_gather", Params: params(), Go: gatherAll},
		{Name: "all_to_all", Params: params(), Go: exchangeAll},
		{Name: "broadcast", Params: params(kernel.U32), Go: broadcastOne},
	})
	if err != nil {
		return nil, fmt.Errorf("fabric: %w", err)
	}
	t.move.Store(&ks)
	return ks[fn], nil
}

// load loads the module for exactly the number of ranks, or, where NVRTC is missing or
// fails, for any number. Ranks need not have the same one.
func (t *toolbox) load(dev *device.Device, options []string, to []*kernel.Kernel, defs []kernel.Def) error {
	x := kernel.Source{Name: "fabric.cu", CUDA: source, Options: t.exactly(options), Kernels: defs}
	m, err := kernel.Resident(dev, &x)
	if err != nil {
		failed := err
		x.Options, x.PTX = options, archive
		m, err = kernel.Resident(dev, &x)
		switch missing := errors.Is(failed, errors.ErrUnsupported); {
		case err != nil && missing: // which must not hide what is wrong
			return err
		case err != nil:
			return errors.Join(failed, err)
		case !missing:
			slog.Warn("chorus: own kernels for this number of ranks cannot be had, so those for any number are used",
				"ranks", t.ranks, "device", dev.String(), "error", failed)
		}
	}
	for i, d := range defs {
		if to[i], err = m.Kernel(d.Name); err != nil {
			return err
		}
	}
	return nil
}

// The parameters of all kernels: what they know of the rank, and the operation's
// input, output, bytes and whether these are aligned.
const (
	peerParam = 0 // maxRanks of them
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
