package alloc

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func benchArena(b *testing.B) (*Device, *Arena) {
	m := newMachine(b, 140<<30)
	d := m.device("")
	b.ReportAllocs()
	return d, must(d.Default().Arena(m.stream()))
}

func BenchmarkHit(b *testing.B) {
	for _, n := range []uint64{512, 64 << 10, 1 << 20, 64 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			d, a := benchArena(b)
			for range b.N {
				p, _ := a.Alloc(n)
				_ = d.Free(p)
			}
		})
	}
}

func BenchmarkChurn(b *testing.B) {
	for _, live := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(live), func(b *testing.B) {
			d, a := benchArena(b)
			r := rand.New(rand.NewPCG(1, 2))
			size := func() uint64 { return uint64(math.Exp2(16 * r.Float64())) }
			blocks := make([]uint64, live)
			for i := range blocks {
				blocks[i] = must(a.Alloc(size()))
			}
			type op struct {
				block int
				bytes uint64
			}
			ops := make([]op, 1<<20)
			for i := range ops {
				ops[i] = op{r.IntN(live), size()}
			}
			b.ResetTimer()
			for i := range b.N {
				o := &ops[i%len(ops)]
				_ = d.Free(blocks[o.block])
				blocks[o.block], _ = a.Alloc(o.bytes)
			}
		})
	}
}

// A pass over the recorded training steps; the time is that of one operation.
func BenchmarkTraining(b *testing.B) {
	f, err := os.Open("../../../internal/memtrace/testdata/trace_train.json.gz")
	require.NoError(b, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(b, err)
	var trace struct{ Events [][]any }
	require.NoError(b, json.NewDecoder(z).Decode(&trace))
	type op struct {
		block int
		bytes uint64
	}
	var ops []op
	at := map[any]int{}
	n := 0
	for _, e := range trace.Events {
		switch e[0] {
		case "alloc":
			at[e[1]] = n
			ops = append(ops, op{n, uint64(e[2].(float64))})
			n++
		case "free_completed":
			ops = append(ops, op{at[e[1]], 0})
			delete(at, e[1])
		}
	}
	d, a := benchArena(b)
	blocks := make([]uint64, n)
	b.ResetTimer()
	for i := 0; i < b.N; {
		for _, o := range ops {
			if o.bytes > 0 {
				blocks[o.block], _ = a.Alloc(o.bytes)
			} else {
				_ = d.Free(blocks[o.block])
				blocks[o.block] = 0
			}
		}
		for j, p := range blocks {
			if p != 0 {
				_ = d.Free(p)
				blocks[j] = 0
			}
		}
		i += len(ops)
	}
}

// 16 goroutines have a stream each; the time is that of a pair over all of them.
func BenchmarkStreams(b *testing.B) {
	const streams = 16
	for _, live := range []int{0, 1000} {
		b.Run(fmt.Sprint(live), func(b *testing.B) {
			m := newMachine(b, 140<<30)
			d := m.device("")
			b.ReportAllocs()
			var wg sync.WaitGroup
			for i := range streams {
				a := must(d.Default().Arena(m.stream()))
				wg.Go(func() {
					r := rand.New(rand.NewPCG(uint64(i), 2))
					blocks := make([]uint64, max(live, 1))
					for i := range b.N / streams {
						if j := i % len(blocks); live == 0 {
							blocks[j], _ = a.Alloc(64 << 10)
							_ = d.Free(blocks[j])
						} else {
							if blocks[j] != 0 {
								_ = d.Free(blocks[j])
							}
							blocks[j], _ = a.Alloc(1 + r.Uint64()>>48)
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
