package job

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"time"
)

// The handshake. Neither side trusts any data before it is complete:
//
//	dialer    magic version tag nonce point seal      101 bytes
//	listener  magic version status nonce point proof  102 bytes
//	dialer    proof                                    32 bytes
//
// The seal is a short HMAC of the bytes before it, so that the listener drops strangers before it computes anything
// else for them. Who repeats a recorded first message gets no further. A proof is an HMAC, with the job's control key, of all bytes exchanged before
// it. The frame keys are derived from the control key and an X25519 exchange, so
// a secret that leaks later does not decrypt recorded traffic. All messages have
// a fixed length, so no length from an unauthenticated peer is used.
const (
	ProtocolVersion = 10
	NonceBytes      = 32
	PointBytes      = 32
	ProofBytes      = sha256.Size
	sealBytes       = 16
	HelloBytes      = 4 + 1 + tagBytes + NonceBytes + PointBytes + sealBytes
	AnswerBytes     = 4 + 1 + 1 + NonceBytes + PointBytes + ProofBytes

	HandshakeTimeout = 2 * time.Second
)

var Magic = [4]byte{'c', 'h', 'o', 'r'}

// Status bytes of the listener's reply.
const (
	StatusWelcome = iota
	statusOtherJob
	statusOtherVersion
	statusOtherSecret
)

var (
	errNotChorus    = errors.New("the program at this address is not a Chorus coordinator")
	errOtherJob     = errors.New("different job: use the same --job in all processes")
	errOtherVersion = errors.New("different Chorus protocol version: use one version of Chorus in the whole job")
	errReplayed     = errors.New("its first message was used before, or it lost its place to another connection")
	errBadProof     = errors.New("different secret: the proof of the shared secret is wrong")
	errOldToken     = errors.New("CHORUS_TOKEN is of another run of the job, or of another secret: start the process with the launcher of this run")
)

// dialHandshake authenticates c on the dialing side.
func dialHandshake(c net.Conn, job string, by Credential) (*Link, error) {
	if s, ok := c.(simulatedConn); ok {
		return s.Handshake(job, by, true)
	}
	key := by.Key
	if err := c.SetDeadline(time.Now().Add(HandshakeTimeout)); err != nil {
		return nil, err
	}
	priv, nonce, err := ephemeral()
	if err != nil {
		return nil, err
	}
	tag := by.Tag(job)
	said := Concat(Magic[:], []byte{ProtocolVersion}, tag[:], nonce, priv.PublicKey().Bytes())
	said = append(said, Seal(key, said)...)
	if _, err := c.Write(said); err != nil {
		return nil, err
	}
	answer := make([]byte, AnswerBytes)
	if n, err := io.ReadFull(c, answer); err != nil {
		if n > 0 && !bytes.HasPrefix(answer[:n], Magic[:min(n, len(Magic))]) {
			return nil, errNotChorus
		}
		return nil, err
	}
	if err := CheckAnswer(answer); err != nil {
		if by.Worker && err == errBadProof {
			err = errOldToken
		}
		return nil, err
	}
	said = append(said, answer[:AnswerBytes-ProofBytes]...)
	if !hmac.Equal(answer[AnswerBytes-ProofBytes:], proof(key, "listener", said)) {
		// Send a zero proof, so that the listener can notify its user, too.
		_, err := c.Write(make([]byte, ProofBytes))
		return nil, errors.Join(errBadProof, err)
	}
	said = append(said, answer[AnswerBytes-ProofBytes:]...)
	mine := proof(key, "dialer", said)
	if _, err := c.Write(mine); err != nil {
		return nil, err
	}
	point := answer[6+NonceBytes:][:PointBytes]
	return newLink(c, key, priv, point, append(said, mine...), true)
}

func CheckAnswer(b []byte) error {
	switch {
	case !bytes.HasPrefix(b, Magic[:]):
		return errNotChorus
	case b[5] == statusOtherVersion || b[4] != ProtocolVersion:
		return errOtherVersion
	case b[5] == statusOtherJob:
		return errOtherJob
	case b[5] == statusOtherSecret:
		return errBadProof
	case b[5] != StatusWelcome:
		return errNotChorus
	}
	return nil
}

// AcceptHandshake authenticates c on the listening side. It does not reply to
// strangers; a dialer of another job, version or secret receives only that status.
func AcceptHandshake(c net.Conn, job string, by Credential) (*Link, error) {
	s, limited := c.(*limitedConn)
	inner := c
	if limited {
		inner = s.Conn
	}
	if sim, ok := inner.(simulatedConn); ok {
		return sim.Handshake(job, by, false)
	}
	if !limited { // the time of a stranger has begun when it was accepted
		if err := c.SetDeadline(time.Now().Add(HandshakeTimeout)); err != nil {
			return nil, err
		}
	}
	hello, err := ReadHello(c)
	if err != nil {
		return nil, err
	}
	if by, err = by.Of(hello, job); err != nil {
		return nil, Reject(c, err)
	}
	if limited && !s.said(hello) {
		return nil, errReplayed
	}
	priv, nonce, err := ephemeral()
	if err != nil {
		return nil, err
	}
	key := by.Key
	part := Concat(Magic[:], []byte{ProtocolVersion, StatusWelcome}, nonce, priv.PublicKey().Bytes())
	said := append(hello, part...)
	mine := proof(key, "listener", said)
	if _, err := c.Write(append(part, mine...)); err != nil {
		return nil, err
	}
	said = append(said, mine...)
	theirs := make([]byte, ProofBytes)
	if _, err := io.ReadFull(c, theirs); err != nil {
		return nil, err
	}
	if !hmac.Equal(theirs, proof(key, "dialer", said)) {
		return nil, errBadProof
	}
	point := hello[5+tagBytes+NonceBytes:][:PointBytes]
	l, err := newLink(rawConn(c), key, priv, point, append(said, theirs...), false)
	if err == nil {
		l.Worker = by.Worker
	}
	return l, err
}

// ReadHello reads the first message of a dialer.
func ReadHello(c net.Conn) ([]byte, error) {
	hello := make([]byte, HelloBytes)
	// Read the magic first, so that a port scanner or a browser is rejected
	// immediately and does not occupy one of the few places until the deadline.
	if _, err := io.ReadFull(c, hello[:len(Magic)]); err != nil {
		return nil, err
	}
	if !bytes.Equal(hello[:len(Magic)], Magic[:]) {
		return nil, errNotChorus
	}
	// The rest depends on the version.
	if _, err := io.ReadFull(c, hello[len(Magic):][:1]); err != nil || hello[len(Magic)] != ProtocolVersion {
		return hello, err
	}
	_, err := io.ReadFull(c, hello[len(Magic)+1:])
	return hello, err
}

// nonceOf returns the nonce of a dialer's first message.
func nonceOf(hello []byte) []byte { return hello[5+tagBytes:][:NonceBytes] }

// Seal returns the end of a dialer's first message.
func Seal(key, said []byte) []byte { return proof(key, "hello", said)[:sealBytes] }

// Of returns the credential that a dialer's first message names: this one, or the
// credential of workers.
func (k Credential) Of(hello []byte, job string) (Credential, error) {
	if hello[4] != ProtocolVersion {
		return k, errOtherVersion
	}
	worker, err := k.forWorkers(k.run)
	if err != nil {
		return k, err
	}
	switch [tagBytes]byte(hello[5:][:tagBytes]) {
	case k.Tag(job):
	case worker.Tag(job):
		k = worker
	default:
		return k, errOtherJob
	}
	said := hello[:HelloBytes-sealBytes]
	if !hmac.Equal(hello[HelloBytes-sealBytes:], Seal(k.Key, said)) {
		if k.Worker {
			return k, errOldToken
		}
		return k, errBadProof
	}
	return k, nil
}

// Reject replies to a dialer of another version, job or secret with a status
// and without a proof, and returns the reason.
func Reject(c net.Conn, reason error) error {
	status, ok := map[error]byte{errOtherVersion: statusOtherVersion, errOtherJob: statusOtherJob, errBadProof: statusOtherSecret, errOldToken: statusOtherSecret}[reason]
	if !ok {
		return reason
	}
	answer := make([]byte, AnswerBytes)
	copy(answer, Magic[:])
	answer[4], answer[5] = ProtocolVersion, status
	_, err := c.Write(answer)
	return errors.Join(reason, err)
}

// newLink creates the encrypted link of an authenticated connection.
func newLink(c net.Conn, key []byte, priv *ecdh.PrivateKey, point, said []byte, dialer bool) (*Link, error) {
	pub, err := ecdh.X25519().NewPublicKey(point)
	if err != nil {
		return nil, err
	}
	shared, err := priv.ECDH(pub)
	if err != nil {
		return nil, err
	}
	salt := sha256.Sum256(said)
	toListener, err := frameCipher(Concat(shared, key), salt[:], "chorus dialer to listener")
	if err != nil {
		return nil, err
	}
	toDialer, err := frameCipher(Concat(shared, key), salt[:], "chorus listener to dialer")
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	if dialer {
		return &Link{Conn: c, Seal: toListener, Open: toDialer}, nil
	}
	return &Link{Conn: c, Seal: toDialer, Open: toListener}, nil
}

func frameCipher(ikm, salt []byte, info string) (cipher.AEAD, error) {
	k, err := hkdf.Key(sha256.New, ikm, salt, info, KeyBytes)
	if err != nil {
		return nil, err
	}
	b, err := aes.NewCipher(k)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(b)
}

func ephemeral() (*ecdh.PrivateKey, []byte, error) {
	priv, err := ecdh.X25519().GenerateKey(rand.Reader)
	nonce := make([]byte, NonceBytes)
	rand.Read(nonce) // never fails: crypto/rand exits the process instead
	return priv, nonce, err
}

func proof(key []byte, role string, said []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(role))
	h.Write(said)
	return h.Sum(nil)
}

func Concat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
