package nccl

import (
	"errors"
	"strconv"
	"strings"
	"unicode"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/safefile"
)

// A failure is the first cause for which a communicator is of no use any more.
type failure struct {
	first   error         // as it was noticed
	err     error         // as Config.OnFailure knows it better, once
	settled chan struct{} // is closed
}

// cause is what is known now.
func (f *failure) cause() error {
	select {
	case <-f.settled:
		return f.err
	default:
		return f.first
	}
}

// Err returns why the communicator has failed, or nil: an operation that ran into
// an error after it was enqueued (ncclCommGetAsyncError), one in which NCCL itself failed
// (ErrorInternal, ErrorSystem, ErrorRemote), or a *TimeoutError. A
// failure is final, and what c has in flight is aborted, unless Config.Recoverable.
// NCCL does not notice every failure of a peer; the deadline does in the end, and
// comm.Join earlier.
func (c *Communicator) Err() error {
	if f := c.failed.Load(); f != nil {
		<-f.settled
		return f.err
	}
	async, err := c.asyncError()
	if err != nil || async == ncclapi.Success || async == ncclapi.InProgress {
		return err
	}
	e := c.error("", async)
	e.Async = true
	if c.leaving.Load() { // the other ranks end too, as this one does
		return e
	}
	c.breakWith(c.dev.Because(e))
	return c.Err()
}

func (c *Communicator) asyncError() (ncclapi.Result, error) {
	if c.over() {
		return ncclapi.Success, nil
	}
	c.life.RLock()
	defer c.life.RUnlock()
	if c.over() {
		return ncclapi.Success, nil
	}
	async, r := c.api.CommGetAsyncError(*c.h)
	return async, c.fail("ncclCommGetAsyncError", r)
}

// lastMessage is NCCL's own last word.
func (c *Communicator) lastMessage() string {
	c.life.RLock()
	defer c.life.RUnlock()
	if c.over() {
		return ""
	}
	return c.api.GetLastError(*c.h)
}

// breakWith makes a cause the communicator's failure, if it is the first, and ends
// what is in flight here and on the other ranks of this process.
func (c *Communicator) breakWith(cause error) {
	if f := c.blame(cause); f != nil {
		c.end(f)
	}
}

// giveUp makes a final error of an operation the communicator's failure: the first
// operations wait for the other ranks, and end with such an error when these have given
// up. The communicator is entered.
func (c *Communicator) giveUp(err error) {
	if f := c.blame(err); f != nil {
		go c.end(f) // which waits until the operation has left the communicator
	}
}

// known returns what is known of the cause of an operation's error. The communicator is not
// entered, since Config.OnFailure may do so.
func (c *Communicator) known(err error) error {
	if final(err) && c.failed.Load() != nil {
		return c.Err()
	}
	return err
}

// final reports whether NCCL, and not a Substitute, has failed within an operation, so that
// nobody knows in which state the communicator is.
func final(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && !e.substitute && (e.Err == ErrorRemote || e.Err == ErrorInternal || e.Err == ErrorSystem)
}

// blame makes a cause the failure, or returns nil where there is one. end must follow.
func (c *Communicator) blame(cause error) *failure {
	f := &failure{first: cause, err: cause, settled: make(chan struct{})}
	if !c.failed.CompareAndSwap(nil, f) {
		return nil
	}
	if t, ok := errors.AsType[*TimeoutError](cause); ok && t.Rank == c.rank {
		c.rec.timedOut(t)
	}
	c.rec.cut(Failed)
	return f
}

// end is what follows a failure.
func (c *Communicator) end(f *failure) {
	c.leaveTrace()
	if c.onFailure != nil {
		if better := c.onFailure(c, f.first); better != nil {
			f.err = better
		}
	}
	close(f.settled)
	for _, m := range c.others() { // before NCCL tells them of the abort
		if o := m.comm.Value(); o != nil {
			if theirs := o.blame(f.err); theirs != nil {
				go o.end(theirs)
			}
		}
	}
	if c.recoverable {
		c.abortSubstitute()
	} else {
		_ = c.Abort()
	}
}

// leaveTrace writes all flight recorders of the process where the environment wants it.
func (c *Communicator) leaveTrace() {
	prefix := env.NCCLTraceFile.Value()
	if prefix == "" {
		return
	}
	f, err := safefile.Create(prefix + strconv.Itoa(c.rank) + suffix(c.rec.name))
	if err != nil {
		return // the failure counts for more
	}
	defer f.Close()
	_ = DumpTrace(f)
}

// suffix keeps the files of communicators apart that have a rank in common.
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
