package job

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

// MaxFrameBytes limits a frame: a CompareAndSwap contains two values of
// MaxValueBytes, a key and headers.
const MaxFrameBytes = 2*MaxValueBytes + MaxKeyBytes + 4096

const (
	frameHeadBytes  = 8 + 8
	maxMessageBytes = MaxFrameBytes - tagBytes - frameHeadBytes // tagBytes is also the overhead of AES-GCM
	// writePiece is the size of the pieces of a write. Each piece has the full time limit.
	writePiece = 64 << 10
)

// smallFrame is the length up to which each link keeps a buffer for its frames. The others share buffers.
const smallFrame = 4 << 10

var largeFrames = sync.Pool{New: func() any {
	b := make([]byte, 0, 4+MaxFrameBytes)
	return &b
}}

// A Frame is the unit of a link. Messages of a stream have consecutive numbers from 1.
// Frames with number 0 are about the link: they are not repeated on another link.
type Frame struct {
	number uint64
	ack    uint64   // number of the last message that the sender of this frame has received
	head   []byte   // of the message that is sent; messages to many processes share their bodies
	Body   []byte   // a message, or the rest of it after head
	parts  [][]byte // of the message that is sent, after body
}

// A Link is an authenticated connection that carries encrypted frames: a length
// of four bytes and AES-GCM ciphertext. The nonce is the sequence number of the
// frame in its direction, so that changed, repeated, dropped or reordered frames
// are detected. One goroutine may read; several may write.
type Link struct {
	Conn       net.Conn
	Seal, Open cipher.AEAD
	Worker     bool // the other end has only a worker's credential
	received   uint64
	progress   func() // called when bytes have arrived; may be nil
	most       uint32 // limit of a received frame; 0 means maxFrameBytes. Used by the reader only

	mu   sync.Mutex // held while writing
	sent uint64
	buf  []byte
}

// Write sends one frame, and fails if the other end accepts no bytes for d.
func (l *Link) Write(f Frame, d time.Duration) error {
	n := len(f.head) + len(f.Body)
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
	b := binary.BigEndian.AppendUint32(buf[:0], uint32(n+l.Seal.Overhead()))
	b = binary.BigEndian.AppendUint64(b, f.number)
	b = binary.BigEndian.AppendUint64(b, f.ack)
	b = append(append(b, f.head...), f.Body...)
	for _, p := range f.parts {
		b = append(b, p...)
	}
	b = l.Seal.Seal(b[:4], frameNonce(l.sent), b[4:], b[:4])
	l.sent++
	if n <= smallFrame {
		l.buf = b[:0]
	}
	for piece := range slices.Chunk(b, writePiece) {
		if err := l.Conn.SetWriteDeadline(time.Now().Add(d)); err != nil {
			return err
		}
		if _, err := l.Conn.Write(piece); err != nil {
			return err
		}
	}
	return nil
}

// Read returns the next frame.
func (l *Link) Read() (Frame, error) {
	var head [4]byte
	if err := l.fill(head[:]); err != nil {
		return Frame{}, err
	}
	n := binary.BigEndian.Uint32(head[:])
	most := cmp.Or(l.most, MaxFrameBytes)
	if n > most || int(n) < l.Open.Overhead()+frameHeadBytes {
		return Frame{}, fmt.Errorf("frame of %d bytes: want %d to %d", n, l.Open.Overhead()+frameHeadBytes, most)
	}
	b := make([]byte, n)
	if err := l.fill(b); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	plain, err := l.Open.Open(b[:0], frameNonce(l.received), b, head[:])
	if err != nil {
		return Frame{}, errors.New("frame was changed in transit")
	}
	l.received++
	return Frame{number: binary.BigEndian.Uint64(plain), ack: binary.BigEndian.Uint64(plain[8:]), Body: plain[frameHeadBytes:]}, nil
}

// readMessage returns the message of the next frame, which must arrive within d.
func (l *Link) readMessage(d time.Duration) (Message, Frame, error) {
	if err := l.Conn.SetReadDeadline(time.Now().Add(d)); err != nil {
		return Message{}, Frame{}, err
	}
	f, err := l.Read()
	if err != nil {
		return Message{}, f, err
	}
	if err := l.Conn.SetReadDeadline(time.Time{}); err != nil {
		return Message{}, f, err
	}
	m, err := DecodeMessage(f.Body)
	return m, f, err
}

// fill reads all of b, like io.ReadFull, and reports progress.
func (l *Link) fill(b []byte) error {
	for n := 0; n < len(b); {
		m, err := l.Conn.Read(b[n:])
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
func (l *Link) finish() {
	w, ok := l.Conn.(interface{ CloseWrite() error })
	if !ok {
		l.Close()
		return
	}
	_ = w.CloseWrite() // an error means that the peer is gone
	time.AfterFunc(lastMessageTimeout, func() { l.Close() })
}

func (l *Link) Close() error { return l.Conn.Close() }

func frameNonce(n uint64) []byte {
	b := make([]byte, 12)
	binary.BigEndian.PutUint64(b[4:], n)
	return b
}
