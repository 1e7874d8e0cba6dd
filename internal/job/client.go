package job

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// A Client is a member's end of its stream to the coordinator.
type Client struct {
	Stream *stream
	Clock  *runClock
	To     Target
	Addr   string // of the coordinator, in messages
	ip     string // address of its host, or "" without a network
	host   string // host of this process
	Hello  Welcome
	Since  time.Time              // when this process has registered
	events func(*Client, Message) // called by the reader, in order, for each message that is not a reply
	Ctx    context.Context
	Cancel context.CancelCauseFunc
	wg     sync.WaitGroup
	ended  atomic.Bool // the coordinator closed without a failure
	EndedC chan struct{}
	final  atomic.Bool  // the coordinator has refused this process
	Loss   atomic.Int32 // how the coordinator was lost: a value of type loss
	strict atomic.Int64 // time of clock when LostAfter becomes the limit for silence

	open context.Context // cancelled when the connection is closed
	shut context.CancelFunc
	redials
	responder responder

	Mu      sync.Mutex
	LastID  uint64
	replies map[uint64]chan Message
}

// newClient takes ownership of l and starts heartbeats. One goroutine delivers
// all events, one after the other.
func newClient(l *Link, to Target, addr, host string, hello Welcome, events func(*Client, Message)) *Client {
	clock := NewRunClock(hello.step())
	k := &Client{Stream: NewStream(l, clock, hello.LostAfter), Clock: clock, To: to, Addr: addr, ip: addrIP(l.Conn.RemoteAddr()), host: host, Hello: hello, Since: time.Now(), events: events,
		replies: map[uint64]chan Message{}, EndedC: make(chan struct{}), redials: newRedials()}
	k.Clock.sys = to.Sys
	k.Ctx, k.Cancel = context.WithCancelCause(context.Background())
	k.open, k.shut = context.WithCancel(context.Background())
	k.strict.Store(math.MaxInt64)
	k.Stream.renew = k.reconnect
	k.wg.Go(k.readLoop)
	k.wg.Go(k.Stream.writeLoop)
	k.wg.Go(k.watch)
	return k
}

func (k *Client) readLoop() {
	defer k.Stream.stopRenewing()
	for {
		b, err := k.Stream.read()
		if err != nil {
			k.disconnected(err)
			return
		}
		m, err := DecodeMessage(b)
		if err != nil {
			k.disconnected(err)
			return
		}
		k.dispatch(m)
	}
}

func (k *Client) dispatch(m Message) {
	switch m.Kind {
	case kindBeat:
		k.Stream.heardBeat(m)
	case kindInquiry:
		k.respond(m)
	case kindReply, kindAttendance:
		k.Mu.Lock()
		ch := k.replies[m.ID]
		delete(k.replies, m.ID)
		k.Mu.Unlock()
		if ch != nil {
			ch <- m
		}
	case kindEnded:
		if k.ended.CompareAndSwap(false, true) {
			close(k.EndedC)
		}
	case kindResumed:
	case kindComplete:
		k.BeStrict(0)
	case KindRefuse:
		k.final.Store(true)
		k.Loss.Store(int32(lostByIt))
		k.events(k, m)
	case kindHandover:
		k.events(k, m)
		k.leftBehind(m)
	default:
		k.events(k, m)
	}
}

// leftBehind ends the client because the coordinator leaves the job and another
// one follows.
func (k *Client) leftBehind(m Message) {
	var h handover
	if err := m.Record(&h); err != nil {
		k.Cancel(err)
		return
	}
	k.final.Store(true)
	k.Loss.Store(int32(lostLeaving))
	if h.Failed {
		k.Loss.Store(int32(lostResigned))
	}
	k.Cancel(&MemberLostError{Rank: -1, Host: k.Hello.Host, PID: k.Hello.PID, Since: time.Now(), Reason: h.Reason, ExitCode: -1})
	k.CloseConnection()
}

// disconnected ends the client. The end of the connection is a loss, unless the
// coordinator announced it. A coordinator that was only silent may resume, so it
// is told why this process disconnected.
func (k *Client) disconnected(err error) {
	silent, down := errors.Is(err, os.ErrDeadlineExceeded), k.isDown()
	if silent && !k.ended.Load() {
		k.Stream.writeLast(Message{Kind: KindSilent, Epoch: FirstEpoch}, k.Hello.Heartbeat)
	}
	k.CloseConnection()
	if k.ended.Load() {
		k.cancelEnded()
		return
	}
	who := "the coordinator in it"
	switch {
	case k.Hello.Registry:
		who = "the registry in it"
	case k.Hello.Rank < 0:
		who = "its launcher, which coordinates the job,"
	}
	reason := fmt.Sprintf("the connection to %s failed: %v", who, err)
	refused, isRefused := errors.AsType[*RefusedError](err)
	switch {
	case silent:
		reason = fmt.Sprintf("%s was %s", who, reasonOf(err, k.silenceLimit()))
	case errors.Is(err, errProcessEnded) && isClosedByPeer(err):
		reason = "the coordinator's connection closed: its process ended"
	case isRefused && isClosedByPeer(err):
		reason = fmt.Sprintf("%s closed the connection, and then refused this process: %s", who, refused.Reason)
	}
	switch {
	case down: // by this process
	case silent:
		k.Loss.Store(int32(lostSilent))
	default:
		k.Loss.CompareAndSwap(int32(NotLost), int32(lostSilent)) // nothing shows that its process has ended
	}
	k.Cancel(&MemberLostError{Rank: k.Hello.Rank, Host: k.Hello.Host, PID: k.Hello.PID,
		Since: time.Now(), Reason: reason, ExitCode: -1})
}

// isSuspended reports whether the coordinator is this host's launcher and is
// stopped, for example by Ctrl-Z, so that it will either continue or close the
// connection. The members of a registry do not wait for it, and neither do the
// other hosts of a job: they go on without this host or fail, and its processes
// must not run on beside them.
func (k *Client) isSuspended() bool {
	if k.Hello.Several || k.Hello.Registry || k.Hello.Rank >= 0 || k.Hello.Host != k.host {
		return false
	}
	return k.To.Sys.isSuspended(k.Hello.PID)
}

// CloseConnection closes the connection. The failure of the job does not: a launcher must
// send reports and heartbeats while its workers stop.
func (k *Client) CloseConnection() {
	k.shut()
	k.Stream.close()
}

func (k *Client) isDown() bool { return k.open.Err() != nil }

// cancelEnded wakes waiting calls after a regular end of the job. It does not
// cancel the context, because no process failed.
func (k *Client) cancelEnded() {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	for id, ch := range k.replies {
		close(ch)
		delete(k.replies, id)
	}
}

func (k *Client) Send(m Message) error { return k.Stream.sendWait(m) }

// ask sends a request and waits for the reply, the end of ctx, or end. It sends nothing
// after the end: the coordinator may still exist and answer.
func (k *Client) ask(ctx context.Context, end <-chan struct{}, q Message) (Message, uint64, error) {
	select {
	case <-end:
		return Message{}, 0, k.endCause()
	default:
	}
	k.Mu.Lock()
	k.LastID++
	id := k.LastID
	q.ID = id
	ch := make(chan Message, 1)
	k.replies[id] = ch
	k.Mu.Unlock()
	if k.ended.Load() {
		k.drop(id)
		return Message{}, id, ErrEnded
	}
	if err := k.Send(q); err != nil {
		if errors.Is(err, ErrTooLarge) {
			k.drop(id)
			return Message{}, id, err
		}
		// The connection is closed, and the reader knows why.
	}
	m, err := k.await(ctx, end, ch)
	return m, id, err
}

func (k *Client) await(ctx context.Context, end <-chan struct{}, ch chan Message) (Message, error) {
	select {
	case m, ok := <-ch:
		if !ok {
			return Message{}, ErrEnded
		}
		return m, nil
	case <-end:
		return Message{}, k.endCause()
	case <-ctx.Done():
		return Message{}, endOf(ctx)
	}
}

// endOf returns the error of a context that has ended, with its cause if that is another one.
func endOf(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, ctx.Err()) {
		return cause
	}
	return fmt.Errorf("%w: %w", ctx.Err(), cause)
}

// endCause returns why the job or the connection ended. The connection closes
// slightly before the reader knows the reason.
func (k *Client) endCause() error {
	if err := context.Cause(k.Ctx); err != nil {
		return err
	}
	if k.ended.Load() {
		return ErrEnded
	}
	return net.ErrClosed
}

// drop removes a pending request.
func (k *Client) drop(id uint64) {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	delete(k.replies, id)
}

// AskMissing asks the coordinator which members are missing.
func (k *Client) AskMissing() (attendance, error) {
	ctx, cancel := context.WithTimeout(context.Background(), HandshakeTimeout)
	defer cancel()
	var r attendance
	m, id, err := k.ask(ctx, k.Ctx.Done(), Message{Kind: KindWho, Epoch: FirstEpoch})
	if err != nil {
		k.drop(id)
		return r, err
	}
	return r, m.Record(&r)
}

// Leave closes the client after the error err. The coordinator still counts a
// member that timed out as joined, because that member is not at fault.
func (k *Client) Leave(err error) {
	if _, timeout := errors.AsType[*JoinTimeoutError](err); timeout {
		k.closeWith(leaveGaveUp)
		return
	}
	k.Close()
}

// closeBy limits close. If the coordinator reads nothing, for example because it is stopped, it loses this process later.
const closeBy = 4 * lastMessageTimeout

// Close leaves the job. It notifies the coordinator, so that this is not a loss, waits at most
// lastMessageTimeout for its answer, and closes the connection. If messages are not written by then, it waits
// for the writer until closeBy. It returns when all goroutines have ended.
func (k *Client) Close() { k.closeWith(leaveJob) }

func (k *Client) closeWith(id uint64) {
	limit := time.AfterFunc(closeBy, k.hangUp)
	defer limit.Stop()
	flushed := true
	if !k.isDown() && !k.ended.Load() {
		_ = k.Send(Message{Kind: kindLeave, Epoch: FirstEpoch, ID: id}) // an error means that the coordinator is gone
		k.Stream.SendBeat()                                             // its echo acknowledges the message
		flushed = k.Stream.Flush(lastMessageTimeout)
	}
	if flushed {
		k.hangUp()
	} else { // the writer may stall: it writes the message before it closes the connection
		k.Cancel(ErrClosed)
		k.shut()
		k.Stream.closeAfterQueue()
	}
	k.wg.Wait()
}

// hangUp closes the connection of a client that leaves.
func (k *Client) hangUp() {
	k.Cancel(ErrClosed)
	k.CloseConnection()
}
