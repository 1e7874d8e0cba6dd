package comm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// otherCalls has what rank 1 issues instead of the quantized sum of the other ranks, in float8_e4m3fn.
var otherCalls = map[string]func(g *comm.Group, xs comm.Shards[float32]) error{
	"plain": func(g *comm.Group, xs comm.Shards[float32]) error { return comm.AllReduce(g, comm.Sum, xs...) },
	"format": func(g *comm.Group, xs comm.Shards[float32]) error {
		return comm.AllReduceQuantized(g, comm.Sum, xs, &comm.QuantizedConfig{Format: memory.Int8})
	},
	"mean": func(g *comm.Group, xs comm.Shards[float32]) error {
		return comm.AllReduceQuantized(g, comm.Avg, xs, nil)
	},
	"fewer": func(g *comm.Group, xs comm.Shards[float32]) error { // the shares have the same length
		return comm.AllReduceQuantized(g, comm.Sum, comm.Shards[float32]{xs[0].Slice(0, xs[0].Len()-1)}, nil)
	},
	"type": func(g *comm.Group, xs comm.Shards[float32]) error {
		ys, err := comm.Make[memory.BFloat16Bits](g, xs[0].Len())
		if err != nil {
			return err
		}
		defer ys.Close()
		got, wide := make([]memory.BFloat16Bits, xs[0].Len()), make([]float32, xs[0].Len())
		if err := errors.Join(ys[0].Zero(g.Stream(0)), comm.AllReduceQuantized(g, comm.Sum, ys, nil), ys[0].CopyTo(g.Stream(0), got)); err != nil {
			return err
		}
		for k := range got {
			wide[k] = got[k].Float32()
		}
		return xs[0].CopyFrom(g.Stream(0), wide)
	},
}

// otherTexts has the operation of rank 1 in the flight recorder.
var otherTexts = map[string]string{
	"plain": "ncclAllReduce(%d x float32, sum)", "format": "AllReduceQuantized(%d x float32 in int8, sum)", "mean": "AllReduceQuantized(%d x float32 in float8_e4m3fn, avg)",
	"fewer": "AllReduceQuantized(%d x float32 in float8_e4m3fn, sum)", "type": "AllReduceQuantized(%d x bfloat16 in float8_e4m3fn, sum)",
}

func otherText(how string, n int) string {
	if how == "fewer" {
		n--
	}
	return fmt.Sprintf(otherTexts[how], n)
}

// quantizedWorker issues what quantizedBut1 issues, and returns an error unless all elements are NaN.
func quantizedWorker(ctx context.Context, g *comm.Group, xs comm.Shards[float32], how string) error {
	if err := errors.Join(quantizedBut1(g, xs, how), g.Wait(ctx)); err != nil {
		return err
	}
	got := make([]float32, xs[0].Len())
	if err := errors.Join(xs[0].CopyTo(g.Stream(0), got), g.Shutdown(ctx)); err != nil {
		return err
	}
	k := slices.IndexFunc(got, func(x float32) bool { return x == x })
	if k < 0 || how == "fewer" && g.Rank() == 1 && k == len(got)-1 {
		return nil
	}
	return fmt.Errorf("element %d is %g: want NaN", k, got[k])
}

// quantizedBut1 issues a quantized sum, and on rank 1 something else.
func quantizedBut1(g *comm.Group, xs comm.Shards[float32], how string) error {
	if g.Rank() == 1 {
		return otherCalls[how](g, xs)
	}
	return comm.AllReduceQuantized(g, comm.Sum, xs, nil)
}

// Ranks of one process that give different formats, reductions, types or lengths, or of which one reduces without blocks, get an error
// that has both operations, and none of them waits, whoever moves the blocks.
func TestAllReduceQuantizedMixed(t *testing.T) {
	const n = 1000
	for how := range otherCalls {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
			t.Run(fmt.Sprint(how, "/", s), func(t *testing.T) {
				testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
					errs := joinDevices(t, cut(devs, 1, 1), &comm.Config{Strategy: s, NCCL: &nccl.Config{Timeout: 20 * time.Second}}, func(ctx context.Context, g *comm.Group) error {
						xs, err := comm.MakeFrom(g, make([]float32, n))
						if err != nil {
							return err
						}
						return errors.Join(quantizedBut1(g, xs, how), g.Wait(ctx), xs.Close())
					})
					requireMismatch(t, errs, fmt.Sprintf("AllReduceQuantized(%d x float32 in float8_e4m3fn, sum) as collective", n), otherText(how, n)+" as collective")
				})
			})
		}
	}
}

// Processes that mix them are told so long before the deadline, by Chorus kernels, which wait for each other.
func TestAllReduceQuantizedMixedByProcesses(t *testing.T) {
	t.Parallel()
	eachBackend(t, 3, 2, testgpu.CUDA, func(t *testing.T, backend string, ranks int) {
		for how := range otherCalls {
			t.Run(how, func(t *testing.T) {
				if backend == "virtual" {
					t.Parallel()
				}
				_, out, took := job(t, backend, "quantized "+how, ranks, env.CommStrategy.Name+"=own", paceVar+"=10ms")
				require.Contains(t, out, "the ranks do not issue the same operations as collective 11")
				require.Contains(t, out, otherText(how, 1<<20)+" as collective 11")
				require.Contains(t, out, "AllReduceQuantized(1048576 x float32 in float8_e4m3fn, sum)")
				require.Less(t, took, 2*time.Minute, out)
			})
		}
	})
}

// Where NCCL moves the blocks, processes whose blocks have the same size do not wait for each other. Then all elements are NaN on all
// ranks, or the ranks are named if the operation is slow.
func TestAllReduceQuantizedMixedByNCCL(t *testing.T) {
	t.Parallel()
	eachBackend(t, 3, 2, testgpu.CUDA, func(t *testing.T, backend string, ranks int) {
		for how := range otherCalls {
			if how == "plain" {
				continue // NCCL may hang or mix data up
			}
			t.Run(how, func(t *testing.T) {
				code, out, _ := job(t, backend, "quantized "+how, ranks, env.CommStrategy.Name+"=nccl")
				if code != 0 { // the operation took so long that the ranks' recorders were compared
					require.Contains(t, out, "the ranks do not issue the same operations as collective 11")
					require.Contains(t, out, otherText(how, 1<<20)+" as collective 11")
				}
			})
		}
	})
}

// A process may keep errors when others keep none: its elements and errors are those of a group that all keep them, and the other
// ranks lose what the rounding takes.
func TestAllReduceQuantizedErrorsOfOneProcess(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		const n, calls = 3000, 3
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
			var results, kept [2][][]float32 // with errors on both ranks, those of rank 1 always zero, and on rank 0 alone; by call
			for way := range results {
				errs := joinDevices(t, cut(devs, 1, 1), &comm.Config{Strategy: s}, func(ctx context.Context, g *comm.Group) error {
					q := newQuantizedSum(t, g, floats, n, 0)
					if way == 0 || g.Rank() == 0 {
						q.feedBack(t)
					}
					err := q.fill(func(rank, k int) float32 { return float32(math.Sin(float64(k * (rank + 1)))) })
					for range calls {
						if g.Rank() == 1 && way == 0 {
							err = errors.Join(err, q.cfg.Errors[0].Zero(g.Stream(0)))
						}
						got, failed := q.sum()
						if err = errors.Join(err, failed); err == nil && g.Rank() == 0 {
							mine := make([]float32, n)
							err = q.cfg.Errors[0].CopyTo(g.Stream(0), mine)
							results[way], kept[way] = append(results[way], got), append(kept[way], mine)
						}
					}
					return errors.Join(err, g.Wait(ctx))
				})
				require.NoError(t, errors.Join(errs...))
			}
			require.Equal(t, results[0], results[1], s)
			require.Equal(t, kept[0], kept[1], s)
			require.NotEqual(t, results[1][0], results[1][1], "the errors count")
		}
	})
}

// The flight recorder and its dumps have one operation, whoever moves the blocks, with its format. In dumps, the name is one that
// PyTorch's tools know.
func TestAllReduceQuantizedInTheFlightRecorder(t *testing.T) {
	for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.Config{Strategy: s})
		q := newQuantizedSum(t, g, bfloats, 100, 0)
		q.op, q.cfg.Format = comm.Avg, memory.Int8
		require.NoError(t, errors.Join(q.fill(func(int, int) float32 { return 1 }), q.enqueue(), g.Wait(testgpu.Context(t))))
		list := g.Communicator(1).Trace()
		last := list[len(list)-1]
		require.Equal(t, fmt.Sprintf("AllReduceQuantized(100 x bfloat16 in int8, avg) as collective %d", last.Collective), last.String())
		require.Equal(t, []int{100, 100}, []int{last.In, last.Out})
		var b bytes.Buffer
		require.NoError(t, g.Communicator(1).DumpTrace(&b))
		type entry struct {
			Name   string   `json:"profiling_name"`
			Kind   string   `json:"kind"`
			Format string   `json:"format"`
			Types  []string `json:"input_dtypes"`
			Uneven bool     `json:"uneven"`
		}
		var dump struct{ Entries []entry }
		require.NoError(t, json.Unmarshal(b.Bytes(), &dump))
		require.Equal(t, entry{"nccl:all_reduce", "quantized_all_reduce", "Char", []string{"BFloat16"}, false}, dump.Entries[len(dump.Entries)-1])
	}
}
