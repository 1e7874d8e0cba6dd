package ddp

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/stream"
)

// A queue tells a worker when to reduce each bucket: as soon as its last gradient is ready
// on all local ranks, but in the same order on all ranks.
type queue struct {
	g    *comm.Group
	work worker
	what string // what becomes ready: "gradient" or "unit"

	mu      sync.Mutex
	buckets []bucket
	of      []place     // where each gradient is
	arrived [][]arrival // by bucket and local rank
	next    int         // the bucket to reduce next
	seen    [][]bool    // by local rank: the gradients that are ready in this step
	order   []int       // of the ready gradients on the first local rank
	last    []int       // order in the step before
	ended   bool        // there was one
	static  [][]bool    // by local rank: the gradients that are ready in every step; nil if unknown

	any    bool  // a step may have any gradients; static decides if it is known
	partly bool  // a local rank may have none
	always bool  // a step may have none at all
	failed error // why this step cannot be reduced; the step ends with it

	streams []*stream.Stream // the program's, by local rank, while a step ends
	graphs  gpu.Graphs       // that have captured calls with a stream of the program
	trial   *trial           // nil without Autotune
}

// A place is a bucket and the place in it.
type place struct{ bucket, nth int }

// A worker reduces the buckets. The queue calls it with its lock held.
type worker interface {
	// collect enqueues the copy of gradient i to its bucket on s, if it needs one.
	collect(local int, s *stream.Stream, i int) error
	// reduce enqueues the reduction of bucket k on the group's streams, which
	// have waited for its gradients.
	reduce(k int) error
}

// An arrival is the state of a bucket on a local rank.
type arrival struct {
	pending int            // gradients that are not ready in this step
	stream  *stream.Stream // of the gradient that became ready last
	ready   *stream.Event  // recorded when all gradients are ready
	reduced *mark          // the result is in its place
}

// newQueue returns a queue without buckets.
func newQueue(g *comm.Group, work worker, what string, grads int) *queue {
	q := &queue{g: g, work: work, what: what}
	for range g.Locals() {
		q.seen = append(q.seen, make([]bool, grads))
	}
	return q
}

// fill gives the queue buckets, and counts work that is already on the group's
// streams as the reduction of the step before.
func (q *queue) fill(buckets []bucket) error {
	arrived := make([][]arrival, len(buckets))
	for k := range buckets {
		for i := range q.g.Locals() {
			a, err := newArrival(q.g.Stream(i))
			arrived[k] = append(arrived[k], a)
			if err != nil {
				return errors.Join(err, closeArrivals(arrived))
			}
		}
	}
	err := closeArrivals(q.arrived)
	q.buckets, q.arrived, q.of = buckets, arrived, make([]place, len(q.seen[0]))
	for k, b := range buckets {
		for j, i := range b.grads {
			q.of[i] = place{k, j}
		}
	}
	q.rewind()
	return err
}

func newArrival(s *stream.Stream) (a arrival, err error) {
	if a.ready, err = stream.NewEvent(s.Device(), nil); err != nil {
		return a, err
	}
	a.reduced, err = newMark(s)
	return a, err
}

func closeArrivals(arrived [][]arrival) error {
	var errs []error
	for _, as := range arrived {
		for i := range as {
			errs = append(errs, as[i].ready.Close(), as[i].reduced.close())
		}
	}
	return errors.Join(errs...)
}

// ready notes that gradient i is complete on s.
func (q *queue) ready(op string, s *stream.Stream, i int) error {
	local, err := q.local(op, s)
	if err != nil {
		return err
	}
	if i < 0 || i >= len(q.seen[0]) {
		return fmt.Errorf("%s: %s %d of %d does not exist", op, q.what, i, len(q.seen[0]))
	}
	if err := q.check(q.what + " ready"); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.seen[local][i] {
		return fmt.Errorf("%s: %s %d was ready already in this step: call Finish between steps", op, q.what, i)
	}
	if q.static != nil && !q.static[local][i] {
		return fmt.Errorf("%s on rank %d: gradient %d was not used in the first step: a static graph uses the same gradients in every step",
			op, q.rank(local), i)
	}
	err = q.work.collect(local, s, i)
	if err == nil {
		err = q.arrived[q.of[i].bucket][local].arrive(s, 1)
	}
	if err != nil {
		return fmt.Errorf("%s: %s %d on rank %d of %d: %w", op, q.what, i, q.rank(local), q.g.Size(), err)
	}
	q.seen[local][i] = true
	if local == 0 {
		q.order = append(q.order, i)
	}
	return q.launch()
}

// check returns an error if the group in use is closed or broken.
func (q *queue) check(op string) error {
	if err := q.trial.checkOpen(q.g); err != nil {
		return fmt.Errorf("ddp: %s: %w", op, err)
	}
	if err := route.GroupOf(q.g).Check(op); err != nil {
		return fmt.Errorf("ddp: %w", err)
	}
	return nil
}

// arrive notes that n of the bucket's gradients are complete on s.
func (a *arrival) arrive(s *stream.Stream, n int) error {
	if a.stream != nil && a.stream != s {
		// The bucket waits for one event of the last stream: earlier streams must
		// be before it.
		if err := s.WaitStream(a.stream); err != nil {
			return err
		}
	}
	a.stream = s
	if a.pending -= n; a.pending > 0 {
		return nil
	}
	return a.ready.Record(s)
}

// launch reduces all buckets whose turn it is.
func (q *queue) launch() error {
	for ; q.next < len(q.buckets); q.next++ {
		if q.failed != nil {
			return q.failed
		}
		as := q.arrived[q.next]
		if slices.ContainsFunc(as, func(a arrival) bool { return a.pending > 0 }) {
			return nil
		}
		if err := q.check("reduce a bucket of gradients"); err != nil {
			return err
		}
		for i := range as {
			if err := q.g.Stream(i).Wait(as[i].ready); err != nil {
				return err
			}
		}
		if err := q.work.reduce(q.next); err != nil {
			return err
		}
		if err := q.record(q.next); err != nil {
			return err
		}
	}
	return nil
}

// record marks the point on the group's streams behind the reduction of a bucket.
func (q *queue) record(k int) error {
	for i := range q.arrived[k] {
		if err := q.arrived[k][i].reduced.set(q.g.Stream(i)); err != nil {
			return err
		}
	}
	return nil
}

// launchRest counts all gradients as ready on the streams of the local ranks, and reduces the
// buckets that are left.
func (q *queue) launchRest(streams []*stream.Stream) error {
	for k := range q.arrived {
		for i := range q.arrived[k] {
			if a := &q.arrived[k][i]; a.pending > 0 {
				if err := a.arrive(streams[i], a.pending); err != nil {
					return err
				}
			}
		}
	}
	return q.launch()
}

// missing returns an error that names the gradients of all local ranks that should be ready
// and are not.
func (q *queue) missing(op string) error {
	var ranks []string
	for local, seen := range q.seen {
		if q.partly && !q.has(local) {
			continue
		}
		var lack []int
		for i, is := range seen {
			if !is && (q.static == nil || q.static[local][i]) {
				lack = append(lack, i)
			}
		}
		switch {
		case len(lack) == 1:
			ranks = append(ranks, fmt.Sprintf("on rank %d %s %d of %d is not ready", q.rank(local), q.what, lack[0], len(seen)))
		case len(lack) > 1:
			ranks = append(ranks, fmt.Sprintf("on rank %d %ss %s of %d are not ready", q.rank(local), q.what, runs(lack), len(seen)))
		}
	}
	if len(ranks) == 0 {
		return nil
	}
	why := "every " + q.what + " must be, in every step"
	if q.static != nil {
		why = "a static graph uses the same gradients in every step"
	}
	return fmt.Errorf("%s: %s: %s", op, strings.Join(ranks, "; "), why)
}

// runs lists numbers, which ascend: those that follow each other as "3 to 7".
func runs(ns []int) string {
	var parts []string
	for i := 0; i < len(ns); {
		j := i
		for j+1 < len(ns) && ns[j+1] == ns[j]+1 {
			j++
		}
		part := fmt.Sprint(ns[i])
		if j > i+1 {
			part = fmt.Sprintf("%d to %d", ns[i], ns[j])
		} else if j > i {
			part = fmt.Sprintf("%d, %d", ns[i], ns[j])
		}
		parts, i = append(parts, part), j+1
	}
	return strings.Join(parts, ", ")
}

// end ends the step on the streams. Gradients that should be ready and are not count as zeros,
// because the ranks of other processes wait for their buckets, and the next step begins on all
// ranks alike. The error names these gradients. end calls agree after the last bucket.
func (q *queue) end(op string, streams []*stream.Stream, agree func() error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	var lack error
	if !q.any || q.static != nil {
		lack = q.missing(op)
		if !q.begun() && !q.always {
			return q.notBegun(op, lack)
		}
	}
	if err := q.conclude(streams, agree); err != nil || lack == nil {
		return errors.Join(lack, err)
	}
	return fmt.Errorf("%w; they counted as zeros, and the next Ready begins another step", lack)
}

// notBegun is the error of the end of a step without gradients.
func (q *queue) notBegun(op string, lack error) error {
	why := "no " + q.what + " has become ready since the last step"
	if lack == nil {
		return fmt.Errorf("%s: %s: a rank without input calls Join", op, why)
	}
	return fmt.Errorf("%w; %s", lack, why)
}

// conclude reduces the buckets that are left, calls agree, and ends the step.
func (q *queue) conclude(streams []*stream.Stream, agree func() error) error {
	if err := q.launchRest(streams); err != nil {
		if q.failed != nil {
			q.rewind()
		}
		return err
	}
	if err := agree(); err != nil {
		return err
	}
	return q.finish(streams)
}

// finish ends the step: the streams wait for the last bucket, and with it for
// all, as the group's streams reduce in order.
func (q *queue) finish(streams []*stream.Stream) error {
	if err := q.trial.checkOpen(q.g); err != nil {
		return fmt.Errorf("ddp: end a step: %w", err)
	}
	if err := q.g.Err(); err != nil { // a broken group lets the streams pass without a result
		return err
	}
	for i, a := range q.arrived[len(q.arrived)-1] {
		if err := a.reduced.wait(streams[i]); err != nil {
			return err
		}
	}
	if err := q.trial.follow(q.g); err != nil {
		return err
	}
	q.order, q.last, q.ended = q.last, q.order, true
	if q.trial != nil {
		q.trial.ended++
	}
	q.rewind()
	return nil
}

// rewind prepares for the next step.
func (q *queue) rewind() {
	q.next, q.order, q.failed = 0, q.order[:0], nil
	for k, b := range q.buckets {
		for i := range q.arrived[k] {
			q.arrived[k][i].pending, q.arrived[k][i].stream = q.expected(i, b.grads), nil
		}
	}
	for _, seen := range q.seen {
		clear(seen)
	}
}

// expected is the number of gradients of a bucket that will be ready. A bucket without any
// waits for the end of the step.
func (q *queue) expected(local int, grads []int) int {
	if q.static == nil {
		return len(grads)
	}
	n := 0
	for _, i := range grads {
		if q.static[local][i] {
			n++
		}
	}
	return max(n, 1)
}

// begun reports whether a gradient is ready in this step.
func (q *queue) begun() bool {
	return slices.ContainsFunc(q.seen, func(seen []bool) bool { return slices.Contains(seen, true) })
}

// has reports whether a gradient of a local rank is ready in this step.
func (q *queue) has(local int) bool { return slices.Contains(q.seen[local], true) }

// sorted checks that there is one stream for each local rank, whose work can be ordered
// with the group's now, and returns them in that order, until the next call.
func (q *queue) sorted(op string, streams []*stream.Stream) ([]*stream.Stream, error) {
	if len(streams) != q.g.Locals() {
		return nil, fmt.Errorf("%s: %d streams for %d local ranks: %w", op, len(streams), q.g.Locals(), comm.ErrMismatch)
	}
	if q.streams == nil {
		q.streams = make([]*stream.Stream, len(streams))
	}
	by := q.streams
	clear(by)
	for _, s := range streams {
		local, err := q.local(op, s)
		if err != nil {
			return nil, err
		}
		if by[local] != nil {
			return nil, fmt.Errorf("%s: two streams of %s: want one for each local rank: %w", op, s.Device(), comm.ErrMismatch)
		}
		by[local] = s
	}
	return by, nil
}

// local returns the local rank whose device s is on. If s is being captured, the graph holds the queue and the memory of its worker.
func (q *queue) local(op string, s *stream.Stream) (int, error) {
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return 0, err
	}
	for i := range q.g.Locals() {
		if q.g.Device(i) == s.Device() {
			if err := q.trial.refuseCapture(op, s); err != nil {
				return 0, err
			}
			if err := q.graphs.Add(gpu.StreamOf(s)); err != nil {
				return 0, fmt.Errorf("%s: %w", op, err)
			}
			return i, nil
		}
	}
	return 0, fmt.Errorf("%s: %s is on no device of the group: %w", op, s, comm.ErrMismatch)
}

func (q *queue) rank(local int) int { return q.g.Communicator(local).Rank() }

func (q *queue) close() error { return errors.Join(closeArrivals(q.arrived), q.trial.close()) }
