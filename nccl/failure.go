package nccl

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/stream"
)

// A failure is the first cause of a communicator's failure.
type failure struct {
	first error         // as it was noticed
	err   error         // after Config.OnFailure; valid once done is closed
	done  chan struct{} // closed when err is valid
}

// cause returns the cause as known so far.
func (f *failure) cause() error {
	select {
	case <-f.done:
		return f.err
	default:
		return f.first
	}
}

// Err returns why the communicator has failed, or nil. The causes are: an operation that
// failed after it was enqueued (ncclCommGetAsyncError), an input that is not a number
// (*NaNError), a failure of NCCL itself during a call
// (ErrorInternal, ErrorSystem, ErrorRemote), or a *TimeoutError. A failure is final, and
// the pending operations of c are aborted, unless Config.Recoverable is set. NCCL does not
// notice every failure of a peer; the deadline eventually does, and a group of comm.Join
// notices it earlier.
func (c *Communicator) Err() error {
	if c == nil {
		return c.errClosed("error")
	}
	if f := c.failed.Load(); f != nil {
		<-f.done
		return f.err
	}
	err, final := c.findFailure()
	if !final {
		return err
	}
	c.fail(err)
	return c.Err()
}

// findFailure looks for a failure that a kernel or NCCL has reported, and that is not recorded yet. final is false if
// it cannot be known, or if another end of the communicator caused it.
func (c *Communicator) findFailure() (err error, final bool) {
	if err := c.foundNaN(); err != nil {
		return err, true
	}
	async, err := c.asyncError()
	if err != nil || async == ncclapi.Success || async == ncclapi.InProgress {
		return err, false
	}
	e := c.newError("", async)
	e.Async = true
	if c.aborting.Load() { // the other ranks end too, because this one does
		return e, false
	}
	return gpu.DeviceOf(c.dev).Because(e), true
}

func (c *Communicator) asyncError() (ncclapi.Result, error) {
	if c.isClosed() {
		return ncclapi.Success, nil
	}
	c.life.RLock()
	defer c.life.RUnlock()
	if c.isClosed() {
		return ncclapi.Success, nil
	}
	async, r := c.api.CommGetAsyncError(*c.h)
	return async, c.check("ncclCommGetAsyncError", r)
}

// lastMessage returns NCCL's last error message.
func (c *Communicator) lastMessage() string {
	c.life.RLock()
	defer c.life.RUnlock()
	if c.isClosed() {
		return ""
	}
	return c.api.GetLastError(*c.h)
}

// fail records a cause as the communicator's failure, if it is the first, and aborts the
// pending operations here and on the other ranks of this process.
func (c *Communicator) fail(cause error) {
	c.observeBeforeTraces()
	if f := c.setFailure(cause); f != nil {
		c.completeFailure(f)
	}
}

// failAsync records a final error of an operation as the communicator's
// failure. The first operations wait for the other ranks, and so fail with such
// an error when these ranks have failed. The communicator is entered.
func (c *Communicator) failAsync(err error) {
	if f := c.setFailure(err); f != nil {
		go c.completeFailure(f) // waits until the operation has left the communicator
	}
}

// wasAborted reports whether the communicator was closed without a failure, so that its operations fail for no
// other reason.
func (c *Communicator) wasAborted() bool { return c.isClosed() && c.failed.Load() == nil }

// bestCause returns the best known cause of an operation's error. The communicator is not
// entered, since Config.OnFailure may enter it.
func (c *Communicator) bestCause(err error) error {
	if isFatal(err) && c.failed.Load() != nil {
		return c.Err()
	}
	return err
}

// isFatal reports whether NCCL itself has failed within an operation, so that
// the state of the communicator is unknown.
func isFatal(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && (e.Err == ErrorRemote || e.Err == ErrorInternal || e.Err == ErrorSystem)
}

// setFailure records a cause as the failure, which the caller must pass to
// completeFailure, or returns nil if the communicator has already failed.
func (c *Communicator) setFailure(cause error) *failure {
	f := &failure{first: cause, err: cause, done: make(chan struct{})}
	if !c.failed.CompareAndSwap(nil, f) {
		return nil
	}
	if t, ok := errors.AsType[*TimeoutError](cause); ok && t.Stream == "" && t.Rank == c.rank && t.Operation.Record == t.Last.Record && !t.Lost {
		c.rec.TimedOut(t.Operation.Record)
	}
	c.rec.CountError(reasonOf(cause))
	c.rec.SetEnd(cause.Error(), errors.Is(cause, ErrorRemote) || errors.Is(cause, ErrorTimeout))
	c.rec.SetFinalState(collective.Failed)
	return f
}

// reasonOf returns the reason of a failure for metrics.
func reasonOf(cause error) string {
	if errors.Is(cause, ErrorTimeout) {
		return collective.ReasonTimeout
	}
	if errors.Is(cause, ErrorRemote) {
		return collective.ReasonPeerLost
	}
	if e, ok := errors.AsType[*Error](cause); ok && !e.Async {
		return collective.ReasonRefused
	}
	return collective.ReasonAsync
}

// completeFailure completes a failure: it informs the user and ends the other ranks.
func (c *Communicator) completeFailure(f *failure) {
	c.writeTraces()
	if c.onFailure != nil {
		if better := c.onFailure(c, f.first); better != nil {
			f.err = better
		}
	}
	close(f.done)
	for _, m := range c.others() { // before NCCL informs them of the abort
		if o := m.comm.Value(); o != nil {
			if theirs := o.setFailure(f.err); theirs != nil {
				go o.completeFailure(theirs)
			}
		}
	}
	if c.recoverable && !c.blocked() {
		c.abortBackends()
	} else { // only an abort ends a call that waits in NCCL for the other ranks
		_ = c.Abort()
	}
}

// observeBeforeTraces records which operations have completed, so that a trace does not show
// the state of up to a second ago.
func (c *Communicator) observeBeforeTraces() {
	if env.NCCLTraceFile.Value() != "" {
		c.observeBeforeAbort()
	}
}

// writeTraces writes all flight recorders of the process, once, if the
// environment asks for it, and returns when the file is complete.
func (c *Communicator) writeTraces() {
	if prefix := env.NCCLTraceFile.Value(); prefix != "" {
		c.traces.Do(func() { c.writeTracesTo(prefix) })
	}
}

func (c *Communicator) writeTracesTo(prefix string) {
	var b bytes.Buffer // so that no process ends between the creation of the file and most of the work
	_ = DumpTrace(&b)
	f, err := safe.CreatePrivate(prefix + strconv.Itoa(c.rank) + suffix(c.rec.Name))
	if err != nil {
		return // the failure is more important
	}
	defer f.Close()
	_, _ = f.Write(b.Bytes())
}

// suffix tells the file names of communicators with the same rank apart.
func suffix(name string) string {
	if name == "" {
		return ""
	}
	return "-" + strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("._-", r) {
			return r
		}
		return '_'
	}, name)
}

// A TimeoutError reports an operation, or a launch of a graph with operations of the rank, that has not completed within its timeout. It
// matches ErrorTimeout. The communicator has failed with it.
type TimeoutError struct {
	Rank, Size int
	Device     string
	Graph      string        // the graph whose launch has not ended; "" for operations that are not captured
	OneSided   bool          // the rank has one-sided operations on the stream, which have not ended
	Stream     string        // of the launch or the one-sided operations; "" for another operation
	Operation  Operation     // the operation that has not completed, or the first one that it may be; none if Stream is set
	Last       Operation     // the last operation that it may be; Operation if the operation is known
	Lost       bool          // it may also be an earlier operation, which the flight recorder no longer has
	InCall     bool          // NCCL's call has not returned: it waits until the other ranks have issued the operation
	Age        time.Duration // since Last was issued, without the time of captures; if Stream is set, since the watchdog observed progress
	Limit      time.Duration
	Completed  Operation // the last completed operation; none if its Record is 0
	Behind     []int     // ranks of this process that never issued it; of a launch, those whose launches had fewer collectives
	Others     []string  // operations of other ranks in this process that may be the cause, a sentence each
	NCCL       string    // NCCL's last message (ncclGetLastError), or ""
}

func (e *TimeoutError) Error() string {
	var b strings.Builder
	if e.Stream != "" {
		e.describeLaunch(&b)
		return b.String()
	}
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
		collective.Between(e.Operation, e.Last, e.Lost), e.Rank, e.Size, e.Device, has, e.Age.Round(time.Millisecond), e.Limit, why)
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

// describeLaunch writes the text for work that the flight recorder does not have.
func (e *TimeoutError) describeLaunch(b *strings.Builder) {
	const puts = "a one-sided operation (Put, Signal or WaitSignal)"
	what, why := e.Graph+", launched", "check that all ranks launch their graphs equally often and in the same order"
	switch {
	case e.Graph == "":
		what, why = puts, "check that WaitSignal waits for as many signals as the peers send"
	case e.OneSided:
		what, why = what+", or "+puts, why+", and that WaitSignal waits for as many signals as the peers send"
	}
	fmt.Fprintf(b, "nccl: %s on %s, with operations of rank %d of %d (%s), has not ended after %v (the limit is %v); the flight recorder does not have it: %s",
		what, e.Stream, e.Rank, e.Size, e.Device, e.Age.Round(time.Millisecond), e.Limit, strings.Join(append(e.Others, why), "; "))
	if e.NCCL != "" {
		b.WriteString("; NCCL's last message: " + e.NCCL)
	}
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

// errTimeout returns the error of the operations that have exceeded the timeout.
func (c *Communicator) errTimeout(x collective.Suspicion, age time.Duration, others []*member) *TimeoutError {
	_, completed := c.rec.Final()
	t := &TimeoutError{
		Rank: c.rank, Size: c.size, Device: c.dev.String(), Limit: x.Timeout, Operation: x.First.Operation(),
		Last: x.Last.Operation(), Lost: x.Lost, Age: age, Completed: completed.Operation(), NCCL: c.lastMessage(),
	}
	e := x.Last
	pending, inside := c.rec.Unaccepted()
	t.InCall = inside && pending.ID == e.ID
	if collective.Kinds[e.Kind].Peer {
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

// errMismatch returns the error of an operation that the mismatches of the ranks refused.
func (c *Communicator) errMismatch(o *operation) *MismatchError {
	c.rec.CountError(collective.ReasonMismatch)
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

// This file decides whether an operation completed. Every wait and the watchdog use it.
// When the kernels of NCCL and Chorus are aborted, they end, and their stream passes them.
// A passed stream therefore proves that an operation completed only if no abort had begun
// by then: a caller first observes the stream, and then checks whether an abort has begun
// (checkNoAbort). The flight recorder keeps each completion that was proved (recordPassed). After an
// abort these records are the only proof (knownCompleted).

// A closing is what this process did to end a communicator, or its operations.
type closing struct {
	how   string // such as "closed the communicator"
	at    time.Time
	abort bool // from then on streams pass operations that have not completed
	after bool // the communicator had failed before
}

func (e *closing) String() string {
	return fmt.Sprintf("this process %s %v ago", e.how, time.Since(e.at).Round(time.Millisecond))
}

// An abortFlag is raised by the first abort among communicators that share NCCL's abort flag:
// a parent with Config.SplitShare and its children. NCCL then ends the operations of all
// these communicators.
type abortFlag struct{ by atomic.Pointer[closing] }

// A closedError is returned by calls on a communicator that this process has closed, and
// by waits for its operations.
type closedError struct {
	what string // the operation or the wait, and the rank
	by   *closing
}

func (e *closedError) Error() string { return fmt.Sprintf("nccl: %s: %s", e.what, e.by) }

// Unwrap returns device.ErrClosed, for errors.Is.
func (e *closedError) Unwrap() error { return device.ErrClosed }

// recordClosing records how this process ends the communicator, before it does so.
func (c *Communicator) recordClosing(how string, abort bool) {
	e := &closing{how: how, at: time.Now(), abort: abort, after: c.failed.Load() != nil}
	c.closing.CompareAndSwap(nil, e)
	if abort {
		c.flag.by.CompareAndSwap(nil, e)
		c.rec.SetFinalState(collective.Aborted)
	}
}

// abortedBy returns the call of this process that may have aborted operations of c, or nil.
func (c *Communicator) abortedBy() *closing {
	if e := c.closing.Load(); e != nil && e.abort {
		return e
	}
	if e := c.flag.by.Load(); e != nil {
		return &closing{how: e.how + ", of a communicator that shares its resources (Config.SplitShare or ShrinkShare),", at: e.at}
	}
	return nil
}

// checkNoAbort returns nil if no operation of c can have left its stream without completing so
// far, and otherwise the reason why one can.
func (c *Communicator) checkNoAbort(what string) error {
	if c.failed.Load() == nil {
		if e := c.abortedBy(); e != nil {
			return c.errUncertain(what, e)
		}
	}
	if err := c.Err(); err != nil {
		return err
	}
	if e := c.abortedBy(); e != nil {
		return c.errUncertain(what, e)
	}
	return nil
}

// errUncertain returns the error of operations that may not have completed.
func (c *Communicator) errUncertain(what string, e *closing) error {
	return &closedError{fmt.Sprintf("%s on rank %d of %d (%s): the operations may not have completed and their output is undefined", what, c.rank, c.size, c.dev), e}
}

// recordPassed records that the stream has passed the operations up to a record. It returns an
// error if that does not prove that they completed.
func (c *Communicator) recordPassed(record uint64, on uintptr) error {
	if err := c.checkNoAbort("wait"); err != nil {
		return err
	}
	if err := c.peersLost(); err != nil {
		return err
	}
	c.rec.Complete(record, on)
	return nil
}

// peersLost returns an error if copy engines have read from a device that was lost: a
// stream that waits for a lost device continues without the data.
func (c *Communicator) peersLost() error {
	if devs := c.sources.Load(); devs != nil {
		for rank, dev := range *devs {
			if _, _, err := dev.MemoryInfo(); err != nil { // calls the driver
				return fmt.Errorf("nccl: wait on rank %d of %d (%s): rank %d has given no data: %w", c.rank, c.size, c.dev, rank, err)
			}
		}
	}
	return nil
}

// readPeers records that copy engines read from the devices of all ranks.
func (b *Batch) readPeers() {
	if b.ops[0].comm.sources.Load() != nil {
		return
	}
	devs := make([]*device.Device, len(b.ops))
	for i := range b.ops {
		devs[b.ops[i].comm.rank] = b.ops[i].comm.dev
	}
	for i := range b.ops {
		b.ops[i].comm.sources.Store(&devs)
	}
}

// point returns the place behind the operations of c on s that were issued so far.
func (c *Communicator) point(s *stream.Stream) collective.Point {
	record, lost := c.rec.LastOn(s)
	return collective.Point{Stream: uintptr(gpu.StreamOf(s).Raw()), Record: record, Lost: lost}
}

// completed is called after the stream was seen to have passed the point. It returns nil if the
// operations before the point have completed, and otherwise why they may not have.
func (c *Communicator) completed(p collective.Point) error {
	err := c.recordPassed(p.Record, p.Stream)
	if err != nil && c.knownCompleted(p) {
		return nil
	}
	return err
}

// cannotComplete returns nil while completed may return nil once the stream has passed the point,
// and otherwise the error that completed will return.
func (c *Communicator) cannotComplete(p collective.Point) error {
	if c.knownCompleted(p) {
		return nil
	}
	return c.checkNoAbort("wait")
}

// knownCompleted reports whether the operations before the point are known to have completed.
func (c *Communicator) knownCompleted(p collective.Point) bool {
	return !p.Lost && c.rec.AllCompleted(p.Record, p.Stream)
}

// endedBy is documented as Ended in package ranks.
func (c *Communicator) endedBy() error {
	if e := c.closing.Load(); e != nil && !e.after {
		return &closedError{fmt.Sprintf("rank %d of %d (%s)", c.rank, c.size, c.dev), e}
	}
	return nil
}

// observeBeforeAbort records which operations have completed, because an abort hides that.
func (c *Communicator) observeBeforeAbort() {
	if c.failed.Load() != nil || c.isClosed() || !c.rec.Pending() {
		return
	}
	poll.Within(callTimeout, func() error {
		_, _, err := c.watch.Observe()
		return err
	})
}

// A watched is the view that collective.Watch has of a communicator.
type watched struct{ *Communicator }

// Closed reports whether the communicator was closed.
func (c watched) Closed() bool { return c.isClosed() }

// RecordPassed records that a stream has passed the operations up to a record. It does not record a failure that it finds: that
// would observe the communicator first (observeBeforeTraces), which comes back here.
func (c watched) RecordPassed(record uint64, stream uintptr) error {
	if err, _ := c.findFailure(); err != nil {
		return err
	}
	return c.recordPassed(record, stream)
}

// Others returns the recorders of the other ranks of this process.
func (c watched) Others() []*collective.Recorder { return recorders(c.others()) }

// TimedOut returns the error of operations that are older than the deadline.
func (c watched) TimedOut(x collective.Suspicion, age time.Duration) error {
	return c.errTimeout(x, age, c.others())
}

// LaunchTimedOut returns the error of a launch that has not ended.
func (c watched) LaunchTimedOut(kinds collective.Launches, on string, age, timeout time.Duration) error {
	t := &TimeoutError{
		Rank: c.rank, Size: c.size, Device: c.dev.String(), OneSided: kinds&collective.OneSidedLaunches != 0, Stream: on, Age: age, Limit: timeout,
		Operation: Operation{Root: -1}, Last: Operation{Root: -1}, Completed: Operation{Root: -1}, NCCL: c.lastMessage(),
	}
	if kinds&collective.GraphLaunches != 0 {
		t.Graph = c.graphNames()
		mine := c.rec.LaunchedCollectives()
		for _, m := range c.others() {
			if n := m.LaunchedCollectives(); n < mine {
				t.Behind = append(t.Behind, m.Rank)
				t.Others = append(t.Others, fmt.Sprintf("rank %d (%s) has launched %d collectives in graphs, and this rank %d", m.Rank, m.Device, n, mine))
			}
		}
	}
	return t
}

// Fail fails the communicator.
func (c watched) Fail(cause error) { c.fail(cause) }

// An Operation is an operation in the flight recorder.
type Operation = collective.Operation

// A Frame is one function of a call stack, from the inside to the outside.
type Frame = collective.Frame

// Trace returns the last operations that were issued on c, the oldest first, at most
// Config.TraceSize. It may be called at any time by any goroutine, also after the end of
// c.
func (c *Communicator) Trace() []Operation {
	if c == nil {
		return nil
	}
	return c.rec.Trace()
}

// DumpTrace writes the flight recorders of all communicators of the process that
// are not closed, as JSON with the field names of PyTorch's flight recorder. A
// communicator that has failed is in the dump until it is closed.
func DumpTrace(w io.Writer) error { return collective.Dump(w, liveRecorders()) }

// DumpTrace writes the flight recorder of c in the format of the function DumpTrace. It
// may be called at any time by any goroutine, also after the end of c.
func (c *Communicator) DumpTrace(w io.Writer) error {
	if c == nil || c.rec == nil {
		return fmt.Errorf("nccl: dump trace: no communicator given")
	}
	return collective.Dump(w, []*collective.Recorder{c.rec})
}

// Progress is the progress of a rank. The Progress of all ranks together shows which rank
// is behind.
type Progress struct {
	Rank      int
	Issued    Operation // the last operation that NCCL has accepted
	Completed Operation // the last operation that is known to have completed
}

// Progress returns the rank's progress. Any goroutine may call it at any time,
// also after the end of c.
func (c *Communicator) Progress() Progress {
	issued, completed := c.rec.Final()
	return Progress{Rank: c.rank, Issued: issued.Operation(), Completed: completed.Operation()}
}

// errorf returns an error that names an operation, which has a String method or is a string, and the rank.
func (c *Communicator) errorf(op any, format string, args ...any) error {
	return fmt.Errorf("nccl: %s on rank %d of %d: %w", op, c.rank, c.size, fmt.Errorf(format, args...))
}
