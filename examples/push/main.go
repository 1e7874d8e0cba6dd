// Push sends the weights of two trainers to receivers, such as inference engines, that come and go while the training
// goes on. Each trainer has half of every weight, in float32; each receiver wants all of it, in bfloat16.
//
//	chorus run --nproc-per-node 2 -- bin/push &
//	bin/push -receiver a -device 2 & bin/push -receiver b -device 3 -pushes 5
//
// A receiver that is killed within a push costs the trainers the time to begin this push again, and nothing else.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var (
	name   = flag.String("receiver", "", "be a receiver with this `name`; without it, the process is a trainer")
	addr   = flag.String("addr", "127.0.0.1:29610", "`host:port` of the first trainer to which receivers connect")
	number = flag.Int("device", 0, "`number` of the receiver's device")
	pushes = flag.Int("pushes", 0, "number of pushes after which the receiver leaves; 0 is all")
	steps  = flag.Int64("steps", 0, "number of steps of the training; 0 is until a trainer is interrupted")
	pause  = flag.Duration("pause", 50*time.Millisecond, "time of a step")
)

// timing limits the time for a push to begin, in which receivers may still be busy.
var timing = cluster.Timing{Join: 30 * time.Second}

func main() {
	log.SetFlags(0)
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	run := train
	if *name != "" {
		run = receive
		log.SetPrefix(*name + " ")
	}
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

// train trains until the last step, or the one in which the first trainer is interrupted.
func train(interrupt context.Context) error {
	g, err := comm.Init(interrupt, &comm.InitConfig{Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	parts, err := makeParts(g.Stream(0), memory.Float32, g.Rank(), g.Size())
	if err != nil {
		return err
	}
	defer closeParts(parts)
	ctx := context.WithoutCancel(interrupt) // the trainers end together
	p, err := checkpoint.NewPublisher(ctx, g, &cluster.RegistryConfig{Job: "push", Addr: *addr, Timing: timing}, [][]checkpoint.Part{parts})
	if err != nil {
		return err
	}
	defer p.Close()
	log.SetPrefix(fmt.Sprintf("trainer %d ", g.Rank()))
	var receivers []string
	for step := int64(1); ; step++ {
		if err := update(g.Stream(0), parts, step); err != nil {
			return err
		}
		begun := time.Now()
		names, err := p.Publish(ctx, step)
		switch {
		case err != nil && g.Err() != nil:
			return err
		case err != nil:
			log.Printf("could not push step %d: %v", step, err)
		case !slices.Equal(names, receivers):
			receivers = names
			log.Printf("pushes to %v from step %d on, which has taken %v", receivers, step, time.Since(begun).Round(time.Millisecond))
		}
		last := step == *steps || interrupt.Err() != nil
		if err := comm.BroadcastValue(ctx, g, 0, &last, nil); err != nil {
			return err
		}
		if last {
			log.Printf("has done %d steps", step)
			if err := p.Shutdown(ctx); err != nil {
				log.Print(err) // a receiver was lost
			}
			return g.Shutdown(ctx)
		}
		time.Sleep(*pause)
	}
}

// receive takes pushes until the end of the training, or until it leaves.
func receive(ctx context.Context) error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print(note)
	}
	dev, err := sys.Open(*number)
	if err != nil {
		return err
	}
	s, err := stream.New(dev, nil)
	if err != nil {
		return err
	}
	defer s.Close()
	parts, err := makeParts(s, memory.BFloat16, 0, 1)
	if err != nil {
		return err
	}
	defer closeParts(parts)
	begun := time.Now()
	sub, err := checkpoint.Subscribe(ctx, s, &cluster.EnlistConfig{Job: "push", Addr: *addr, Name: *name, Timing: timing}, parts)
	if err != nil {
		return err
	}
	defer sub.Close()
	for n := 0; *pushes == 0 || n < *pushes; {
		step, err := sub.Next(ctx)
		switch {
		case errors.Is(err, cluster.ErrEnded):
			return nil // with the training
		case errors.Is(err, cluster.ErrDelisted) || ctx.Err() != nil:
			return err
		case err != nil:
			log.Print(err)
			continue
		}
		took := time.Since(begun)
		n++
		if err := verify(s, parts, step); err != nil {
			return err
		}
		if n == 1 {
			log.Printf("has the weights of step %d, its first ones, after %v", step, took.Round(time.Millisecond))
		} else {
			log.Printf("has the weights of step %d", step)
		}
	}
	log.Printf("leaves after %d pushes", *pushes)
	return sub.Close()
}

// shapes are the weights of the model.
var shapes = map[string][]int{"embedding": {1000, 64}, "layer.0": {64, 256}, "layer.1": {256, 64}, "norm": {64}}

// value is element i of each weight after a step: a number that bfloat16 has.
func value(step int64, i int) float32 { return float32((int(step) + i%7) % 256) }

// makeParts allocates a rank's parts of the weights on s.
func makeParts(s *stream.Stream, dt memory.DType, rank, ranks int) (parts []checkpoint.Part, err error) {
	for name, shape := range shapes {
		n := 1
		for _, d := range shape {
			n *= d
		}
		p := checkpoint.Part{Name: name, Shape: shape, Flat: true, Start: n * rank / ranks}
		if p.Data, err = tensor.Make(s, dt, n*(rank+1)/ranks-p.Start); err != nil {
			closeParts(parts)
			return nil, err
		}
		parts = append(parts, p)
	}
	return parts, nil
}

func closeParts(parts []checkpoint.Part) {
	for _, p := range parts {
		_ = p.Data.Close() // fails only if the device has
	}
}

// update stands for a step of the training: it gives the weights new values.
func update(s *stream.Stream, parts []checkpoint.Part, step int64) error {
	for _, p := range parts {
		host := make([]float32, p.Data.Len())
		for i := range host {
			host[i] = value(step, p.Start+i)
		}
		x, err := tensor.OfHost(host, len(host))
		if err := errors.Join(err, tensor.Copy(s, p.Data, x)); err != nil {
			return err
		}
	}
	return nil
}

// verify stands for the use of the weights: it compares them with those of the step.
func verify(s *stream.Stream, parts []checkpoint.Part, step int64) error {
	for _, p := range parts {
		host := make([]float32, p.Data.Len())
		x, err := tensor.OfHost(host, len(host))
		if err := errors.Join(err, tensor.Copy(s, x, p.Data)); err != nil {
			return err
		}
		for i, v := range host {
			if v != value(step, i) {
				return fmt.Errorf("weight %q has %v at %d after step %d: want %v", p.Name, v, i, step, value(step, i))
			}
		}
	}
	return nil
}
