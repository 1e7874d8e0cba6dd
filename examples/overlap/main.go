// Overlap runs copies concurrently with kernels: several streams process data in
// parts faster than one stream.
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
	length = 1 << 18 // numbers in a part
	steps  = 50      // iterations of the kernel for each number
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
}

type stepArgs struct {
	X        memory.Slice[float32]
	Steps, N int32
}

// step launches the kernel. Virtual devices run the Go function.
var step = kernel.Define(&source, "step", func(c *kernel.Call, a stepArgs) {
	x := kernel.Data(c, a.X)
	for i := range x {
		for range a.Steps {
			x[i] = x[i]*0.5 + 1
		}
	}
})

func main() {
	log.SetFlags(0)
	log.SetPrefix("overlap: ")
	if err := compare(); err != nil {
		log.Fatal(err)
	}
}

func compare() error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print(note)
	}
	dev := sys.Devices()[0]
	m, err := kernel.Compile(dev, &source)
	if err != nil {
		return err
	}
	defer m.Close()
	var host [parts]*memory.Pinned[float32] // only copies of page-locked memory run concurrently
	for i := range host {
		if host[i], err = memory.MakePinned[float32](dev, length); err != nil {
			return err
		}
		defer host[i].Close()
	}
	if _, err := run(dev, host[:], 3); err != nil { // warm-up
		return err
	}
	for _, n := range []int{1, 3} {
		var took time.Duration
		nvtx.Range(fmt.Sprint("streams: ", n), func() { took, err = run(dev, host[:], n) })
		if err != nil {
			return err
		}
		fmt.Printf("%d parts of %d numbers over %d streams: %v\n", parts, length, n, took.Round(time.Microsecond))
	}
	return nil
}

// run processes the parts on the device with n streams and returns the time.
func run(dev *device.Device, host []*memory.Pinned[float32], n int) (took time.Duration, err error) {
	for _, h := range host {
		clear(h.Data())
	}
	streams, buffers := make([]*stream.Stream, n), make([]memory.Slice[float32], n)
	for i := range streams {
		if streams[i], err = stream.FromPool(dev, 0); err != nil { // owned by the pool
			return 0, err
		}
		if buffers[i], err = memory.Make[float32](streams[i], length); err != nil {
			return 0, err
		}
		defer buffers[i].Close()
	}
	took, err = elapsed(streams, func() error {
		for i, h := range host {
			// Parts that share a buffer are on the same stream, which orders them.
			s, x := streams[i%n], buffers[i%n]
			err := errors.Join(
				x.CopyFromPinned(s, h),
				step.Launch(s, kernel.Cover(length), stepArgs{x, steps, length}),
				x.CopyToPinned(s, h),
			)
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return took, check(host)
}

// elapsed returns the time that streams take for the operations that enqueue enqueues.
func elapsed(streams []*stream.Stream, enqueue func() error) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	timed := &stream.EventConfig{Timing: true}
	first, others := streams[0], streams[1:]
	start, err := first.Record(timed)
	if err != nil {
		return 0, err
	}
	defer start.Close()
	for _, s := range others { // all streams start together
		if err := s.Wait(start); err != nil {
			return 0, err
		}
	}
	if err := enqueue(); err != nil {
		return 0, err
	}
	for _, s := range others { // the end event follows all streams
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
	return end.Elapsed(start)
}

// check returns an error unless the kernel has written the right number everywhere.
func check(host []*memory.Pinned[float32]) error {
	for i, h := range host {
		for k, v := range h.Data() {
			if v != 2 { // the fixed point of x = x/2 + 1
				return fmt.Errorf("number %d of part %d is %g: want 2", k, i, v)
			}
		}
	}
	return nil
}
