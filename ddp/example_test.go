package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/tensor"
)

// onRanks runs an example with a group of two virtual devices, so that the examples run anywhere.
// A program calls comm.Init.
func onRanks(example func(ctx context.Context, g *comm.Group) error) {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
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

// gradients returns two gradients for each rank. The elements of rank i are i+1.
func gradients(g *comm.Group) (flats comm.Shards[float32], grads [][]memory.Slice[float32], err error) {
	for i := range g.Locals() {
		flat, parts, err := memory.MakeFlat[float32](g.Stream(i), 2, 1)
		if err != nil {
			return flats, nil, err
		}
		flats, grads = append(flats, flat), append(grads, parts)
		for _, p := range parts {
			numbers := make([]float32, p.Len())
			for k := range numbers {
				numbers[k] = float32(i + 1)
			}
			if err := p.CopyFrom(g.Stream(i), numbers); err != nil {
				return flats, nil, err
			}
		}
	}
	return flats, grads, nil
}

// A backward pass announces each gradient that it has enqueued; Finish orders the stream after the
// reduction.
func ExampleNewReducer() {
	onRanks(func(ctx context.Context, g *comm.Group) error {
		flats, grads, err := gradients(g)
		if err != nil {
			return err
		}
		defer flats.Close()
		r, err := ddp.NewReducer(g, grads, nil)
		if err != nil {
			return err
		}
		defer r.Close()
		for _, s := range g.Streams() {
			for _, gradient := range []int{1, 0} { // the last layer is first
				if err := r.Ready(s, gradient); err != nil {
					return err
				}
			}
		}
		if err := errors.Join(r.Finish(g.Streams()...), g.Wait(ctx)); err != nil {
			return err
		}
		mean := make([]float32, 2)
		err = grads[0][0].CopyTo(g.Stream(0), mean)
		fmt.Println(mean)
		return err
	})
	// Output: [1.5 1.5]
}

// Rank 1 has no input in the last step: only rank 0 counts in the mean. Join ends the epoch when no
// rank has more input.
func ExampleReducer_Join() {
	onRanks(func(ctx context.Context, g *comm.Group) error {
		flats, grads, err := gradients(g)
		if err != nil {
			return err
		}
		defer flats.Close()
		r, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{Uneven: true, DivideByActive: true})
		if err != nil {
			return err
		}
		defer r.Close()
		s := g.Stream(0)
		if err := errors.Join(r.Ready(s, 1), r.Ready(s, 0), r.Finish(g.Streams()...)); err != nil {
			return err
		}
		last, err := r.Join(ctx, g.Streams()...)
		if err != nil {
			return err
		}
		mean := make([]float32, 2)
		err = grads[1][0].CopyTo(g.Stream(1), mean)
		fmt.Println("rank", last, "has made all steps; the last gradient is", mean)
		return err
	})
	// Output: rank 1 has made all steps; the last gradient is [1 1]
}

// Each rank updates half of the parameters, and all ranks get all of them.
func ExampleNewSharder() {
	onRanks(func(ctx context.Context, g *comm.Group) error {
		sh, err := ddp.NewSharder[float32](g, []int{4}, nil)
		if err != nil {
			return err
		}
		defer sh.Close()
		for i, s := range g.Streams() {
			gradient := float32(i + 1)
			err := errors.Join(sh.Grads(i)[0].CopyFrom(s, []float32{gradient, gradient, gradient, gradient}), sh.Ready(s, 0))
			if err != nil {
				return err
			}
		}
		if err := sh.Finish(g.Streams()...); err != nil {
			return err
		}
		for i, s := range g.Streams() { // the optimiser: here the parameters become the gradients
			for _, p := range sh.Parts(i) {
				if err := memory.Copy(s, p.Param, p.Grad); err != nil {
					return err
				}
			}
		}
		if err := errors.Join(sh.AllGather(g.Streams()...), g.Wait(ctx)); err != nil {
			return err
		}
		params := make([]float32, 4)
		err = sh.Params(0)[0].CopyTo(g.Stream(0), params)
		fmt.Println("a shard has", sh.Len(), "elements; the parameters are", params)
		return err
	})
	// Output: a shard has 4 elements; the parameters are [1.5 1.5 1.5 1.5]
}

// Two layers of four parameters. Each rank has half of both, and all parameters of a layer while it uses it.
func ExampleNewUnits() {
	onRanks(func(ctx context.Context, g *comm.Group) error {
		u, err := ddp.NewUnits[float32, memory.BFloat16Bits](g, [][]int{{4}, {4}}, nil)
		if err != nil {
			return err
		}
		defer u.Close()
		for k := 1; k >= 0; k-- { // the backward pass
			for i, s := range g.Streams() {
				params, err := u.Use(s, k)
				if err != nil {
					return err
				}
				grads, err := u.Grads(s, k)
				if err != nil {
					return err
				}
				gradient := memory.BFloat16Of(float32(i + k + len(params)))
				err = grads[0].CopyFrom(s, []memory.BFloat16Bits{gradient, gradient, gradient, gradient})
				if err := errors.Join(err, u.Ready(s, k), u.Done(s, k)); err != nil {
					return err
				}
			}
		}
		if err := u.Finish(g.Streams()...); err != nil {
			return err
		}
		for i, s := range g.Streams() { // the optimiser: here the parameters become the gradients
			param := u.Shard(i)
			for j, p := range u.Pieces(i) {
				to, err := tensor.Of(param.Slice(p.At, p.At+p.Len), p.Len)
				if err := errors.Join(err, tensor.Copy(s, to, u.ShardGrads(i)[j])); err != nil {
					return err
				}
			}
		}
		if err := u.Refresh(g.Streams()...); err != nil {
			return err
		}
		s := g.Stream(0)
		params, err := u.Use(s, 1) // the other local ranks have the layer, too
		if err != nil {
			return err
		}
		values := make([]memory.BFloat16Bits, 4)
		err = errors.Join(g.Wait(ctx), params[0].CopyTo(s, values))
		fmt.Println("the second layer begins with", values[0].Float32())
		return err
	})
	// Output: the second layer begins with 2.5
}

// The norm of gradients that are divided over the ranks.
func ExamplePowers() {
	onRanks(func(ctx context.Context, g *comm.Group) error {
		flats, grads, err := gradients(g)
		if err != nil {
			return err
		}
		defer flats.Close()
		var lists []*optim.Grads
		for i, s := range g.Streams() {
			t, err := tensor.Of(grads[i][0], 2)
			if err != nil {
				return err
			}
			list, err := optim.NewGrads(s, t)
			if err != nil {
				return err
			}
			defer list.Close()
			lists = append(lists, list)
		}
		if err := ddp.Powers(g, 2, lists, g.Streams()); err != nil {
			return err
		}
		norm, _, err := lists[0].Coef(g.Stream(0), 1)
		if err != nil {
			return err
		}
		out := make([]float32, 1)
		err = errors.Join(g.Wait(ctx), norm.CopyTo(g.Stream(0), out))
		fmt.Printf("%.3f\n", out[0]) // the root of 1+1+4+4
		return err
	})
	// Output: 3.162
}
