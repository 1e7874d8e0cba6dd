package job

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/gochorus/chorus/internal/safe"
)

// A Target is a coordinator to connect to.
type Target struct {
	Job, Addr string
	Key       Credential
	connect   func(context.Context) (net.Conn, error) // nil means TCP to addr; a simulation has another network
	Sys       *System
	// Follows reports whether the launcher of a worker has followed the coordinator at Addr without a break since a time. It is nil for
	// a worker that needs no launcher.
	Follows func(ctx context.Context, since time.Time) bool
}

// Dial connects once to the coordinator and reads its welcome.
func (to Target) Dial(ctx context.Context) (*Link, Welcome, error) {
	connect := to.connect
	if connect == nil {
		connect = func(ctx context.Context) (net.Conn, error) { return to.Sys.dialContext(ctx, to.Addr) }
	}
	conn, err := connect(ctx)
	if err != nil {
		if other := ownerError(to.Addr, err); other != nil {
			return nil, Welcome{}, authError(to.Job, to.Addr, other)
		}
		return nil, Welcome{}, dialError(to.Addr, err)
	}
	if err := knownPeer(conn); err != nil {
		conn.Close()
		return nil, Welcome{}, authError(to.Job, to.Addr, err)
	}
	return greet(ctx, conn, to)
}

// Register registers a process with the coordinator at the other end of a link.
// addr names the coordinator in messages, and id tells what reg is: a
// registration or a host. The client stays open after an error.
func (to Target) Register(l *Link, hello Welcome, addr, name string, id uint64, reg any, events func(*Client, Message)) (*Client, error) {
	k := newClient(l, to, addr, name, hello, events)
	m := Note(kindRegister, reg)
	m.ID = id
	if err := k.Send(m); err != nil {
		return k, fmt.Errorf("cluster: join job %q: register at %s: %w", to.Job, addr, err)
	}
	return k, nil
}

// greet authenticates a new connection, which it takes ownership of, and
// returns its link.
func greet(ctx context.Context, conn net.Conn, to Target) (*Link, Welcome, error) {
	var hello Welcome
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	l, err := dialHandshake(conn, to.Job, to.Key)
	if err == nil {
		hello, err = readWelcome(l)
	}
	if err == nil && hello.Refers {
		err = &Referral{hello.At, hello.Over, hello.Finished, addrIP(conn.RemoteAddr())}
	}
	if err == nil && !stop() { // ctx closes the connection
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, hello, authError(to.Job, to.Addr, err)
	}
	return l, hello, nil
}

// authError converts errors that a retry cannot fix to AuthErrors.
func authError(job, addr string, err error) error {
	for _, final := range []error{errNotChorus, errOtherJob, errOtherVersion, errBadProof, errOldToken} {
		if errors.Is(err, final) {
			return &AuthError{Job: job, Addr: addr, Reason: final.Error()}
		}
	}
	if other, ok := errors.AsType[*safe.UserError](err); ok {
		return &AuthError{Job: job, Addr: addr, Reason: other.Error() + "; choose another port", err: other}
	}
	return fmt.Errorf("dial coordinator at %s: %w", addr, err)
}

func readWelcome(l *Link) (Welcome, error) {
	var hello Welcome
	m, _, err := l.readMessage(HandshakeTimeout)
	if err != nil {
		return hello, err
	}
	if m.Kind != KindWelcome {
		return hello, fmt.Errorf("coordinator sent a message of kind %d first", m.Kind)
	}
	if err := m.Record(&hello); err != nil {
		return hello, err
	}
	if hello.Heartbeat <= 0 || hello.LostAfter < hello.Heartbeat {
		return hello, fmt.Errorf("coordinator has heartbeat %v and lost-after %v", hello.Heartbeat, hello.LostAfter)
	}
	return hello, nil
}

// IsRefusal reports whether a process at a candidate's address has refused this host. It has not proved who it is, so that this
// is only a hint: any stranger at the port can say so.
func IsRefusal(err error) bool {
	_, auth := errors.AsType[*AuthError](err)
	return auth
}

// PortTaken returns nil if a coordinator of the job has the port to listen on, and otherwise the error. taken is the error
// of the attempt to listen, and cure says what the user can do.
func (to Target) PortTaken(ctx context.Context, taken error, cure string) error {
	met := to.SameJob(ctx)
	if met == nil {
		return nil
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return JoinEnd(ctx, &JoinTimeoutError{Job: to.Job})
	}
	if _, other := errors.AsType[*safe.UserError](met); other {
		return met
	}
	owner := "another program or another job has the port"
	if OutOfTime(met) {
		owner = "the process that has the port does not answer"
	}
	return fmt.Errorf("%w: %s; %s", taken, owner, cure)
}

// sameJobTries limits the attempts to learn which job a coordinator has. A busy host may answer late.
const sameJobTries = 4

// SameJob returns nil if a coordinator of the job or a host that refers to it answers, and otherwise the error. If no process
// answers, outOfTime reports true for the error.
func (to Target) SameJob(ctx context.Context) (err error) {
	for range sameJobTries {
		one, cancel := context.WithTimeout(ctx, DialAttempt)
		var l *Link
		l, _, err = to.Dial(one)
		late := one.Err() != nil
		cancel()
		_, refers := errors.AsType[*Referral](err)
		_, final := errors.AsType[*AuthError](err)
		switch {
		case refers:
			return nil
		case err == nil:
			return l.Close()
		case OutOfTime(err):
		case final || !late:
			return err
		default: // the end of the attempt has closed the connection
			err = fmt.Errorf("%w: %w", os.ErrDeadlineExceeded, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return err
}

// OutOfTime reports whether an attempt failed only because of its deadline,
// which connections and dialers report by different errors.
func OutOfTime(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)
}

// JoinEnd returns the error of a join that ended with ctx: the timeout, or the
// caller's cancellation.
func JoinEnd(ctx context.Context, timeout *JoinTimeoutError) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return timeout
	}
	return fmt.Errorf("cluster: join job %q: %w", timeout.Job, context.Cause(ctx))
}
