package stream_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// onVirtual runs an example on one virtual device.
func onVirtual(example func(dev *device.Device) error) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	if err := example(sys.Devices()[0]); err != nil {
		log.Fatal(err)
	}
}

// One stream works while another copies; an event hands the memory over.
func Example() {
	onVirtual(func(dev *device.Device) error {
		compute, err := stream.FromPool(dev, 0)
		if err != nil {
			return err
		}
		transfer, err := stream.FromPool(dev, 0)
		if err != nil {
			return err
		}
		x, err := memory.MakeFrom(compute, []float32{1, 2, 3})
		if err != nil {
			return err
		}
		defer x.Close()
		done, err := compute.Record(nil) // behind what writes x
		if err != nil {
			return err
		}
		defer done.Close()
		if err := errors.Join(transfer.Wait(done), x.RecordStream(transfer)); err != nil {
			return err
		}
		out := make([]float32, 3) // compute goes on meanwhile
		err = x.CopyTo(transfer, out)
		fmt.Println(out)
		return err
	})
	// Output: [1 2 3]
}

// Events with timing measure what lies between them on the device.
func ExampleEvent_Elapsed() {
	onVirtual(func(dev *device.Device) error {
		s := stream.Default(dev)
		x, err := memory.Make[float32](s, 1<<20)
		if err != nil {
			return err
		}
		defer x.Close()
		timed := &stream.EventConfig{Timing: true}
		start, err := s.Record(timed)
		if err != nil {
			return err
		}
		defer start.Close()
		if err := x.Zero(s); err != nil {
			return err
		}
		end, err := s.Record(timed)
		if err != nil {
			return err
		}
		defer end.Close()
		if err := end.Sync(context.Background()); err != nil {
			return err
		}
		took, err := end.Elapsed(start)
		fmt.Println("it took time:", took > 0)
		return err
	})
	// Output: it took time: true
}

type stepArgs struct {
	X memory.Slice[float32]
	N int32
}

// Copies run concurrently with kernels: several streams process the parts of the data, each
// in a buffer of its own.
func ExampleFromPool() {
	const parts, length = 4, 1 << 10
	source := &kernel.Source{Name: "step.cu", CUDA: `extern "C" __global__ void step(float* x, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) x[i] = x[i] * 0.5f + 1.0f;
}`}
	step := kernel.Define(source, "step", func(c *kernel.Call, a stepArgs) { // for virtual devices
		x := kernel.Data(c, a.X)
		for i := range x {
			x[i] = x[i]*0.5 + 1
		}
	})
	onVirtual(func(dev *device.Device) error {
		var streams [2]*stream.Stream
		var buffers [2]memory.Slice[float32]
		var err error
		for i := range streams {
			if streams[i], err = stream.FromPool(dev, 0); err != nil { // the pool owns it
				return err
			}
			if buffers[i], err = memory.Make[float32](streams[i], length); err != nil {
				return err
			}
			defer buffers[i].Close()
		}
		m, err := kernel.Compile(dev, source)
		if err != nil {
			return err
		}
		defer m.Close()
		host, err := memory.MakePinned[float32](dev, parts*length) // only copies of page-locked memory overlap
		if err != nil {
			return err
		}
		defer host.Close()
		clear(host.Data())
		for i := range parts {
			// Parts that share a buffer are on one stream, which orders them.
			s, x := streams[i%2], buffers[i%2]
			part := host.Slice(i*length, (i+1)*length)
			if err := errors.Join(
				x.CopyFromPinned(s, part),
				step.Launch(s, kernel.Cover(length), stepArgs{x, length}),
				x.CopyToPinned(s, part),
			); err != nil {
				return err
			}
		}
		err = errors.Join(streams[0].Sync(context.Background()), streams[1].Sync(context.Background()))
		fmt.Println(host.Data()[0], host.Data()[parts*length-1])
		return err
	})
	// Output: 1 1
}

// A callback tells the host that the device has come somewhere.
func ExampleStream_Callback() {
	onVirtual(func(dev *device.Device) error {
		s := stream.Default(dev)
		told := make(chan string, 1)
		if err := s.Callback(func() { told <- "the work is done" }); err != nil {
			return err
		}
		fmt.Println(<-told)
		return s.Sync(context.Background())
	})
	// Output: the work is done
}
