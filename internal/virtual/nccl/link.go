package nccl

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// errStopped ends an operation whose communicator was aborted or failed.
var errStopped = errors.New("the communicator was stopped")

// A link carries the data of one direction between two ranks. Operations run one
// at a time and use a link in the same order at both ends, so messages need no
// address.
type link struct {
	c    *comm
	peer int
	conn net.Conn
	r    *bufio.Reader
}

const (
	linkBuffer = 32 << 10
	// socketBuffer lets both ends run concurrently. The system may grant less,
	// which only costs time.
	socketBuffer = 1 << 20
)

func (c *comm) newLink(peer int, conn net.Conn) *link {
	if s, ok := conn.(interface {
		SetReadBuffer(int) error
		SetWriteBuffer(int) error
	}); ok {
		_, _ = s.SetReadBuffer(socketBuffer), s.SetWriteBuffer(socketBuffer)
	}
	return &link{c: c, peer: peer, conn: conn, r: bufio.NewReaderSize(conn, linkBuffer)}
}

// to returns the link to a peer and creates it at its first use.
func (c *comm) to(peer int) (*link, error) {
	c.mu.Lock()
	k, address := c.out[peer], c.members[peer].Address
	c.mu.Unlock()
	if k != nil {
		return k, nil
	}
	conn, err := greet(address, &hello{Token: c.token, Use: "data", Rank: c.rank})
	if errors.Is(err, syscall.EMFILE) {
		c.fail(&failure{ncclapi.SystemError, tooFewFiles(fmt.Sprintf("connect to rank %d", peer), err)})
		<-c.stop
		return nil, errStopped
	}
	if err != nil {
		return nil, c.broken(peer)
	}
	k = c.newLink(peer, conn)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		_ = conn.Close()
		return nil, errStopped
	}
	c.out[peer] = k
	return k, nil
}

// tooFewFiles describes a failure for want of file descriptors.
func tooFewFiles(what string, err error) string {
	return fmt.Sprintf("cannot %s: %v: raise the process's limit of open files (ulimit -n)", what, err)
}

// from returns the link from a peer once the peer has created it.
func (c *comm) from(peer int) (*link, error) {
	c.mu.Lock()
	k, arrival, departure := c.in[peer], c.arrival(peer), c.departure(peer)
	c.mu.Unlock()
	if k != nil {
		return k, nil
	}
	select {
	case <-arrival:
	case <-c.stop:
		return nil, errStopped
	case <-departure:
		if !c.hasSent(peer) {
			return nil, c.broken(peer)
		}
		select {
		case <-arrival:
		case <-c.stop:
			return nil, errStopped
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.in[peer], nil
}

// hasSent reports whether a peer that has left had created a link to this rank.
func (c *comm) hasSent(peer int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sentTo[peer]
}

// arrival returns a channel that closes when the link from the peer exists. c.mu is held.
func (c *comm) arrival(peer int) chan struct{} { return signalFor(c.arrivals, peer) }

func (c *comm) arrive(peer int, conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped || c.in[peer] != nil {
		_ = conn.Close()
		return
	}
	c.in[peer] = c.newLink(peer, conn)
	close(c.arrival(peer))
}

// broken handles a failed link. It returns when the operation must end; for a
// lost rank this is when the communicator is aborted.
func (c *comm) broken(peer int) error {
	c.mu.Lock()
	departure := c.departure(peer)
	c.mu.Unlock()
	timer := time.NewTimer(graceForNotice)
	defer timer.Stop()
	select {
	case <-c.stop:
		return errStopped
	case <-departure:
	case <-timer.C:
	}
	c.mu.Lock()
	text := fmt.Sprintf("rank %d was lost: its connection broke during an operation", peer)
	if c.hasLeft(peer) {
		text = fmt.Sprintf("rank %d destroyed its communicator while other ranks still wait for it", peer)
	}
	c.failLocked(&failure{ncclapi.RemoteError, text}, nil)
	c.mu.Unlock()
	<-c.stop
	return errStopped
}

// read reads large data directly from the connection, without a copy.
func (k *link) read(p []byte) error {
	from := io.Reader(k.r)
	if len(p) >= linkBuffer {
		n, _ := io.ReadFull(k.r, p[:min(len(p), k.r.Buffered())])
		p, from = p[n:], k.conn
	}
	if _, err := io.ReadFull(from, p); err != nil {
		return k.c.broken(k.peer)
	}
	return nil
}

func (k *link) write(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if _, err := k.conn.Write(p); err != nil {
		return k.c.broken(k.peer)
	}
	return nil
}

// A sender writes slices to a link in order, in the background.
type sender struct {
	queue chan []byte
	wrote chan struct{}
	acked int
	err   error // valid after wrote is closed
}

// newSender creates a sender for at most n slices.
func newSender(k *link, n int) *sender {
	s := &sender{queue: make(chan []byte, n), wrote: make(chan struct{}, n)}
	go func() {
		defer close(s.wrote)
		for p := range s.queue {
			if s.err = k.write(p); s.err != nil {
				return
			}
			s.wrote <- struct{}{}
		}
	}()
	return s
}

func (s *sender) send(p []byte) { s.queue <- p }

// await returns when n slices are written, so that their bytes may change.
func (s *sender) await(n int) error {
	for ; s.acked < n; s.acked++ {
		if _, ok := <-s.wrote; !ok {
			return s.err
		}
	}
	return nil
}

// finish waits for all writes and stops the sender.
func (s *sender) finish() error {
	close(s.queue)
	for range s.wrote {
		s.acked++
	}
	return s.err
}
