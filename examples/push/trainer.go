package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A training is a trainer's side.
type training struct {
	dev       *device.Device
	group     *comm.Group // of the trainers
	parts     []checkpoint.Part
	registry  *cluster.Registry // of trainer 0
	member    *cluster.Enlistment
	receivers []string // of this generation
	link      *link    // nil without receivers
}

// train trains until the end of interrupt or the last step.
func train(interrupt context.Context, dev *device.Device) (err error) {
	ctx := context.WithoutCancel(interrupt)
	t := &training{dev: dev}
	if *trainer == 0 {
		if t.registry, err = cluster.Serve(ctx, &cluster.RegistryConfig{Job: "push", Addr: *addr, Timing: limits}); err != nil {
			return err
		}
		defer t.registry.Close()
	}
	if t.member, err = enlist(ctx); err != nil {
		return err
	}
	defer t.member.Close()
	if *trainer == 0 {
		if err := errors.Join(t.registry.Await(ctx, trainerNames...), t.registry.Begin(trainerNames...)); err != nil {
			return err
		}
	}
	if t.group, err = comm.JoinEnlisted(ctx, t.member, dev, nil); err != nil {
		return err
	}
	defer t.group.Close()
	if t.parts, err = makeParts(t.group.Stream(0), memory.Float32, *trainer, trainers); err != nil {
		return err
	}
	defer closeParts(t.parts)
	for step := 1; ; step++ {
		if err := t.step(step); err != nil {
			return err
		}
		last, err := t.push(ctx, step, step == *steps || interrupt.Err() != nil)
		if err != nil {
			return err
		}
		if last {
			fmt.Printf("trainer %d has done %d steps\n", *trainer, step)
			return t.group.Shutdown(ctx)
		}
		time.Sleep(*pause)
	}
}

// step stands for a step of a training: it gives the weights new values.
func (t *training) step(step int) error {
	for _, p := range t.parts {
		host := make([]float32, p.Data.Len())
		for i := range host {
			host[i] = value(step, p.Start+i)
		}
		x, err := tensor.Slice[float32](p.Data)
		if err := errors.Join(err, x.CopyFrom(t.group.Stream(0), host)); err != nil {
			return err
		}
	}
	return nil
}

// listed returns the receivers on the list of trainer 0.
func (t *training) listed() (names []string) {
	if t.registry != nil {
		list, _ := t.registry.Members()
		for _, m := range list {
			if !slices.Contains(trainerNames, m.Name) {
				names = append(names, m.Name)
			}
		}
	}
	return names
}

// push pushes the weights to the receivers of the generation. It ends the generation, and begins the next one, if the list has
// changed, if a trainer is no longer in it, or if a trainer stops, which it returns. A failure of the generation is that of a
// receiver, and not the training's.
func (t *training) push(ctx context.Context, step int, stop bool) (last bool, err error) {
	type state struct {
		Alone, Stop bool
		Listed      []string
	}
	states, err := comm.GatherValues(ctx, t.group, nil, state{t.link == nil, stop, t.listed()})
	if err != nil {
		return false, err
	}
	next := states[0].Listed
	last = slices.ContainsFunc(states, func(s state) bool { return s.Stop })
	ends := last || slices.ContainsFunc(states, func(s state) bool { return s.Alone }) || !slices.Equal(next, t.receivers)
	if t.link != nil {
		said, err := t.link.push(ctx, t.group.Stream(0), note{step, ends})
		if err != nil {
			t.report(err)
		}
		if err != nil || said.End {
			t.link = nil
		}
	}
	if !ends || last || len(next) == 0 {
		return last, nil
	}
	begun := true
	if t.registry != nil {
		if err := t.registry.Begin(append(slices.Clone(trainerNames), next...)...); err != nil {
			fmt.Println(err) // a receiver has just left
			begun = false
		} else {
			fmt.Printf("generation: %v\n", next)
		}
	}
	if err := comm.BroadcastValue(ctx, t.group, 0, &begun, nil); err != nil || !begun {
		return false, err
	}
	t.receivers = next
	if t.link, err = connect(ctx, t.member, t.dev, nil, t.parts); err != nil {
		t.report(err)
	}
	return false, nil
}

func (t *training) report(err error) {
	fmt.Printf("trainer %d: receivers %v: %v\n", *trainer, t.receivers, err)
}
