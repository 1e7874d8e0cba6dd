package comm_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// onRanks runs an example with a group of virtual devices, so that the examples run anywhere. A
// program calls comm.Init.
func onRanks(n int, example func(ctx context.Context, g *comm.Group) error) {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: n})
	if err != nil {
		log.Fatal(err)
	}
	g, err := comm.Local(ctx, sys.Devices(), nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(example(ctx, g), g.Close()); err != nil {
		log.Fatal(err)
	}
}

// print waits for the group and prints the numbers of each rank.
func print[T memory.Element](ctx context.Context, g *comm.Group, xs comm.Shards[T]) error {
	if err := g.Wait(ctx); err != nil {
		return err
	}
	for i, x := range xs {
		out := make([]T, x.Len())
		if err := x.CopyTo(g.Stream(i), out); err != nil {
			return err
		}
		fmt.Println("rank", i, "has", out)
	}
	return nil
}

// fill gives local rank i the numbers 10·i, 10·i+1, and so on.
func fill(g *comm.Group, xs comm.Shards[int32]) error {
	for i, x := range xs {
		numbers := make([]int32, x.Len())
		for k := range numbers {
			numbers[k] = int32(10*i + k)
		}
		if err := x.CopyFrom(g.Stream(i), numbers); err != nil {
			return err
		}
	}
	return nil
}

// two returns memory of n and m numbers for each rank.
func two(g *comm.Group, n, m int) (src, dst comm.Shards[int32], err error) {
	if src, err = comm.Make[int32](g, n); err != nil {
		return nil, nil, err
	}
	if dst, err = comm.Make[int32](g, m); err != nil {
		return nil, nil, errors.Join(err, src.Close())
	}
	return src, dst, fill(g, src)
}

func ExampleLocal() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		log.Fatal(err)
	}
	g, err := comm.Local(context.Background(), sys.Devices(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer g.Close()
	fmt.Println(g.Size(), "ranks,", g.Locals(), "in this process, rank 1 on", g.Device(1))
	// Output: 2 ranks, 2 in this process, rank 1 on virtual:1
}

func ExampleAllReduce() {
	onRanks(3, func(ctx context.Context, g *comm.Group) error {
		xs, err := comm.MakeFrom(g, []float32{1, 2})
		if err != nil {
			return err
		}
		defer xs.Close()
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
			return err
		}
		return print(ctx, g, xs)
	})
	// Output:
	// rank 0 has [3 6]
	// rank 1 has [3 6]
	// rank 2 has [3 6]
}

func ExampleAllGather() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		src, dst, err := two(g, 2, 4)
		if err != nil {
			return err
		}
		defer src.Close()
		defer dst.Close()
		if err := comm.AllGather(g, dst, src); err != nil {
			return err
		}
		return print(ctx, g, dst)
	})
	// Output:
	// rank 0 has [0 1 10 11]
	// rank 1 has [0 1 10 11]
}

// Small integers are numbers of the 8-bit format, so their sums are exact.
func ExampleAllReduceQuantized() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		xs, err := comm.Make[float32](g, 3)
		if err != nil {
			return err
		}
		defer xs.Close()
		for i, x := range xs {
			if err := x.CopyFrom(g.Stream(i), []float32{1, -2, 0.5}); err != nil {
				return err
			}
		}
		if err := comm.AllReduceQuantized(g, comm.Sum, xs, &comm.QuantizedConfig{Format: memory.Int8}); err != nil {
			return err
		}
		return print(ctx, g, xs)
	})
	// Output:
	// rank 0 has [2 -4 1]
	// rank 1 has [2 -4 1]
}

func ExampleReduceScatter() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		src, dst, err := two(g, 4, 2)
		if err != nil {
			return err
		}
		defer src.Close()
		defer dst.Close()
		if err := comm.ReduceScatter(g, comm.Sum, dst, src); err != nil {
			return err
		}
		return print(ctx, g, dst)
	})
	// Output:
	// rank 0 has [10 12]
	// rank 1 has [14 16]
}

func ExampleAllToAll() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		src, dst, err := two(g, 4, 4)
		if err != nil {
			return err
		}
		defer src.Close()
		defer dst.Close()
		if err := comm.AllToAll(g, dst, src); err != nil {
			return err
		}
		return print(ctx, g, dst)
	})
	// Output:
	// rank 0 has [0 1 10 11]
	// rank 1 has [2 3 12 13]
}

func ExampleBroadcastFrom() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		xs, err := comm.Make[int32](g, 2)
		if err != nil {
			return err
		}
		defer xs.Close()
		if err := errors.Join(fill(g, xs), comm.BroadcastFrom(g, 1, xs...)); err != nil {
			return err
		}
		return print(ctx, g, xs)
	})
	// Output:
	// rank 0 has [10 11]
	// rank 1 has [10 11]
}

// Two all-reduces start together, as one operation.
func ExampleGroup_Batch() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		xs, ys, err := two(g, 1, 1)
		if err != nil {
			return err
		}
		defer xs.Close()
		defer ys.Close()
		if err := fill(g, ys); err != nil {
			return err
		}
		err = g.Batch(func(b *comm.Batch) error {
			return errors.Join(comm.AllReduce(b, comm.Sum, xs...), comm.AllReduce(b, comm.Max, ys...))
		})
		if err != nil {
			return err
		}
		return errors.Join(print(ctx, g, xs[:1]), print(ctx, g, ys[:1]))
	})
	// Output:
	// rank 0 has [10]
	// rank 0 has [10]
}

// A stream waits for a collective, and the host continues.
func ExampleStart() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		xs, err := comm.MakeFrom(g, []float32{1})
		if err != nil {
			return err
		}
		defer xs.Close()
		w, err := comm.Start(g, func() error { return comm.AllReduce(g, comm.Sum, xs...) })
		if err != nil {
			return err
		}
		defer w.Close()
		if err := w.Wait(ctx); err != nil {
			return err
		}
		done, err := w.Done()
		fmt.Println("done:", done)
		return err
	})
	// Output: done: true
}

// Even and odd ranks make groups of two.
func ExampleGroup_Split() {
	onRanks(4, func(ctx context.Context, g *comm.Group) error {
		groups, err := g.Split(ctx, []int{0, 1, 0, 1}, nil)
		if err != nil {
			return err
		}
		for i, sub := range groups {
			defer sub.Close()
			fmt.Println("rank", i, "is with", sub.Device(0), sub.Device(1))
		}
		return nil
	})
	// Output:
	// rank 0 is with virtual:0 virtual:2
	// rank 1 is with virtual:1 virtual:3
	// rank 2 is with virtual:0 virtual:2
	// rank 3 is with virtual:1 virtual:3
}

// Any Go value goes from the root to all processes. Here the group has one process.
func ExampleBroadcastValue() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		options := map[string]float64{"rate": 0.1}
		if err := comm.BroadcastValue(ctx, g, 0, &options, comm.JSON); err != nil {
			return err
		}
		fmt.Println(options["rate"])
		return nil
	})
	// Output: 0.1
}

func ExampleGatherValues() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		losses, err := comm.GatherValues(ctx, g, comm.Gob, 0.5, 0.25) // one for each local rank
		fmt.Println(losses)
		return err
	})
	// Output: [0.5 0.25]
}

// A transposed view is reduced without a copy by the program.
func ExampleOfTensors() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		xs, err := comm.MakeFrom(g, []float32{1, 2, 3, 4})
		if err != nil {
			return err
		}
		defer xs.Close()
		var views []tensor.Tensor
		for _, x := range xs {
			t, err := tensor.Of(x, 2, 2)
			if err != nil {
				return err
			}
			views = append(views, t.T())
		}
		if err := comm.OfTensors(g).AllReduce(comm.Sum, views...); err != nil {
			return err
		}
		return print(ctx, g, xs[:1])
	})
	// Output: rank 0 has [2 4 6 8]
}

// The sum of one tensor from each device is on one device.
func ExampleReduceAdd() {
	onRanks(3, func(ctx context.Context, g *comm.Group) error {
		xs, err := comm.MakeFrom(g, []float32{1, 10})
		if err != nil {
			return err
		}
		defer xs.Close()
		ts := make([]tensor.Tensor, len(xs))
		for i, x := range xs {
			if ts[i], err = tensor.Of(x, 2); err != nil {
				return err
			}
		}
		sum, err := comm.ReduceAdd(g, ts, &comm.ReduceAddConfig{Destination: g.Device(1)})
		if err != nil {
			return err
		}
		defer sum.Close()
		out, err := tensor.MakeHost(memory.Float32, 2)
		if err != nil {
			return err
		}
		if err := tensor.Copy(g.Stream(1), out, sum); err != nil {
			return err
		}
		numbers, err := tensor.Data[float32](out)
		fmt.Println(sum.Device(), numbers)
		return err
	})
	// Output: virtual:1 [3 30]
}

// Only the root gets the sum. The destinations of the other ranks stay as they are.
func ExampleReduceTo() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		src, dst, err := two(g, 2, 2)
		if err != nil {
			return err
		}
		defer src.Close()
		defer dst.Close()
		for i, x := range dst {
			if err := x.Zero(g.Stream(i)); err != nil {
				return err
			}
		}
		if err := comm.ReduceTo(g, 1, comm.Sum, dst, src); err != nil {
			return err
		}
		return print(ctx, g, dst)
	})
	// Output:
	// rank 0 has [0 0]
	// rank 1 has [10 12]
}

// One tensor of the host is copied to all devices.
func ExampleBroadcast() {
	onRanks(2, func(ctx context.Context, g *comm.Group) error {
		x, err := tensor.OfHost([]float32{1, 2, 3}, 3)
		if err != nil {
			return err
		}
		copies, err := comm.Broadcast(g, x, nil)
		if err != nil {
			return err
		}
		for _, c := range copies {
			defer c.Close()
			fmt.Println(c.Device(), c.Shape())
		}
		return nil
	})
	// Output:
	// virtual:0 [3]
	// virtual:1 [3]
}
