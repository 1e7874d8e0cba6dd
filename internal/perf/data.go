package perf

import (
	_ "embed"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

//go:embed pattern.cu
var source string

// packed has pattern.cu compiled for every size of an element; make ptx writes it.
//
//go:embed pattern.ptx.zst
var packed []byte

var archive = ptx.Open(packed)

// words are C's types of so many bytes.
var words = map[int]string{1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}

func macros(size int) []string { return []string{"--define-macro=CHORUS_WORD=" + words[size]} }

// The parameters of the kernels.
var (
	fillParams = []kernel.Param{kernel.Pointer, kernel.U64, kernel.U64, kernel.U32, kernel.U32, kernel.U32, kernel.U32, kernel.Pointer}

	checkParams = []kernel.Param{kernel.Pointer, kernel.U64, kernel.U64, kernel.U32, kernel.U32, kernel.U32,
		kernel.U32, kernel.U32, kernel.U32, kernel.U32, kernel.Pointer, kernel.U64, kernel.Pointer}
)

// A loom has the kernels for elements of one size on one device.
type loom struct {
	module      *kernel.Module
	fill, check *kernel.Kernel
	grid        kernel.Grid
}

func newLoom(dev *device.Device, size int) (*loom, error) {
	p, err := dev.Properties()
	if err != nil {
		return nil, err
	}
	l := &loom{grid: kernel.Grid{Blocks: [3]uint32{uint32(p.Multiprocessors) * 8, 1, 1}, Threads: [3]uint32{256, 1, 1}}}
	fill, check := standIns[size]()
	l.module, err = kernel.Compile(dev, &kernel.Source{
		Name:    "pattern.cu",
		CUDA:    source,
		Options: macros(size),
		Kernels: []kernel.Def{{Name: "fill", Params: fillParams, Go: fill}, {Name: "check", Params: checkParams, Go: check}},
		PTX:     archive,
	})
	if err != nil {
		return nil, fmt.Errorf("make data to check: %w", err)
	}
	if l.fill, err = l.module.Kernel("fill"); err != nil {
		return nil, err
	}
	l.check, err = l.module.Kernel("check")
	return l, err
}

// A cloth is a pattern on a device.
type cloth struct {
	*pattern
	loom            *loom
	values, results memory.Slice[uint8]
}

func newCloth(s *stream.Stream, l *loom, p *pattern, size int) (c *cloth, err error) {
	c = &cloth{pattern: p, loom: l}
	if c.values, err = memory.MakeFrom(s, encode(p.values, size)); err != nil {
		return nil, err
	}
	if c.results, err = memory.MakeFrom(s, encode(p.results, size)); err != nil {
		_ = c.values.Close()
		return nil, err
	}
	return c, nil
}

func (c *cloth) close() error {
	err := c.values.Close()
	if e := c.results.Close(); err == nil {
		err = e
	}
	return err
}

// A piece is elements of a buffer that are those of one rank, or of all ranks
// reduced, from an element on.
type piece struct {
	at, n        int // in the buffer
	from         int // in the data
	first, ranks int
}

// fill writes a rank's data from its start.
func (c *cloth) fill(s *stream.Stream, dst memory.Slice[uint8], n, rank int, seed uint32) error {
	return c.loom.fill.Launch(s, c.loom.grid, kernel.Ptr(dst), kernel.Uint64(uint64(n)), kernel.Uint64(0),
		kernel.Uint32(uint32(rank)), kernel.Uint32(seed), kernel.Uint32(uint32(c.codes)), kernel.Uint32(uint32(c.limit)), kernel.Ptr(c.values))
}

// check adds to wrong how many elements of a piece are not as they should be.
func (c *cloth) check(s *stream.Stream, x memory.Slice[uint8], p piece, seed uint32, wrong memory.Slice[uint64]) error {
	table := c.values
	if p.ranks > 1 {
		table = c.results
	}
	return c.loom.check.Launch(s, c.loom.grid, kernel.Ptr(x), kernel.Uint64(uint64(p.n)), kernel.Uint64(uint64(p.from)),
		kernel.Uint32(uint32(p.first)), kernel.Uint32(uint32(p.ranks)), kernel.Uint32(seed),
		kernel.Uint32(uint32(c.codes)), kernel.Uint32(uint32(c.limit)), kernel.Uint32(c.op), kernel.Uint32(c.weights),
		kernel.Ptr(table), kernel.Uint64(c.tolerance), kernel.Ptr(wrong))
}
