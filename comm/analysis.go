package comm

import (
	"bytes"
	"context"
	"fmt"
	"sync"

	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/nccl"
)

const (
	// dumpedOperations is the number of operations of each communicator that ranks exchange after
	// a timeout.
	dumpedOperations = 64
	// maxAnalysts limits the ranks of a group that read the dumps of all others.
	maxAnalysts = 8
	// maxDump limits the dump of a rank, in bytes.
	maxDump = 256 << 10
)

// dumps are this rank's part of the exchange of flight recorders.
type dumps struct {
	mu    sync.Mutex
	wrote bool
}

// An analyzedError adds the verdict of the flight recorders to the error of a timeout.
type analyzedError struct {
	err     error
	verdict string
}

func (e *analyzedError) Error() string {
	return fmt.Sprintf("%v; the flight recorders of the ranks say: %s", e.err, e.verdict)
}

func (e *analyzedError) Unwrap() error { return e.err }

func (w *reporter) dumpKey(rank int) string { return fmt.Sprint(w.prefix, "dump/", rank) }

func (w *reporter) dumpWanted() string { return fmt.Sprint(w.prefix, "dump/wanted") }

// awaitDump writes this rank's flight recorders when another rank has timed out, until ctx ends.
func (w *reporter) awaitDump(ctx context.Context, c *nccl.Communicator) {
	if _, err := w.r.Get(ctx, w.dumpWanted()); err == nil {
		w.writeDump(ctx, c)
	}
}

// askForDumps asks all ranks for their flight recorders, and writes this rank's.
func (w *reporter) askForDumps(ctx context.Context, c *nccl.Communicator) {
	_ = w.r.Set(ctx, w.dumpWanted(), []byte("1")) // without answers there is no verdict
	w.writeDump(ctx, c)
}

func (w *reporter) writeDump(ctx context.Context, c *nccl.Communicator) {
	w.dumps.mu.Lock()
	defer w.dumps.mu.Unlock()
	if w.dumps.wrote {
		return
	}
	w.dumps.wrote = true
	for n := dumpedOperations; n > 0; n /= 2 {
		if b, err := ranks.Of(c).Dump(n); err == nil && len(b) <= maxDump {
			_ = w.r.Set(ctx, w.dumpKey(c.Rank()), b) // the verdict then says that this rank did not answer
			return
		}
	}
}

// analyst reports whether this rank compares the dumps of all ranks. In a large group only some ranks
// do, because all dumps come from one process.
func analyst(rank, size int) bool { return size <= maxAnalysts || rank%(size/maxAnalysts) == 0 }

// analyzed adds the verdict of the flight recorders to the error of a timeout, if there is one. It waits
// for the recorders of all ranks until ctx ends.
func (w *reporter) analyzed(ctx context.Context, c *nccl.Communicator, err error) error {
	if !analyst(c.Rank(), c.Size()) {
		return err
	}
	job := analyze.Live()
	for _, b := range w.readDumps(ctx, c) {
		_ = job.Add(bytes.NewReader(b)) // an invalid dump is like no answer
	}
	switch r := job.Analyze(); r.Kind {
	case analyze.KindNone, analyze.KindFile:
		return err
	default:
		return &analyzedError{err, r.Verdict}
	}
}

// readDumps returns the dumps of the ranks that answer before ctx ends.
func (w *reporter) readDumps(ctx context.Context, c *nccl.Communicator) (list [][]byte) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for rank := range c.Size() {
		wg.Go(func() {
			if b, err := w.r.Get(ctx, w.dumpKey(rank)); err == nil && len(b) <= maxDump {
				mu.Lock()
				defer mu.Unlock()
				list = append(list, b)
			}
		})
	}
	wg.Wait()
	return list
}
