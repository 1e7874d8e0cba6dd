package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/sockets"
)

// A client is a member's end of its stream to the coordinator.
type client struct {
	stream *stream
	clock  *runClock
	to     target
	addr   string // of the coordinator, in messages
	ip     string // address of its host, or "" without a network
	host   string // host of this process
	hello  welcome
	events func(*client, message) // called by the reader, in order, for each message that is not a reply
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
	ended  atomic.Bool // the coordinator closed without a failure
	endedC chan struct{}
	final  atomic.Bool  // the coordinator has refused this process
	loss   atomic.Int32 // how the coordinator was lost: a value of type loss
	strict atomic.Int64 // time of clock when LostAfter becomes the limit for silence

	open context.Context // cancelled when the connection is closed
	shut context.CancelFunc
	redials
	responder responder

	mu      sync.Mutex
	lastID  uint64
	replies map[uint64]chan message
}

// A target is a coordinator to connect to.
type target struct {
	job, addr string
	key       credential
	connect   func(context.Context) (net.Conn, error) // nil means TCP to addr; a simulation has another network
	sys       *system
}

// dial connects once to the coordinator and reads its welcome.
func (to target) dial(ctx context.Context) (*link, welcome, error) {
	connect := to.connect
	if connect == nil {
		connect = func(ctx context.Context) (net.Conn, error) { return to.sys.dialContext(ctx, to.addr) }
	}
	conn, err := connect(ctx)
	if err != nil {
		return nil, welcome{}, dialError(to.addr, err)
	}
	if err := knownPeer(conn); err != nil {
		conn.Close()
		return nil, welcome{}, authError(to.job, to.addr, err)
	}
	return greet(ctx, conn, to)
}

// register registers a process with the coordinator at the other end of a link. addr names the coordinator in messages, and id tells
// what reg is: a registration or a host. An error does not close the client.
func (to target) register(l *link, hello welcome, addr, name string, id uint64, reg any, events func(*client, message)) (*client, error) {
	k := newClient(l, to, addr, name, hello, events)
	m := note(kindRegister, reg)
	m.id = id
	if err := k.send(m); err != nil {
		return k, fmt.Errorf("cluster: join job %q: register at %s: %w", to.job, addr, err)
	}
	return k, nil
}

// greet authenticates a new connection and returns its link. It takes ownership of conn.
func greet(ctx context.Context, conn net.Conn, to target) (*link, welcome, error) {
	var hello welcome
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	l, err := dialHandshake(conn, to.job, to.key)
	if err == nil {
		hello, err = readWelcome(l)
	}
	if err == nil && hello.Refers {
		err = &referral{hello.At, hello.Over, hello.Finished, addrIP(conn.RemoteAddr())}
	}
	if err == nil && !stop() { // ctx closes the connection
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, hello, authError(to.job, to.addr, err)
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
	if other, ok := errors.AsType[*sockets.UserError](err); ok {
		return &AuthError{Job: job, Addr: addr, Reason: other.Error() + "; choose another port", err: other}
	}
	return fmt.Errorf("dial coordinator at %s: %w", addr, err)
}

func readWelcome(l *link) (welcome, error) {
	var hello welcome
	m, _, err := l.readMessage(handshakeTimeout)
	if err != nil {
		return hello, err
	}
	if m.kind != kindWelcome {
		return hello, fmt.Errorf("coordinator sent a message of kind %d first", m.kind)
	}
	if err := m.record(&hello); err != nil {
		return hello, err
	}
	if hello.Heartbeat <= 0 || hello.LostAfter < hello.Heartbeat {
		return hello, fmt.Errorf("coordinator has heartbeat %v and lost-after %v", hello.Heartbeat, hello.LostAfter)
	}
	return hello, nil
}

// newClient takes ownership of l and starts heartbeats. One goroutine delivers
// all events, in order.
func newClient(l *link, to target, addr, host string, hello welcome, events func(*client, message)) *client {
	clock := newRunClock(hello.step())
	k := &client{stream: newStream(l, clock, hello.LostAfter), clock: clock, to: to, addr: addr, ip: addrIP(l.c.RemoteAddr()), host: host, hello: hello, events: events,
		replies: map[uint64]chan message{}, endedC: make(chan struct{}), redials: newRedials()}
	k.clock.sys = to.sys
	k.ctx, k.cancel = context.WithCancelCause(context.Background())
	k.open, k.shut = context.WithCancel(context.Background())
	k.strict.Store(math.MaxInt64)
	k.stream.renew = k.reconnect
	k.wg.Go(k.readLoop)
	k.wg.Go(k.stream.writeLoop)
	k.wg.Go(k.watch)
	return k
}

func (k *client) readLoop() {
	defer k.stream.stopRenewing()
	for {
		b, err := k.stream.read()
		if err != nil {
			k.disconnected(err)
			return
		}
		m, err := decodeMessage(b)
		if err != nil {
			k.disconnected(err)
			return
		}
		k.dispatch(m)
	}
}

func (k *client) dispatch(m message) {
	switch m.kind {
	case kindBeat:
		k.stream.heardBeat(m)
	case kindInquiry:
		k.respond(m)
	case kindReply, kindAttendance:
		k.mu.Lock()
		ch := k.replies[m.id]
		delete(k.replies, m.id)
		k.mu.Unlock()
		if ch != nil {
			ch <- m
		}
	case kindEnded:
		if k.ended.CompareAndSwap(false, true) {
			close(k.endedC)
		}
	case kindResumed:
	case kindComplete:
		k.beStrict(0)
	case kindRefuse:
		k.final.Store(true)
		k.loss.Store(int32(lostByIt))
		k.events(k, m)
	case kindHandover:
		k.events(k, m)
		k.leftBehind(m)
	default:
		k.events(k, m)
	}
}

// leftBehind ends the client because the coordinator leaves the job. Another one follows.
func (k *client) leftBehind(m message) {
	var h handover
	if err := m.record(&h); err != nil {
		k.cancel(err)
		return
	}
	k.final.Store(true)
	k.loss.Store(int32(lostLeaving))
	if h.Failed {
		k.loss.Store(int32(lostResigned))
	}
	k.cancel(&MemberLostError{Rank: -1, Host: k.hello.Host, PID: k.hello.PID, Since: time.Now(), Reason: h.Reason, ExitCode: -1})
	k.closeConnection()
}

// disconnected ends the client. The end of the connection is a loss, unless the
// coordinator announced it. A coordinator that was only silent may resume, so it
// is told why this process disconnected.
func (k *client) disconnected(err error) {
	silent, down := errors.Is(err, os.ErrDeadlineExceeded), k.isDown()
	if silent && !k.ended.Load() {
		k.stream.writeLast(message{kind: kindSilent, epoch: firstEpoch}, k.hello.Heartbeat)
	}
	k.closeConnection()
	if k.ended.Load() {
		k.cancelEnded()
		return
	}
	who := "the coordinator in it"
	if k.hello.Rank < 0 {
		who = "its launcher, which coordinates the job,"
	}
	reason := fmt.Sprintf("the connection to %s failed: %v", who, err)
	switch {
	case silent:
		reason = fmt.Sprintf("%s was %s", who, reasonOf(err, k.silenceLimit()))
	case isClosedByPeer(err):
		reason = "the coordinator's connection closed: its process ended"
	}
	switch {
	case down: // by this process
	case silent:
		k.loss.Store(int32(lostSilent))
	default:
		k.loss.CompareAndSwap(int32(notLost), int32(lostSilent)) // nothing shows that its process has ended
	}
	k.cancel(&MemberLostError{Rank: k.hello.Rank, Host: k.hello.Host, PID: k.hello.PID,
		Since: time.Now(), Reason: reason, ExitCode: -1})
}

// isSuspended reports whether the coordinator is this host's launcher and is
// stopped, for example by Ctrl-Z. It will either continue or close the
// connection. In a job on several hosts the other hosts do not wait for it: they go on without this host or fail, and
// its processes must not run on beside them.
func (k *client) isSuspended() bool {
	if k.hello.Several || k.hello.Rank >= 0 || k.hello.Host != k.host {
		return false
	}
	return k.to.sys.isSuspended(k.hello.PID)
}

// isStopped reads the state in the content of /proc/<pid>/stat. The process name is in
// parentheses and may itself contain parentheses, so the state follows the last one.
func isStopped(stat []byte) bool {
	state := bytes.TrimSpace(stat[bytes.LastIndexByte(stat, ')')+1:])
	return len(state) > 0 && (state[0] == 'T' || state[0] == 't')
}

// closeConnection closes the connection. The failure of the job does not: a launcher must
// send reports and heartbeats while its workers stop.
func (k *client) closeConnection() {
	k.shut()
	k.stream.close()
}

func (k *client) isDown() bool { return k.open.Err() != nil }

// cancelEnded wakes waiting calls after a regular end of the job. It does not
// cancel the context, because no process failed.
func (k *client) cancelEnded() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, ch := range k.replies {
		close(ch)
		delete(k.replies, id)
	}
}

func (k *client) send(m message) error { return k.stream.sendWait(m) }

// ask sends a request and waits for the reply, the end of ctx, or end. It sends nothing
// after the end: the coordinator may still exist and answer.
func (k *client) ask(ctx context.Context, end <-chan struct{}, q message) (message, uint64, error) {
	select {
	case <-end:
		return message{}, 0, k.endCause()
	default:
	}
	k.mu.Lock()
	k.lastID++
	id := k.lastID
	q.id = id
	ch := make(chan message, 1)
	k.replies[id] = ch
	k.mu.Unlock()
	if k.ended.Load() {
		k.drop(id)
		return message{}, id, ErrEnded
	}
	if err := k.send(q); err != nil {
		if errors.Is(err, ErrTooLarge) {
			k.drop(id)
			return message{}, id, err
		}
		// The connection is closed, and the reader knows why.
	}
	m, err := k.await(ctx, end, ch)
	return m, id, err
}

func (k *client) await(ctx context.Context, end <-chan struct{}, ch chan message) (message, error) {
	select {
	case m, ok := <-ch:
		if !ok {
			return message{}, ErrEnded
		}
		return m, nil
	case <-end:
		return message{}, k.endCause()
	case <-ctx.Done():
		return message{}, ctx.Err()
	}
}

// endCause returns why the job or the connection ended. The connection closes
// slightly before the reader knows the reason.
func (k *client) endCause() error {
	if err := context.Cause(k.ctx); err != nil {
		return err
	}
	if k.ended.Load() {
		return ErrEnded
	}
	return net.ErrClosed
}

// drop removes a pending request.
func (k *client) drop(id uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.replies, id)
}

// askMissing asks the coordinator which members are missing.
func (k *client) askMissing() (attendance, error) {
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	var r attendance
	m, id, err := k.ask(ctx, k.ctx.Done(), message{kind: kindWho, epoch: firstEpoch})
	if err != nil {
		k.drop(id)
		return r, err
	}
	return r, m.record(&r)
}

// leave closes the client after the error err. The coordinator still counts a
// member that timed out as joined, because that member is not at fault.
func (k *client) leave(err error) {
	if _, timeout := errors.AsType[*JoinTimeoutError](err); timeout {
		k.closeWith(leaveGaveUp)
		return
	}
	k.close()
}

// closeBy limits close. If the coordinator reads nothing, for example because it is stopped, it loses this process later.
const closeBy = 4 * lastMessageTimeout

// close leaves the job. It notifies the coordinator, so that this is not a loss, waits at most
// lastMessageTimeout for its answer, and closes the connection. If messages are not written by then, it waits
// for the writer until closeBy. It returns when all goroutines have ended.
func (k *client) close() { k.closeWith(leaveJob) }

func (k *client) closeWith(id uint64) {
	limit := time.AfterFunc(closeBy, k.hangUp)
	defer limit.Stop()
	flushed := true
	if !k.isDown() && !k.ended.Load() {
		_ = k.send(message{kind: kindLeave, epoch: firstEpoch, id: id}) // an error means that the coordinator is gone
		k.stream.sendBeat()                                             // its echo acknowledges the message
		flushed = k.stream.flush(lastMessageTimeout)
	}
	if flushed {
		k.hangUp()
	} else { // the writer may stall: it writes the message before it closes the connection
		k.cancel(ErrClosed)
		k.shut()
		k.stream.closeAfterQueue()
	}
	k.wg.Wait()
}

// hangUp closes the connection of a client that leaves.
func (k *client) hangUp() {
	k.cancel(ErrClosed)
	k.closeConnection()
}
