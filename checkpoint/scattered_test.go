package checkpoint

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/gds"
)

// TestGather compares random runs of random views, in two boxes, with plain indexing.
func TestGather(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	data := randomBytes(5 << 20)
	path := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.WriteFile(path, data, 0o644))
	f, err := gds.Open(path, nil)
	require.NoError(t, err)
	c := &Checkpoint{files: []*gds.File{f}}
	defer c.Close()
	for range 500 {
		s := randomView(r)
		var want []byte
		elements(s, func(off int64) { want = append(want, data[off:off+int64(s.size)]...) })
		n := len(want) / s.size
		from := r.IntN(n)
		to := from + 1 + r.IntN(n-from)
		got := bytes.Repeat([]byte{0xee}, (to-from)*s.size)
		require.NoError(t, c.gather(t.Context(), s, got, from))
		require.True(t, bytes.Equal(want[from*s.size:to*s.size], got), "shape %v, boxes %+v, elements %d to %d", s.shape, s.boxes, from, to)
	}
}

// TestGatherLongView reads a view whose elements lie further apart than the scratch memory.
func TestGatherLongView(t *testing.T) {
	data := randomBytes(5 << 20)
	path := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.WriteFile(path, data, 0o644))
	f, err := gds.Open(path, nil)
	require.NoError(t, err)
	c := &Checkpoint{files: []*gds.File{f}}
	defer c.Close()
	const n = 600_000
	s := &scattered{shape: []int{n}, size: 4, boxes: []filed{{at: []int{0}, n: []int{n}, off: 8, strides: []int{2}}}}
	got := make([]byte, 4*n)
	require.NoError(t, c.gather(t.Context(), s, got, 0))
	for i := range n {
		if !bytes.Equal(data[8+8*i:12+8*i], got[4*i:4*i+4]) {
			t.Fatalf("element %d is wrong", i)
		}
	}
}

// randomView returns a view of 5 MiB with random strides, in two boxes.
func randomView(r *rand.Rand) *scattered {
	s := &scattered{size: 1 << r.IntN(4)}
	dims := r.IntN(5)
	for range dims {
		s.shape = append(s.shape, 1+r.IntN(9))
	}
	if dims == 2 && r.IntN(2) == 0 {
		s.shape = []int{1 + r.IntN(200), 1 + r.IntN(200)}
	}
	cut := -1
	if dims > 0 {
		cut = r.IntN(dims)
	}
	first := 0
	for k := range 2 {
		b := filed{at: make([]int, dims), n: slices.Clone(s.shape), off: int64(r.IntN(1000)), strides: make([]int, dims)}
		if cut >= 0 {
			b.at[cut] = first
			if b.n[cut] -= first; k == 0 {
				b.n[cut] = r.IntN(s.shape[cut] + 1)
			}
			first = b.n[cut]
		}
		// Strides in a random order of the dimensions, with gaps, or 0.
		step := 1 + r.IntN(2)*r.IntN(40)
		for _, d := range r.Perm(dims) {
			if b.strides[d] = step; r.IntN(8) == 0 {
				b.strides[d] = 0
				continue
			}
			if next := step * (s.shape[d] + r.IntN(2)); next*300*s.size < 900<<10 {
				step = next
			}
		}
		if s.boxes = append(s.boxes, b); cut < 0 {
			break
		}
	}
	return s
}

// elements calls fn with the offset of each element, in row-major order.
func elements(s *scattered, fn func(off int64)) {
	at := make([]int, len(s.shape))
	for range product(s.shape) {
		for _, b := range s.boxes {
			off, inside := 0, true
			for d, i := range at {
				inside = inside && i >= b.at[d] && i < b.at[d]+b.n[d]
				off += (i - b.at[d]) * b.strides[d]
			}
			if inside {
				fn(b.off + int64(off*s.size))
				break
			}
		}
		for d := len(at) - 1; d >= 0; d-- {
			if at[d]++; at[d] < s.shape[d] {
				break
			}
			at[d] = 0
		}
	}
}
