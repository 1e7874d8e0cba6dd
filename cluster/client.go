package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/sameuser"
)

// A client is a member's end of its connection to the coordinator.
type client struct {
	link   *link
	addr   string
	host   string // of this process
	hello  welcome
	events func(*client, message) // called by the reader for what is no reply, in order
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
	ended  atomic.Bool // the coordinator left without a failure
	endedC chan struct{}
	down   chan struct{} // closed when the connection is of no more use
	downed sync.Once
	pulse  *pulse

	mu      sync.Mutex
	lastID  uint64
	replies map[uint64]chan message
}

// dialAttempt bounds one try to connect: the coordinator's host may drop
// packets while others are tried.
const dialAttempt = 2 * time.Second

// dial connects to the coordinator at addr once and reads its welcome.
func dial(ctx context.Context, job, addr string, key credential) (*link, welcome, error) {
	var hello welcome
	d := net.Dialer{Timeout: dialAttempt}
	conn, err := d.DialContext(ctx, networkOf(addr), addr)
	if err != nil {
		return nil, hello, dialError(addr, err)
	}
	if err := knownPeer(conn); err != nil {
		conn.Close()
		return nil, hello, authError(job, addr, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	l, err := dialHandshake(conn, job, key)
	if err == nil {
		hello, err = readWelcome(l)
	}
	if err == nil && !stop() { // ctx has closed, or will close, the connection
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, hello, authError(job, addr, err)
	}
	return l, hello, nil
}

// authError makes those errors that another attempt cannot cure AuthErrors.
func authError(job, addr string, err error) error {
	for _, final := range []error{errNotChorus, errOtherJob, errOtherVersion, errBadProof} {
		if errors.Is(err, final) {
			return &AuthError{Job: job, Addr: addr, Reason: final.Error()}
		}
	}
	if other, ok := errors.AsType[*sameuser.Error](err); ok {
		return &AuthError{Job: job, Addr: addr, Reason: other.Error() + "; choose another port", err: other}
	}
	return fmt.Errorf("dial coordinator at %s: %w", addr, err)
}

func readWelcome(l *link) (welcome, error) {
	var hello welcome
	l.patience = handshakeTimeout
	b, err := l.read()
	if err != nil {
		return hello, err
	}
	m, err := decodeMessage(b)
	if err != nil {
		return hello, err
	}
	if m.kind != kindWelcome {
		return hello, fmt.Errorf("coordinator began with a message of kind %d", m.kind)
	}
	if err := m.record(&hello); err != nil {
		return hello, err
	}
	if hello.Heartbeat <= 0 || hello.LostAfter < hello.Heartbeat {
		return hello, fmt.Errorf("coordinator has heartbeat %v and lost-after %v", hello.Heartbeat, hello.LostAfter)
	}
	return hello, nil
}

// newClient takes over l and starts its heartbeat. Events come from one
// goroutine, in order.
func newClient(l *link, addr, host string, hello welcome, events func(*client, message)) *client {
	k := &client{link: l, addr: addr, host: host, hello: hello, events: events, pulse: newPulse(hello),
		replies: map[uint64]chan message{}, endedC: make(chan struct{}), down: make(chan struct{})}
	k.ctx, k.cancel = context.WithCancelCause(context.Background())
	l.patience = hello.LostAfter
	l.excuse = func(since time.Time) bool { return k.pulse.paused(since) || k.isSuspended() }
	k.wg.Go(k.readLoop)
	k.wg.Go(k.beatLoop)
	k.wg.Go(func() { k.pulse.run(hello.Heartbeat, k.down) })
	return k
}

func (k *client) readLoop() {
	for {
		b, err := k.link.read()
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
	case kindReply, kindRoll:
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
	default:
		k.events(k, m)
	}
}

// disconnected ends the client. The coordinator's going is a loss unless it
// said so before. One that was merely silent may come back, and is told why
// this process has given up on it.
func (k *client) disconnected(err error) {
	silent := errors.Is(err, os.ErrDeadlineExceeded)
	if silent && !k.ended.Load() {
		_ = k.link.write(message{kind: kindSilent, epoch: firstEpoch}.encode(), k.hello.Heartbeat)
	}
	k.hangUp()
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
		reason = fmt.Sprintf("%s was %s", who, reasonOf(err, k.hello.LostAfter))
	case isClosedByPeer(err):
		reason = "the coordinator's connection closed: its process ended"
	}
	k.cancel(&MemberLostError{Rank: k.hello.Rank, Host: k.hello.Host, PID: k.hello.PID,
		Since: time.Now(), Reason: reason, ExitCode: -1})
}

// isSuspended reports that the coordinator is this host's launcher and that
// somebody has stopped it, as Ctrl-Z does. It will go on, or its connection
// will close.
func (k *client) isSuspended() bool {
	if k.hello.Rank >= 0 || k.hello.Host != k.host {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", k.hello.PID))
	if err != nil {
		return false
	}
	// The name is in parentheses and may have any; the state follows the last.
	state := bytes.TrimSpace(b[bytes.LastIndexByte(b, ')')+1:])
	return len(state) > 0 && (state[0] == 'T' || state[0] == 't')
}

// hangUp closes the connection. It outlives the job's failure: a launcher has
// to go on reporting, and to live, while its workers stop.
func (k *client) hangUp() {
	k.downed.Do(func() { close(k.down) })
	k.link.close()
}

func (k *client) isDown() bool {
	select {
	case <-k.down:
		return true
	default:
		return false
	}
}

// cancelEnded wakes calls that wait, without a loss: the context stays as it
// is, since no process failed.
func (k *client) cancelEnded() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, ch := range k.replies {
		close(ch)
		delete(k.replies, id)
	}
}

// beatLoop tells the coordinator that this process lives.
func (k *client) beatLoop() {
	t := time.NewTicker(k.hello.Heartbeat)
	defer t.Stop()
	for {
		select {
		case <-k.down:
			return
		case <-t.C:
			// The reader learns of a failure, too, and knows its cause better.
			_ = k.send(message{kind: kindBeat, epoch: firstEpoch})
		}
	}
}

func (k *client) send(m message) error { return k.link.write(m.encode(), k.hello.LostAfter) }

// ask sends a request and waits for its reply, the end of ctx, or the end of
// the job.
func (k *client) ask(ctx context.Context, kd kind, body []byte) (message, uint64, error) {
	return k.askUntil(ctx, k.ctx.Done(), kd, body)
}

// askUntil is ask with another end than that of the job. After the end nothing is
// sent: a coordinator that is still there could answer before the end is seen.
func (k *client) askUntil(ctx context.Context, end <-chan struct{}, kd kind, body []byte) (message, uint64, error) {
	select {
	case <-end:
		return message{}, 0, k.endCause()
	default:
	}
	k.mu.Lock()
	k.lastID++
	id := k.lastID
	ch := make(chan message, 1)
	k.replies[id] = ch
	k.mu.Unlock()
	if k.ended.Load() {
		k.drop(id)
		return message{}, id, ErrEnded
	}
	if err := k.send(message{kind: kd, epoch: firstEpoch, id: id, body: body}); err != nil {
		if errors.Is(err, ErrTooLarge) {
			k.drop(id)
			return message{}, id, err
		}
		// The reader sees the broken connection, too: let it say why.
		k.link.close()
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

// endCause says why the job ended, or that the connection did: that closes a
// moment before the reader has found out why.
func (k *client) endCause() error {
	if err := context.Cause(k.ctx); err != nil {
		return err
	}
	if k.ended.Load() {
		return ErrEnded
	}
	return net.ErrClosed
}

// drop forgets a request.
func (k *client) drop(id uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.replies, id)
}

// who asks the coordinator who is missing.
func (k *client) who() (roll, error) {
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	var r roll
	m, id, err := k.ask(ctx, kindWho, nil)
	if err != nil {
		k.drop(id)
		return r, err
	}
	return r, m.record(&r)
}

// Ids of kindLeave.
const (
	leaveJob = iota
	leaveGaveUp
)

// leave is close after err. The coordinator goes on counting a member whose
// time was over among those who came: it is not to blame.
func (k *client) leave(err error) {
	if _, timeout := errors.AsType[*JoinTimeoutError](err); timeout {
		k.closeWith(leaveGaveUp)
		return
	}
	k.close()
}

// close leaves: the coordinator is told, so that this is no loss, and the
// connection is closed. It returns when no goroutine is left.
func (k *client) close() { k.closeWith(leaveJob) }

func (k *client) closeWith(id uint64) {
	if !k.isDown() && !k.ended.Load() {
		_ = k.send(message{kind: kindLeave, epoch: firstEpoch, id: id}) // if it fails, the coordinator is gone
	}
	k.cancel(ErrClosed)
	k.hangUp()
	k.wg.Wait()
}
