package tensor

import (
	_ "embed"
	"fmt"
	"math"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// GroupedMatMul enqueues the products of groups of rows on s
// (torch.nn.functional.grouped_mm), such as the tokens of each expert. Group i
// is the next rows[i] rows of a. These rows of c become their product with the
// matrix b[i]. a has shape [m k], b [g k n], c [m n], and the numbers of rows,
// which may be 0, sum up to m. See MatMul for types, layouts, precision and
// errors; cfg has no tensors.
//
// Each group with rows is a product of its own, one after the other on s. If the sizes are on the device,
// see GroupedMatMulAt.
func GroupedMatMul(s *stream.Stream, c, a, b Tensor, rows []int, cfg *MatMulConfig) error {
	const op = "tensor: grouped matmul"
	if cfg == nil {
		cfg = &noConfig
	}
	if err := checkGrouped(op, s, cfg, c, a, b); err != nil {
		return err
	}
	if a.Dims() != 2 || b.Dims() != 3 || c.Dims() != 2 || b.Size(0) != len(rows) || b.Size(1) != a.Size(1) || c.Size(0) != a.Size(0) || c.Size(1) != b.Size(2) {
		return fmt.Errorf("%s: a of shape %v, b of %v and c of %v for %d groups: want [m k], [%d k n] and [m n]", op, a.Shape(), b.Shape(), c.Shape(), len(rows), len(rows))
	}
	total := 0
	for i, n := range rows {
		if n < 0 || n > a.Size(0)-total {
			return fmt.Errorf("%s: groups of %v rows for %d rows of a: group %d does not fit", op, rows, a.Size(0), i)
		}
		total += n
	}
	if total != a.Size(0) {
		return fmt.Errorf("%s: groups of %v rows sum up to %d: want the %d rows of a", op, rows, total, a.Size(0))
	}
	check := func(c, a, b Tensor) error { // of all groups, before the first product is enqueued
		var m multiplication
		if err := m.set(s, &c, &a, &b, cfg); err != nil {
			return matMulError(s, c, a, b, err)
		}
		return nil
	}
	enqueue := func(c, a, b Tensor) error { return MatMul(s, c, a, b, cfg) }
	for _, do := range []func(c, a, b Tensor) error{check, enqueue} {
		at := 0
		for i, n := range rows {
			if n > 0 {
				one, err := b.Select(0, i)
				if err == nil {
					err = do(c.part(0, at, n, nil), a.part(0, at, n, nil), one)
				}
				if err != nil {
					return fmt.Errorf("%s: group %d of %d rows: %w", op, i, n, err)
				}
			}
			at += n
		}
	}
	return nil
}

// GroupedMatMulAt is GroupedMatMul for groups of rows whose sizes are on the device
// (torch.nn.functional.grouped_mm with offs). ends is contiguous, int32 of shape [g]: where each group
// ends. The host never reads it, so graphs may hold the product, and each replay reads the current
// sizes.
//
//	a        b        c        group i
//	[m k]    [g k n]  [m n]    the rows from the end of group i-1, or 0, to ends[i]
//	[g m k]  [g k n]  [g m n]  the first ends[i] rows of matrix i
//
// The second form is for rows with a fixed room for each group, such as comm.ExpertRows with its Counts.
// Rows of a that belong to no group are not read, and those of c stay as they are.
//
// Wrong ends cannot damage other memory. Each end is limited to 0 and m, and in the first form an
// end that is smaller than that of an earlier group counts as that one, so that the group is
// empty.
//
// a and b are float16, bfloat16 or float32. c has their type, or is float32. Sums are in float32, on
// tensor cores for 16-bit types, and rounded once; products of float32 are exact fused
// multiply-adds. Layouts are those of MatMul, and a transposed c is possible. If addresses and strides
// are not multiples of 16 bytes, or c is transposed, the product is slower. Dimensions are at most 2³¹-256. cfg
// may set Alpha and Beta; Settings have no effect. Products of 16-bit types need compute
// capability 8.0.
//
// Results are reproducible, and a row depends only on its own group. GroupedMatMulAt allocates nothing
// and returns when its only kernel is enqueued. The first product of some types and
// layouts on a device compiles the kernel, as in IndexSelect.
func GroupedMatMulAt(s *stream.Stream, c, a, b, ends Tensor, cfg *MatMulConfig) error {
	return groupedAt("tensor: grouped matmul at", s, c, a, b, ends, cfg, false)
}

// GroupedMatMulInner is GroupedMatMulAt for groups of the inner dimension, such as the gradients of the
// weights of experts (torch.nn.functional.grouped_mm of two matrices). All of c is written: the product
// of a group without elements is 0, to which Beta may add.
//
//	a        b        c        group i
//	[m k]    [k n]    [g m n]  the columns of a and rows of b from the end of group i-1, or 0, to ends[i]
//	[g m k]  [g k n]  [g m n]  the first ends[i] columns of matrix i of a, and rows of matrix i of b
//
// Ends are limited to 0 and k, and what belongs to no group is not read.
func GroupedMatMulInner(s *stream.Stream, c, a, b, ends Tensor, cfg *MatMulConfig) error {
	return groupedAt("tensor: grouped matmul inner", s, c, a, b, ends, cfg, true)
}

// checkGrouped validates what the tensors and the configuration of all grouped products have in
// common.
func checkGrouped(op string, s *stream.Stream, cfg *MatMulConfig, c Tensor, in ...Tensor) error {
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	for _, x := range append([]Tensor{c}, in...) {
		if err := x.at().Check(op, s.Device()); err != nil {
			return err
		}
	}
	for _, x := range []Tensor{cfg.DeviceAlpha, cfg.DeviceBeta, cfg.Add, cfg.Bias, cfg.Aux, cfg.BiasGrad, cfg.ScaleA, cfg.ScaleB, cfg.ScaleResult, cfg.AMax} {
		if x.at().DType != 0 {
			return fmt.Errorf("%s: the configuration has the tensor %s: want only Alpha, Beta, Epilogue, FastAccum and Settings", op, x)
		}
	}
	if sharesWithin(&c) {
		return fmt.Errorf("%s: c has strides %v: its elements share memory", op, c.Strides())
	}
	for i := range in {
		if shares(&c, &in[i]) {
			name := [...]string{"a", "b", "ends"}[i]
			return fmt.Errorf("%s: c shares memory with %s: an output needs its own memory", op, name)
		}
	}
	return nil
}

// ---- groups whose sizes are on the device ----

// groupedAt enqueues the products of groups of rows, or of the inner dimension.
func groupedAt(op string, s *stream.Stream, c, a, b, ends Tensor, cfg *MatMulConfig, inner bool) error {
	if cfg == nil {
		cfg = &noConfig
	}
	if err := checkGrouped(op, s, cfg, c, a, b, ends); err != nil {
		return err
	}
	var g groupedLaunch
	if err := g.set(s, c, a, b, ends, cfg, inner); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if g.groups == 0 || g.m == 0 || g.n == 0 {
		return nil
	}
	k, err := loadedGrouped[g.kind.index()].Of(s.Device(), g.kind.load)
	if err == nil {
		err = k.kernel.Launch(s, g.grid(k.resident), g.args()...)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	gpu.StreamOf(s).Uses("grouped matrix product", false, func() []cudadrv.Use {
		return strided.Uses(strided.Uses(strided.Uses(nil, a.at(), false), b.at(), false), c.at(), true)
	})
	return nil
}

// A groupedLaunch has the arguments of a kernel of grouped.cu.
type groupedLaunch struct {
	kind             groupedKind
	c, a, b, ends    Tensor
	flags            uint32
	groups, m, n, k  int
	ld, step         [2]int // of a and b
	crow, ccol, cell int    // strides of c
	alpha, beta      float32
}

// The flags of grouped.cu.
const (
	groupedInner uint32 = 1 << iota
	groupedSeparate
	groupedFloats
	groupedAlignedA
	groupedAlignedB
	groupedAlignedC
)

// most is the largest dimension: a tile may begin before it and end behind it.
const mostGrouped = math.MaxInt32 - 255

// set validates the shapes, types and layouts, and derives the launch.
func (g *groupedLaunch) set(s *stream.Stream, c, a, b, ends Tensor, cfg *MatMulConfig, inner bool) error {
	g.c, g.a, g.b, g.ends = c, a, b, ends
	if ends.DType() != memory.Int32 || ends.Dims() != 1 || !ends.Contiguous() {
		return fmt.Errorf("ends %s with strides %v: want int32 of one dimension, contiguous", ends, ends.Strides())
	}
	g.groups = ends.Size(0)
	separate := a.Dims() == 3
	forms := [...]string{"[m k], [g k n] and [m n], or [g m k], [g k n] and [g m n]", "[m k], [k n] and [g m n], or [g m k], [g k n] and [g m n]"}
	want, grouped := [3]int{2, 3, 2}, []Tensor{b} // the dimensions of a, b and c, and the tensors with a matrix for each group
	if inner {
		want, grouped = [3]int{2, 2, 3}, []Tensor{c}
	}
	if separate {
		want, grouped = [3]int{3, 3, 3}, []Tensor{a, b, c}
	}
	fits := want == [3]int{a.Dims(), b.Dims(), c.Dims()}
	for _, x := range grouped {
		fits = fits && x.Size(0) == g.groups
	}
	if !fits || a.Size(-2) != c.Size(-2) || a.Size(-1) != b.Size(-2) || b.Size(-1) != c.Size(-1) {
		form := forms[0]
		if inner {
			form = forms[1]
		}
		return fmt.Errorf("a of shape %v, b of %v and c of %v for %d groups: want %s", a.Shape(), b.Shape(), c.Shape(), g.groups, form)
	}
	g.m, g.n, g.k = c.Size(-2), c.Size(-1), a.Size(-1)
	if max(g.m, g.n, g.k, g.groups) > mostGrouped {
		return fmt.Errorf("a of shape %v, b of %v and c of %v: want dimensions of at most %d", a.Shape(), b.Shape(), c.Shape(), mostGrouped)
	}
	if cfg.Epilogue != NoEpilogue || cfg.FastAccum {
		return fmt.Errorf("the configuration has Epilogue %d and FastAccum %v: want only Alpha, Beta and Settings", cfg.Epilogue, cfg.FastAccum)
	}
	if g.groups == 0 {
		return nil
	}
	return g.setProduct(s, cfg, inner, separate)
}

// setProduct derives the kernel and its strides. One product with the matrices of the groups is a MatMul, which validates the
// rest.
func (g *groupedLaunch) setProduct(s *stream.Stream, cfg *MatMulConfig, inner, separate bool) error {
	one := func(x Tensor) Tensor {
		if !separate && x.Dims() == 3 {
			x, _ = x.Select(0, 0) // there is a group
		}
		return x
	}
	var m multiplication
	c, a, b := one(g.c), one(g.a), one(g.b)
	if err := m.set(s, &c, &a, &b, cfg); err != nil {
		return matMulError(s, c, a, b, err)
	}
	switch t := a.DType(); t {
	case memory.Float16, memory.BFloat16:
		if err := s.Device().Require(device.Feature{Name: "grouped matrix products of 16-bit types", Major: 8}); err != nil {
			return err
		}
	case memory.Float32:
	default:
		return fmt.Errorf("a of %s: want float16, bfloat16 or float32", t)
	}
	sideA, err := sideOf("a", &g.a, int64(g.groups))
	if err != nil {
		return err
	}
	sideB, err := sideOf("b", &g.b, int64(g.groups))
	if err != nil {
		return err
	}
	g.kind = groupedKind{element: a.DType(), aInner: sideA.row, bInner: !sideB.row, tileRows: groupedTile}
	// Few rows in each group would leave half of a tile empty.
	if fewRows := !inner && !separate && g.m <= 3*groupedTile/4*g.groups || g.m <= groupedTile/2; fewRows && g.kind.element != memory.Float32 {
		g.kind.tileRows = groupedTile / 2
	}
	lines := func(x side, row bool) int {
		if row {
			return int(x.ldR)
		}
		return int(x.ldC)
	}
	g.ld = [2]int{lines(sideA, sideA.row), lines(sideB, sideB.row)}
	g.step = [2]int{int(sideA.stride), int(sideB.stride)}
	strides := g.c.at().Strides
	g.crow, g.ccol = strides[len(strides)-2], strides[len(strides)-1]
	if len(strides) == 3 {
		g.cell = strides[0]
	}
	if g.n == 1 {
		g.ccol = 1
	}
	g.alpha, g.beta = float32(m.Factors[0]), float32(m.Factors[1])
	g.setFlags(inner, separate)
	return nil
}

func (g *groupedLaunch) setFlags(inner, separate bool) {
	aligned := func(x *Tensor, strides ...int) bool {
		all := x.Ptr()
		for _, n := range strides {
			all |= uint64(n * x.DType().Size())
		}
		return all%16 == 0
	}
	for flag, on := range map[uint32]bool{
		groupedInner: inner, groupedSeparate: separate, groupedFloats: g.c.DType() == memory.Float32,
		groupedAlignedA: aligned(&g.a, g.ld[0], g.step[0]), groupedAlignedB: aligned(&g.b, g.ld[1], g.step[1]),
		groupedAlignedC: g.ccol == 1 && aligned(&g.c, g.crow, g.cell),
	} {
		if on {
			g.flags |= flag
		}
	}
}

// grid returns enough blocks for all tiles that there can be, but no more than the device has at a time: blocks
// take tiles by turns.
func (g *groupedLaunch) grid(resident int) kernel.Grid {
	up := func(n, d int) int { return (n-1)/d + 1 }
	tiles := up(g.m, g.kind.tileRows) * g.groups
	if g.flags&(groupedInner|groupedSeparate) == 0 {
		tiles = up(g.m, g.kind.tileRows) + g.groups
	}
	blocks := min(resident, tiles*up(g.n, groupedTile))
	threads, shared := g.kind.block()
	return kernel.Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{threads, 1, 1}, SharedBytes: shared}
}

func (g *groupedLaunch) args() []kernel.Arg {
	at := func(x Tensor) kernel.Arg { // of no bytes, because the matrices may have gaps
		if x.Len() == 0 { // an offset may be behind the memory
			return kernel.Address(0)
		}
		v, _ := memory.View[uint8](x.Buffer(), x.Offset(), 0) // the tensor's own memory
		return kernel.Ptr(v)
	}
	args := []kernel.Arg{at(g.c), at(g.a), at(g.b), words(g.ends)}
	for _, n := range g.numbers() {
		switch n := n.(type) {
		case uint32:
			args = append(args, kernel.Scalar(n))
		case int32:
			args = append(args, kernel.Scalar(n))
		case int64:
			args = append(args, kernel.Scalar(n))
		case float32:
			args = append(args, kernel.Scalar(n))
		}
	}
	return args
}

// numbers returns the arguments that are no pointers.
func (g *groupedLaunch) numbers() []any {
	return []any{uint32(g.groups), g.flags, int32(g.m), int32(g.n), int32(g.k), int64(g.ld[0]), int64(g.step[0]), int64(g.ld[1]), int64(g.step[1]),
		int64(g.crow), int64(g.ccol), int64(g.cell), g.alpha, g.beta}
}

// ---- the kernels ----

//go:embed grouped.cu
var groupedSource string

// groupedTile is the number of columns of a tile, and of its rows unless they are half as many.
const groupedTile = 128

// A groupedKind is a kernel of grouped.cu.
type groupedKind struct {
	element        memory.DType
	aInner, bInner bool // elements are adjacent along the inner dimension
	tileRows       int
}

// A groupedKernel is a kernel on a device.
type groupedKernel struct {
	kernel   *kernel.Kernel
	resident int // blocks that the device has at a time
}

var loadedGrouped [3 * 2 * 2 * 2]inside.PerDevice[groupedKernel]

// index numbers the kernels.
func (k *groupedKind) index() int {
	i := map[memory.DType]int{memory.Float16: 0, memory.BFloat16: 1, memory.Float32: 2}[k.element]
	for _, on := range []bool{k.aInner, k.bInner, k.tileRows == groupedTile} {
		i *= 2
		if on {
			i++
		}
	}
	return i
}

// block returns the threads and the dynamic shared memory of a block.
func (k *groupedKind) block() (threads, shared uint32) {
	if k.element == memory.Float32 {
		return 256, 0
	}
	const stages, tileInner, size = 4, 32, 2
	return 128, uint32(stages * tileInner * size * (k.tileRows + groupedTile))
}

// source returns grouped.cu for the kernel.
func (k *groupedKind) source() *kernel.Source {
	number := func(on bool) int {
		if on {
			return 1
		}
		return 0
	}
	element := map[memory.DType]int{memory.Float16: 16, memory.BFloat16: 17, memory.Float32: 32}[k.element]
	p, u, i, n, f := kernel.Pointer, kernel.U32, kernel.I32, kernel.I64, kernel.F32
	src := &kernel.Source{Name: "grouped.cu", CUDA: groupedSource,
		Options: []string{fmt.Sprint("-DELEMENT=", element), fmt.Sprint("-DA_INNER=", number(k.aInner)), fmt.Sprint("-DB_INNER=", number(k.bInner)), fmt.Sprint("-DTILE_M=", k.tileRows)},
		Kernels: []kernel.Def{{Name: "grouped", Params: []kernel.Param{p, p, p, p, u, u, i, i, i, n, n, n, n, n, n, n, f, f}, Go: standInGrouped(*k)}}}
	inside.Declare(src, map[string]string{"grouped": "---r--------------"})
	return src
}

// load compiles the kernel.
func (k *groupedKind) load(to *groupedKernel, dev *device.Device) error {
	src := k.source()
	inside.MakeResident(src)
	m, err := kernel.Compile(dev, src)
	if err != nil {
		return err
	}
	if to.kernel, err = m.Kernel("grouped"); err != nil {
		return err
	}
	p, err := dev.Properties()
	if err != nil {
		return err
	}
	threads, shared := k.block()
	each, err := to.kernel.Occupancy(int(threads), int(shared))
	to.resident = max(1, each) * p.Multiprocessors
	return err
}
