package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/safe"
)

// A World is the membership of this process in one epoch of a job, as Run gives it to its
// function. It has all methods of the epoch's [Store], which is empty when the epoch begins.
// Methods are safe for concurrent use.
type World struct {
	membership
	epoch  uint64
	new    []int
	left   []Departure
	cancel context.CancelCauseFunc

	mu     sync.Mutex
	news   chan struct{} // closed when held or until changes
	begun  uint64        // steps
	held   bool          // a planned change: no step may begin
	agreed bool          // until is the last step of the epoch
	until  uint64
	leaves bool // Step has returned the end of the epoch
}

// newWorld returns the world of a record. It ends with parent and with the job, or only with the job if this is its one epoch.
func newWorld(parent context.Context, r *runner, m job.Message) (*World, error) {
	var rec job.World
	if err := m.Record(&rec); err != nil {
		return nil, err
	}
	if m.ID >= uint64(len(rec.Members)) {
		return nil, errors.New("the coordinator's list does not include this process")
	}
	w := &World{epoch: m.Epoch, new: rec.New, left: rec.Left, news: make(chan struct{})}
	w.membership = membership{job: r.cfg.Job, me: rec.Members[m.ID], members: rec.Members, key: r.k.To.Key, by: rec.By, number: m.Epoch}
	for i := range w.left {
		w.left[i].Reason = safe.Text(w.left[i].Reason)
	}
	if w.ctx, w.cancel = r.k.Ctx, r.k.Cancel; !r.once {
		w.ctx, w.cancel = context.WithCancelCause(parent)
		lost := r.k.Ctx // another client follows after its end
		context.AfterFunc(lost, func() { w.cancel(context.Cause(lost)) })
	}
	w.view = Store{calls: job.NewRemote(w.ctx, r.k, w.epoch), rank: w.me.Rank, timeout: r.cfg.Timing.Call}
	return w, nil
}

// Epoch returns the number of the epoch, from 1 on, which grows with each
// change of the world.
func (w *World) Epoch() int { return int(w.epoch) }

// New returns the ranks that were not in the epoch before, in ascending order,
// or nil in the first epoch.
func (w *World) New() []int { return slices.Clone(w.new) }

// Left returns the processes that have left the job since the last epoch that this process took part
// in, with the reasons. If this process has missed an epoch, because the coordinator was lost as
// the epoch began, the reasons of departures before it are unknown. Left may differ between ranks,
// because some may have missed an epoch: do not decide by it which collectives to call.
func (w *World) Left() []Departure { return slices.Clone(w.left) }

// addMissed adds to Left the members of the epoch last, the last one of this process, that have left
// before an epoch that this process has missed.
func (w *World) addMissed(last *World) {
	if last == nil || w.epoch <= last.epoch+1 {
		return
	}
	for _, m := range last.members {
		if slices.ContainsFunc(w.members, func(o Member) bool { return job.Same(m, o) }) || slices.ContainsFunc(w.left, func(d Departure) bool { return job.Same(m, d.Member) }) {
			continue
		}
		w.left = append(w.left, Departure{Member: m, Reason: fmt.Sprintf("left after epoch %d; the reason is unknown, because this process missed epoch %d", last.epoch, last.epoch+1)})
	}
}

// Step begins a step of the program. If a planned change of the world is due,
// it returns a *ChangeError after the same number of steps on all ranks, and
// the function of Run must return. Step does not communicate unless a change is
// due. Then it returns when all ranks have called it, so that no rank closes
// its group while another one still waits for an operation of the last step.
// All ranks must call Step equally often. If the epoch has ended because of a
// loss, Step returns the cause.
//
// A program that does not call Step loses the step that it is in at each planned change,
// which waits for CHORUS_DRAIN_TIMEOUT.
func (w *World) Step() error {
	if w.begins() {
		return nil
	}
	if w.ctx.Err() == nil && w.leave() {
		// Without an answer the other ranks are still in the last step, or have returned. CHORUS_DRAIN_TIMEOUT limits that.
		_ = w.Barrier(w.ctx, lastStep)
	}
	if w.ctx.Err() != nil {
		return context.Cause(w.ctx)
	}
	return &ChangeError{Epoch: int(w.epoch), Reason: "the world changes"}
}

// lastStep is the barrier behind the last step of an epoch.
const lastStep = "chorus: last step of the epoch"

// leave records that Step has seen the end of the epoch, and reports whether this is the first time.
func (w *World) leave() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	first := !w.leaves
	w.leaves = true
	return first
}

// begins reports whether another step of the epoch begins, which may have to wait for the last step's number.
func (w *World) begins() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		switch {
		case w.ctx.Err() != nil, w.agreed && w.begun >= w.until:
			return false
		case w.agreed || !w.held:
			w.begun++
			return true
		}
		news := w.news
		w.mu.Unlock()
		select {
		case <-news:
		case <-w.ctx.Done():
		}
		w.mu.Lock()
	}
}

// hold forbids further steps and returns the number of steps begun.
func (w *World) hold() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held = true
	return w.begun
}

// runUntil permits steps up to number last, the last of the epoch.
func (w *World) runUntil(last uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.agreed {
		w.agreed, w.until = true, last
		close(w.news)
	}
}

// isLeaving reports whether Step has returned the end of the epoch.
func (w *World) isLeaving() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.leaves
}
