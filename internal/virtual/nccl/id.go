package nccl

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net"
	"strings"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// A token is a secret shared by the ranks of a communicator. A connection must
// present it.
type token [16]byte

func (t token) String() string { return hex.EncodeToString(t[:]) }

// derive returns the token of a communicator created from this one.
func (t token) derive(purpose string) token {
	sum := sha256.Sum256(append(t[:], purpose...))
	return token(sum[:16])
}

func randomToken() (t token) {
	_, _ = rand.Read(t[:]) // never fails
	return t
}

const idMagic = "chorusID"

// makeID packs a token and the address of its root into a unique id.
func makeID(t token, address string) (ncclapi.UniqueID, error) {
	var id ncclapi.UniqueID
	at := copy(id[:], idMagic)
	at += copy(id[at:], t[:])
	if len(address) > len(id)-at-1 {
		return id, errors.New("the address of the root is too long for a unique id: " + address)
	}
	id[at] = byte(len(address))
	copy(id[at+1:], address)
	return id, nil
}

func parseID(id *ncclapi.UniqueID) (t token, address string, err error) {
	rest, ok := strings.CutPrefix(string(id[:]), idMagic)
	if !ok {
		return t, "", errors.New("the unique id was not created by virtual devices")
	}
	rest = rest[copy(t[:], rest):]
	if n := int(rest[0]); n < len(rest) {
		return t, rest[1 : 1+n], nil
	}
	return t, "", errors.New("the unique id is damaged")
}

// listen opens a listener at a new address: a network of package net, a space and
// an address. Unix sockets are abstract, so that no file remains if the process
// is killed.
func (l *lib) listen() (net.Listener, string, error) {
	network, where := "unix", "@chorus-"+randomToken().String()
	if ip := l.cfg.Network; ip != "" {
		network, where = "tcp", net.JoinHostPort(ip, "0")
	}
	ln, err := net.Listen(network, where)
	if err != nil {
		return nil, "", err
	}
	return ln, network + " " + ln.Addr().String(), nil
}

func dial(address string) (net.Conn, error) {
	network, where, _ := strings.Cut(address, " ")
	return net.DialTimeout(network, where, greetTimeout)
}
