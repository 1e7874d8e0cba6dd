package cluster

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"

	"github.com/gochorus/chorus/internal/safefile"
)

const (
	minSecretBytes = 16
	maxSecretBytes = 64 << 10
	keyBytes       = 32
	tagBytes       = 16
)

// keys are what a job's secret is good for. Each is derived for one purpose: a
// worker's process and its children, which get only a worker's key, can neither
// read the gossip nor do what a launcher does.
type keys struct {
	control credential // of launchers, and of processes that have the secret themselves
	gossip  []byte     // encrypts memberlist's packets
	label   string     // begins each of them, in clear
}

// deriveKeys derives a job's keys. The job's name is the salt: the same secret
// gives two jobs different keys. An empty secret gives keys that anyone can
// derive who knows the name; callers have decided that this is allowed.
func deriveKeys(secret []byte, job string) (keys, error) {
	k, err := hkdf.Key(sha256.New, secret, []byte(job), "chorus control 1", keyBytes)
	if err != nil {
		return keys{}, err
	}
	control := credential{key: k}
	gossip, err := hkdf.Key(sha256.New, secret, []byte(job), "chorus gossip 1", keyBytes)
	if err != nil {
		return keys{}, err
	}
	label, err := hkdf.Key(sha256.New, secret, []byte(job), "chorus gossip label 1", tagBytes)
	return keys{control, gossip, hex.EncodeToString(label)}, err
}

// A credential authenticates connections to the coordinator. With that of a worker
// a process registers as a worker only.
type credential struct {
	key    []byte
	worker bool
}

// forWorkers returns the credential of the job's workers, from which that of the
// launchers cannot be found.
func (c credential) forWorkers() (credential, error) {
	if c.worker {
		return c, nil
	}
	k, err := hkdf.Expand(sha256.New, c.key, "chorus worker 1", keyBytes)
	return credential{key: k, worker: true}, err
}

// tag names a job and a role on the wire without telling the name.
func (c credential) tag(job string) [tagBytes]byte {
	if c.worker {
		sum := sha256.Sum256([]byte("chorus worker of job 1\x00" + job))
		return [tagBytes]byte(sum[:tagBytes])
	}
	return jobTag(job)
}

// jobTag is the tag of those who have the job's secret.
func jobTag(job string) [tagBytes]byte {
	sum := sha256.Sum256([]byte("chorus job 1\x00" + job))
	return [tagBytes]byte(sum[:tagBytes])
}

// readSecretFile reads a shared secret and checks that only its owner can.
// White space at the end does not count: editors add a newline, pipes do not.
func readSecretFile(path string) ([]byte, error) {
	f, err := safefile.Open(path)
	if err != nil {
		return nil, badConfig("secret file: %v", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, badConfig("secret file: %v", err)
	}
	if mode := st.Mode().Perm(); mode&0o077 != 0 {
		return nil, badConfig("secret file %s: mode %04o lets others use it: run chmod 600 %[1]s", path, mode)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSecretBytes+1))
	if err != nil {
		return nil, badConfig("secret file: %v", err)
	}
	if len(b) > maxSecretBytes {
		return nil, badConfig("secret file %s: more than %d bytes", path, maxSecretBytes)
	}
	b = bytes.TrimRight(b, " \t\r\n")
	if err := checkSecret(b); err != nil {
		return nil, badConfig("secret file %s: %v", path, err)
	}
	return b, nil
}

func checkSecret(b []byte) error {
	if len(b) < minSecretBytes {
		return fmt.Errorf("%d bytes of secret: want at least %d, for instance from: openssl rand -hex 32", len(b), minSecretBytes)
	}
	return nil
}

func encodeToken(c credential) string { return hex.EncodeToString(c.key) }

// decodeToken returns the credential of a worker.
func decodeToken(s string) (*credential, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != keyBytes {
		return nil, fmt.Errorf("want %d hexadecimal digits", 2*keyBytes)
	}
	return &credential{key: b, worker: true}, nil
}
