package job

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxUnackedBytes limits the cost of the messages that the other end has not acknowledged. A peer
	// that exceeds it is lost; a member waits.
	maxUnackedBytes = MaxStoreBytes
	// maxWorkerUnackedBytes is the limit for a worker at the coordinator: most of its messages are replies, which are
	// short or share the memory of the store.
	maxWorkerUnackedBytes = 8 << 20
	// ackEvery is the number of received bytes after which an acknowledgement is sent
	// without waiting for the next message or heartbeat.
	ackEvery = 256 << 10
)

// A stream carries messages between a member and the coordinator in both directions, in
// order and each once. It outlives its links: if a link fails, the member connects
// again, and both ends repeat the messages that the other one has not acknowledged.
//
// One goroutine reads, and one writes. Any goroutine may send.
type stream struct {
	clock  *runClock
	sendBy time.Duration // time limit of a write without progress
	most   int           // limit of bytes
	// renew waits for a link after err ended the current one, or returns why the stream ends.
	renew func(err error) (renewal, error)

	heard    atomic.Int64  // time of clock when bytes arrived last
	born     time.Time     // heartbeats carry the time since then
	reached  atomic.Int64  // the greatest of these times that the other end has repeated
	starved  atomic.Int64  // clock.starved() at that time
	renewals chan renewal  // a link that replaces the current one
	expired  chan struct{} // closed by expire
	expiring sync.Once
	ready    chan struct{}
	done     chan struct{} // closed when the writer has ended

	reading *Link // used by the reader only

	mu       sync.Mutex
	changed  *sync.Cond // an acknowledgement arrived, or the state changed
	link     *Link      // nil while messages cannot be written
	links    int        // number of links so far
	out      []Message  // unacknowledged messages; the first has number acked+1
	acked    uint64
	next     int  // index in out of the first message to write on link
	idle     bool // the writer has written the messages before next
	bytes    int  // cost of out
	received uint64
	unsaid   int    // bytes received since the last frame that was written
	beat     bool   // send a heartbeat
	beatSeen uint64 // time in the last heartbeat of the other end
	resumed  bool   // send kindResumed
	closed   bool   // no new messages; queued messages are still sent
	hungUp   bool   // received messages are ignored, too
	over     bool   // the reader has ended, or the writer after the last message: no link follows
	detached bool   // the link belongs to another stream
	cause    error  // why this end has closed the stream; nil if it was asked to
}

// A renewal is a link that replaces a failed one.
type renewal struct {
	link  *Link
	acked uint64 // number of the last message that the other end has received
	greet bool   // the other end waits for kindResumed
}

func NewStream(l *Link, clock *runClock, sendBy time.Duration) *stream {
	s := &stream{clock: clock, born: time.Now(), sendBy: sendBy, most: maxUnackedBytes, renewals: make(chan renewal, 1), expired: make(chan struct{}),
		ready: make(chan struct{}, 1), done: make(chan struct{}), reading: l, link: l, links: 1}
	s.changed = sync.NewCond(&s.mu)
	s.touch()
	if l != nil {
		l.progress = s.touch
	}
	return s
}

func (s *stream) touch() {
	s.heard.Store(int64(s.clock.now()))
	s.starved.Store(int64(s.clock.starved()))
}

// silent returns for how long nothing has arrived while this process ran on schedule.
func (s *stream) silent() time.Duration {
	return s.clock.now() - time.Duration(s.heard.Load())
}

// expire ends the stream because the other end was silent, but leaves the link
// open for the last messages.
func (s *stream) expire() {
	s.expiring.Do(func() {
		close(s.expired)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.link != nil {
			_ = s.link.Conn.SetReadDeadline(time.Now()) // a closed connection wakes the reader, too
		}
	})
}

// read returns the next message, which may be a frame about the link.
func (s *stream) read() ([]byte, error) {
	for {
		f, err := s.reading.Read()
		if err != nil {
			if err = s.replaceLink(err); err != nil {
				return nil, err
			}
			continue
		}
		fresh, err := s.accept(f)
		if err != nil {
			s.reading.Close() // repeated on the next link
			continue
		}
		if fresh && len(f.Body) > 0 {
			return f.Body, nil
		}
	}
}

// accept counts a frame and reports whether it was not received before.
func (s *stream) accept(f Frame) (fresh bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trim(f.ack)
	switch {
	case f.number == 0:
		return true, nil
	case f.number <= s.received:
		return false, nil
	case f.number != s.received+1:
		return false, fmt.Errorf("message %d after message %d", f.number, s.received)
	}
	s.received++
	if s.unsaid += len(f.Body); s.unsaid >= ackEvery {
		s.wake()
	}
	return true, nil
}

// trim removes the messages up to number acked.
func (s *stream) trim(acked uint64) {
	if acked <= s.acked || acked-s.acked > uint64(len(s.out)) {
		return
	}
	n := int(acked - s.acked)
	for _, m := range s.out[:n] {
		s.bytes -= m.cost()
		m.release()
	}
	clear(s.out[:n])
	s.out, s.acked, s.next = s.out[n:], acked, max(0, s.next-n)
	s.changed.Broadcast()
}

// replaceLink continues on another link after err, or returns why the stream ends.
func (s *stream) replaceLink(err error) error {
	select {
	case <-s.expired:
		return os.ErrDeadlineExceeded
	case r := <-s.renewals:
		return s.adopt(r)
	default:
	}
	if cause := s.endCause(); cause != nil {
		return cause
	}
	if s.renew == nil {
		return err
	}
	r, err := s.renew(err)
	if err != nil {
		return err
	}
	return s.adopt(r)
}

// endCause returns why this end has closed the stream, or nil.
func (s *stream) endCause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cause
}

// fail closes the stream, and the reader then reports the cause.
func (s *stream) fail(cause error) {
	s.closed, s.cause = true, cause
	s.drop()
	if s.link != nil {
		s.link.Close()
		s.link = nil
	}
	s.changed.Broadcast()
	s.wake()
}

// adopt continues on the link of r.
func (s *stream) adopt(r renewal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		r.link.Close()
		return errStreamClosed
	}
	s.reading.Close()
	r.link.most = s.reading.most // of a process that has not registered, also if it continues its stream
	s.reading = r.link
	r.link.progress = s.touch
	s.touch()
	s.trim(r.acked)
	s.link, s.next, s.resumed = r.link, 0, r.greet
	s.links++
	s.wake()
	select {
	case <-s.expired:
		return os.ErrDeadlineExceeded
	default:
		return nil
	}
}

// replaceBy offers a link, which it takes ownership of, to replace the current
// one.
func (s *stream) replaceBy(r renewal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropRenewal()
	if s.over {
		r.link.Close()
		return
	}
	s.renewals <- r
	if s.link != nil {
		s.link.Close() // wakes the reader
		s.link = nil
	}
}

// dropRenewal closes a link that the reader has not adopted yet.
func (s *stream) dropRenewal() {
	select {
	case r := <-s.renewals:
		r.link.Close()
	default:
	}
}

// stopRenewing is called when the reader has ended.
func (s *stream) stopRenewing() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	s.dropRenewal()
	s.wake()
}

// detach closes the stream without its link, and returns the link.
func (s *stream) detach() *Link {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.link
	s.link, s.closed, s.hungUp, s.over, s.detached = nil, true, true, true, true
	s.wake()
	return l
}

// Generation returns the number of links so far.
func (s *stream) Generation() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.links
}

// receivedSoFar returns the number of the last message that has arrived.
func (s *stream) receivedSoFar() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.received
}

// drop forgets the queued messages.
func (s *stream) drop() {
	for _, m := range s.out {
		m.release()
	}
	s.acked += uint64(len(s.out)) // a late acknowledgement changes nothing
	s.out, s.next, s.bytes = nil, 0, 0
}

// send queues a message and does not block. If the queue is full, or no frame can carry the message, the stream
// ends: a message that is left out or repeated for ever would leave the other end waiting. The caller must not change
// the body afterwards.
func (s *stream) send(m Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
	case m.bytes() > maxMessageBytes:
		s.fail(fmt.Errorf("a message of %d bytes for it: %w", m.bytes(), ErrTooLarge))
	case len(s.out) > 0 && s.bytes+m.cost() > s.most:
		s.fail(fmt.Errorf("it has not acknowledged messages of %d bytes", s.bytes))
	default:
		s.append(m)
		return
	}
	m.release()
}

func (s *stream) append(m Message) {
	s.out = append(s.out, m)
	s.bytes += m.cost()
	s.wake()
}

var errStreamClosed = errors.New("the connection is closed")

// sendWait queues a message, and waits while the queue is full.
func (s *stream) sendWait(m Message) error {
	if m.bytes() > maxMessageBytes {
		return fmt.Errorf("message of %d bytes: %w", m.bytes(), ErrTooLarge)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.out) > 0 && s.bytes+m.cost() > s.most && !s.closed {
		s.changed.Wait()
	}
	if s.closed {
		return errStreamClosed
	}
	s.append(m)
	return nil
}

// SendBeat sends a heartbeat, unless one is still waiting to be sent.
func (s *stream) SendBeat() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.beat = true
		s.wake()
	}
}

// heardBeat records a heartbeat, which carries the time of its sender, and the
// last one that its sender has heard from this end.
func (s *stream) heardBeat(m Message) {
	if len(m.Body) != 8 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beatSeen = m.ID
	if at := binary.BigEndian.Uint64(m.Body); at <= uint64(time.Since(s.born)) {
		s.reached.Store(max(s.reached.Load(), int64(at)))
	}
}

// isCertain reports whether the other end cannot have lost this one for silence: it has heard something that was sent less than
// limit ago. The time is that of the machine, which goes on while this process is stopped or starved.
func (s *stream) isCertain(limit time.Duration) bool {
	return time.Since(s.born)-time.Duration(s.reached.Load()) < limit
}

// writeLast writes a message about the link, before the stream is closed.
func (s *stream) writeLast(m Message, d time.Duration) {
	s.mu.Lock()
	l := s.link
	s.mu.Unlock()
	if l != nil {
		_ = l.Write(Frame{Body: m.Encode()}, d) // the coordinator is probably lost
	}
}

// Flush waits until the other end has acknowledged all messages, at most for d,
// and reports whether nothing is left to write.
func (s *stream) Flush(d time.Duration) bool {
	over := false
	t := time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		over = true
		s.changed.Broadcast()
	})
	defer t.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.out) > 0 && !over && !s.closed {
		s.changed.Wait()
	}
	return len(s.out) == 0 || s.closed || s.idle && s.next == len(s.out)
}

// closeAfterQueue ends the stream after all queued messages are written.
func (s *stream) closeAfterQueue() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.hungUp = true, true
	s.changed.Broadcast()
	s.wake()
}

// close ends the stream, and its reader, if that has not ended already.
func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.hungUp = true, true
	s.drop()
	if s.link != nil {
		s.link.Close()
	}
	s.changed.Broadcast()
	s.wake()
}

// isClosed reports whether the stream accepts no more messages.
func (s *stream) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// closeLinks closes the link after the reader and the writer have ended.
func (s *stream) closeLinks() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop()
	if s.link != nil {
		s.link.Close()
	}
	if !s.detached && s.reading != nil {
		s.reading.Close()
	}
}

func (s *stream) hasHungUp() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hungUp
}

// wake wakes the writer.
func (s *stream) wake() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// writeLoop writes messages until the stream is closed.
func (s *stream) writeLoop() {
	defer close(s.done)
	for range s.ready {
		for {
			l, f, last := s.nextFrame()
			if last {
				if l != nil {
					l.finish()
				}
				return
			}
			if l == nil {
				break
			}
			if err := l.Write(f, s.sendBy); err != nil { // never ErrTooLarge: send and sendWait refuse such messages
				s.writeFailed(l)
			}
		}
	}
}

// writeFailed stops writing on l, while the reader continues, to receive
// messages that the other end sent before.
func (s *stream) writeFailed(l *Link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link == l {
		s.link = nil
	}
	l.finish()
}

// nextFrame returns the next frame to write and its link, or no link if there is
// nothing to write. If last is true, the stream is closed and nothing is left to write.
func (s *stream) nextFrame() (l *Link, f Frame, last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f.ack, s.idle = s.received, false
	switch {
	case s.link == nil:
		return nil, f, s.closed && s.over
	case s.resumed:
		s.resumed = false
		f.Body = Message{Kind: kindResumed, Epoch: FirstEpoch}.Encode()
	case s.next < len(s.out):
		m := s.out[s.next]
		f.number, f.head, f.Body, f.parts = s.acked+uint64(s.next)+1, m.head(), m.Body, m.parts
		s.next++
	case s.closed:
		s.over = true // nobody would end another link
		s.dropRenewal()
		return s.link, f, true
	case s.beat:
		s.beat = false
		f.Body = Message{Kind: kindBeat, Epoch: FirstEpoch, ID: uint64(time.Since(s.born)), Body: binary.BigEndian.AppendUint64(nil, s.beatSeen)}.Encode()
	case s.unsaid >= ackEvery: // an empty frame acknowledges
	default:
		s.idle = true
		return nil, f, false
	}
	s.unsaid = 0
	return s.link, f, false
}

// ExtraSilence limits the time that isTooSilent adds to a limit.
func ExtraSilence(limit time.Duration) time.Duration { return limit/32 + limit/8 }

// isTooSilent reports whether the other end has been silent for longer than limit. A heartbeat that is due
// just before the limit has the time to arrive. If this process was starved during the silence, its
// clock stood still. It then waits for the same time once more, at most an eighth of the limit: it has
// messages to read, and other processes of this host were probably starved, too.
func (s *stream) isTooSilent(limit time.Duration) bool {
	starved := s.clock.starved() - time.Duration(s.starved.Load())
	return s.silent() > limit+limit/32+min(starved, limit/8)
}
