package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A progress is the part of the state that is not in device memory.
type progress struct {
	Losses []float32 // of each step; their number is the version of the state
	Used   []int32   // how often each row of the data was used
}

// A trainer is the state of this process. It outlives the epochs of the job.
type trainer struct {
	pause time.Duration
	steps func() int // of the whole training

	train, test            training.Digits
	model                  *training.Model
	params, grads, momenta memory.Slice[float32]
	has                    bool // this process has a state
	at                     progress

	rank, size int // in the last epoch
}

// open allocates the state. It needs no other process.
func (t *trainer) open(dev *device.Device) (err error) {
	if t.train, t.test, err = training.LoadDigits(); err != nil {
		return err
	}
	t.at.Used = make([]int32, t.train.Rows())
	if t.model, err = training.NewModel(dev); err != nil {
		return err
	}
	m := t.model
	if t.params, m.Params, err = memory.MakeFlat[float32](m.Stream, training.ParamLens...); err != nil {
		return err
	}
	if t.grads, m.Grads, err = memory.MakeFlat[float32](m.Stream, training.ParamLens...); err != nil {
		return err
	}
	if t.momenta, _, err = memory.MakeFlat[float32](m.Stream, training.ParamLens...); err != nil {
		return err
	}
	for _, x := range []memory.Slice[float32]{t.params, t.momenta} {
		if err := x.Zero(m.Stream); err != nil {
			return err
		}
	}
	return m.Init()
}

func (t *trainer) close() {
	if err := errors.Join(t.params.Close(), t.grads.Close(), t.momenta.Close(), t.model.Close()); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// epoch trains with the processes of one epoch of the job. ctx ends with the epoch.
func (t *trainer) epoch(ctx context.Context, w *cluster.World) (err error) {
	t.rank, t.size = w.Rank(), w.Size()
	g, err := comm.Join(ctx, w, t.model.Stream.Device(), nil)
	if err != nil {
		return err
	}
	defer func() { err = t.leave(ctx, g, err) }()
	if err := t.synchronise(ctx, g); err != nil {
		return err
	}
	fmt.Printf("epoch %d: rank %d of %d, pid %d, goes on at step %d\n", w.Epoch(), w.Rank(), w.Size(), os.Getpid(), len(t.at.Losses))
	red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{t.model.Grads}, &ddp.ReducerConfig{Op: new(comm.Sum)})
	if err != nil {
		return err
	}
	defer red.Close()
	for len(t.at.Losses) < t.steps() {
		// If the world changes as planned, all ranks leave here, after the same step.
		if err := w.Step(); err != nil {
			return err
		}
		if err := t.step(ctx, g, red); err != nil {
			return err
		}
		if err := sleep(ctx, t.pause); err != nil {
			return err
		}
	}
	return nil
}

// leave ends the group of an epoch. If no rank is lost, all ranks leave it together, so that
// none of them breaks an operation of another one. What is enqueued later begins after the group's work, also if that was aborted.
func (t *trainer) leave(ctx context.Context, g *comm.Group, err error) error {
	err = cmp.Or(err, t.model.Stream.WaitStream(g.Stream(0)))
	_, planned := errors.AsType[*cluster.ChangeError](err)
	if err == nil || planned {
		return cmp.Or(g.Shutdown(ctx), err)
	}
	return errors.Join(err, g.Close())
}

// synchronise gives all ranks the state of the most advanced one. Survivors of a loss may
// differ by one step: some of them have received the last gradients and some have not.
func (t *trainer) synchronise(ctx context.Context, g *comm.Group) error {
	version := int64(-1)
	if t.has {
		version = int64(len(t.at.Losses))
	}
	if err := g.Stream(0).WaitStream(t.model.Stream); err != nil {
		return err
	}
	_, err := comm.SyncState(ctx, g, version, &t.at, t.params.AsBytes(), t.momenta.AsBytes())
	t.has = t.has || err == nil // without any state, all ranks begin with the same one
	return err
}

// step trains on one batch. It changes the state only after the gradients of all ranks have arrived.
func (t *trainer) step(ctx context.Context, g *comm.Group, red *ddp.Reducer) error {
	m, done := t.model, len(t.at.Losses)
	first := done % training.Steps * training.BatchRows // rows in order, the same for each pass over the data
	from, to := training.Share(training.BatchRows, g.Rank(), g.Size())
	loss, err := memory.Make[float32](m.Stream, 1)
	if err != nil {
		return err
	}
	defer loss.Close()
	if err := m.Pass(t.train.Slice(first+from, first+to), loss, nil, red.Ready); err != nil {
		return err
	}
	if err := red.Finish(m.Stream); err != nil {
		return err
	}
	used, err := t.sum(ctx, g, loss, from, to)
	if err != nil {
		return err
	}
	if err := m.SGD(t.params, t.momenta, t.grads); err != nil {
		return err
	}
	var value [1]float32
	if err := loss.CopyTo(m.Stream, value[:]); err != nil {
		return err
	}
	for i, n := range used {
		t.at.Used[first+i] += n
	}
	t.at.Losses = append(t.at.Losses, value[0])
	if n := len(t.at.Losses); n%training.Steps == 0 && g.Rank() == 0 {
		fmt.Printf("step %d of %d: loss %.4f\n", n, t.steps(), value[0])
	}
	return nil
}

// sum adds the loss of all ranks, counts the use of each row of the batch, and waits for
// these sums and for the gradients.
func (t *trainer) sum(ctx context.Context, g *comm.Group, loss memory.Slice[float32], from, to int) ([]int32, error) {
	used := make([]int32, training.BatchRows)
	for i := from; i < to; i++ {
		used[i] = 1
	}
	x, err := memory.MakeFrom(t.model.Stream, used)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	err = g.Between([]*stream.Stream{t.model.Stream}, func() error {
		return errors.Join(comm.AllReduce(g, comm.Sum, loss), comm.AllReduce(g, comm.Sum, x))
	})
	if err == nil {
		err = g.Wait(ctx)
	}
	if err != nil {
		return nil, err
	}
	return used, x.CopyTo(t.model.Stream, used)
}

// checksum returns a checksum of the parameters.
func (t *trainer) checksum() (uint32, error) {
	b := make([]byte, t.params.Bytes())
	err := t.params.AsBytes().CopyTo(t.model.Stream, b)
	return crc32.ChecksumIEEE(b), err
}

// A result is the result of the training, with the use of each row of the data.
type result struct {
	training.Result
	Used []int32 `json:"used"`
}

func (t *trainer) result() (*result, error) {
	r := &result{Used: t.at.Used}
	r.Losses, r.Ranks, r.Backend = t.at.Losses, t.size, t.model.Stream.Device().System().Backend()
	var err error
	r.TestAccuracy, err = t.model.Accuracy(t.test, nil)
	return r, err
}

// Write writes the result to a file in JSON. If file is empty, it does nothing.
func (r *result) Write(file string) error { return training.WriteJSON(file, r) }

// sleep waits for d or for the end of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	if d == 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
