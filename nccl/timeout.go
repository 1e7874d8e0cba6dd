package nccl

import (
	"fmt"
	"github.com/gochorus/chorus/internal/flight"
	"strings"
	"time"
)

// A TimeoutError reports an operation that has not completed within its timeout. It
// matches ErrorTimeout. The communicator has failed with it.
type TimeoutError struct {
	Rank, Size int
	Device     string
	Operation  Operation     // the operation that has not completed, or the first one that it may be
	Last       Operation     // the last operation that it may be; Operation if the operation is known
	Lost       bool          // it may also be an earlier operation, which the flight recorder no longer has
	InCall     bool          // NCCL's call has not returned: it waits until the other ranks have issued the operation
	Age        time.Duration // since Last was issued, without the time of captures
	Limit      time.Duration
	Completed  Operation // the last completed operation; none if its Record is 0
	Behind     []int     // ranks of this process that never issued it
	Others     []string  // operations of other ranks in this process that may be the cause, a sentence each
	NCCL       string    // NCCL's last message (ncclGetLastError), or ""
}

func (e *TimeoutError) Error() string {
	var b strings.Builder
	single := e.Last.Record == e.Operation.Record && !e.Lost
	has, why := "is not known to have completed", ""
	switch {
	case e.InCall:
		has = "has not returned from NCCL"
	case single && e.Operation.Queued:
		has, why = "has not completed", ": its stream has not reached it, because work that was enqueued on the stream before it still runs or waits"
	case single && !e.Operation.Started.IsZero():
		has = "has started and is not known to have completed"
	}
	fmt.Fprintf(&b, "nccl: %s on rank %d of %d (%s) %s after %v (the limit is %v)%s",
		flight.Between(e.Operation, e.Last, e.Lost), e.Rank, e.Size, e.Device, has, e.Age.Round(time.Millisecond), e.Limit, why)
	if e.InCall && len(e.Others) > 0 {
		b.WriteString(": " + strings.Join(e.Others, "; "))
	}
	if e.Completed.Record > 0 {
		fmt.Fprintf(&b, "; the last known to have completed is %s", e.Completed)
	} else {
		b.WriteString("; none is known to have completed")
	}
	for _, text := range e.Others {
		if !e.InCall {
			b.WriteString("; " + text)
		}
	}
	if e.NCCL != "" {
		b.WriteString("; NCCL's last message: " + e.NCCL)
	}
	return b.String()
}

// Unwrap returns ErrorTimeout, for errors.Is.
func (e *TimeoutError) Unwrap() error { return ErrorTimeout }

// Timeout reports true, as net.Error does.
func (e *TimeoutError) Timeout() bool { return true }

// A MismatchError reports an operation that another rank of this process issued
// differently, under the same number. NCCL would hang or corrupt data. The operation is
// not enqueued on this rank, and if both are in one Group, on neither.
type MismatchError struct {
	Rank, Size int
	Operation  Operation
	Other      int       // the rank that differs
	Theirs     Operation // none if the trace no longer has it
}

func (e *MismatchError) Error() string {
	text := fmt.Sprintf("nccl: the ranks do not issue the same operations: rank %d of %d issued %s, rank %d issued %s",
		e.Rank, e.Size, e.Operation, e.Other, e.Theirs)
	if e.Operation.String() == e.Theirs.String() {
		text += ", but different backends execute them: one of them was issued through package nccl, or in a batch with other collectives of its rank, or not in one batch with the operations of all ranks"
	}
	return text
}

// Unwrap returns ErrorInvalidUsage, for errors.Is.
func (e *MismatchError) Unwrap() error { return ErrorInvalidUsage }

// errTimeout makes the error of the operations that have exceeded the timeout.
func (c *Communicator) errTimeout(x flight.Suspicion, age time.Duration, others []*member) *TimeoutError {
	_, completed := c.rec.Final()
	t := &TimeoutError{
		Rank: c.rank, Size: c.size, Device: c.dev.String(), Limit: x.Timeout, Operation: x.First.Operation(),
		Last: x.Last.Operation(), Lost: x.Lost, Age: age, Completed: completed.Operation(), NCCL: c.lastMessage(),
	}
	e := x.Last
	pending, inside := c.rec.Unaccepted()
	t.InCall = inside && pending.ID == e.ID
	if flight.Kinds[e.Kind].Peer {
		for _, m := range others {
			if m.Rank == e.Root {
				observeWithin(observeTime, []*member{m})
				last, _ := m.Final()
				text := fmt.Sprintf("the last that rank %d (%s) has issued is %s", m.Rank, m.Device, last.Operation())
				if last.Operation().Queued {
					text += ", which its stream has not reached"
				}
				t.Others = append(t.Others, text)
			}
		}
		return t
	}
	observeWithin(observeTime, others)
	for _, m := range others {
		if issued, last := m.Issued(); issued < e.Collective {
			t.Behind = append(t.Behind, m.Rank)
			if t.InCall {
				t.Others = append(t.Others, fmt.Sprintf("rank %d (%s) has not issued it, the last operation is %s", m.Rank, m.Device, last.Operation()))
				continue
			}
			t.Others = append(t.Others, fmt.Sprintf("rank %d (%s) is behind: it has issued %d collectives, the last operation is %s", m.Rank, m.Device, issued, last.Operation()))
		} else if theirs, found := m.Collective(e.Collective); found && theirs.Operation().Queued {
			t.Others = append(t.Others, fmt.Sprintf("rank %d (%s) has issued it, but its stream has not reached it: work that was enqueued on the stream before it still runs or waits", m.Rank, m.Device))
		}
	}
	return t
}

// errMismatch makes the error of an operation that the board of the ranks refused.
func (c *Communicator) errMismatch(o *operation) *MismatchError {
	c.rec.CountError(flight.ReasonMismatch)
	mine := c.rec.Entry(o.Record)
	e := &MismatchError{Rank: c.rank, Size: c.size, Operation: mine.Operation(), Other: -1, Theirs: Operation{Root: -1}}
	for _, m := range c.others() {
		if theirs, found := m.Collective(o.Number); found && theirs.Signature != mine.Signature {
			e.Other, e.Theirs = m.Rank, theirs.Operation()
			break
		}
	}
	return e
}
