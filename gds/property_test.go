package gds

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var allEngines = []Engine{Auto, Cached, Direct, CuFile}

// newRandom returns a source whose seed is printed.
func newRandom(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// smallRing bounds the pinned memory of the device's System for one test.
func smallRing(t testing.TB, d *device.Device, bytes int64) *ring {
	t.Helper()
	r, err := ringOf(d)
	require.NoError(t, err)
	was := r.bound
	r.bound = bytes
	t.Cleanup(func() { r.bound = was })
	return r
}

// randomPieces cuts device memory of n bytes into pieces with other gaps than they
// have in a file of size bytes. It returns what shall be where.
func randomPieces(r *rand.Rand, x memory.Slice[byte], size int) (pieces []piece) {
	off, at := 0, 0
	for len(pieces) < 60 {
		n := []int{0, 1, 17, 511, 4096, 100_000, 700_000}[r.IntN(7)]
		off += []int{0, 0, 0, 1, 4095, 40_000, 300_000}[r.IntN(7)]
		at += []int{0, 0, 1, 512}[r.IntN(4)]
		if n > 1 {
			n = 1 + r.IntN(n)
		}
		if off+n > size || at+n > x.Len() {
			break
		}
		pieces = append(pieces, piece{Off: int64(off), Mem: x.Slice(at, at+n)})
		off, at = off+n, at+n
	}
	return pieces
}

// Any pieces of any files arrive, on several devices at the same time that share a
// ring with room for three slots.
func TestRandomPieces(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ring := smallRing(t, devs[0], 3*minSlot)
		r := newRandom(t)
		const size = 6<<20 + 4321
		var files []string
		contents := [][]byte{randomBytes(size), randomBytes(size)}
		for i, c := range contents {
			for j := range c {
				c[j] += byte(i)
			}
			files = append(files, writeFile(t, c))
		}
		var wg sync.WaitGroup
		for i, e := range allEngines {
			for j, path := range files {
				s, f := newStream(t, devs[(i+j)%2]), openFile(t, path, &FileConfig{Engine: e, Threads: 1 + r.IntN(5)})
				tune(f, []int64{minSlot, 2 * minSlot}[r.IntN(2)], 1+r.IntN(maxDepth))
				x := makeBytes(t, s, size)
				pieces := randomPieces(r, x, size)
				wg.Go(func() { readAndCompare(t, s, f, x, pieces, contents[j]) })
			}
		}
		wg.Wait()
		require.Zero(t, ring.used)
		require.Empty(t, ring.waiting)
	})
}

func readAndCompare(t *testing.T, s *stream.Stream, f *File, x memory.Slice[byte], pieces []piece, content []byte) {
	var moved atomic.Int64
	err := f.readPieces(testgpu.Context(t), s, pieces, hooks{Moved: func(n int) { moved.Add(int64(n)) }})
	if err != nil {
		t.Error(err)
		return
	}
	got, want := make([]byte, x.Len()), make([]byte, x.Len())
	if err := x.CopyTo(s, got); err != nil {
		t.Error(err)
		return
	}
	for i := range want {
		want[i] = 0xa5
	}
	for _, p := range pieces {
		copy(want[p.Mem.Offset()-x.Offset():], content[p.Off:p.End()])
	}
	if string(want) != string(got) {
		t.Errorf("%s by %s: other bytes than the file's, or beside the pieces", f.path, f.first)
	}
	if moved.Load() != bytesOf(pieces) {
		t.Errorf("%s by %s: %d bytes were reported of %d", f.path, f.first, moved.Load(), bytesOf(pieces))
	}
}

// What is written in place is in the file, and nothing else has changed.
func TestRandomWrites(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		smallRing(t, devs[0], 3*minSlot)
		r := newRandom(t)
		for _, e := range allEngines {
			t.Run(e.String(), func(t *testing.T) {
				s := newStream(t, devs[0])
				want := randomBytes(3<<20 + 99)
				path := writeFile(t, want)
				f, err := OpenFile(path, os.O_RDWR, &FileConfig{Engine: e, Threads: 3})
				require.NoError(t, err)
				defer f.Close()
				content := make([]byte, len(want))
				for i := range content {
					content[i] = byte(r.Uint32())
				}
				x, err := memory.MakeFrom(s, content)
				require.NoError(t, err)
				defer x.Close()
				pieces := randomPieces(r, x, len(want))
				for _, p := range pieces {
					copy(want[p.Off:], content[p.Mem.Offset():p.Mem.Offset()+p.Mem.Len()])
				}
				var moved atomic.Int64
				require.NoError(t, f.writePieces(testgpu.Context(t), s, pieces, hooks{Moved: func(n int) { moved.Add(int64(n)) }}))
				require.EqualValues(t, bytesOf(pieces), moved.Load())
				got, err := os.ReadFile(path)
				require.NoError(t, err)
				require.True(t, string(want) == string(got), "the file is another")

				back := makeBytes(t, s, len(want)) // by the same File, which knows that it has changed
				require.NoError(t, f.Load(testgpu.Context(t), s, back, 0))
				require.True(t, string(want) == string(hostBytes(t, s, back)))
			})
		}
	})
}

// Files that are written whole by any engine have their bytes, also beyond an
// aligned end.
func TestWriteWhole(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		ctx, s := testgpu.Context(t), newStream(t, devs[0])
		for _, e := range allEngines {
			for _, n := range []int{1, 4095, 4096, 4097, 1<<20 + 1} {
				t.Run(fmt.Sprintf("%s/%d", e, n), func(t *testing.T) {
					want := randomBytes(n)
					x, err := memory.MakeFrom(s, want)
					require.NoError(t, err)
					defer x.Close()
					path := filepath.Join(t.TempDir(), "file")
					f, err := Create(path, &FileConfig{Engine: e})
					require.NoError(t, err)
					require.NoError(t, f.Save(ctx, s, x, 0))
					require.NoError(t, f.Commit(ctx))
					got, err := os.ReadFile(path)
					require.NoError(t, err)
					require.True(t, string(want) == string(got))
				})
			}
		}
	})
}
