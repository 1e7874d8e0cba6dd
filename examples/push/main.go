// Push sends the weights of two trainers to receivers, such as inference engines, that come and go while the training
// goes on. Each trainer has half of every weight, in float32; each receiver wants all of it, in bfloat16.
//
//	bin/push -trainer 0 & bin/push -trainer 1 &
//	bin/push -receiver a & bin/push -receiver b -pushes 5
//
// The first trainer serves a registry, which lists all processes. Each change of the receivers begins another
// generation: a world and a group of the trainers and of all receivers on the list. A receiver that is
// killed within a push breaks that generation's group, which ends the push and nothing else.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
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

// trainers is the number of trainers, which have the first ranks of each group.
const trainers = 2

// shapes are the weights of the model.
var shapes = map[string][]int{"embedding": {1000, 64}, "layer.0": {64, 256}, "layer.1": {256, 64}, "norm": {64}}

// value is element i of each weight after a step: a number that bfloat16 has.
func value(step, i int) float32 { return float32((step + i%7) % 256) }

var (
	trainer = flag.Int("trainer", -1, "be trainer 0 or 1")
	name    = flag.String("receiver", "", "be a receiver with this `name`")
	addr    = flag.String("addr", "127.0.0.1:29610", "`host:port` of trainer 0")
	number  = flag.Int("device", 0, "`number` of the device")
	steps   = flag.Int("steps", 0, "number of steps of the training; 0 is until a trainer is interrupted")
	pause   = flag.Duration("pause", 50*time.Millisecond, "time of a step")
	pushes  = flag.Int("pushes", 0, "number of pushes after which the receiver leaves; 0 is all")
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatalf("%s: %v", who(), err)
	}
}

func who() string { return cmp.Or(*name, fmt.Sprint("trainer ", *trainer)) }

// trainerNames are the names of the trainers on the list.
var trainerNames = []string{"trainer 0", "trainer 1"}

func run(ctx context.Context) error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		fmt.Fprintln(os.Stderr, note)
	}
	dev, err := sys.Open(*number)
	if err != nil {
		return err
	}
	switch {
	case *trainer >= 0 && *trainer < trainers && *name == "":
		return train(ctx, dev)
	case *trainer < 0 && *name != "":
		return receive(ctx, dev)
	}
	return errors.New("want -trainer 0, -trainer 1 or -receiver with a name")
}

// limits are those for reaching trainer 0, and for a generation to become complete.
var limits = cluster.Timing{Join: 30 * time.Second}

// enlist puts this process on the list of trainer 0.
func enlist(ctx context.Context) (*cluster.Enlistment, error) {
	return cluster.Enlist(ctx, &cluster.EnlistConfig{Job: "push", Addr: *addr, Name: who(), Timing: limits})
}

// A note is what the members of a generation tell each other before each push.
type note struct {
	Step int
	End  bool // the generation ends: other receivers are on the list, or this one leaves
}

// A link is the part of a process in a generation.
type link struct {
	group    *comm.Group
	transfer *checkpoint.Transfer
}

// connect joins the next generation.
func connect(ctx context.Context, m *cluster.Enlistment, dev *device.Device, dst, src []checkpoint.Part) (*link, error) {
	g, err := comm.JoinEnlisted(ctx, m, dev, nil)
	if err != nil {
		return nil, err
	}
	x, err := checkpoint.NewTransfer(ctx, g, [][]checkpoint.Part{dst}, [][]checkpoint.Part{src}, nil)
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return &link{g, x}, nil
}

// push exchanges the notes of all members, and transfers the weights, between the work on s before and after, unless a
// member ends the generation. Then all of them leave together, so that none reports a loss. After an error the
// generation is broken, and work that was aborted may still use the weights, so s waits for it.
func (l *link) push(ctx context.Context, s *stream.Stream, mine note) (all note, err error) {
	defer func() {
		if err != nil {
			_ = errors.Join(s.WaitStream(l.group.Stream(0)), l.transfer.Close(), l.group.Close()) // the error is known
		}
	}()
	notes, err := comm.GatherValues(ctx, l.group, nil, mine)
	for _, n := range notes {
		all.Step, all.End = max(all.Step, n.Step), all.End || n.End
	}
	switch {
	case err != nil:
		return all, err
	case all.End:
		return all, errors.Join(l.transfer.Close(), l.group.Shutdown(ctx))
	}
	return all, errors.Join(l.group.Between([]*stream.Stream{s}, l.transfer.Run), l.group.Wait(ctx))
}

// makeParts allocates this process's parts of the weights on s: the given share of the elements, or all of them.
func makeParts(s *stream.Stream, dt memory.DType, share, of int) (parts []checkpoint.Part, err error) {
	for name, shape := range shapes {
		n := 1
		for _, d := range shape {
			n *= d
		}
		p := checkpoint.Part{Name: name, Shape: shape, Flat: true, Start: n * share / of}
		if p.Data, err = tensor.Make(s, dt, n*(share+1)/of-p.Start); err != nil {
			return nil, errors.Join(err, closeParts(parts))
		}
		parts = append(parts, p)
	}
	return parts, nil
}

func closeParts(parts []checkpoint.Part) error {
	var errs []error
	for _, p := range parts {
		errs = append(errs, p.Data.Close())
	}
	return errors.Join(errs...)
}
