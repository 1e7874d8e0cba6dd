package training

import (
	"bytes"
	"compress/gzip"
	"context"
	_ "embed"
	"encoding/binary"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Hook is called for parameter i of the model with stream s.
type Hook func(s *stream.Stream, i int) error

// A Trainer trains a model on each local rank of a group.
type Trainer struct {
	Group  *comm.Group
	Models []*Model
	Need   Hook                                       // called before a parameter is used; may be nil
	Ready  Hook                                       // called when a gradient is enqueued
	Update func() error                               // called at the end of a step, when all gradients are ready
	First  int                                        // the step to begin with, after a resumed training's
	Save   func(ctx context.Context, steps int) error // called after each step with the steps done; may be nil
}

// A Result holds the results of a run.
type Result struct {
	First        int       `json:"first"`  // the step that Losses begin with
	Losses       []float32 `json:"losses"` // loss of each step, over all ranks
	TestAccuracy float64   `json:"test_accuracy"`
	Ranks        int       `json:"ranks"`
	Backend      string    `json:"backend"`
	Seconds      float64   `json:"seconds"`
	StateBytes   int       `json:"state_bytes,omitempty"` // optimizer state on each rank
	ModelBytes   int       `json:"model_bytes,omitempty"` // size of the parameters
}

// Run trains for all epochs and prints the loss of each on rank 0.
func (t *Trainer) Run(ctx context.Context) (*Result, error) {
	train, test, err := LoadDigits()
	if err != nil {
		return nil, err
	}
	losses := make(comm.Shards[float32], len(t.Models))
	defer func() { _ = losses.Close() }()
	for i, m := range t.Models {
		if losses[i], err = memory.MakeFrom(m.Stream, make([]float32, Steps)); err != nil {
			return nil, err
		}
	}
	g := t.Group
	res := &Result{First: t.First, Ranks: g.Size(), Backend: g.Device(0).System().Backend()}
	for e := t.First / Steps; e < Epochs; e++ {
		from := max(t.First-e*Steps, 0)
		for i := from; i < Steps; i++ {
			if err := t.step(ctx, train.Slice(i*BatchRows, (i+1)*BatchRows), losses, e*Steps+i); err != nil {
				return nil, err
			}
		}
		ls, err := t.gather(ctx, losses)
		if err != nil {
			return nil, err
		}
		res.Losses = append(res.Losses, ls[from:]...)
		if g.Rank() == 0 {
			fmt.Printf("epoch %d of %d: loss %.4f\n", e+1, Epochs, ls[Steps-1])
		}
	}
	res.TestAccuracy, err = t.Models[0].Accuracy(test, t.Need)
	return res, err
}

// step enqueues one step on the local ranks' parts of the batch. The host waits
// only for the copies of the batch.
func (t *Trainer) step(ctx context.Context, batch Digits, losses comm.Shards[float32], step int) error {
	at := step % Steps
	for i, m := range t.Models {
		from, to := Share(batch.Rows(), t.Group.Communicator(i).Rank(), t.Group.Size())
		if err := m.Pass(batch.Slice(from, to), losses[i].Slice(at, at+1), t.Need, t.Ready); err != nil {
			return err
		}
	}
	if err := t.Update(); err != nil || t.Save == nil {
		return err
	}
	return t.Save(ctx, step+1)
}

// gather sums the losses of an epoch over the ranks and copies them to the host.
func (t *Trainer) gather(ctx context.Context, losses comm.Shards[float32]) ([]float32, error) {
	g := t.Group
	for i, m := range t.Models {
		if err := g.Stream(i).WaitStream(m.Stream); err != nil {
			return nil, err
		}
	}
	if err := comm.AllReduce(g, comm.Sum, losses...); err != nil {
		return nil, err
	}
	// Wait for the group first: this wait returns an error if a rank is lost.
	if err := g.Wait(ctx); err != nil {
		return nil, err
	}
	for i, m := range t.Models {
		if err := m.Stream.WaitStream(g.Stream(i)); err != nil {
			return nil, err
		}
	}
	host := make([]float32, Steps)
	return host, losses[0].CopyTo(t.Models[0].Stream, host)
}

// Streams returns the streams of the models.
func (t *Trainer) Streams() []*stream.Stream {
	var ss []*stream.Stream
	for _, m := range t.Models {
		ss = append(ss, m.Stream)
	}
	return ss
}

// String returns a summary in one line. A run that was complete already has no losses.
func (r *Result) String() string {
	if len(r.Losses) == 0 {
		return fmt.Sprintf("ranks %d, backend %s, steps 0, test accuracy %.3f, %.1f s", r.Ranks, r.Backend, r.TestAccuracy, r.Seconds)
	}
	return fmt.Sprintf("ranks %d, backend %s, steps %d, loss %.4f -> %.4f, test accuracy %.3f, %.1f s", r.Ranks, r.Backend,
		len(r.Losses), r.Losses[0], r.Losses[len(r.Losses)-1], r.TestAccuracy, r.Seconds)
}

// Write writes the result to a file in JSON. If file is empty, it does nothing.
func (r *Result) Write(file string) error { return WriteJSON(file, r) }

// WriteJSON writes a result to a file. If file is empty, it does nothing.
func WriteJSON(file string, result any) error {
	if file == "" {
		return nil
	}
	b, err := json.Marshal(result)
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}

// The shape of the task: 1536 rows for training, in order, and the rest for testing.
const (
	BatchRows = 256 // over all ranks
	Epochs    = 10
	Steps     = trainRows / BatchRows // steps in an epoch

	pixels    = 64
	hidden    = 128
	classes   = 10
	trainRows = 1536
	maxRows   = 512 // maximum size of a batch or of the test set
)

var (
	//go:embed data/digits.csv.gz
	digitsCSV []byte
	//go:embed data/reference.json
	referenceJSON []byte
	//go:embed data/w1.f32
	w1Bytes []byte
	//go:embed data/w2.f32
	w2Bytes []byte
)

// A Digits holds rows of pixels from 0 to 1, and the digit of each row.
type Digits struct {
	x []float32
	y []int32
}

// Rows returns the number of rows.
func (d Digits) Rows() int { return len(d.y) }

// Slice returns the rows i to j-1.
func (d Digits) Slice(i, j int) Digits { return Digits{d.x[i*pixels : j*pixels], d.y[i:j]} }

// LoadDigits returns the training rows and the test rows.
func LoadDigits() (train, test Digits, err error) {
	z, err := gzip.NewReader(bytes.NewReader(digitsCSV))
	if err != nil {
		return train, test, err
	}
	lines, err := csv.NewReader(z).ReadAll()
	if err != nil {
		return train, test, err
	}
	var all Digits
	for n, line := range lines {
		if len(line) != pixels+1 {
			return train, test, fmt.Errorf("digits: row %d has %d numbers: want %d", n+1, len(line), pixels+1)
		}
		for i, field := range line {
			v, err := strconv.Atoi(field)
			if err != nil {
				return train, test, fmt.Errorf("digits: row %d: %w", n+1, err)
			}
			if i == pixels {
				all.y = append(all.y, int32(v))
			} else {
				all.x = append(all.x, float32(v)/16)
			}
		}
	}
	return all.Slice(0, trainRows), all.Slice(trainRows, all.Rows()), nil
}

func floats(b []byte) []float32 {
	f := make([]float32, len(b)/4)
	for i := range f {
		f[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return f
}

// Reference returns the losses of a PyTorch run of the same task.
func Reference() ([]float64, error) {
	var r struct{ Losses []float64 }
	err := json.Unmarshal(referenceJSON, &r)
	return r.Losses, err
}

// Share returns the rows of n that a rank of size ranks trains on. Sizes differ by at most
// one, so the number of ranks need not divide the batch.
func Share(n, rank, size int) (from, to int) { return n * rank / size, n * (rank + 1) / size }

// A Resume is an example that continues.
type Resume struct {
	Folder  string                              // of its checkpoints
	Steps   int                                 // of the whole training
	Restore func(saved *checkpoint.Saved) error // restores the state of the local ranks
	Print   func(format string, args ...any)    // prints a line; only the process of rank 0 calls it
}

// Run restores the newest complete checkpoint and returns its step, or 0 if the folder has no
// checkpoint. It is an error if all checkpoints are damaged, because the training would begin
// again and replace them. Collective.
func (t *Resume) Run(ctx context.Context, g *comm.Group) (step int, err error) {
	print := t.Print
	if g.Rank() != 0 {
		print = func(string, ...any) {}
	}
	saved, skipped, err := checkpoint.Latest(ctx, g, t.Folder)
	for _, x := range skipped {
		print("skipped %s: %s", x.Folder, strings.ReplaceAll(x.Reason, "\n", "; "))
	}
	switch {
	case err != nil:
		return 0, err
	case saved == nil && len(skipped) > 0:
		return 0, fmt.Errorf("resume: none of the %d checkpoints in %s is complete: see chorus checkpoint verify %s, or start without -resume", len(skipped), t.Folder, t.Folder)
	case saved == nil:
		print("no checkpoint in %s: starting at step 1", t.Folder)
		return 0, nil
	}
	defer func() { err = errors.Join(err, saved.Close()) }()
	if err := t.Restore(saved); err != nil {
		return 0, err
	}
	if step = int(saved.Step()); step >= t.Steps {
		print("the training is complete: %s has step %d of %d", saved.Folder(), step, t.Steps)
		return step, nil
	}
	print("resumed at step %d from %s", step, saved.Folder())
	return step, nil
}
