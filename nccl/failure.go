package nccl

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
	"unicode"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/safefile"
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
	if f := c.failed.Load(); f != nil {
		<-f.done
		return f.err
	}
	if err := c.foundNaN(); err != nil {
		c.fail(err)
		return c.Err()
	}
	async, err := c.asyncError()
	if err != nil || async == ncclapi.Success || async == ncclapi.InProgress {
		return err
	}
	e := c.newError("", async)
	e.Async = true
	if c.aborting.Load() { // the other ranks end too, because this one does
		return e
	}
	c.fail(gpu.DeviceOf(c.dev).Because(e))
	return c.Err()
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

// fail makes a cause the communicator's failure, if it is the first, and aborts the
// pending operations here and on the other ranks of this process.
func (c *Communicator) fail(cause error) {
	c.observeBeforeTraces()
	if f := c.setFailure(cause); f != nil {
		c.completeFailure(f)
	}
}

// failAsync makes a final error of an operation the communicator's failure. The first
// operations wait for the other ranks, and fail with such an error when these ranks have
// failed. The communicator is entered.
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

// isFatal reports whether NCCL itself has failed within an operation. The state of the
// communicator is then unknown.
func isFatal(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && (e.Err == ErrorRemote || e.Err == ErrorInternal || e.Err == ErrorSystem)
}

// setFailure makes a cause the failure, or returns nil if the communicator has already failed.
// completeFailure must follow.
func (c *Communicator) setFailure(cause error) *failure {
	f := &failure{first: cause, err: cause, done: make(chan struct{})}
	if !c.failed.CompareAndSwap(nil, f) {
		return nil
	}
	if t, ok := errors.AsType[*TimeoutError](cause); ok && t.Rank == c.rank && t.Operation.Record == t.Last.Record && !t.Lost {
		c.rec.TimedOut(t.Operation.Record)
	}
	c.rec.CountError(reasonOf(cause))
	c.rec.SetEnd(cause.Error(), errors.Is(cause, ErrorRemote) || errors.Is(cause, ErrorTimeout))
	c.rec.SetFinalState(flight.Failed)
	return f
}

// reasonOf returns the reason of a failure for metrics.
func reasonOf(cause error) string {
	if errors.Is(cause, ErrorTimeout) {
		return flight.ReasonTimeout
	}
	if errors.Is(cause, ErrorRemote) {
		return flight.ReasonPeerLost
	}
	if e, ok := errors.AsType[*Error](cause); ok && !e.Async {
		return flight.ReasonRefused
	}
	return flight.ReasonAsync
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

// writeTraces writes all flight recorders of the process, once, if the environment asks for it.
// The file is complete when it returns.
func (c *Communicator) writeTraces() {
	if prefix := env.NCCLTraceFile.Value(); prefix != "" {
		c.traces.Do(func() { c.writeTracesTo(prefix) })
	}
}

func (c *Communicator) writeTracesTo(prefix string) {
	var b bytes.Buffer // so that no process ends between the creation of the file and most of the work
	_ = DumpTrace(&b)
	f, err := safefile.CreatePrivate(prefix + strconv.Itoa(c.rank) + suffix(c.rec.Name))
	if err != nil {
		return // the failure is more important
	}
	defer f.Close()
	_, _ = f.Write(b.Bytes())
}

// suffix makes the file names of communicators with the same rank different.
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
