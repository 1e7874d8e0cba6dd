package memory_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Numbers go to a device, one half over the other there, and come back.
func Example() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	x, err := memory.MakeFrom(s, []float32{1, 2, 3, 4})
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close() // behind everything that s has by then
	if err := memory.Copy(s, x.Slice(2, 4), x.Slice(0, 2)); err != nil {
		log.Fatal(err)
	}
	out := make([]float32, x.Len())
	if err := x.CopyTo(s, out); err != nil { // waits until out is filled
		log.Fatal(err)
	}
	fmt.Println(x.DType(), x.Bytes(), out)
	// Output: float32 16 [1 2 1 2]
}

// Copies of pinned memory do not wait; the host works meanwhile.
func ExamplePinned() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	host, err := memory.MakePinned[int64](s.Device(), 3)
	if err != nil {
		log.Fatal(err)
	}
	defer host.Close()
	copy(host.Data(), []int64{7, 8, 9})
	x, err := memory.Make[int64](s, 3)
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	if err := x.CopyFromPinned(s, host); err != nil {
		log.Fatal(err)
	}
	passed, err := s.Record(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer passed.Close()
	// The host may do something else here, but not change the numbers yet.
	if err := passed.Sync(context.Background()); err != nil {
		log.Fatal(err)
	}
	host.Data()[0] = 0
	out := make([]int64, 3)
	if err := x.CopyTo(s, out); err != nil {
		log.Fatal(err)
	}
	fmt.Println(out)
	// Output: [7 8 9]
}
