package strided

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
)

// hostTables has a kernel for each kernel that gets a table. The addresses of a table are offsets in the memories; those of
// a fan and of a sum have the source's in words.
const hostTables = `
static void move(Pieces& t, u64 d, u64 s) { for (u32 i = 0; i < t.count; i++) t.to[i] += d, t.from[i] += s; }
static void move(Fan& t, u64 d, u64 s) {
	for (u32 i = 0; i < t.ways; i++) t.to[i] += d;
	for (u32 i = 0; i < t.count; i++) t.from[i] += s;
}
static void move(Sum& t, u64 d, u64 s) {
	t.to += d;
	for (u32 i = 0; i < t.count * t.places; i++) t.words[i] += s;
}
#define TABLE(kernel, T) static void kernel##_at(void* d, void* s, T t) { move(t, (u64)d, (u64)s); kernel(t); }
#define TABLES(bytes) TABLE(pieces##bytes, Pieces) TABLE(fan##bytes, Fan)
TABLES(1) TABLES(2) TABLES(4) TABLES(8) TABLES(16) TABLE(sum1, Sum) TABLE(sum16, Sum)
`

// The kernels, compiled as C++, and the functions that stand in for them give the
// same bytes.
func TestSourceAgreesWithGo(t *testing.T) {
	testhost.Serial(t)
	t.Parallel()
	names := []string{"convert", "sum1_at", "sum16_at"}
	for width := 1; width <= 16; width *= 2 {
		names = append(names, fmt.Sprint("copy", width), fmt.Sprintf("pieces%d_at", width), fmt.Sprintf("fan%d_at", width))
	}
	h := testgpu.CompileForHost(t, source+hostTables, nil, names...)
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 4))
	var trials []trial
	for width := 1; width <= 16; width *= 2 {
		for range 8 {
			trials = append(trials, copyTrial(r, width))
		}
	}
	for width := 1; width <= 16; width *= 2 {
		for _, count := range []int{1, 2, 3, 7, maxPieces - 1, maxPieces} {
			trials = append(trials, piecesTrial(r, width, count))
		}
		for _, count := range []int{1, 2, 5, maxSources} {
			trials = append(trials, fanTrial(r, width, count, 1+r.IntN(maxDestinations)))
		}
	}
	for d := memory.Bool; d <= memory.Float8E5M2; d++ {
		require.Contains(t, sumTypes, unsigned(d), "the kernel has no %s", d)
	}
	drawn := testgpu.SampleRaced(t, 4)
	for _, d := range sumTypes {
		for _, places := range []int{1, 2, 3, 8, 9, 17} {
			if !drawn() {
				continue
			}
			trials = append(trials, sumTrial(r, d, places, 1+r.IntN(sumPieces(places)), false))
			if !dtype.Of(d).IsFloat8() {
				trials = append(trials, sumTrial(r, d, places, sumPieces(places), true))
			}
		}
	}
	for to := memory.Bool; to <= memory.Float8E5M2; to++ {
		for from := memory.Bool; from <= memory.Float8E5M2; from++ {
			trials = append(trials, convertTrial(r, to, from))
		}
	}
	for _, x := range trials {
		x.compare(t, x.run(h))
	}
}

type trial struct {
	kernel       string
	to, from     memory.DType
	loops        []loop // from the outermost
	table        any    // of a kernel that has one, with places in dst and src for addresses
	dst, src     []byte
	want         []byte
	elements     int // of all threads
	floatResults bool
}

// run runs the kernel on the host, and returns the destination.
func (x *trial) run(h *testgpu.HostKernels) []byte {
	dst, perThread := bytes.Clone(x.dst), 4
	args := []any{dst, x.src}
	switch {
	case x.table != nil:
		args = append(args, x.table)
	default:
		args = append(args, uint32(x.elements), uint32(len(x.loops)))
		for i := range maxLoops {
			l := loop{n: 1}
			if at := len(x.loops) - 1 - i; at >= 0 {
				l = x.loops[at]
			}
			args = append(args, uint32(l.n), int64(l.dst), int64(l.src))
		}
	}
	switch {
	case x.kernel == "convert":
		args = append(args, uint32(x.to), uint32(x.from))
	case strings.HasPrefix(x.kernel, "sum"):
		perThread = 1
	}
	h.Run(x.kernel, (x.elements-1)/(threads*perThread)+1, threads, args...)
	return dst
}

// copyTrial copies elements of a width between random places.
func copyTrial(r *rand.Rand, width int) trial {
	x := trial{kernel: fmt.Sprint("copy", width), elements: 1}
	dst, src := 1, 1
	for range r.IntN(maxLoops) {
		l := loop{1 + r.IntN(5), dst, src}
		x.loops = append([]loop{l}, x.loops...)
		dst, src = dst*l.n+r.IntN(2), src*l.n+r.IntN(3)
		x.elements *= l.n
		if x.elements > 3000 {
			break
		}
	}
	x.dst, x.src = noise(r, (dst+1)*width), noise(r, (src+1)*width)
	x.want = bytes.Clone(x.dst)
	runs(x.loops, func(p run) {
		for i := range p.n {
			copy(x.want[(p.dst+i*p.dstStep)*width:][:width], x.src[(p.src+i*p.srcStep)*width:])
		}
	})
	return x
}

// piecesTrial copies rows of elements of a width.
func piecesTrial(r *rand.Rand, width, count int) trial {
	x := trial{kernel: fmt.Sprintf("pieces%d_at", width)}
	t := pieceTable{count: uint32(count)}
	dst, src := 0, 0
	type rows struct{ n, row, dst, src, toStep, fromStep int }
	var all []rows
	for i := range count {
		p := rows{n: 1 + r.IntN(3), row: 1 + r.IntN(300), dst: dst + r.IntN(3), src: src + r.IntN(3)}
		p.toStep, p.fromStep = p.row+r.IntN(4), r.IntN(p.row+4)
		all = append(all, p)
		dst, src = p.dst+p.n*p.toStep, p.src+p.n*max(p.row, p.fromStep)
		t.n += uint32(p.n * p.row)
		t.to[i], t.from[i], t.end[i] = uint64(p.dst*width), uint64(p.src*width), t.n
		t.row[i], t.toStep[i], t.fromStep[i] = uint32(p.row), uint32(p.toStep), uint32(p.fromStep)
	}
	x.dst, x.src = noise(r, (dst+2)*width), noise(r, (src+2)*width)
	x.want, x.table, x.elements = bytes.Clone(x.dst), t, int(t.n)
	for _, p := range all {
		for k := range p.n {
			copy(x.want[(p.dst+k*p.toStep)*width:][:p.row*width], x.src[(p.src+k*p.fromStep)*width:])
		}
	}
	return x
}

// fanTrial copies pieces of elements of a width to several places.
func fanTrial(r *rand.Rand, width, count, ways int) trial {
	x := trial{kernel: fmt.Sprintf("fan%d_at", width)}
	t := fanTable{count: uint32(count), ways: uint32(ways)}
	src := 0
	for i := range count {
		src += r.IntN(3)
		n := 1 + r.IntN(40)
		t.n += uint32(n)
		t.from[i], t.end[i] = uint64(src*width), t.n
		src += n
	}
	each := (int(t.n) + 1) * width
	x.dst, x.src = noise(r, each*ways), noise(r, src*width)
	x.want = bytes.Clone(x.dst)
	for w := range ways {
		t.to[w] = uint64(each * w)
		begin := 0
		for i := range count {
			end := int(t.end[i])
			copy(x.want[each*w+begin*width:each*w+end*width], x.src[t.from[i]:])
			begin = end
		}
	}
	x.table, x.elements = t, int(t.n)
	return x
}

// sumTypes are those that the kernel knows.
var sumTypes = []memory.DType{memory.Bool, memory.Uint8, memory.Uint16, memory.Uint32, memory.Uint64, memory.Float16, memory.BFloat16,
	memory.Float32, memory.Float64, memory.Float8E4M3, memory.Float8E5M2}

// sumTrial adds pieces of elements, single ones or 16 bytes at once.
func sumTrial(r *rand.Rand, d memory.DType, places, count int, wide bool) trial {
	x := trial{kernel: "sum1_at", to: d}
	pack := d.Size()
	if wide {
		x.kernel, pack = "sum16_at", 16
	}
	t := sumTable{count: uint32(count), places: uint32(places), kind: uint32(d)}
	ends := make([]uint32, count)
	src := 0
	for i := range count {
		n := 1 + r.IntN(5)
		if i%7 == 0 {
			n += r.IntN(600)
		}
		t.n += uint32(n)
		ends[i] = t.n
		for k := range places {
			src += r.IntN(2)
			t.words[i*places+k] = uint64(src * pack)
			src += n
		}
	}
	copy(t.ends(count, places), ends)
	x.dst, x.src = noise(r, (int(t.n)+1)*pack), noise(r, src*pack)
	size := d.Size()
	for i := range len(x.src) / size {
		switch {
		case d == memory.Bool:
			x.src[i] &= 1
		case dtype.Of(d).IsFloat(): // of two magnitudes, so that sums are rounded
			dtype.Of(d).Store(x.src, i, dtype.FloatValue(math.Ldexp(r.Float64()*2-1, r.IntN(12)-6)))
		}
	}
	x.want, x.table, x.elements = bytes.Clone(x.dst), t, int(t.n)
	begin := uint32(0)
	for i, end := range ends {
		for at := range int(end-begin) * pack / size {
			sum := dtype.Of(d).Load(x.src[t.words[i*places]:], at)
			to := int(begin)*pack/size + at
			dtype.Of(d).Store(x.want, to, sum)
			for k := 1; k < places; k++ {
				y := dtype.Of(d).Load(x.src[t.words[i*places+k]:], at)
				if z := dtype.Of(d).Load(x.want, to); dtype.Of(d).IsFloat() {
					dtype.Of(d).Store(x.want, to, dtype.FloatValue(z.Float64()+y.Float64()))
				} else {
					dtype.Of(d).Store(x.want, to, dtype.IntValue(z.Int64()+y.Int64()))
				}
			}
		}
		begin = end
	}
	return x
}

// convertTrial converts numbers that the type can hold, and what torch has an answer
// for otherwise.
func convertTrial(r *rand.Rand, to, from memory.DType) trial {
	const n = 1500
	x := trial{kernel: "convert", to: to, from: from, elements: n, loops: []loop{{n, 1, 1}}, floatResults: dtype.Of(to).IsFloat()}
	x.dst, x.src = noise(r, n*to.Size()), noise(r, n*from.Size())
	for i := range n {
		if from == memory.Bool {
			x.src[i] &= 1
		}
		if !dtype.Of(from).IsFloat() {
			continue
		}
		f := math.Ldexp(r.Float64()*2-1, r.IntN(40)-20)
		if dtype.Of(to).IsFloat() && r.IntN(10) == 0 {
			f = []float64{math.Inf(1), math.NaN(), 464, 465, 57344, 61440, 65519, 65520, math.Copysign(0, -1)}[r.IntN(9)]
		}
		if to == memory.Uint64 {
			f = math.Abs(f) * 0x1p44
		}
		dtype.Of(from).Store(x.src, i, dtype.FloatValue(f))
		if v := dtype.Of(from).Load(x.src, i).Float64(); !dtype.Of(to).IsFloat() && (math.IsNaN(v) || math.Abs(v) >= 0x1p64) {
			dtype.Of(from).Store(x.src, i, dtype.FloatValue(1))
		}
	}
	x.want = bytes.Clone(x.dst)
	for i := range n {
		dtype.Of(to).Store(x.want, i, dtype.Of(from).Load(x.src, i))
	}
	return x
}

func noise(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func (x *trial) compare(t *testing.T, got []byte) {
	t.Helper()
	if !x.floatResults {
		require.Equal(t, x.want, got, "%s, %s from %s, %v", x.kernel, x.to, x.from, x.loops)
		return
	}
	size := x.to.Size()
	for i := range x.elements {
		a, b := dtype.Of(x.to).Load(x.want, i).Float64(), dtype.Of(x.to).Load(got, i).Float64()
		if math.IsNaN(a) && math.IsNaN(b) {
			continue
		}
		require.Equal(t, x.want[i*size:(i+1)*size], got[i*size:(i+1)*size], "%s from %s: %v", x.to, x.from, dtype.Of(x.from).Load(x.src, i))
	}
}
