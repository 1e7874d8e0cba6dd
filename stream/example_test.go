package stream_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
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
