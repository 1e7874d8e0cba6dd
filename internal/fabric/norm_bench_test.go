package fabric_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/memory"
)

// BenchmarkNorm measures the fused norm of bfloat16 by both algorithms, with and without clusters,
// an all-reduce alone, and an all-reduce with a separate kernel for the norm.
func BenchmarkNorm(b *testing.B) {
	benchGroups(b, func(b *testing.B, group []member) {
		for _, c := range []normCase{{rows: 1, cols: 6144}, {rows: 6, cols: 6144}, {rows: 6, cols: 6144, scale: 1}, {rows: 32, cols: 6144}, {rows: 128, cols: 4096}} {
			for _, mode := range []string{"eager", "graph"} {
				b.Run(fmt.Sprintf("rows=%d/cols=%d/small=%t/%s", c.rows, c.cols, c.scale != 0, mode), func(b *testing.B) {
					benchNorm(b, group, c, mode == "graph")
				})
			}
		}
	})
}

func benchNorm(b *testing.B, group []member, c normCase, captured bool) {
	for _, how := range []string{"auto", "one-shot", "one-shot without clusters", "two-shot-packets", "all-reduce alone", "separate"} {
		b.Run(how, func(b *testing.B) {
			measureEach(b, group, captured, func(m member) func() error {
				c.algorithm = map[string]fabric.Algorithm{"one-shot": fabric.OneShot, "one-shot without clusters": fabric.OneShot, "two-shot-packets": fabric.TwoShotPackets}[how]
				m.SetClusters(how != "one-shot without clusters")
				x := newNormRank(b, m, bfloat, c, rand.New(rand.NewPCG(1, 1)), rand.New(rand.NewPCG(1, 2)))
				require.NoError(b, x.begin(bfloat))
				reduce := func() error {
					return fabric.AllReduce[memory.BFloat16Bits](m.Rank, m.s, x.in, x.in, collective.Sum, nil)
				}
				switch how {
				case "all-reduce alone":
					return reduce
				case "separate":
					return func() error { return errors.Join(reduce(), fabric.AddNorm(m.s, &x.norm)) }
				}
				if !m.TakesNorm(&x.norm) {
					b.Skip("no room for this algorithm")
				}
				return func() error { return m.EnqueueNorm(m.s, &x.norm) }
			})
		})
	}
}
