package nancheck

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudahost"
	"github.com/gochorus/chorus/internal/ptxtest"
)

// hostMain runs the kernels thread by thread on bytes that it reads, twice with the same slot, and
// writes the results.
const hostMain = `
#include <cstdlib>
#define RUN(bytes, W) case bytes: look##bytes((const W*)x.data(), h[1], h[2], h[3] + turn, words, words + 1, found); break;
int main() {
	u64 h[5]; // bytes of an element, elements, infinity, operation, blocks
	while (fread(h, sizeof h, 1, stdin) == 1) {
		std::vector<u64> x(h[0] * h[1] / 8 + 1);
		if (fread(x.data(), 1, h[0] * h[1], stdin) != h[0] * h[1]) return 1;
		u64 words[3] = {}, found[2] = {};
		gridDim.x = h[4], blockDim.x = 32;
		for (u64 turn = 0; turn < 2; turn++)
			for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
				for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
					switch (h[0]) { RUN(1, unsigned char) RUN(2, unsigned short) RUN(4, unsigned) RUN(8, u64) }
		if (words[1] || words[2]) return 2;
		fwrite(found, sizeof found, 1, stdout);
	}
}
`

// hostAtomics are the functions that the kernel uses, for one thread.
const hostAtomics = `
static Dim gridDim, blockDim;
static void __threadfence() {}
static void __threadfence_system() {}
static void __syncthreads() {}
static unsigned long long atomicMax(unsigned long long* p, unsigned long long v) { auto o = *p; if (v > o) *p = v; return o; }
static unsigned long long atomicExch(unsigned long long* p, unsigned long long v) { auto o = *p; *p = v; return o; }
static unsigned long long atomicCAS(unsigned long long* p, unsigned long long a, unsigned long long v) { auto o = *p; if (o == a) *p = v; return o; }
static unsigned atomicInc(unsigned* p, unsigned most) { auto o = *p; *p = o >= most ? 0 : o + 1; return o; }
`

// The kernels, compiled as C++, find the same elements as their Go functions.
func TestSourceAgreesWithGo(t *testing.T) {
	program := ptxtest.Host(t, cudahost.Shim()+hostAtomics+source+hostMain)
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	var in bytes.Buffer
	var want []uint64
	for _, infinity := range infinities {
		for range 20 * min(int(infinity), 1) {
			size, n, operation := map[uint64]int{0x7e: 1, 0x7c: 1, 0x7c00: 2, 0x7f80: 2, 0x7f800000: 4}[infinity], r.IntN(300), r.Uint64()
			if size == 0 {
				size = 8
			}
			b := make([]byte, n*size)
			for i := range b {
				b[i] = byte(r.Uint32()) & byte(0x3f|r.Uint32N(4)<<6)
			}
			require.NoError(t, binary.Write(&in, binary.LittleEndian, []uint64{uint64(size), uint64(n), infinity, operation, 1 + r.Uint64N(4)}))
			in.Write(b)
			x := []uint64{0, 0}
			if at := first(b, size, infinity); at >= 0 {
				x = []uint64{operation, uint64(at)}
			}
			want = append(want, x...)
		}
	}
	cmd := exec.Command(program)
	cmd.Stdin = &in
	out, err := cmd.Output()
	require.NoError(t, err)
	got := make([]uint64, len(out)/8)
	require.NoError(t, binary.Read(bytes.NewReader(out), binary.LittleEndian, got))
	require.Equal(t, want, got)
}

// first is firstNaN of bytes.
func first(b []byte, size int, infinity uint64) int {
	switch size {
	case 1:
		return firstNaN(b, infinity)
	case 2:
		return firstNaN(words[uint16](b), infinity)
	case 4:
		return firstNaN(words[uint32](b), infinity)
	}
	return firstNaN(words[uint64](b), infinity)
}

func words[W word](b []byte) []W {
	x := make([]W, len(b)/binary.Size(W(0)))
	if err := binary.Read(bytes.NewReader(b), binary.LittleEndian, x); err != nil {
		panic(err)
	}
	return x
}
