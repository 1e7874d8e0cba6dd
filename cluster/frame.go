package cluster

import (
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// maxFrameBytes limits a frame: a CompareAndSwap contains two values of
// MaxValueBytes, a key and headers.
const maxFrameBytes = 2*MaxValueBytes + MaxKeyBytes + 4096

// A link is an authenticated connection that carries encrypted frames: a length
// of four bytes and AES-GCM ciphertext. The nonce is the sequence number of the
// frame in its direction, so that changed, repeated, dropped or reordered frames
// are detected. One goroutine may read; several may write.
type link struct {
	c          net.Conn
	seal, open cipher.AEAD
	worker     bool // the other end has only a worker's credential
	received   uint64
	patience   time.Duration // read timeout; 0 means none
	// excuse, if not nil, reports whether silence since then is not a failure.
	excuse func(since time.Time) bool

	mu   sync.Mutex // held while writing
	sent uint64
	buf  []byte
}

// write sends one frame with timeout d.
func (l *link) write(plain []byte, d time.Duration) error {
	if len(plain)+l.seal.Overhead() > maxFrameBytes {
		return fmt.Errorf("frame of %d bytes: %w", len(plain), ErrTooLarge)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	b := binary.BigEndian.AppendUint32(l.buf[:0], uint32(len(plain)+l.seal.Overhead()))
	b = l.seal.Seal(b, frameNonce(l.sent), plain, b[:4])
	l.sent++
	l.buf = b[:0]
	if cap(b) > 64<<10 {
		l.buf = nil // one large value must not pin a large buffer
	}
	if err := l.c.SetWriteDeadline(time.Now().Add(d)); err != nil {
		return err
	}
	_, err := l.c.Write(b)
	return err
}

// read returns the next frame.
func (l *link) read() ([]byte, error) {
	var head [4]byte
	if err := l.fill(head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxFrameBytes || int(n) < l.open.Overhead() {
		return nil, fmt.Errorf("frame of %d bytes: want %d to %d", n, l.open.Overhead(), maxFrameBytes)
	}
	b := make([]byte, n)
	if err := l.fill(b); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	plain, err := l.open.Open(b[:0], frameNonce(l.received), b, head[:])
	if err != nil {
		return nil, errors.New("frame was changed in transit")
	}
	l.received++
	return plain, nil
}

// fill reads all of b, like io.ReadFull, with the link's timeout.
func (l *link) fill(b []byte) error {
	for n := 0; n < len(b); {
		m, err := l.readSome(b[n:])
		n += m
		if err != nil && n < len(b) {
			return err
		}
	}
	return nil
}

// readSome reads once. After a timeout it reads once more: if this process was
// suspended, data of the peer is waiting. If excuse is true, the timeout starts
// again.
func (l *link) readSome(b []byte) (int, error) {
	if l.patience <= 0 {
		return l.c.Read(b)
	}
	begin, wait := time.Now(), l.patience
	for {
		if err := l.c.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return 0, err
		}
		n, err := l.c.Read(b)
		switch {
		case n > 0 || !errors.Is(err, os.ErrDeadlineExceeded):
			return n, err
		case wait == l.patience:
			wait /= 8
		case l.excuse != nil && l.excuse(begin):
			begin, wait = time.Now(), l.patience
		default:
			return n, err
		}
	}
}

// finish closes the sending direction and gives the peer time to read. Closing at
// once with unread data on this side would let the kernel discard sent data.
func (l *link) finish() {
	w, ok := l.c.(interface{ CloseWrite() error })
	if !ok {
		l.close()
		return
	}
	_ = w.CloseWrite() // an error means that the peer is gone
	time.AfterFunc(lastMessageTimeout, func() { l.close() })
}

func (l *link) close() error { return l.c.Close() }

func frameNonce(n uint64) []byte {
	b := make([]byte, 12)
	binary.BigEndian.PutUint64(b[4:], n)
	return b
}
