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
	Operation  Operation     // the first that has not completed
	Age        time.Duration // since it was issued, without the time of captures
	Limit      time.Duration
	Completed  Operation // the last that has; none if its Record is 0
	Behind     []int     // ranks of this process that never issued it
	Others     []string  // what the ranks of this process have done that may be the cause, a sentence each
	NCCL       string    // NCCL's own last message (ncclGetLastError), or ""
}

func (e *TimeoutError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "nccl: %s on rank %d of %d (%s) has not completed after %v (the limit is %v)",
		e.Operation, e.Rank, e.Size, e.Device, e.Age.Round(time.Millisecond), e.Limit)
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

// timedOut is the error of an operation that is too old.
func (c *Communicator) timedOut(e entry, age time.Duration, others []*member) *TimeoutError {
	_, completed := c.rec.final()
	t := &TimeoutError{
		Rank: c.rank, Size: c.size, Device: c.dev.String(), Limit: c.rec.timeout,
		Operation: e.operation(), Age: age, Completed: completed.operation(), NCCL: c.lastMessage(),
	}
	if kinds[e.kind].peer {
		for _, m := range others {
			if m.rank == int(e.root) {
				last, _ := m.final()
				t.Others = append(t.Others, fmt.Sprintf("the last that rank %d (%s) has issued is %s", m.rank, m.device, last.operation()))
			}
		}
	} else {
		for _, m := range others {
			if issued, last := m.issued(); issued < e.collective {
				t.Behind = append(t.Behind, m.rank)
				t.Others = append(t.Others, fmt.Sprintf("rank %d (%s) is behind: it has issued %d collectives, the last operation is %s", m.rank, m.device, issued, last.operation()))
			}
		}
	}
	return t
}

// awaited is the first collective after e that not all of the others have issued. It
// is what hangs: e is done then, although that is not known.
func (r *recorder) awaited(e entry, others []*member) (next entry, found bool) {
	fewest := uint64(math.MaxUint64)
	for _, m := range others {
		issued, _ := m.issued()
		fewest = min(fewest, issued)
	}
	if kinds[e.kind].peer || fewest < e.collective || fewest == math.MaxUint64 {
		return entry{}, false
	}
	return r.collective(fewest + 1)
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
