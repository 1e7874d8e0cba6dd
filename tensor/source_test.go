package tensor

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/internal/ptxtest"
	"github.com/gochorus/chorus/memory"
)

// hostMain calls the kernels: for each trial it reads the numbers, then both memories,
// and writes the destination.
const hostMain = `
#define ARGS n, count, L(0), L(1), L(2), L(3), L(4), L(5), L(6), L(7)
#define L(k) (u32)h[7 + 3 * k], h[8 + 3 * k], h[9 + 3 * k]
// A piece is where it begins in both memories, in elements, and its end.
#define P(W) n, count, Q(W, 0), Q(W, 1), Q(W, 2), Q(W, 3), Q(W, 4), Q(W, 5), Q(W, 6), Q(W, 7), Q(W, 8), Q(W, 9)
#define Q(W, k) (W*)d + h[7 + 3 * k], (const W*)s + h[8 + 3 * k], (u32)h[9 + 3 * k]
int main() {
	i64 h[37]; // width or 0, two types, elements, loops, bytes of both memories, loops
	while (fread(h, sizeof h, 1, stdin) == 1) {
		std::vector<Wide> to((h[5] + 15) / 16), from((h[6] + 15) / 16);
		if (fread(to.data(), 1, h[5], stdin) != (size_t)h[5] || fread(from.data(), 1, h[6], stdin) != (size_t)h[6]) return 1;
		const u32 n = h[3], count = h[4];
		void *d = to.data(), *s = from.data();
		for (blockIdx.x = 0; blockIdx.x <= (n - 1) / (THREADS * ITEMS); blockIdx.x++)
			for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++)
				switch (h[0]) {
				case -1: pieces1(P(unsigned char)); break;
				case -2: pieces2(P(unsigned short)); break;
				case -4: pieces4(P(u32)); break;
				case -8: pieces8(P(u64)); break;
				case -16: pieces16(P(Wide)); break;
				case 0: convert(d, s, ARGS, h[1], h[2]); break;
				case 1: copy1((unsigned char*)d, (unsigned char*)s, ARGS); break;
				case 2: copy2((unsigned short*)d, (unsigned short*)s, ARGS); break;
				case 4: copy4((u32*)d, (u32*)s, ARGS); break;
				case 8: copy8((u64*)d, (u64*)s, ARGS); break;
				case 16: copy16((Wide*)d, (Wide*)s, ARGS); break;
				}
		fwrite(d, 1, h[5], stdout);
	}
}
`

// The kernels, compiled as C++, and the functions that stand in for them give the
// same bytes.
func TestSourceAgreesWithGo(t *testing.T) {
	t.Parallel()
	program := ptxtest.Host(t, ptxtest.HostShim+source+hostMain)
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 4))
	var in bytes.Buffer
	var trials []trial
	for width := 1; width <= 16; width *= 2 {
		for range 8 {
			trials = append(trials, copyTrial(r, width))
		}
	}
	for width := 1; width <= 16; width *= 2 {
		for count := 1; count <= maxPieces; count++ {
			trials = append(trials, piecesTrial(r, width, count))
		}
	}
	for to := memory.Bool; to <= memory.Float8E5M2T; to++ {
		for from := memory.Bool; from <= memory.Float8E5M2T; from++ {
			trials = append(trials, convertTrial(r, to, from))
		}
	}
	for _, x := range trials {
		x.write(&in)
	}
	cmd := exec.Command(program)
	cmd.Stdin = &in
	got, err := cmd.Output()
	require.NoError(t, err)
	for _, x := range trials {
		require.GreaterOrEqual(t, len(got), len(x.want))
		x.compare(t, got[:len(x.want)])
		got = got[len(x.want):]
	}
	require.Empty(t, got)
}

// A piece is n elements from a place in the source to one in the destination.
type piece struct{ n, dst, src int }

type trial struct {
	width        int
	to, from     memory.DType
	loops        []loop // from the outermost
	pieces       []piece
	dst, src     []byte
	want         []byte
	elements     int
	floatResults bool
}

// copyTrial copies elements of a width between random places.
func copyTrial(r *rand.Rand, width int) trial {
	x := trial{width: width, elements: 1}
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

// piecesTrial copies pieces of elements of a width.
func piecesTrial(r *rand.Rand, width, count int) trial {
	x := trial{width: -width}
	dst, src := 0, 0
	for range count {
		p := piece{1 + r.IntN(700), dst + r.IntN(3), src + r.IntN(3)}
		x.pieces = append(x.pieces, p)
		dst, src = p.dst+p.n, p.src+p.n
		x.elements += p.n
	}
	x.dst, x.src = noise(r, (dst+2)*width), noise(r, (src+2)*width)
	x.want = bytes.Clone(x.dst)
	for _, p := range x.pieces {
		copy(x.want[p.dst*width:][:p.n*width], x.src[p.src*width:])
	}
	return x
}

// convertTrial converts numbers that the type can hold, and what torch has an answer
// for otherwise.
func convertTrial(r *rand.Rand, to, from memory.DType) trial {
	const n = 1500
	x := trial{to: to, from: from, elements: n, loops: []loop{{n, 1, 1}}, floatResults: element.IsFloat(to)}
	x.dst, x.src = noise(r, n*to.Size()), noise(r, n*from.Size())
	for i := range n {
		if from == memory.Bool {
			x.src[i] &= 1
		}
		if !element.IsFloat(from) {
			continue
		}
		f := math.Ldexp(r.Float64()*2-1, r.IntN(40)-20)
		if element.IsFloat(to) && r.IntN(10) == 0 {
			f = []float64{math.Inf(1), math.NaN(), 464, 465, 57344, 61440, 65519, 65520, math.Copysign(0, -1)}[r.IntN(9)]
		}
		if to == memory.Uint64 {
			f = math.Abs(f) * 0x1p44
		}
		element.SetFloat(from, x.src, i, f)
		if v := element.Load(from, x.src, i).Round(memory.Float64); !element.IsFloat(to) && (math.IsNaN(v) || math.Abs(v) >= 0x1p64) {
			element.SetFloat(from, x.src, i, 1)
		}
	}
	x.want = bytes.Clone(x.dst)
	for i := range n {
		element.Store(to, x.want, i, element.Load(from, x.src, i))
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

func (x *trial) write(out *bytes.Buffer) {
	h := [7 + 3*max(maxLoops, maxPieces)]int64{int64(x.width), int64(x.to), int64(x.from), int64(x.elements),
		int64(len(x.loops) + len(x.pieces)), int64(len(x.dst)), int64(len(x.src))}
	end := 0
	for i, p := range x.pieces {
		end += p.n
		h[7+3*i], h[8+3*i], h[9+3*i] = int64(p.dst), int64(p.src), int64(end)
	}
	for i := range maxLoops {
		if len(x.pieces) > 0 {
			break
		}
		h[7+3*i] = 1
		if at := len(x.loops) - 1 - i; at >= 0 {
			l := x.loops[at]
			h[7+3*i], h[8+3*i], h[9+3*i] = int64(l.n), int64(l.dst), int64(l.src)
		}
	}
	_ = binary.Write(out, binary.LittleEndian, h) // to memory
	out.Write(x.dst)
	out.Write(x.src)
}

func (x *trial) compare(t *testing.T, got []byte) {
	t.Helper()
	if x.width != 0 || !x.floatResults {
		require.Equal(t, x.want, got, "width %d, %s from %s, %v", x.width, x.to, x.from, x.loops)
		return
	}
	size := x.to.Size()
	for i := range x.elements {
		a, b := element.Load(x.to, x.want, i).Round(memory.Float64), element.Load(x.to, got, i).Round(memory.Float64)
		if math.IsNaN(a) && math.IsNaN(b) {
			continue
		}
		require.Equal(t, x.want[i*size:(i+1)*size], got[i*size:(i+1)*size], "%s from %s: %v", x.to, x.from, element.Load(x.from, x.src, i))
	}
}
