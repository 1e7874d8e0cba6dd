package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// Two ranks of one process, each a goroutine of its own. Package comm does the
// same with less to write.
func Example() {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		log.Fatal(err)
	}
	devs := sys.Devices()
	id, err := nccl.NewUniqueID(devs[0])
	if err != nil {
		log.Fatal(err)
	}
	sums := make([][]float32, len(devs))
	var wg sync.WaitGroup
	for rank, dev := range devs {
		wg.Go(func() {
			var err error
			if sums[rank], err = sumOf(ctx, dev, id, rank, len(devs)); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
	fmt.Println(sums)
	// Output: [[11 22] [11 22]]
}

func sumOf(ctx context.Context, dev *device.Device, id nccl.UniqueID, rank, size int) (out []float32, err error) {
	c, err := nccl.NewCommunicator(ctx, dev, id, rank, size, nil) // waits for the other rank
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	s, err := stream.New(dev, nil)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	in := [][]float32{{1, 2}, {10, 20}}[rank]
	x, err := memory.MakeFrom(s, in)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	if err := nccl.AllReduce(c, s, x, x, nccl.Sum); err != nil {
		return nil, err
	}
	out = make([]float32, len(in))
	return out, x.CopyTo(s, out)
}

// The flight recorder has what was issued last. DumpTrace writes it as JSON.
func ExampleCommunicator_Trace() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	list, err := nccl.NewCommunicators(context.Background(), sys.Devices(), nil)
	if err != nil {
		log.Fatal(err)
	}
	c := list[0]
	defer c.Close()
	s, err := stream.New(c.Device(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	x, err := memory.MakeFrom(s, []float32{1, 2})
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	if err := errors.Join(nccl.AllReduce(c, s, x, x, nccl.Avg), nccl.Broadcast(c, s, x, x, 0)); err != nil {
		log.Fatal(err)
	}
	for _, o := range c.Trace() {
		fmt.Println(o)
	}
	// Output:
	// ncclAllReduce(2 x float32, avg) as collective 1
	// ncclBroadcast(2 x float32, root 0) as collective 2
}

// Collectives use the memory of a registered pool without copying it first.
func ExampleCommunicator_RegisterPool() {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	dev := sys.Devices()[0]
	id, err := nccl.NewUniqueID(dev)
	if err != nil {
		log.Fatal(err)
	}
	c, err := nccl.NewCommunicator(ctx, dev, id, 0, 1, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	s, err := stream.New(dev, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	pool := memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
	defer pool.Close()
	if err := c.RegisterPool(pool); err != nil {
		log.Fatal(err)
	}
	err = pool.Use(s, func() error {
		x, err := memory.MakeFrom(s, []float32{1, 2})
		if err != nil {
			return err
		}
		defer x.Close()
		return nccl.AllReduce(c, s, x, x, nccl.Sum)
	})
	fmt.Println(err, pool.Reserved())
	// Output: <nil> 2097152
}
