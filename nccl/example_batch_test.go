package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A member is the communicator of a rank with a stream and memory of two numbers.
type member struct {
	c *nccl.Communicator
	s *stream.Stream
	x memory.Slice[float32]
}

// onRanks runs an example with two ranks on virtual devices in this process. Rank i has the
// numbers i+1 and 10·(i+1).
func onRanks(example func(ranks []member) error) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		log.Fatal(err)
	}
	comms, err := nccl.NewCommunicators(context.Background(), sys.Devices(), nil)
	if err != nil {
		log.Fatal(err)
	}
	var ranks []member
	for i, c := range comms {
		s := stream.Default(sys.Devices()[i])
		x, err := memory.MakeFrom(s, []float32{float32(i + 1), float32(10 * (i + 1))})
		if err != nil {
			log.Fatal(err)
		}
		ranks = append(ranks, member{c, s, x})
	}
	err = example(ranks)
	for _, r := range ranks {
		err = errors.Join(err, r.x.Close(), r.c.Close())
	}
	if err != nil {
		log.Fatal(err)
	}
}

func print(ranks []member) error {
	for i, r := range ranks {
		out := make([]float32, r.x.Len())
		if err := r.x.CopyTo(r.s, out); err != nil {
			return err
		}
		fmt.Println("rank", i, "has", out)
	}
	return nil
}

// The operations of several ranks of one goroutine must start together.
func ExampleGroup() {
	onRanks(func(ranks []member) error {
		err := nccl.Group(func(b *nccl.Batch) error {
			for _, r := range ranks {
				if err := nccl.AllReduce(b.On(r.c), r.s, r.x, r.x, nccl.Max); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		return print(ranks)
	})
	// Output:
	// rank 0 has [2 20]
	// rank 1 has [2 20]
}

// Rank 0 sends its second number to the first number of rank 1.
func ExampleSend() {
	onRanks(func(ranks []member) error {
		from, to := ranks[0], ranks[1]
		err := nccl.Group(func(b *nccl.Batch) error {
			return errors.Join(
				nccl.Send(b.On(from.c), from.s, from.x.Slice(1, 2), 1),
				nccl.Recv(b.On(to.c), to.s, to.x.Slice(0, 1), 0),
			)
		})
		if err != nil {
			return err
		}
		return print(ranks)
	})
	// Output:
	// rank 0 has [1 10]
	// rank 1 has [10 20]
}

// A batch that is used in each step is made once.
func ExampleNewBatch() {
	onRanks(func(ranks []member) error {
		b := nccl.NewBatch()
		for range 3 {
			for _, r := range ranks {
				if err := nccl.Broadcast(b.On(r.c), r.s, r.x, r.x, 1); err != nil {
					return err
				}
			}
			if err := b.Enqueue(); err != nil {
				return err
			}
		}
		return print(ranks)
	})
	// Output:
	// rank 0 has [2 20]
	// rank 1 has [2 20]
}

// Each rank multiplies its numbers by a factor before the sum.
func ExampleNewPreMulSum() {
	onRanks(func(ranks []member) error {
		var sums []*nccl.PreMulSum
		for i, r := range ranks {
			sum, err := nccl.NewPreMulSum(r.c, []float32{1, 0.5}[i])
			if err != nil {
				return err
			}
			defer sum.Close()
			sums = append(sums, sum)
		}
		err := nccl.Group(func(b *nccl.Batch) error {
			for i, r := range ranks {
				if err := nccl.AllReduce(b.On(r.c), r.s, r.x, r.x, sums[i].Op()); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		return print(ranks)
	})
	// Output:
	// rank 0 has [2 20]
	// rank 1 has [2 20]
}
