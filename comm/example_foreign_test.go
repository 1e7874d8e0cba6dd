package comm_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An array is what another library in this process says of its memory: the address, and the stream that works on it.
type array struct {
	ptr    uint64
	stream uintptr // a CUstream
	free   func() error
}

// libraryArray stands for the other library. A program with PyTorch takes data_ptr and cuda_stream of a tensor, or a
// DLPack struct for tensor.FromDLPack.
func libraryArray(dev *device.Device, numbers []float32) (*array, error) {
	s, err := stream.New(dev, nil)
	if err != nil {
		return nil, err
	}
	bytes := 4 * len(numbers)
	p, err := memory.Driver.Alloc(s, bytes)
	if err != nil {
		return nil, err
	}
	x, err := memory.Adopt[float32](s, p, len(numbers), nil)
	if err != nil {
		return nil, err
	}
	free := func() error { return errors.Join(memory.Driver.Free(s, p, bytes), s.Close()) }
	return &array{p, s.Handle(), free}, errors.Join(x.CopyFrom(s, numbers), x.Close())
}

// Memory of another library is reduced in place, between two points of that library's streams. The host waits
// for nothing, and nothing is copied.
func ExampleGroup_Between() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		var released sync.WaitGroup
		streams, xs := make([]*stream.Stream, g.Locals()), make(comm.Shards[float32], g.Locals())
		for i := range xs {
			a, err := libraryArray(g.Device(i), []float32{1, 2, float32(i)})
			if err != nil {
				return err
			}
			released.Add(1)
			release := func() { // all operations on the memory have completed
				defer released.Done()
				if err := a.free(); err != nil {
					log.Print(err)
				}
			}
			if streams[i], err = stream.External(g.Device(i), a.stream); err != nil {
				return err
			}
			if xs[i], err = memory.Adopt[float32](streams[i], a.ptr, 3, release); err != nil {
				return err
			}
		}
		err := g.Between(streams, func() error { return comm.AllReduce(g, comm.Sum, xs...) })
		for i, s := range streams { // the library's next operations on its streams see the sums
			sums := make([]float32, 3)
			err = errors.Join(err, xs[i].CopyTo(s, sums))
			fmt.Println("rank", i, "has", sums)
		}
		err = errors.Join(err, xs.Close())
		for _, s := range streams { // only the wrappers
			err = errors.Join(err, s.Close())
		}
		released.Wait()
		return err
	})
	// Output:
	// rank 0 has [2 4 1]
	// rank 1 has [2 4 1]
}
