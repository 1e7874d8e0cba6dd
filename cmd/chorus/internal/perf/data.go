package perf

import (
	_ "embed"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

//go:embed pattern.cu
var source string

// packed is pattern.cu compiled for each element size; make ptx writes it.
//
//go:embed pattern.ptx.zst
var packed []byte

var archive = ptx.Open(packed)

// words maps a size in bytes to a C type.
var words = map[int]string{1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}

func macros(size int) []string { return []string{"--define-macro=CHORUS_WORD=" + words[size]} }

// The parameters of the kernels.
var (
	fillParams = []kernel.Param{kernel.Pointer, kernel.U64, kernel.U64, kernel.U32, kernel.U32, kernel.U32, kernel.U32, kernel.Pointer}

	checkParams = []kernel.Param{kernel.Pointer, kernel.U64, kernel.U64, kernel.U32, kernel.U32, kernel.U32,
		kernel.U32, kernel.U32, kernel.U32, kernel.U32, kernel.Pointer, kernel.U64, kernel.Pointer}
)

// A dataKernels holds the data kernels for one element size on one device.
type dataKernels struct {
	module      *kernel.Module
	fill, check *kernel.Kernel
	grid        kernel.Grid
}

func newDataKernels(dev *device.Device, size int) (*dataKernels, error) {
	p, err := dev.Properties()
	if err != nil {
		return nil, err
	}
	l := &dataKernels{grid: kernel.Grid{Blocks: [3]uint32{uint32(p.Multiprocessors) * 8, 1, 1}, Threads: [3]uint32{256, 1, 1}}}
	fill, check := standIns[size]()
	src := &kernel.Source{
		Name:    "pattern.cu",
		CUDA:    source,
		Options: macros(size),
		Kernels: []kernel.Def{{Name: "fill", Params: fillParams, Go: fill}, {Name: "check", Params: checkParams, Go: check}},
	}
	kern.Embed(src, archive)
	l.module, err = kernel.Compile(dev, src)
	if err != nil {
		return nil, fmt.Errorf("load the test data kernels: %w", err)
	}
	if l.fill, err = l.module.Kernel("fill"); err != nil {
		return nil, err
	}
	l.check, err = l.module.Kernel("check")
	return l, err
}

// A dataTables is a pattern in device memory.
type dataTables struct {
	*pattern
	kernels         *dataKernels
	values, results memory.Slice[uint8]
}

func newDataTables(s *stream.Stream, l *dataKernels, p *pattern, size int) (c *dataTables, err error) {
	c = &dataTables{pattern: p, kernels: l}
	if c.values, err = memory.MakeFrom(s, encode(p.values, size)); err != nil {
		return nil, err
	}
	if c.results, err = memory.MakeFrom(s, encode(p.results, size)); err != nil {
		_ = c.values.Close()
		return nil, err
	}
	return c, nil
}

func (c *dataTables) close() error {
	err := c.values.Close()
	if e := c.results.Close(); err == nil {
		err = e
	}
	return err
}

// A piece describes consecutive elements of a buffer: their expected values are
// the data of one rank, or the reduction of several ranks' data.
type piece struct {
	at, n        int // offset and length in the buffer
	from         int // offset in the data
	first, ranks int
}

// fill writes the data of a rank from its start.
func (c *dataTables) fill(s *stream.Stream, dst memory.Slice[uint8], n, rank int, seed uint32) error {
	return c.kernels.fill.Launch(s, c.kernels.grid, kernel.Ptr(dst), kernel.Scalar[uint64](uint64(n)), kernel.Scalar[uint64](0),
		kernel.Scalar[uint32](uint32(rank)), kernel.Scalar[uint32](seed), kernel.Scalar[uint32](uint32(c.codes)), kernel.Scalar[uint32](uint32(c.limit)), kernel.Ptr(c.values))
}

// check adds the number of wrong elements of a piece to wrong.
func (c *dataTables) check(s *stream.Stream, x memory.Slice[uint8], p piece, seed uint32, wrong memory.Slice[uint64]) error {
	table := c.values
	if p.ranks > 1 {
		table = c.results
	}
	return c.kernels.check.Launch(s, c.kernels.grid, kernel.Ptr(x), kernel.Scalar[uint64](uint64(p.n)), kernel.Scalar[uint64](uint64(p.from)),
		kernel.Scalar[uint32](uint32(p.first)), kernel.Scalar[uint32](uint32(p.ranks)), kernel.Scalar[uint32](seed),
		kernel.Scalar[uint32](uint32(c.codes)), kernel.Scalar[uint32](uint32(c.limit)), kernel.Scalar[uint32](c.op), kernel.Scalar[uint32](c.weights),
		kernel.Ptr(table), kernel.Scalar[uint64](c.tolerance), kernel.Ptr(wrong))
}
