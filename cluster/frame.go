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

// maxFrameBytes bounds a frame: a value of MaxValueBytes in a CompareAndSwap,
// twice, with its key and headers.
const maxFrameBytes = 2*MaxValueBytes + MaxKeyBytes + 4096

// A link is an authenticated connection of sealed frames. A frame is its length
// in four bytes and AES-GCM ciphertext, whose nonce is the number of the frame
// in its direction: a frame that is changed, repeated, dropped or moved is
// noticed. One goroutine reads; any may write.
type link struct {
	c          net.Conn
	seal, open cipher.AEAD
	worker     bool // the other end has only a worker's credential
	received   uint64
	patience   time.Duration // how long a read waits; 0 means for ever
	// excuse, if not nil, says whether the silence since then proves nothing.
	excuse func(since time.Time) bool

	mu   sync.Mutex // held while writing
	sent uint64
	buf  []byte
}

// write sends one frame and gives up after d.
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
		return nil, errors.New("frame was changed on its way")
	}
	l.received++
	return plain, nil
}

// fill reads all of b, as io.ReadFull does, within the link's patience.
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

// readSome reads once. When time is up it looks once more: if this process, not
// the other, was stopped, what the other sent in the meantime is waiting. With
// an excuse for the silence, such as that, it begins again.
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

// finish says that nothing more will be sent and leaves the other end a moment
// to read what was: to close at once, with something unread on this side, would
// let the kernel throw it away.
func (l *link) finish() {
	w, ok := l.c.(interface{ CloseWrite() error })
	if !ok {
		l.close()
		return
	}
	_ = w.CloseWrite() // if it fails, the other end has gone and its words may be left
	time.AfterFunc(farewell, func() { l.close() })
}

func (l *link) close() error { return l.c.Close() }

func frameNonce(n uint64) []byte {
	b := make([]byte, 12)
	binary.BigEndian.PutUint64(b[4:], n)
	return b
}
