package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

func receive(ctx context.Context, dev *device.Device) error {
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
	m, err := enlist(ctx)
	if err != nil {
		return err
	}
	defer m.Close()
	for done := 0; ctx.Err() == nil; {
		l, err := connect(ctx, m, dev, parts, nil)
		if errors.Is(err, cluster.ErrEnded) {
			return nil // so has the training
		}
		if err == nil {
			err = follow(ctx, m, l, s, parts, &done)
		}
		if err != nil {
			fmt.Printf("%s: %v\n", *name, err)
		}
		switch {
		case *pushes > 0 && done >= *pushes:
			fmt.Printf("%s leaves after %d pushes\n", *name, done)
			return nil
		case errors.Is(err, cluster.ErrDelisted):
			return err
		}
	}
	return context.Cause(ctx)
}

// follow takes pushes until the generation ends.
func follow(ctx context.Context, m *cluster.Enlistment, l *link, s *stream.Stream, parts []checkpoint.Part, done *int) error {
	for {
		leaves := *pushes > 0 && *done >= *pushes
		if leaves {
			_ = m.Close() // the next generation is without this receiver
		}
		said, err := l.push(ctx, s, note{End: leaves})
		if err != nil || said.End {
			return err
		}
		*done++
		if err := verify(s, parts, said.Step); err != nil {
			return errors.Join(err, l.transfer.Close(), l.group.Close())
		}
		fmt.Printf("%s has the weights of step %d\n", *name, said.Step)
	}
}

// verify compares the weights with those of a step.
func verify(s *stream.Stream, parts []checkpoint.Part, step int) error {
	for _, p := range parts {
		host := make([]float32, p.Data.Len())
		x, err := tensor.OfHost(host, len(host))
		if err != nil {
			return err
		}
		if err := tensor.Copy(s, x, p.Data); err != nil {
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
