package comm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/nccl"
)

const (
	// dumpedOperations is the number of operations of each communicator that ranks exchange after
	// a timeout.
	dumpedOperations = 64
	// maxAnalysts limits the ranks of a group that read the dumps of all others.
	maxAnalysts = 8
	// maxDump and maxDumps limit the dumps of a rank and of all ranks of a group, in bytes: they are
	// in the job's store.
	maxDump  = 256 << 10
	maxDumps = 16 << 20
	// writeDumpTime is the maximum time to write a dump.
	writeDumpTime = time.Second
)

// dumps are this process's part of the exchange of flight recorders.
type dumps struct {
	mu      sync.Mutex // held while the dump is written
	written bool
	ended   bool // this process writes no dump and reads none any more
}

// An analyzedError adds the verdict of the flight recorders and the findings of the RAS service to the
// error of a timeout.
type analyzedError struct {
	err     error
	verdict string   // "" if there is none
	service []string // sentences without a period
}

func (e *analyzedError) Error() string {
	text := e.err.Error()
	if e.verdict != "" {
		text += "; the flight recorders of the ranks say: " + e.verdict
	}
	for _, s := range e.service {
		text += "\nNCCL's RAS: " + s
	}
	return text
}

func (e *analyzedError) Unwrap() error { return e.err }

func (w *reporter) dumpKey(rank int) string { return fmt.Sprint(w.prefix, "dump/", rank) }

func (w *reporter) dumpWanted() string { return fmt.Sprint(w.prefix, "dump/wanted") }

// awaitDump writes the local ranks' flight recorders when another rank has timed out, until ctx ends.
func (w *reporter) awaitDump(ctx context.Context) {
	if _, ok := w.await(ctx, w.dumpWanted()); ok {
		ctx, cancel := context.WithTimeout(ctx, writeDumpTime)
		defer cancel()
		w.writeDump(ctx, w.comms)
	}
}

// askForDumps asks all ranks for their flight recorders, and writes the local ranks'.
func (w *reporter) askForDumps(ctx context.Context, c *nccl.Communicator) {
	_ = w.r.Set(ctx, w.dumpWanted(), []byte("1")) // without answers there is no verdict
	if w.comms == nil {                           // the group is not complete
		w.writeDump(ctx, []*nccl.Communicator{c})
		return
	}
	w.writeDump(ctx, w.comms)
}

func (w *reporter) writeDump(ctx context.Context, comms []*nccl.Communicator) {
	w.dumps.mu.Lock()
	defer w.dumps.mu.Unlock()
	if w.dumps.written || w.dumps.ended {
		return
	}
	w.dumps.written = true
	for _, c := range comms {
		b := collective.Of(c).Dump(dumpedOperations, dumpLimit(c.Size()))
		// Without a dump the verdict says that this rank did not answer.
		if len(b) == 0 || w.r.Set(ctx, w.dumpKey(c.Rank()), b) != nil {
			w.dumps.written = false
		}
	}
}

// A deleter is a Rendezvous that can delete keys, as a job's store can. Others keep the dumps.
type deleter interface {
	Add(ctx context.Context, key string, delta int64) (int64, error)
	Delete(ctx context.Context, key string) (bool, error)
}

// dumpsEnded counts the processes that have written their dumps and have ended their group.
func (w *reporter) dumpsEnded() string { return fmt.Sprint(w.prefix, "dump/ended") }

// end returns true once, if this process has written its dumps or is writing
// one.
func (d *dumps) end() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	first := !d.ended
	d.ended = true
	return first && d.written
}

// deleteDumps deletes the dumps of all size ranks if each rank has written one
// and this process is the last one to end its group, because a rank may still
// read them before that. If a rank writes none, they stay until the job ends.
func (w *reporter) deleteDumps(size int) {
	r, ok := w.r.(deleter)
	if !w.dumps.end() || !ok || w.r.Context().Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastReportTime)
	defer cancel()
	if n, err := r.Add(ctx, w.dumpsEnded(), 1); err != nil || n < int64(len(w.firstRanks())) {
		return
	}
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() { _, _ = r.Delete(ctx, w.dumpKey(rank)) }) // it stays until the job ends
	}
	wg.Wait()
}

// dumpLimit is the largest dump of a rank in a group of size ranks.
func dumpLimit(size int) int { return min(maxDump, maxDumps/size) }

// analyst reports whether this rank compares the dumps of all ranks. In a large group only some ranks
// do, because all dumps come from one process.
func analyst(rank, size int) bool { return size <= maxAnalysts || rank%(size/maxAnalysts) == 0 }

// analyzed adds the verdict of the flight recorders and the findings of the RAS service to the error of
// a timeout, if there are any. It waits for the recorders of all ranks and the service until ctx ends.
func (w *reporter) analyzed(ctx context.Context, c *nccl.Communicator, service <-chan []string, err error) error {
	if !analyst(c.Rank(), c.Size()) {
		return err
	}
	job := analyze.Live(w.worldRanks())
	for _, b := range w.readDumps(ctx, c) {
		if len(b) > 0 {
			_ = job.Add(bytes.NewReader(b)) // an invalid dump is like no answer
		}
	}
	found := &analyzedError{err: err}
	if r := job.Analyze(); r.Kind != analyze.KindNone && r.Kind != analyze.KindFile {
		found.verdict = r.Verdict
	}
	select {
	case found.service = <-service:
	case <-ctx.Done():
	}
	if found.verdict == "" && len(found.service) == 0 {
		return err
	}
	return found
}

// readDumps returns the dumps by rank, with none for a rank that does not
// answer before ctx ends.
func (w *reporter) readDumps(ctx context.Context, c *nccl.Communicator) [][]byte {
	list := make([][]byte, c.Size())
	var wg sync.WaitGroup
	for rank := range list {
		wg.Go(func() {
			if b, err := w.last(ctx, w.dumpKey(rank)); err == nil && len(b) <= dumpLimit(len(list)) {
				list[rank] = b
			}
		})
	}
	wg.Wait()
	return list
}

// askService asks NCCL's RAS service about the ranks of a communicator, and
// returns at once. The channel receives its findings, and is closed if there
// are none.
func (w *reporter) askService(c *nccl.Communicator) <-chan []string {
	found := make(chan []string, 1)
	addr := serviceAddress(c)
	if addr == "" || !analyst(c.Rank(), c.Size()) {
		close(found)
		return found
	}
	world := w.worldRanks()
	go func() {
		defer close(found)
		a, err := analyze.AskRAS(addr)
		if err != nil {
			return // the service is older, disabled, or another program has its port
		}
		mine := a.Of(c.Rank(), c.Size(), os.Getpid())
		found <- mine.Findings(func(x *analyze.RASCommunicator, rank int) string {
			if len(mine.Communicators) > 1 { // this process has the same rank in several groups of the size
				return fmt.Sprintf("rank %d of communicator %s", rank, x.Hash)
			}
			return fmt.Sprint("rank ", world[rank])
		})
	}()
	return found
}

// serviceAddress returns the address of a communicator's service, or "" if there is none to ask.
func serviceAddress(c *nccl.Communicator) string {
	return analyze.RASAddress(c.Device().System().Backend() == gpu.Virtual)
}

// A closing records how this process ended a group.
type closing struct {
	how string // closedGroup or shutGroup
	at  time.Time
}

// A closedError is returned by calls on a group that this process has closed, and by waits
// for operations that were pending at that time.
type closedError struct {
	op         string
	by         *closing
	incomplete bool         // operations may not have completed
	cause      *brokenError // why the group was broken before it was closed; nil if it was not broken
}

func (e *closedError) Error() string {
	text := fmt.Sprintf("comm: %s: this process %s %v ago", e.op, e.by.how, time.Since(e.by.at).Round(time.Millisecond))
	if e.incomplete {
		text += ": the operations may not have completed and their output is undefined"
	}
	if e.cause != nil {
		text += fmt.Sprintf("; it was broken before: %v", e.cause.cause)
	}
	return text
}

// Unwrap returns device.ErrClosed and the cause, for errors.Is.
func (e *closedError) Unwrap() []error {
	if e.cause == nil {
		return []error{device.ErrClosed}
	}
	return []error{device.ErrClosed, e.cause}
}

// errClosed returns the error of a call on a group that this process has closed.
func (g *Group) errClosed(op string) *closedError {
	e := &closedError{op: op, by: g.closing.Load(), cause: g.broken.Load()}
	if e.by == nil { // newGroup has failed
		e.by = &closing{closedGroup, time.Now()}
	}
	return e
}

// errIncomplete returns the error of operations that ended with err and are not known to have
// completed.
func (g *Group) errIncomplete(op string, err error) error {
	if b := g.broken.Load(); b != nil {
		return b
	}
	if g.closing.Load() == nil {
		return g.fail(err)
	}
	if e, ok := err.(*closedError); ok && e.incomplete {
		return e
	}
	e := g.errClosed(op)
	e.incomplete = errors.Is(err, device.ErrClosed)
	return e
}
