package perf

import (
	"cmp"
	_ "embed"
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

//go:embed pattern.cu
var source string

// packed is pattern.cu compiled for each element size; make ptx writes it.
//
//go:embed pattern.ptx.zst
var packed []byte

var archive = cudacc.OpenArchive(packed)

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
	inside.Embed(src, archive)
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

// A pattern is the test data of one element type and reduction: codes, the value
// of each code in the type, and the values of reduced codes.
type pattern struct {
	codes     int      // number of codes: elements have codes 0 to codes-1
	limit     int      // ranks from here on contribute zeros
	op        uint32   // reduction of codes; see pattern.cu
	weights   uint32   // 1 if odd ranks count twice
	values    []uint64 // the bits of each code
	results   []uint64 // the bits of each reduced code
	tolerance uint64   // allowed difference of the bits of a result
}

// Reductions of codes.
const (
	codeSum uint32 = iota
	codeMin
	codeMax
)

// mostCodes limits the size of the tables.
const mostCodes = 2048

// newPattern builds the data for a reduction over n ranks; moves means no reduction.
func newPattern(t memory.DType, op reduction, n int) *pattern {
	p := &pattern{limit: n, codes: exact(t) + 1}
	value := func(code int) float64 { return float64(code) }
	result := value
	switch op {
	case minimum:
		p.op = codeMin
	case maximum:
		p.op = codeMax
	case prod:
		p.divide(exponents(t), n)
		value = func(code int) float64 { return math.Ldexp(1, code) }
		result = value
	case sum:
		p.divide(exact(t), n)
	case mulSum:
		p.weights = 1
		p.divide(exact(t)/2, n)
	case avg:
		p.divide(exact(t), n)
		result = func(total int) float64 { return float64(total) / float64(n) }
		if n&(n-1) != 0 && dtype.Of(t).IsFloat() {
			p.tolerance = 2 // 1/n is rounded, and the products are rounded again
		}
	}
	for c := range p.codes {
		p.values = append(p.values, bits(t, value(c)))
	}
	last := p.codes - 1
	if p.op == codeSum {
		last = last * p.limit << p.weights
	}
	for c := range last + 1 {
		p.results = append(p.results, bits(t, result(c)))
	}
	return p
}

// divide assigns codes to n ranks such that their sum is at most most.
func (p *pattern) divide(most, n int) {
	each := max(most/n, 1)
	p.codes, p.limit = each+1, min(n, max(most/each, 1))
}

// exact returns the largest n such that a type represents all integers up to n, or mostCodes.
func exact(t memory.DType) int {
	row := dtype.Of(t)
	n := 1 << min(row.Digits, 32)
	if !row.IsFloat() {
		n--
	}
	return min(n, mostCodes)
}

// exponents returns the largest exponent of a power of two that a type represents, or 30.
func exponents(t memory.DType) int {
	row := dtype.Of(t)
	if row.IsFloat() {
		return min(row.MaxExp, 30)
	}
	return min(row.Digits-1, 30)
}

// preMulSum returns the reduction that multiplies the elements of odd ranks by
// two, and that is created once for each element type.
func (r *rank) preMulSum(t memory.DType) (nccl.Op, error) {
	if op, ok := r.factors[t]; ok {
		return op, nil
	}
	make, ok := factorMakers[t]
	if !ok {
		return 0, fmt.Errorf("mulsum is not supported for %s", typeName(t))
	}
	p, err := make(r.c, r.c.Rank()%2 == 1)
	if err != nil {
		return 0, err
	}
	r.later(p.Close)
	r.factors[t] = p.Op()
	return p.Op(), nil
}

var factorMakers = map[memory.DType]func(c *nccl.Communicator, two bool) (*nccl.PreMulSum, error){
	memory.Int8: factor[int8](1, 2), memory.Uint8: factor[uint8](1, 2), memory.Int32: factor[int32](1, 2),
	memory.Uint32: factor[uint32](1, 2), memory.Int64: factor[int64](1, 2), memory.Uint64: factor[uint64](1, 2),
	memory.Float32: factor[float32](1, 2), memory.Float64: factor[float64](1, 2),
	memory.Float16:    factor(memory.Float16Of(1), memory.Float16Of(2)),
	memory.BFloat16:   factor(memory.BFloat16Of(1), memory.BFloat16Of(2)),
	memory.Float8E4M3: factor(memory.Float8E4M3Of(1), memory.Float8E4M3Of(2)),
	memory.Float8E5M2: factor(memory.Float8E5M2Of(1), memory.Float8E5M2Of(2)),
}

func factor[T memory.Element](one, two T) func(*nccl.Communicator, bool) (*nccl.PreMulSum, error) {
	return func(c *nccl.Communicator, twice bool) (*nccl.PreMulSum, error) {
		if twice {
			return nccl.NewPreMulSum(c, two)
		}
		return nccl.NewPreMulSum(c, one)
	}
}

// ParseTypes returns the types for a name of nccl-tests or of package memory, or
// all types of NCCL for "all".
func ParseTypes(name string) ([]memory.DType, error) {
	var list []memory.DType
	var names []string
	for _, t := range dtypes {
		names = append(names, typeName(t))
		if name == "all" || name == typeName(t) || name == t.String() {
			list = append(list, t)
		}
	}
	if list == nil {
		return nil, fmt.Errorf("unknown element type %q: want all or one of %s", name, strings.Join(names, ", "))
	}
	return list, nil
}

// dtypes are the types of NCCL, sorted by NCCL's numbers.
var dtypes = []memory.DType{memory.Int8, memory.Uint8, memory.Int32, memory.Uint32, memory.Int64, memory.Uint64, memory.Float16,
	memory.Float32, memory.Float64, memory.BFloat16, memory.Float8E4M3, memory.Float8E5M2}

// typeName returns the name of nccl-tests.
func typeName(t memory.DType) string { return cmp.Or(dtype.Of(t).NCCLTests, t.String()) }

// bits returns the bits of x converted to a type: rounded to the nearest value
// for floats, and toward zero for integers.
func bits(t memory.DType, x float64) uint64 {
	if row := dtype.Of(t); row.IsFloat() {
		var word [8]byte
		row.Store(word[:], 0, dtype.FloatValue(x))
		return binary.LittleEndian.Uint64(word[:])
	}
	return uint64(int64(x))
}

// encode writes bits as elements of size bytes.
func encode(all []uint64, size int) []byte {
	var out []byte
	for _, b := range all {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], b)
		out = append(out, word[:size]...)
	}
	return out
}

// A reduction is a reduction operator.
type reduction int

// The reductions of nccl-tests. mulSum multiplies the elements of each rank by
// the rank's factor before it adds them.
const (
	moves reduction = iota // no reduction
	sum
	prod
	maximum
	minimum
	avg
	mulSum
)

var reductionNames = [...]string{"none", "sum", "prod", "max", "min", "avg", "mulsum"}

// String returns the name in the table.
func (r reduction) String() string { return reductionNames[r] }

// parseReductions returns the reduction with a name, or all reductions for "all".
func parseReductions(name string) (list []reduction, err error) {
	for r := sum; r <= mulSum; r++ {
		if name == "all" || name == r.String() {
			list = append(list, r)
		}
	}
	if list == nil {
		return nil, fmt.Errorf("unknown reduction %q: want all or one of %s", name, strings.Join(reductionNames[1:], ", "))
	}
	return list, nil
}

// raw returns the NCCL operator, which is not valid for mulSum.
func (r reduction) raw() nccl.Op {
	return [...]nccl.Op{nccl.Sum, nccl.Sum, nccl.Prod, nccl.Max, nccl.Min, nccl.Avg, nccl.Sum}[r]
}

// standIns are the Go implementations of pattern.cu's kernels, by element size in bytes.
var standIns = map[int]func() (fill, check func(*kernel.Call)){
	1: standInsOf[uint8], 2: standInsOf[uint16], 4: standInsOf[uint32], 8: standInsOf[uint64],
}

// codeOf is the function code of pattern.cu.
func codeOf(i uint64, rank, seed, codes, limit uint32) uint32 {
	if rank >= limit {
		return 0
	}
	h := uint32(i)*0x9E3779B1 ^ uint32(i>>32) ^ rank*0x85EBCA77 ^ seed
	h ^= h >> 16
	h *= 0x7FEB352D
	h ^= h >> 15
	h *= 0x846CA68B
	h ^= h >> 16
	return h % codes
}

// tableLen returns the largest possible length of a table of codes.
func tableLen(codes, ranks, weights uint32) int { return int((codes-1)*ranks<<weights) + 1 }

func standInsOf[W uint8 | uint16 | uint32 | uint64]() (fill, check func(*kernel.Call)) {
	fill = func(c *kernel.Call) {
		n, from, rank, seed, codes, limit := int(kernel.Get[uint64](c, 1)), kernel.Get[uint64](c, 2), kernel.Get[uint32](c, 3), kernel.Get[uint32](c, 4), kernel.Get[uint32](c, 5), kernel.Get[uint32](c, 6)
		p, table := kernel.Update[W](c, 0, n), kernel.Read[W](c, 7, int(codes))
		for i := range p {
			p[i] = table[codeOf(from+uint64(i), rank, seed, codes, limit)]
		}
	}
	check = func(c *kernel.Call) {
		n, from, first, ranks, seed := int(kernel.Get[uint64](c, 1)), kernel.Get[uint64](c, 2), kernel.Get[uint32](c, 3), kernel.Get[uint32](c, 4), kernel.Get[uint32](c, 5)
		codes, limit, op, weights := kernel.Get[uint32](c, 6), kernel.Get[uint32](c, 7), kernel.Get[uint32](c, 8), kernel.Get[uint32](c, 9)
		most := int(codes)
		if ranks > 1 && op == codeSum {
			most = tableLen(codes, limit, weights)
		}
		p, table := kernel.Read[W](c, 0, n), kernel.Read[W](c, 10, most)
		bad := uint64(0)
		for i := range p {
			all := codeOf(from+uint64(i), first, seed, codes, limit) << (weights & first & 1)
			for r := first + 1; r < first+ranks; r++ {
				code := codeOf(from+uint64(i), r, seed, codes, limit) << (weights & r & 1)
				switch op {
				case codeSum:
					all += code
				case codeMin:
					all = min(all, code)
				default:
					all = max(all, code)
				}
			}
			want, got := table[all], p[i]
			if uint64(max(want, got)-min(want, got)) > kernel.Get[uint64](c, 11) {
				bad++
			}
		}
		kernel.Update[uint64](c, 12, 1)[0] += bad
	}
	return fill, check
}
