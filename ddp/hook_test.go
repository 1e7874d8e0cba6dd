package ddp_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A hook gets the buckets in order, with the gradients at their places and in their shapes, and
// Avg has divided them.
func TestHookGetsBuckets(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		var grads [][]tensor.Tensor
		for i := range devs {
			s := g.Stream(i)
			x, y := must(t)(tensor.Make(s, memory.Float32, 2, 3)), must(t)(tensor.Make(s, memory.Float16, 5))
			z := must(t)(tensor.Make(s, memory.Float32, 3))
			t.Cleanup(func() { require.NoError(t, errors.Join(x.Close(), y.Close(), z.Close())) })
			write(t, g, i, x, []float64{2, 4, 6, 8, 10, 12})
			write(t, g, i, y, []float64{1, 2, 3, 4, 5})
			write(t, g, i, z, []float64{6, 6, 6})
			grads = append(grads, []tensor.Tensor{x, y, z})
		}
		var seen [][]int
		hook := hookFunc(func(b *ddp.Bucket) ([]tensor.Tensor, error) {
			require.Equal(t, len(seen), b.Index)
			require.Equal(t, b.Index == 1, b.Last)
			seen = append(seen, b.Params)
			for i := range b.Flat {
				for j, p := range b.Params {
					require.Equal(t, grads[i][p].Shape(), b.Grads[i][j].Shape())
					h := make([]float64, size(b.Grads[i][j].Shape()))
					require.NoError(t, tensor.Copy(g.Stream(i), must(t)(tensor.OfHost(h, b.Grads[i][j].Shape()...)), b.Grads[i][j]))
					require.Equal(t, []float64{1, 0.5, 3}[p], h[0])
				}
			}
			return nil, b.AllReduce()
		})
		red, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{Hook: hook})
		require.NoError(t, err)
		reduceAll(t, g, red, 3)
		require.Equal(t, [][]int{{1}, {0, 2}}, seen)
		require.NoError(t, red.Close())
	})
}

// A hook whose result does not fit returns an error on all ranks, and the reducer goes on with
// the next step.
func TestHookOfWrongSizes(t *testing.T) {
	for want, result := range map[string]func(b *ddp.Bucket) []tensor.Tensor{
		"it returned 7 elements for local rank 0: want the 8 of the bucket": func(b *ddp.Bucket) []tensor.Tensor {
			x, _ := b.Flat[0].Narrow(0, 0, 7)
			return []tensor.Tensor{x}
		},
		"it returned 0 tensors": func(*ddp.Bucket) []tensor.Tensor { return []tensor.Tensor{} },
		"it returned no tensor": func(*ddp.Bucket) []tensor.Tensor { return []tensor.Tensor{{}} },
		"on another device": func(*ddp.Bucket) []tensor.Tensor {
			x, _ := tensor.MakeHost(memory.Float32, 8)
			return []tensor.Tensor{x}
		},
		"it returned uint8 for float32": func(b *ddp.Bucket) []tensor.Tensor {
			x, _ := b.Flat[0].ViewDType(memory.Uint8)
			x, _ = x.Narrow(0, 0, 8)
			return []tensor.Tensor{x}
		},
		"it returned shape [2 4]": func(b *ddp.Bucket) []tensor.Tensor {
			x, _ := b.Flat[0].View(2, 4)
			return []tensor.Tensor{x}
		},
	} {
		testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
			errs := processes(t, devs, func(g *comm.Group) error {
				wrong := g.Rank() == 1
				return hookSteps(g, hookFunc(func(b *ddp.Bucket) ([]tensor.Tensor, error) {
					if err := b.AllReduce(); err != nil || !wrong {
						return nil, err
					}
					wrong = false
					return result(b), nil
				}))
			})
			for rank, err := range errs {
				require.ErrorContains(t, err, want, "rank %d", rank)
				require.ErrorContains(t, err, "a step after it: 3 3")
				require.ErrorIs(t, err, comm.ErrMismatch)
			}
			require.ErrorContains(t, errs[0], "rank 1 has given something wrong")
		})
	}
}

// processes runs a function on groups of one rank each, as if each rank were a process.
func processes(t *testing.T, devs []*device.Device, fn func(g *comm.Group) error) []error {
	t.Helper()
	gs, errs := join(t, testgpu.Context(t), devs)
	require.NoError(t, errors.Join(errs...))
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() { errs[i] = fn(g) })
	}
	wg.Wait()
	return errs
}

// hookSteps runs two steps of two gradients. It returns the error of the first one, if the second
// one has the sum.
func hookSteps(g *comm.Group, hook ddp.Hook) error {
	s := g.Stream(0)
	flat, grads, err := memory.MakeFlat[float32](s, 4, 4)
	if err != nil {
		return err
	}
	defer flat.Close()
	red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, &ddp.ReducerConfig{Hook: hook, Op: new(comm.Sum)})
	if err != nil {
		return err
	}
	defer red.Close()
	first := hookStep(red, s, grads)
	if second := hookStep(red, s, grads); first == nil || second != nil {
		return errors.Join(first, second)
	}
	h := make([]float32, 4)
	if err := grads[1].CopyTo(s, h); err != nil {
		return err
	}
	return errors.Join(first, fmt.Errorf("a step after it: %v %v", h[0], h[1]))
}

func hookStep(red *ddp.Reducer, s *stream.Stream, grads []memory.Slice[float32]) error {
	for j := 1; j >= 0; j-- {
		if err := grads[j].CopyFrom(s, []float32{1.5, 1.5, 1.5, 1.5}); err != nil {
			return err
		}
		_ = red.Ready(s, j) // Finish returns its error too
	}
	return red.Finish(s)
}

// A hook that fails on one rank breaks the group of several processes, so that no rank waits.
func TestHookThatFails(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		limitNCCL(t, devs)
		failed := errors.New("no memory left")
		errs := processes(t, devs, func(g *comm.Group) error {
			err := hookSteps(g, hookFunc(func(b *ddp.Bucket) ([]tensor.Tensor, error) {
				if g.Rank() == 1 {
					return nil, failed
				}
				return nil, b.AllReduce()
			}))
			return errors.Join(err, g.Wait(testgpu.Context(t)))
		})
		require.ErrorIs(t, errs[1], failed)
		require.ErrorContains(t, errs[1], "ddp: the hook of bucket 0 on rank 1: no memory left")
		require.ErrorIs(t, errs[0], comm.ErrBroken)
		require.ErrorIs(t, errs[1], comm.ErrBroken)
	})
}

// limitNCCL gives operations on GPUs less time: NCCL's kernel does not see that a rank is gone.
func limitNCCL(t *testing.T, devs []*device.Device) {
	if devs[0].System().Backend() == "cuda" {
		t.Setenv(env.NCCLTimeout.Name, "3s")
	}
}

// In one process a step that a hook has failed ends with the error, and the next one begins.
func TestHookThatFailsOnce(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		calls := 0
		err := hookSteps(local(t, devs), hookFunc(func(b *ddp.Bucket) ([]tensor.Tensor, error) {
			if calls++; calls == 1 {
				return nil, errors.New("not now")
			}
			return nil, b.AllReduce()
		}))
		require.ErrorContains(t, err, "not now")
		require.ErrorContains(t, err, "a step after it: 1.5 1.5")
		require.Equal(t, 2, calls, "the step that failed is not tried again")
	})
}

// The hooks of all ranks must be the same.
func TestHooksThatDiffer(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, err := range processes(t, devs, func(g *comm.Group) error {
			return hookSteps(g, &ddp.PowerSGD{Rank: 1 + g.Rank()})
		}) {
			require.ErrorContains(t, err, "by the hook PowerSGD of rank 1 from step 1000")
			require.ErrorContains(t, err, "by the hook PowerSGD of rank 2 from step 1000")
		}
	})
}

func TestHookConfigErrors(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))
	x, err := memory.Make[float32](g.Stream(0), 4)
	require.NoError(t, err)
	defer x.Close()
	n, err := memory.Make[int32](g.Stream(0), 4)
	require.NoError(t, err)
	defer n.Close()
	for want, err := range map[string]error{
		"max by a hook: want sum or avg":             refused(g, &ddp.ReducerConfig{Hook: &ddp.PowerSGD{}, Op: new(comm.Max)}, x),
		"a hook for gradients of int32":              refused(g, &ddp.ReducerConfig{Hook: &ddp.PowerSGD{}}, n),
		"PowerSGD of rank -1":                        refused(g, &ddp.ReducerConfig{Hook: &ddp.PowerSGD{Rank: -1}}, x),
		"DivideByActive with sum":                    refused(g, &ddp.ReducerConfig{Uneven: true, DivideByActive: true, Op: new(comm.Sum)}, x),
		"are for uneven inputs: set Uneven":          refused(g, &ddp.ReducerConfig{StopTogether: true}, x),
		"max of uneven inputs":                       refused(g, &ddp.ReducerConfig{Uneven: true, Op: new(comm.Max)}, x),
		"uneven inputs for gradients of int32: want": refused(g, &ddp.ReducerConfig{Uneven: true}, n),
	} {
		require.ErrorContains(t, err, want)
	}
}
