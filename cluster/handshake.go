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

// The handshake, before which nobody believes anything that was sent:
//
//	dialer    magic version tag nonce point            85 bytes
//	listener  magic version status nonce point proof  102 bytes
//	dialer    proof                                    32 bytes
//
// A proof is an HMAC, under the job's control key, of everything said before
// it. The frame keys come from the control key and from an X25519 exchange, so
// a secret that leaks later does not open recorded traffic. Every message has a
// fixed length: no length of a stranger is ever used.
const (
	protocolVersion = 1
	nonceBytes      = 32
	pointBytes      = 32
	proofBytes      = sha256.Size
	helloBytes      = 4 + 1 + tagBytes + nonceBytes + pointBytes
	answerBytes     = 4 + 1 + 1 + nonceBytes + pointBytes + proofBytes

	handshakeTimeout = 2 * time.Second
)

var magic = [4]byte{'c', 'h', 'o', 'r'}

// Status bytes of the listener's answer.
const (
	statusWelcome = iota
	statusOtherJob
	statusOtherVersion
)

var (
	errNotChorus    = errors.New("what answers there is no Chorus coordinator")
	errOtherJob     = errors.New("that coordinator serves another job")
	errOtherVersion = errors.New("the two ends have different Chorus protocol versions; use one version in the whole job")
	errBadProof     = errors.New("the proof of the shared secret does not fit")
)

// dialHandshake authenticates the dialing end of c.
func dialHandshake(c net.Conn, job string, by credential) (*link, error) {
	key := by.key
	if err := c.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	priv, nonce, err := ephemeral()
	if err != nil {
		return nil, err
	}
	tag := by.tag(job)
	said := join(magic[:], []byte{protocolVersion}, tag[:], nonce, priv.PublicKey().Bytes())
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
		return nil, err
	}
	said = append(said, answer[:answerBytes-proofBytes]...)
	if !hmac.Equal(answer[answerBytes-proofBytes:], proof(key, "listener", said)) {
		// A proof of nothing tells the listener, whose user should know, too.
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
	case b[5] != statusWelcome:
		return errNotChorus
	}
	return nil
}

// acceptHandshake authenticates the listening end of c. A stranger gets
// nothing, a dialer of another job or version learns just that.
func acceptHandshake(c net.Conn, job string, by credential) (*link, error) {
	if err := c.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	hello := make([]byte, helloBytes)
	// The magic first: a port scanner or a browser is turned away at once
	// instead of holding one of the few places until the deadline.
	if _, err := io.ReadFull(c, hello[:len(magic)]); err != nil {
		return nil, err
	}
	if !bytes.Equal(hello[:len(magic)], magic[:]) {
		return nil, errNotChorus
	}
	if _, err := io.ReadFull(c, hello[len(magic):]); err != nil {
		return nil, err
	}
	priv, nonce, err := ephemeral()
	if err != nil {
		return nil, err
	}
	if hello[4] != protocolVersion {
		return nil, turnAway(c, statusOtherVersion, errOtherVersion)
	}
	worker, err := by.forWorkers()
	if err != nil {
		return nil, err
	}
	switch said := [tagBytes]byte(hello[5:][:tagBytes]); said {
	case by.tag(job):
	case worker.tag(job):
		by = worker
	default:
		return nil, turnAway(c, statusOtherJob, errOtherJob)
	}
	key := by.key
	part := join(magic[:], []byte{protocolVersion, statusWelcome}, nonce, priv.PublicKey().Bytes())
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
	l, err := newLink(c, key, priv, point, append(said, theirs...), false)
	if err == nil {
		l.worker = by.worker
	}
	return l, err
}

// turnAway answers with a status and no proof, and returns why.
func turnAway(c net.Conn, status byte, why error) error {
	answer := make([]byte, answerBytes)
	copy(answer, magic[:])
	answer[4], answer[5] = protocolVersion, status
	_, err := c.Write(answer)
	return errors.Join(why, err)
}

// newLink turns an authenticated connection into one of sealed frames.
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
	toListener, err := frameCipher(join(shared, key), salt[:], "chorus dialer to listener")
	if err != nil {
		return nil, err
	}
	toDialer, err := frameCipher(join(shared, key), salt[:], "chorus listener to dialer")
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
	rand.Read(nonce) // never fails: crypto/rand ends the process instead
	return priv, nonce, err
}

func proof(key []byte, role string, said []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(role))
	h.Write(said)
	return h.Sum(nil)
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
