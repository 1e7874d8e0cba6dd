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
	sess, err := t.member.World(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	if t.group, err = comm.Join(ctx, sess, dev, nil); err != nil {
		return err
	}
	defer t.group.Close()
	if t.parts, err = makeParts(t.group.Stream(0), memory.Float32, *trainer, trainers); err != nil {
		return err
	}
	defer closeParts(t.parts)
	step := 1
	for ; ; step++ {
		if err := t.step(step); err != nil {
			return err
		}
		last, err := t.regroup(ctx, step == *steps || interrupt.Err() != nil)
		if err != nil {
			return err
		}
		if last {
			break
		}
		t.push(ctx, step)
		time.Sleep(*pause)
	}
	fmt.Printf("trainer %d has done %d steps\n", *trainer, step)
	return errors.Join(t.group.Shutdown(ctx), sess.Shutdown(ctx))
}

// step stands for a step of a training: it gives the weights new values.
func (t *training) step(step int) error {
	for _, p := range t.parts {
		host := make([]float32, p.Data.Len())
		for i := range host {
			host[i] = value(step, p.Start+i)
		}
		x, err := tensor.OfHost(host, len(host))
		if err != nil {
			return err
		}
		if err := tensor.Copy(t.group.Stream(0), p.Data, x); err != nil {
			return err
		}
	}
	return nil
}

// push pushes the weights to the receivers of the generation. A failure is that of a receiver, and not the training's.
func (t *training) push(ctx context.Context, step int) {
	if t.link == nil {
		return
	}
	said, err := t.link.tell(ctx, note{Step: step})
	switch {
	case err == nil && said.End:
		err = t.link.leave(ctx)
		t.link = nil
	case err == nil:
		err = t.link.push(ctx, t.group.Stream(0))
	}
	if err != nil {
		t.fail(err)
	}
}

// fail ends a generation that has failed.
func (t *training) fail(err error) {
	fmt.Printf("trainer %d: receivers %v: %v\n", *trainer, t.receivers, err)
	if t.link != nil {
		_ = t.link.abandon(t.group.Stream(0)) // the error is known
	}
	t.link = nil
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

// regroup begins another generation if this one has ended at one of the trainers, if the list has changed, or if a trainer
// stops, which it returns.
func (t *training) regroup(ctx context.Context, stop bool) (last bool, err error) {
	type state struct {
		Ended, Stop bool
		Listed      []string
	}
	states, err := comm.GatherValues(ctx, t.group, nil, state{t.link == nil, stop, t.listed()})
	if err != nil {
		return false, err
	}
	next := states[0].Listed
	last = slices.ContainsFunc(states, func(s state) bool { return s.Stop })
	ended := slices.ContainsFunc(states, func(s state) bool { return s.Ended })
	switch {
	case ended && t.link != nil:
		t.fail(errors.New("another trainer has left the generation"))
	case !ended && !last && slices.Equal(next, t.receivers):
		return false, nil
	case !ended:
		if _, err = t.link.tell(ctx, note{End: true}); err == nil {
			err = t.link.leave(ctx)
		}
		if err != nil {
			t.fail(err)
		}
		t.link = nil
	}
	if last || len(next) == 0 {
		return last, nil
	}
	begun := true
	if t.registry != nil {
		if err := t.registry.Begin(append(slices.Clone(trainerNames), next...)...); err != nil {
			fmt.Println(err) // a receiver has just left
			begun = false
		}
	}
	if err := comm.BroadcastValue(ctx, t.group, 0, &begun, nil); err != nil || !begun {
		return false, err
	}
	t.receivers = next
	if t.registry != nil {
		fmt.Printf("generation: %v\n", next)
	}
	if t.link, err = connect(ctx, t.member, t.dev, nil, t.parts); err != nil {
		t.fail(err)
	}
	return false, nil
}
