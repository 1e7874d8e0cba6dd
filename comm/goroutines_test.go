package comm_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

// Several goroutines issue operations of a group that use one stream, or all, and have
// them wait for each other: none gets between the parts of another.
func TestSeveralGoroutinesIssue(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
			g := groupBy(t, devs, comm.Config{Strategy: s, NCCL: &nccl.Config{Timeout: time.Minute}})
			work := [2]func(*testing.T, *comm.Group, float32) error{sumUp, copyAround}
			require.NoError(t, errors.Join(atOnce(8, func(i int) (err error) {
				for n := 0; n < 40 && err == nil; n++ {
					err = work[i%2](t, g, float32(i))
				}
				return err
			})...), s)
		}
	})
}

// sumUp adds what all ranks have.
func sumUp(t *testing.T, g *comm.Group, v float32) error {
	xs, err := comm.Make[float32](g, 500)
	if err != nil {
		return err
	}
	defer xs.Close()
	in, got := slices.Repeat([]float32{v}, 500), make([]float32, 500)
	for i := range xs {
		if err := xs[i].CopyFrom(g.Stream(i), in); err != nil {
			return err
		}
	}
	if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
		return err
	}
	for i := range xs {
		if err := xs[i].CopyTo(g.Stream(i), got); err != nil {
			return err
		}
		if want := v * float32(g.Size()); slices.ContainsFunc(got, func(x float32) bool { return x != want }) {
			return fmt.Errorf("the sum on rank %d is %v..., want %v", i, got[:4], want)
		}
	}
	return g.Wait(testgpu.Context(t))
}

// copyAround copies a tensor to all devices and what arrives back to the first.
func copyAround(t *testing.T, g *comm.Group, v float32) error {
	x, err := memory.MakeFrom(g.Stream(0), slices.Repeat([]float32{v}, 600))
	if err != nil {
		return err
	}
	defer x.Close()
	in, err := tensor.Of(x, 20, 30)
	if err != nil {
		return err
	}
	all, err := comm.Broadcast(g, in, nil)
	if err != nil {
		return err
	}
	out, err := comm.Gather(g, all, nil)
	if err != nil {
		return err
	}
	got := make([]float32, 600*g.Size())
	flat, err := tensor.Slice[float32](out)
	if err != nil {
		return err
	}
	if err := flat.CopyTo(g.Stream(0), got); err != nil {
		return err
	}
	if slices.ContainsFunc(got, func(x float32) bool { return x != v }) {
		return fmt.Errorf("what came back is not all %v", v)
	}
	errs := []error{out.Close(), g.Wait(testgpu.Context(t))}
	for _, y := range all {
		errs = append(errs, y.Close())
	}
	return errors.Join(errs...)
}
