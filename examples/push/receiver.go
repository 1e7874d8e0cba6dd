package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/gochorus/chorus/checkpoint"
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
	done := 0
	for {
		g, more, err := next(ctx)
		if err != nil || !more {
			return err
		}
		l, err := connect(ctx, g, trainers+slices.Index(g.Receivers, *name), dev, parts, nil)
		if err != nil {
			fmt.Printf("%s: generation %d: %v\n", *name, g.Number, err)
			continue
		}
		ends, err := follow(ctx, l, s, parts, &done)
		if err != nil {
			fmt.Printf("%s: generation %d: %v\n", *name, g.Number, err)
			_ = l.abandon(s) // the error is known
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if ends {
			fmt.Printf("%s leaves after %d pushes\n", *name, done)
			return nil
		}
	}
}

// follow takes pushes until the generation ends, and reports whether this receiver ends too.
func follow(ctx context.Context, l *link, s *stream.Stream, parts []checkpoint.Part, done *int) (ends bool, err error) {
	for {
		mine := note{Leave: *pushes > 0 && *done >= *pushes}
		said, err := l.tell(ctx, mine)
		if err != nil {
			return false, err
		}
		if said.Stop || said.Leave || said.Regroup {
			return said.Stop || mine.Leave, l.leave(ctx)
		}
		if err := l.push(ctx, s); err != nil {
			return false, err
		}
		*done++
		if err := verify(s, parts, said.Step); err != nil {
			return false, err
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

// limit is how long a receiver tries to reach trainer 0.
const limit = 30 * time.Second

// next waits for the next generation with this receiver; there is none when the training has ended.
func next(ctx context.Context) (g generation, more bool, err error) {
	for begun := time.Now(); ; {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+*addr+"/?name="+url.QueryEscape(*name), nil)
		if err != nil {
			return g, false, err
		}
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			select { // the trainer may not have begun
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			if ctx.Err() == nil && time.Since(begun) < limit {
				continue
			}
			return g, false, errors.Join(err, context.Cause(ctx))
		}
		defer r.Body.Close()
		switch r.StatusCode {
		case http.StatusOK:
			return g, true, json.NewDecoder(r.Body).Decode(&g)
		case http.StatusGone:
			return g, false, nil
		}
		return g, false, fmt.Errorf("trainer 0 answers %s", r.Status)
	}
}
