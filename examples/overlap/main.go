// Overlap lets copies run beside kernels: data that goes through a device in
// parts takes less time over several streams than over one.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nvtx"
	"github.com/gochorus/chorus/stream"
)

const (
	parts  = 8
	length = 1 << 18 // of a part
	steps  = 50      // of the kernel for each number
)

var source = kernel.Source{
	Name: "step.cu",
	CUDA: `extern "C" __global__ void step(float* x, int steps, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i >= n) return;
	float v = x[i];
	for (int k = 0; k < steps; k++) v = v * 0.5f + 1.0f;
	x[i] = v;
}`,
	Kernels: []kernel.Def{{
		Name:   "step",
		Params: []kernel.Param{kernel.Pointer, kernel.I32, kernel.I32},
		Go: func(c *kernel.Call) {
			x := kernel.Update[float32](c, 0, int(c.Int32(2)))
			for i := range x {
				for range c.Int32(1) {
					x[i] = x[i]*0.5 + 1
				}
			}
		},
	}},
}

func main() {
	log.SetFlags(0)
	if err := compare(); err != nil {
		log.Fatal("overlap: ", err)
	}
}

func compare() (err error) {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print("overlap: ", note)
	}
	dev := sys.Devices()[0]
	m, err := kernel.Compile(dev, &source)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	step, err := m.Kernel("step")
	if err != nil {
		return err
	}
	var host []*memory.Pinned[float32] // only copies of page-locked memory overlap
	defer func() {
		for _, h := range host {
			err = errors.Join(err, h.Close())
		}
	}()
	for range parts {
		h, err := memory.MakePinned[float32](dev, length)
		if err != nil {
			return err
		}
		host = append(host, h)
	}
	if _, err := run(dev, step, host, 3); err != nil { // warms up
		return err
	}
	for _, n := range []int{1, 3} {
		over := map[int]string{1: "1 stream", 3: "3 streams"}[n]
		var took time.Duration
		nvtx.Range(over, func() { took, err = run(dev, step, host, n) })
		if err != nil {
			return err
		}
		fmt.Printf("%d parts of %d numbers over %s: %v\n", parts, length, over, took.Round(time.Microsecond))
	}
	return nil
}

// run sends the parts through the device over n streams, and returns how long that
// takes.
func run(dev *device.Device, step *kernel.Kernel, host []*memory.Pinned[float32], n int) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, h := range host {
		clear(h.Data())
	}
	first, err := stream.FromPool(dev, 0) // not ours to close
	if err != nil {
		return 0, err
	}
	streams, buffers := make([]*stream.Stream, n), make([]memory.Slice[float32], n)
	for i := range streams {
		if streams[i], err = stream.FromPool(dev, 0); err != nil {
			return 0, err
		}
		if buffers[i], err = memory.Make[float32](streams[i], length); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, buffers[i].Close()) }()
	}
	timed := &stream.EventConfig{Timing: true}
	start, err := first.Record(timed)
	if err != nil {
		return 0, err
	}
	defer start.Close()
	for _, s := range streams { // none begins before
		if err := s.Wait(start); err != nil {
			return 0, err
		}
	}
	for i, h := range host {
		// The order within a stream keeps the parts that share its buffer apart.
		s, x := streams[i%n], buffers[i%n]
		err := errors.Join(
			x.CopyFromPinned(s, h),
			step.Launch(s, kernel.Cover(length), kernel.Ptr(x), kernel.Int32(steps), kernel.Int32(length)),
			x.CopyToPinned(s, h),
		)
		if err != nil {
			return 0, err
		}
	}
	for _, s := range streams { // and the end comes after all
		if err := first.WaitStream(s); err != nil {
			return 0, err
		}
	}
	end, err := first.Record(timed)
	if err != nil {
		return 0, err
	}
	defer end.Close()
	if err := end.Sync(ctx); err != nil {
		return 0, err
	}
	if took, err = end.Elapsed(start); err != nil {
		return 0, err
	}
	for i, h := range host {
		for k, v := range h.Data() {
			if v != 2 { // where x = x/2 + 1 leads
				return 0, fmt.Errorf("number %d of part %d is %g: want 2", k, i, v)
			}
		}
	}
	return took, nil
}
