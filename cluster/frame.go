package cluster

import (
	"cmp"
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

// maxFrameBytes limits a frame: a CompareAndSwap contains two values of
// MaxValueBytes, a key and headers.
const maxFrameBytes = 2*MaxValueBytes + MaxKeyBytes + 4096

const (
	frameHeadBytes  = 8 + 8
	maxMessageBytes = maxFrameBytes - tagBytes - frameHeadBytes // tagBytes is also the overhead of AES-GCM
	// writePiece is the size of the pieces of a write. Each piece has the full time limit.
	writePiece = 64 << 10
)

// smallFrame is the length up to which each link keeps a buffer for its frames. The others share buffers.
const smallFrame = 4 << 10

var largeFrames = sync.Pool{New: func() any {
	b := make([]byte, 0, 4+maxFrameBytes)
	return &b
}}

// A frame is the unit of a link. Messages of a stream have consecutive numbers from 1.
// Frames with number 0 are about the link: they are not repeated on another link.
type frame struct {
	number uint64
	ack    uint64   // number of the last message that the sender of this frame has received
	head   []byte   // of the message that is sent; messages to many processes share their bodies
	body   []byte   // a message, or the rest of it after head
	parts  [][]byte // of the message that is sent, after body
}

// A link is an authenticated connection that carries encrypted frames: a length
// of four bytes and AES-GCM ciphertext. The nonce is the sequence number of the
// frame in its direction, so that changed, repeated, dropped or reordered frames
// are detected. One goroutine may read; several may write.
type link struct {
	c          net.Conn
	seal, open cipher.AEAD
	worker     bool // the other end has only a worker's credential
	received   uint64
	progress   func() // called when bytes have arrived; may be nil
	most       uint32 // limit of a received frame; 0 means maxFrameBytes. Used by the reader only

	mu   sync.Mutex // held while writing
	sent uint64
	buf  []byte
}

// write sends one frame. It fails if the other end accepts no bytes for d.
func (l *link) write(f frame, d time.Duration) error {
	n := len(f.head) + len(f.body)
	for _, p := range f.parts {
		n += len(p)
	}
	if n > maxMessageBytes {
		return fmt.Errorf("message of %d bytes: %w", n, ErrTooLarge)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	n += frameHeadBytes
	buf := l.buf
	if n > smallFrame { // one large message to each of many processes must not pin a large buffer for each
		large := largeFrames.Get().(*[]byte)
		defer largeFrames.Put(large)
		buf = *large
	}
	b := binary.BigEndian.AppendUint32(buf[:0], uint32(n+l.seal.Overhead()))
	b = binary.BigEndian.AppendUint64(b, f.number)
	b = binary.BigEndian.AppendUint64(b, f.ack)
	b = append(append(b, f.head...), f.body...)
	for _, p := range f.parts {
		b = append(b, p...)
	}
	b = l.seal.Seal(b[:4], frameNonce(l.sent), b[4:], b[:4])
	l.sent++
	if n <= smallFrame {
		l.buf = b[:0]
	}
	for piece := range slices.Chunk(b, writePiece) {
		if err := l.c.SetWriteDeadline(time.Now().Add(d)); err != nil {
			return err
		}
		if _, err := l.c.Write(piece); err != nil {
			return err
		}
	}
	return nil
}

// read returns the next frame.
func (l *link) read() (frame, error) {
	var head [4]byte
	if err := l.fill(head[:]); err != nil {
		return frame{}, err
	}
	n := binary.BigEndian.Uint32(head[:])
	most := cmp.Or(l.most, maxFrameBytes)
	if n > most || int(n) < l.open.Overhead()+frameHeadBytes {
		return frame{}, fmt.Errorf("frame of %d bytes: want %d to %d", n, l.open.Overhead()+frameHeadBytes, most)
	}
	b := make([]byte, n)
	if err := l.fill(b); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return frame{}, err
	}
	plain, err := l.open.Open(b[:0], frameNonce(l.received), b, head[:])
	if err != nil {
		return frame{}, errors.New("frame was changed in transit")
	}
	l.received++
	return frame{number: binary.BigEndian.Uint64(plain), ack: binary.BigEndian.Uint64(plain[8:]), body: plain[frameHeadBytes:]}, nil
}

// readMessage returns the message of the next frame, which must arrive within d.
func (l *link) readMessage(d time.Duration) (message, frame, error) {
	if err := l.c.SetReadDeadline(time.Now().Add(d)); err != nil {
		return message{}, frame{}, err
	}
	f, err := l.read()
	if err != nil {
		return message{}, f, err
	}
	if err := l.c.SetReadDeadline(time.Time{}); err != nil {
		return message{}, f, err
	}
	m, err := decodeMessage(f.body)
	return m, f, err
}

// fill reads all of b, like io.ReadFull, and reports progress.
func (l *link) fill(b []byte) error {
	for n := 0; n < len(b); {
		m, err := l.c.Read(b[n:])
		n += m
		if m > 0 && l.progress != nil {
			l.progress()
		}
		if err != nil && n < len(b) {
			return err
		}
	}
	return nil
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
