package cluster

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
	protocolVersion = 9
	nonceBytes      = 32
	pointBytes      = 32
	proofBytes      = sha256.Size
	sealBytes       = 16
	helloBytes      = 4 + 1 + tagBytes + nonceBytes + pointBytes + sealBytes
	answerBytes     = 4 + 1 + 1 + nonceBytes + pointBytes + proofBytes

	handshakeTimeout = 2 * time.Second
)

var magic = [4]byte{'c', 'h', 'o', 'r'}

// Status bytes of the listener's reply.
const (
	statusWelcome = iota
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
func dialHandshake(c net.Conn, job string, by credential) (*link, error) {
	if s, ok := c.(simulatedConn); ok {
		return s.handshake(job, by, true)
	}
	key := by.key
	if err := c.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	priv, nonce, err := ephemeral()
	if err != nil {
		return nil, err
	}
	tag := by.tag(job)
	said := concat(magic[:], []byte{protocolVersion}, tag[:], nonce, priv.PublicKey().Bytes())
	said = append(said, seal(key, said)...)
	if _, err := c.Write(said); err != nil {
		return nil, err
	}
	answer := make([]byte, answerBytes)
	if n, err := io.ReadFull(c, answer); err != nil {
		if n > 0 && !bytes.HasPrefix(answer[:n], magic[:min(n, len(magic))]) {
			return nil, errNotChorus
		}
		return nil, err
	}
	if err := checkAnswer(answer); err != nil {
		if by.worker && err == errBadProof {
			err = errOldToken
		}
		return nil, err
	}
	said = append(said, answer[:answerBytes-proofBytes]...)
	if !hmac.Equal(answer[answerBytes-proofBytes:], proof(key, "listener", said)) {
		// Send a zero proof, so that the listener can notify its user, too.
		_, err := c.Write(make([]byte, proofBytes))
		return nil, errors.Join(errBadProof, err)
	}
	said = append(said, answer[answerBytes-proofBytes:]...)
	mine := proof(key, "dialer", said)
	if _, err := c.Write(mine); err != nil {
		return nil, err
	}
	point := answer[6+nonceBytes:][:pointBytes]
	return newLink(c, key, priv, point, append(said, mine...), true)
}

func checkAnswer(b []byte) error {
	switch {
	case !bytes.HasPrefix(b, magic[:]):
		return errNotChorus
	case b[5] == statusOtherVersion || b[4] != protocolVersion:
		return errOtherVersion
	case b[5] == statusOtherJob:
		return errOtherJob
	case b[5] == statusOtherSecret:
		return errBadProof
	case b[5] != statusWelcome:
		return errNotChorus
	}
	return nil
}

// acceptHandshake authenticates c on the listening side. It does not reply to
// strangers; a dialer of another job, version or secret receives only that status.
func acceptHandshake(c net.Conn, job string, by credential) (*link, error) {
	s, limited := c.(*limitedConn)
	inner := c
	if limited {
		inner = s.Conn
	}
	if sim, ok := inner.(simulatedConn); ok {
		return sim.handshake(job, by, false)
	}
	if !limited { // the time of a stranger has begun when it was accepted
		if err := c.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
			return nil, err
		}
	}
	hello, err := readHello(c)
	if err != nil {
		return nil, err
	}
	if by, err = by.of(hello, job); err != nil {
		return nil, reject(c, err)
	}
	if limited && !s.said(hello) {
		return nil, errReplayed
	}
	priv, nonce, err := ephemeral()
	if err != nil {
		return nil, err
	}
	key := by.key
	part := concat(magic[:], []byte{protocolVersion, statusWelcome}, nonce, priv.PublicKey().Bytes())
	said := append(hello, part...)
	mine := proof(key, "listener", said)
	if _, err := c.Write(append(part, mine...)); err != nil {
		return nil, err
	}
	said = append(said, mine...)
	theirs := make([]byte, proofBytes)
	if _, err := io.ReadFull(c, theirs); err != nil {
		return nil, err
	}
	if !hmac.Equal(theirs, proof(key, "dialer", said)) {
		return nil, errBadProof
	}
	point := hello[5+tagBytes+nonceBytes:][:pointBytes]
	l, err := newLink(rawConn(c), key, priv, point, append(said, theirs...), false)
	if err == nil {
		l.worker = by.worker
	}
	return l, err
}

// readHello reads the first message of a dialer.
func readHello(c net.Conn) ([]byte, error) {
	hello := make([]byte, helloBytes)
	// Read the magic first, so that a port scanner or a browser is rejected
	// immediately and does not occupy one of the few places until the deadline.
	if _, err := io.ReadFull(c, hello[:len(magic)]); err != nil {
		return nil, err
	}
	if !bytes.Equal(hello[:len(magic)], magic[:]) {
		return nil, errNotChorus
	}
	// The rest depends on the version.
	if _, err := io.ReadFull(c, hello[len(magic):][:1]); err != nil || hello[len(magic)] != protocolVersion {
		return hello, err
	}
	_, err := io.ReadFull(c, hello[len(magic)+1:])
	return hello, err
}

// nonceOf returns the nonce of a dialer's first message.
func nonceOf(hello []byte) []byte { return hello[5+tagBytes:][:nonceBytes] }

// seal returns the end of a dialer's first message.
func seal(key, said []byte) []byte { return proof(key, "hello", said)[:sealBytes] }

// of returns the credential that a dialer's first message names: this one, or the
// credential of workers.
func (k credential) of(hello []byte, job string) (credential, error) {
	if hello[4] != protocolVersion {
		return k, errOtherVersion
	}
	worker, err := k.forWorkers(k.run)
	if err != nil {
		return k, err
	}
	switch [tagBytes]byte(hello[5:][:tagBytes]) {
	case k.tag(job):
	case worker.tag(job):
		k = worker
	default:
		return k, errOtherJob
	}
	said := hello[:helloBytes-sealBytes]
	if !hmac.Equal(hello[helloBytes-sealBytes:], seal(k.key, said)) {
		if k.worker {
			return k, errOldToken
		}
		return k, errBadProof
	}
	return k, nil
}

// reject replies to a dialer of another version, job or secret with a status and without a proof. It
// returns the reason.
func reject(c net.Conn, reason error) error {
	status, ok := map[error]byte{errOtherVersion: statusOtherVersion, errOtherJob: statusOtherJob, errBadProof: statusOtherSecret, errOldToken: statusOtherSecret}[reason]
	if !ok {
		return reason
	}
	answer := make([]byte, answerBytes)
	copy(answer, magic[:])
	answer[4], answer[5] = protocolVersion, status
	_, err := c.Write(answer)
	return errors.Join(reason, err)
}

// newLink creates the encrypted link of an authenticated connection.
func newLink(c net.Conn, key []byte, priv *ecdh.PrivateKey, point, said []byte, dialer bool) (*link, error) {
	pub, err := ecdh.X25519().NewPublicKey(point)
	if err != nil {
		return nil, err
	}
	shared, err := priv.ECDH(pub)
	if err != nil {
		return nil, err
	}
	salt := sha256.Sum256(said)
	toListener, err := frameCipher(concat(shared, key), salt[:], "chorus dialer to listener")
	if err != nil {
		return nil, err
	}
	toDialer, err := frameCipher(concat(shared, key), salt[:], "chorus listener to dialer")
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	if dialer {
		return &link{c: c, seal: toListener, open: toDialer}, nil
	}
	return &link{c: c, seal: toDialer, open: toListener}, nil
}

func frameCipher(ikm, salt []byte, info string) (cipher.AEAD, error) {
	k, err := hkdf.Key(sha256.New, ikm, salt, info, keyBytes)
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
	nonce := make([]byte, nonceBytes)
	rand.Read(nonce) // never fails: crypto/rand exits the process instead
	return priv, nonce, err
}

func proof(key []byte, role string, said []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(role))
	h.Write(said)
	return h.Sum(nil)
}

func concat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
