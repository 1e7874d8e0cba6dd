package memory_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// onVirtual runs an example on a virtual device, so that the examples run anywhere. A program
// opens a device by device.Open.
func onVirtual(example func(s *stream.Stream) error) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	if err := example(stream.Default(sys.Devices()[0])); err != nil {
		log.Fatal(err)
	}
}

func ExampleMake() {
	onVirtual(func(s *stream.Stream) error {
		x, err := memory.Make[float32](s, 3) // its contents are undefined
		if err != nil {
			return err
		}
		defer x.Close()
		out := make([]float32, 3)
		err = errors.Join(x.Zero(s), x.CopyTo(s, out))
		fmt.Println(x.Len(), x.DType(), out)
		return err
	})
	// Output: 3 float32 [0 0 0]
}

// Memory is copied from the host to a device, to another device, and back.
func ExampleCopy() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		log.Fatal(err)
	}
	copyOver := func(a, b *stream.Stream, in, out []float64) error {
		x, err := memory.MakeFrom(a, in) // from the host to the first device
		if err != nil {
			return err
		}
		defer x.Close()
		y, err := memory.Make[float64](b, len(in))
		if err != nil {
			return err
		}
		defer y.Close()
		return errors.Join(
			b.WaitStream(a),      // b waits until a has written x
			x.RecordStream(b),    // x is not reused before b has read it
			memory.Copy(b, y, x), // to the second device
			y.CopyTo(b, out),     // and back; returns when out is complete
		)
	}
	out := make([]float64, 3)
	if err := copyOver(stream.Default(sys.Devices()[0]), stream.Default(sys.Devices()[1]), []float64{1, 2, 3}, out); err != nil {
		log.Fatal(err)
	}
	fmt.Println(out)
	// Output: [1 2 3]
}

// Parameters of several layers lie in one allocation, so that one call sets them all.
func ExampleMakeFlat() {
	onVirtual(func(s *stream.Stream) error {
		flat, parts, err := memory.MakeFlat[float32](s, 2, 3)
		if err != nil {
			return err
		}
		defer flat.Close()
		if err := errors.Join(flat.Zero(s), parts[1].CopyFrom(s, []float32{1, 2, 3})); err != nil {
			return err
		}
		for _, p := range parts {
			out := make([]float32, p.Len())
			if err := p.CopyTo(s, out); err != nil {
				return err
			}
			fmt.Println(out)
		}
		return nil
	})
	// Output:
	// [0 0]
	// [1 2 3]
}

// Two types of elements share one buffer.
func ExampleView() {
	onVirtual(func(s *stream.Stream) error {
		b, err := memory.Alloc(s, 24)
		if err != nil {
			return err
		}
		defer b.Close()
		ints, err := memory.View[int32](b, 0, 2)
		if err != nil {
			return err
		}
		doubles, err := memory.View[float64](b, 8, 2)
		if err != nil {
			return err
		}
		if err := errors.Join(ints.CopyFrom(s, []int32{1, 2}), doubles.CopyFrom(s, []float64{3, 4})); err != nil {
			return err
		}
		out := make([]float64, 2)
		err = doubles.CopyTo(s, out)
		fmt.Println(ints.Bytes(), doubles.Bytes(), out)
		return err
	})
	// Output: 8 16 [3 4]
}

// The device is full: the error says how much memory was requested and how much is free.
func ExampleOutOfMemoryError() {
	onVirtual(func(s *stream.Stream) error {
		_, err := memory.Make[float64](s, 1<<40)
		if oom, ok := errors.AsType[*memory.OutOfMemoryError](err); ok {
			fmt.Println(oom.Device, oom.Requested>>40, "TiB of", oom.Total>>30, "GiB")
			return nil
		}
		return err
	})
	// Output: virtual:0 8 TiB of 8 GiB
}

// The Ledger accounts for all used memory of a device.
func ExampleLedger() {
	onVirtual(func(s *stream.Stream) error {
		x, err := memory.Make[float32](s, 8<<20)
		if err != nil {
			return err
		}
		defer x.Close()
		usage, err := memory.Ledger(s.Device())
		if err != nil {
			return err
		}
		for _, u := range usage.Uses {
			if u.Owner == "buffers" {
				fmt.Println(u.Owner, u.Bytes>>20, "MiB")
			}
		}
		return nil
	})
	// Output: buffers 32 MiB
}

// The host has half-precision numbers as bits.
func ExampleFloat16Of() {
	x := memory.Float16Of(1.0 / 3)
	fmt.Println(x, x.Float32() == float32(1.0/3))
	// Output: 0.33325195 false
}

// Memory of the program is pinned, so that copies from it do not wait.
func ExamplePinSlice() {
	onVirtual(func(s *stream.Stream) error {
		host, err := memory.PinSlice(s.Device(), []int32{1, 2, 3})
		if err != nil {
			return err
		}
		defer host.Close()
		x, err := memory.Make[int32](s, 3)
		if err != nil {
			return err
		}
		defer x.Close()
		out := make([]int32, 3)
		err = errors.Join(x.CopyFromPinned(s, host), x.CopyTo(s, out))
		fmt.Println(out)
		return err
	})
	// Output: [1 2 3]
}
