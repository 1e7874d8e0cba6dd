package ddp_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A step can be captured and launched many times, and others go on without it.
func TestReducerInAGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, flat := range []bool{true, false} {
			for _, wire := range []memory.DType{memory.Invalid, memory.BFloat16} {
				t.Run(fmt.Sprintf("flat=%v/wire=%v", flat, wire), func(t *testing.T) {
					g := local(t, devs)
					tr := newTrainer(t, g, flat, &ddp.ReducerConfig{StaticGraph: true, Compress: wire, BucketBytes: 4096})
					used := all(2)
					used[0][2], used[1][2], used[1][4] = false, false, false
					tr.step(0, used, backwardOrder)
					exec, err := graph.Capture(tr.streams(), func() error { return tr.capture(used) }, nil)
					require.NoError(t, err)
					defer exec.Close()
					for step := range 3 {
						for i := range used {
							for j := range gradLens {
								if used[i][j] {
									tr.fill(i, j, step)
								}
							}
						}
						tr.expect(step, used)
						require.NoError(t, tr.bs[1].s.WaitStream(tr.bs[0].s))
						require.NoError(t, exec.Launch(tr.bs[1].s))
						require.NoError(t, tr.bs[0].s.WaitStream(tr.bs[1].s))
						tr.check(step)
					}
					tr.step(3, used, backwardOrder) // without the graph
				})
			}
		}
	})
}

var backwardOrder = []int{6, 5, 4, 3, 2, 1, 0}

func (tr *trainer) capture(used [][]bool) error {
	for i, b := range tr.bs {
		for _, j := range backwardOrder {
			if !used[i][j] {
				continue
			}
			if err := tr.red.Ready(b.s, j); err != nil {
				return err
			}
		}
	}
	return tr.red.Finish(tr.streams()...)
}
