package stream_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A stream for urgent work has a lower number than the default priority.
func ExampleNew() {
	onVirtual(func(dev *device.Device) error {
		_, greatest, err := stream.PriorityRange(dev)
		if err != nil {
			return err
		}
		s, err := stream.New(dev, &stream.Config{Priority: greatest})
		if err != nil {
			return err
		}
		defer s.Close()
		priority, err := s.Priority()
		fmt.Println(priority < 0)
		return err
	})
	// Output: true
}

// A context carries the stream to functions that do not take one.
func ExampleNewContext() {
	onVirtual(func(dev *device.Device) error {
		s, err := stream.New(dev, nil)
		if err != nil {
			return err
		}
		defer s.Close()
		ctx := stream.NewContext(context.Background(), s)
		fmt.Println(stream.Current(ctx, dev).Equal(s), device.Current(ctx))
		fmt.Println(stream.Current(context.Background(), dev).Equal(stream.Default(dev)))
		return nil
	})
	// Output:
	// true virtual:0
	// true
}

// One stream waits for all work that another stream has now; the host does not wait.
func ExampleStream_WaitStream() {
	onVirtual(func(dev *device.Device) error {
		first, err := stream.FromPool(dev, 0)
		if err != nil {
			return err
		}
		second, err := stream.FromPool(dev, 0)
		if err != nil {
			return err
		}
		x, err := memory.MakeFrom(first, []float32{1, 2})
		if err != nil {
			return err
		}
		defer x.Close()
		out := make([]float32, 2)
		err = errors.Join(second.WaitStream(first), x.RecordStream(second), x.CopyTo(second, out))
		fmt.Println(out)
		return err
	})
	// Output: [1 2]
}
