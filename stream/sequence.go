package stream

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
)

// A Sequence keeps work in one order, whichever streams it is enqueued on, and whichever
// stream a graph that has captured some is launched on: such as that of memory that every
// operation uses. It is a Preparer. For Chorus's own packages.
type Sequence struct {
	mu     sync.Mutex // held while work is enqueued
	users  []*Stream  // that had work; each is retained
	last   *Stream    // that had the last, in a graph or not
	behind *Event     // behind it, where that was in a graph
	graphs []Holder   // that captured some
	closed bool
}

// Begin makes s wait for the work so far. Until End nobody else begins. What is captured
// does not wait: the launch of its graph does.
func (q *Sequence) Begin(s *Stream) error {
	q.mu.Lock()
	err := q.use(s)
	if err == nil {
		err = q.order(s)
	}
	if err != nil {
		q.mu.Unlock()
	}
	return err
}

// End is the end of what has begun.
func (q *Sequence) End() { q.mu.Unlock() }

func (q *Sequence) order(s *Stream) error {
	if AnyCapture() { // the driver is asked only then
		if captured, err := s.Capturing(); captured || err != nil {
			return err
		}
	}
	return q.follow(s)
}

// Hold notes that a graph has work of the sequence.
func (q *Sequence) Hold(g Holder) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.graphs = append(q.graphs, g)
}

// LetGo undoes Hold.
func (q *Sequence) LetGo(g Holder) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i := slices.Index(q.graphs, g); i >= 0 {
		q.graphs = slices.Delete(q.graphs, i, i+1)
	}
}

// Prepare notes that a graph that has work of the sequence is launched on s.
func (q *Sequence) Prepare(s *Stream) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.use(s); err != nil {
		return err
	}
	return q.follow(s)
}

// Launched ends what Prepare began: what comes on other streams is to wait for the graph,
// and for nothing that follows it on s.
func (q *Sequence) Launched(s *Stream) {
	q.mu.Lock()
	defer q.mu.Unlock()
	behind, err := s.Record(nil)
	if err != nil {
		return // the stream itself is to be waited for then
	}
	_ = q.behind.Close() // nobody needs it any more
	q.behind = behind
}

// Close calls end with the streams that had work, if no graph has captured some that
// still is and none of them is being captured, and gives them up. Nobody begins
// meanwhile. name is what the work uses.
func (q *Sequence) Close(name string, end func(users []*Stream) error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.graphs) > 0 {
		return fmt.Errorf("%s: %s uses it: close the graph first", name, q.graphs[0])
	}
	for _, s := range q.users {
		if err := s.RefuseCapture(name, "its operations cannot be waited for"); err != nil {
			return err
		}
	}
	errs := []error{end(q.users)}
	for _, s := range q.users {
		errs = append(errs, s.Release())
	}
	errs = append(errs, q.behind.Close())
	q.users, q.last, q.behind, q.closed = nil, nil, nil, true
	return errors.Join(errs...)
}

// follow lets s wait for the work so far, where the last of it is on another stream. The
// lock is held.
func (q *Sequence) follow(s *Stream) error {
	last, behind := q.last, q.behind
	q.last, q.behind = s, nil
	defer behind.Close()
	switch {
	case last == nil || last == s:
		return nil
	case behind != nil:
		return s.Wait(behind)
	}
	return s.WaitStream(last)
}

// use notes that s gets work. The lock is held.
func (q *Sequence) use(s *Stream) error {
	if q.closed {
		return fmt.Errorf("use: %w", device.ErrClosed)
	}
	if slices.Contains(q.users, s) {
		return nil
	}
	if !s.Retain() {
		return s.Check("use", nil)
	}
	q.users = append(q.users, s)
	return nil
}
