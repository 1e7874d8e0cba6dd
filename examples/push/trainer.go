package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A list has the receivers that wait for the next generation. Each waits with an HTTP request.
type list struct {
	mu      sync.Mutex
	waiting map[string]chan generation
	ended   chan struct{} // closed when the training ends
}

// ServeHTTP answers with the next generation, or with 410 if there is none.
func (l *list) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, next := r.FormValue("name"), make(chan generation, 1)
	l.mu.Lock()
	l.waiting[name] = next
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.waiting[name] == next {
			delete(l.waiting, name)
		}
	}()
	select {
	case g := <-next:
		_ = json.NewEncoder(w).Encode(g) // a receiver that is gone is missed when it does not join
	case <-l.ended:
		http.Error(w, "the training has ended", http.StatusGone)
	case <-r.Context().Done():
	}
}

func (l *list) names() (all []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range l.waiting {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}

// begin tells the receivers of a generation about it.
func (l *list) begin(g generation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, name := range g.Receivers {
		if next, ok := l.waiting[name]; ok {
			next <- g
			delete(l.waiting, name)
		}
	}
}

// A training is a trainer's side.
type training struct {
	dev     *device.Device
	group   *comm.Group // of the trainers
	parts   []checkpoint.Part
	list    *list // of trainer 0
	current generation
	link    *link // nil without receivers
}

// train trains until the end of interrupt or the last step.
func train(interrupt context.Context, dev *device.Device) (err error) {
	ctx := context.WithoutCancel(interrupt)
	t := &training{dev: dev}
	if *trainer == 0 {
		t.list = &list{waiting: map[string]chan generation{}, ended: make(chan struct{})}
		socket, err := net.Listen("tcp", *addr)
		if err != nil {
			return err
		}
		srv := &http.Server{Handler: t.list}
		go func() { _ = srv.Serve(socket) }() // until Shutdown
		defer func() {
			close(t.list.ended)
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			err = errors.Join(err, srv.Shutdown(ctx))
		}()
	}
	sess, err := session(ctx, "push-trainers", port(1), *trainer, trainers)
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
		t.push(ctx, step, last)
		if last {
			break
		}
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
func (t *training) push(ctx context.Context, step int, last bool) {
	if t.link == nil {
		return
	}
	said, err := t.link.tell(ctx, note{Step: step, Stop: last})
	switch {
	case err != nil:
	case said.Stop || said.Leave:
		if err = t.link.leave(ctx); err == nil {
			t.link = nil
			return
		}
	default:
		err = t.link.push(ctx, t.group.Stream(0))
	}
	if err != nil {
		fmt.Printf("trainer %d: push of step %d: %v\n", *trainer, step, err)
		_ = t.link.abandon(t.group.Stream(0)) // the error is known
		t.link = nil
	}
}

// regroup begins another generation if this one has ended at one of the trainers, or if receivers wait. It
// returns whether one of the trainers stops.
func (t *training) regroup(ctx context.Context, stop bool) (last bool, err error) {
	type state struct{ Ended, Wait, Stop bool }
	mine := state{Ended: t.link == nil, Stop: stop}
	if t.list != nil {
		mine.Wait = len(t.list.names()) > 0
	}
	states, err := comm.GatherValues(ctx, t.group, nil, mine)
	if err != nil {
		return false, err
	}
	last = slices.ContainsFunc(states, func(s state) bool { return s.Stop })
	ended := slices.ContainsFunc(states, func(s state) bool { return s.Ended })
	if !ended && (last || !states[0].Wait) {
		return last, nil
	}
	if t.link != nil {
		if !ended {
			if _, err = t.link.tell(ctx, note{Regroup: true}); err == nil {
				err = t.link.leave(ctx)
			}
		}
		if err != nil {
			fmt.Printf("trainer %d: end of generation %d: %v\n", *trainer, t.current.Number, err)
		}
		if ended || err != nil {
			_ = t.link.abandon(t.group.Stream(0)) // the generation ends in any case
		}
		t.link = nil
	}
	next := generation{Number: t.current.Number + 1}
	if t.list != nil && !last {
		next.Receivers = t.list.names()
	}
	if err := comm.BroadcastValue(ctx, t.group, 0, &next, nil); err != nil {
		return last, err
	}
	if t.current = next; len(next.Receivers) == 0 {
		return last, nil
	}
	if t.list != nil {
		t.list.begin(next)
		fmt.Printf("generation %d: %v\n", next.Number, next.Receivers)
	}
	if t.link, err = connect(ctx, next, *trainer, t.dev, nil, t.parts); err != nil {
		fmt.Printf("trainer %d: generation %d: %v\n", *trainer, next.Number, err)
	}
	return last, nil
}
