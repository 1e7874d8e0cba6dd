package nccl

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// A TimeoutError is an operation that has not completed within Config.Timeout. It
// matches ErrorTimeout. The communicator has failed with it.
type TimeoutError struct {
	Rank, Size int
	Device     string
	Operation  Operation     // the operation that has not completed, or the first one that it may be
	Last       Operation     // the last operation that it may be; Operation if the operation is known
	Lost       bool          // it may also be an earlier operation, which the flight recorder no longer has
	Age        time.Duration // since Last was issued, without the time of captures
	Limit      time.Duration
	Completed  Operation // the last that has; none if its Record is 0
	Behind     []int     // ranks of this process that never issued it
	Others     []string  // what the ranks of this process have done that may be the cause, a sentence each
	NCCL       string    // NCCL's own last message (ncclGetLastError), or ""
}

func (e *TimeoutError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "nccl: %s on rank %d of %d (%s) has not completed after %v (the limit is %v)",
		e.what(), e.Rank, e.Size, e.Device, e.Age.Round(time.Millisecond), e.Limit)
	if e.Completed.Record > 0 {
		fmt.Fprintf(&b, "; the last known to have completed is %s", e.Completed)
	} else {
		b.WriteString("; none is known to have completed")
	}
	for _, text := range e.Others {
		b.WriteString("; " + text)
	}
	if e.NCCL != "" {
		b.WriteString("; NCCL's last message: " + e.NCCL)
	}
	return b.String()
}

// what names the operation, or the interval in which it lies.
func (e *TimeoutError) what() string {
	text, first, last := e.Operation.String(), e.Operation, e.Last
	switch {
	case last.Record == 0 || last.Record == first.Record:
	case kinds[first.kind].peer || kinds[last.kind].peer:
		text = fmt.Sprintf("one of the operations from %s to %s", first, last)
	case first.call() == last.call():
		text = fmt.Sprintf("one of collectives %d to %d, such as %s,", first.Collective, last.Collective, first.call())
	default:
		text = fmt.Sprintf("one of collectives %d to %d, from %s to %s,", first.Collective, last.Collective, first.call(), last.call())
	}
	if e.Lost {
		text += " or an earlier operation that the flight recorder no longer has"
	}
	return text
}

// Unwrap returns ErrorTimeout, for errors.Is.
func (e *TimeoutError) Unwrap() error { return ErrorTimeout }

// Timeout reports true, as net.Error does.
func (e *TimeoutError) Timeout() bool { return true }

// A MismatchError is an operation that another rank of this process issued
// differently, under the same number. NCCL would hang or mix data up. It is not
// enqueued on this rank, and if both are in one Group on none.
type MismatchError struct {
	Rank, Size int
	Operation  Operation
	Other      int       // the rank that differs
	Theirs     Operation // none if the trace has it no more
}

func (e *MismatchError) Error() string {
	text := fmt.Sprintf("nccl: the ranks do not issue the same operations: rank %d of %d issued %s, rank %d issued %s",
		e.Rank, e.Size, e.Operation, e.Other, e.Theirs)
	if e.Operation.String() == e.Theirs.String() {
		text += ", which by the group's strategy are carried out in two ways: one of them is on another stream than the group's, or beside others in a Group, or not in one with those of all ranks"
	}
	return text
}

// Unwrap returns ErrorInvalidUsage, for errors.Is.
func (e *MismatchError) Unwrap() error { return ErrorInvalidUsage }

// A suspicion is what may hang: one of the operations from first to last.
type suspicion struct {
	first, last entry
	lost        bool  // it may also be an earlier operation, which the ring has lost
	marked      bool  // a mark proves that one of the operations has not completed
	begun       int64 // when the last was issued, by the recorder's clock
}

// suspects returns what may hang, if anything: the first operation that is not known to have
// completed and those behind it, up to the first mark ahead.
func (r *recorder) suspects(ahead []mark) (x suspicion, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.oldest()
	if e == nil {
		return x, false
	}
	x = suspicion{first: *e, last: *e, begun: e.begun}
	for id := r.settled + 1; id < e.id && !x.lost; id++ {
		x.lost = r.find(id) == nil
	}
	last := r.waiting
	for _, k := range ahead {
		if r.ordered() || k.stream == e.stream {
			last, x.marked = k.record, true
			x.begun = min(x.begun, k.at) // if the ring has lost those before the mark
			break
		}
	}
	for id := e.id; id <= last; id++ {
		if l := r.find(id); l != nil && l.runs() && l.state == Scheduled && (r.ordered() || l.stream == e.stream) {
			if x.last = *l; x.marked {
				x.begun = l.begun
			}
		}
	}
	return x, true
}

// narrow leaves out what comes after the first collective that not all other ranks of the
// process have issued and that cannot complete here without them.
func (x *suspicion) narrow(c *Communicator, others []*member) {
	if next, found := c.rec.awaited(x.first, others); found && next.id >= x.first.id && next.id < x.last.id && c.waitsFor(next, others) {
		x.last, x.begun = next, next.begun
	}
}

// waitsFor reports whether a collective cannot complete on this rank before the ranks that
// have not issued it do so.
func (c *Communicator) waitsFor(e entry, others []*member) bool {
	switch {
	case e.n == 0 || e.kind == allGatherV || e.kind == reduceScatterV || e.kind == allToAllV:
		return false // some rank may have nothing to wait for
	case !kinds[e.kind].rooted:
		return true
	}
	if kinds[e.kind].dstRoot { // the others only give
		return c.rank == int(e.root)
	}
	for _, m := range others {
		if issued, _ := m.issued(); m.rank == int(e.root) {
			return issued < e.collective
		}
	}
	return false
}

// timedOut is the error of operations of which one is too old.
func (c *Communicator) timedOut(x suspicion, age time.Duration, others []*member) *TimeoutError {
	_, completed := c.rec.final()
	t := &TimeoutError{
		Rank: c.rank, Size: c.size, Device: c.dev.String(), Limit: c.rec.timeout, Operation: x.first.operation(),
		Last: x.last.operation(), Lost: x.lost, Age: age, Completed: completed.operation(), NCCL: c.lastMessage(),
	}
	e := x.last
	if kinds[e.kind].peer {
		for _, m := range others {
			if m.rank == int(e.root) {
				last, _ := m.final()
				t.Others = append(t.Others, fmt.Sprintf("the last that rank %d (%s) has issued is %s", m.rank, m.device, last.operation()))
			}
		}
		return t
	}
	for _, m := range others {
		if issued, last := m.issued(); issued < e.collective {
			t.Behind = append(t.Behind, m.rank)
			t.Others = append(t.Others, fmt.Sprintf("rank %d (%s) is behind: it has issued %d collectives, the last operation is %s", m.rank, m.device, issued, last.operation()))
		}
	}
	return t
}

// awaited is the first collective from e on that not all of the others have issued.
func (r *recorder) awaited(e entry, others []*member) (next entry, found bool) {
	fewest := uint64(math.MaxUint64)
	for _, m := range others {
		issued, _ := m.issued()
		fewest = min(fewest, issued)
	}
	if fewest == math.MaxUint64 {
		return entry{}, false
	}
	return r.collective(max(fewest+1, e.collective))
}

// mismatch is the error of an operation that post refused.
func (c *Communicator) mismatch(o *operation) *MismatchError {
	c.rec.mu.Lock()
	mine := *c.rec.at(o.record)
	c.rec.mu.Unlock()
	e := &MismatchError{Rank: c.rank, Size: c.size, Operation: mine.operation(), Other: -1, Theirs: Operation{Root: -1}}
	for _, m := range c.others() {
		if theirs, found := m.collective(o.number); found && theirs.signature != mine.signature {
			e.Other, e.Theirs = m.rank, theirs.operation()
			break
		}
	}
	return e
}
