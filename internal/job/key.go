package job

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/safe"
)

const (
	minSecretBytes = 16
	maxSecretBytes = 64 << 10
	KeyBytes       = 32
	tagBytes       = 16
)

// keys are derived from the secret of a job, each for one purpose. A worker and
// its children receive only a worker key: they can neither read the gossip nor
// act as a launcher.
type keys struct {
	Control Credential // for launchers, and for processes that have the secret
}

// gossipKeys are the keys of gossip in one run of a job.
type gossipKeys struct {
	key   []byte // encrypts memberlist's packets
	label string // unencrypted prefix of each packet
}

// DeriveKeys derives the keys of a job. The job's name is the salt, so two jobs
// with the same secret have different keys. With an empty secret, anyone who
// knows the name can derive the keys; the caller has checked that this is
// permitted.
func DeriveKeys(secret []byte, job string) (keys, error) {
	k, err := hkdf.Key(sha256.New, secret, []byte(job), "chorus control 1", KeyBytes)
	if err != nil {
		return keys{}, err
	}
	return keys{Credential{Key: k}}, nil
}

// ofGossip returns the keys of gossip in a run of the job: packets of an earlier run have another label and another key.
func (k keys) ofGossip(run string) (gossipKeys, error) {
	key, err := hkdf.Expand(sha256.New, k.Control.Key, "chorus gossip 2 of run "+run, KeyBytes)
	if err != nil {
		return gossipKeys{}, err
	}
	label, err := hkdf.Expand(sha256.New, k.Control.Key, "chorus gossip label 2 of run "+run, tagBytes)
	return gossipKeys{key, hex.EncodeToString(label)}, err
}

// A Credential authenticates connections to the coordinator. A worker's
// Credential permits only registration as a worker.
type Credential struct {
	Key    []byte
	Worker bool
	run    string // the run of the job whose workers a listener accepts
}

// forWorkers returns the credential of the workers of a run of the job, so that a token does not outlive its run. The
// launchers' credential cannot be derived from it.
func (c Credential) forWorkers(run string) (Credential, error) {
	if c.Worker {
		return c, nil
	}
	k, err := hkdf.Expand(sha256.New, c.Key, "chorus worker 2 of run "+run, KeyBytes)
	return Credential{Key: k, Worker: true}, err
}

// Derive returns a key that all workers of a run of the job can derive, for one purpose.
func (c Credential) Derive(job, run, purpose string) ([]byte, error) {
	w, err := c.forWorkers(run)
	if err != nil {
		return nil, err
	}
	none, err := DeriveKeys(nil, job)
	if err != nil {
		return nil, err
	}
	known, err := none.Control.forWorkers(run)
	if err != nil {
		return nil, err
	}
	if subtle.ConstantTimeCompare(known.Key, w.Key) == 1 {
		return nil, BadConfig("key for %s of job %q: the job has no secret, so anyone could derive the key: set %s in all processes", purpose, job, env.SecretFile.Name)
	}
	return hkdf.Expand(sha256.New, w.Key, "chorus key 1 for "+purpose, KeyBytes)
}

// Tag identifies a job and a role on the wire without revealing the name.
func (c Credential) Tag(job string) [tagBytes]byte {
	if c.Worker {
		sum := sha256.Sum256([]byte("chorus worker of job 1\x00" + job))
		return [tagBytes]byte(sum[:tagBytes])
	}
	return JobTag(job)
}

// JobTag returns the tag for processes with the job's secret.
func JobTag(job string) [tagBytes]byte {
	sum := sha256.Sum256([]byte("chorus job 1\x00" + job))
	return [tagBytes]byte(sum[:tagBytes])
}

// ReadSecretFile reads a shared secret and checks that only the owner can access
// the file. It ignores trailing white space, because editors add a newline and
// pipes do not.
func ReadSecretFile(path string) ([]byte, error) {
	f, err := safe.Open(path)
	if err != nil {
		return nil, BadConfig("secret file: %v", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, BadConfig("secret file: %v", err)
	}
	if mode := st.Mode().Perm(); mode&0o077 != 0 && !isPodSecret(st) {
		return nil, BadConfig("secret file %s: mode %04o lets others use it: run chmod 600 %[1]s", path, mode)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return nil, BadConfig("secret file %s belongs to user %d, who knows the secret: want this user's or root's", path, sys.Uid)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSecretBytes+1))
	if err != nil {
		return nil, BadConfig("secret file: %v", err)
	}
	if len(b) > maxSecretBytes {
		return nil, BadConfig("secret file %s: more than %d bytes", path, maxSecretBytes)
	}
	b = bytes.TrimRight(b, " \t\r\n")
	if err := CheckSecret(b); err != nil {
		return nil, BadConfig("secret file %s: %v", path, err)
	}
	return b, nil
}

// isPodSecret reports whether the file is of a Kubernetes Secret in a pod with fsGroup: root owns
// it, and the pod's group can only read it. No process outside of the pod has this group or sees
// the file.
func isPodSecret(st fs.FileInfo) bool {
	_, inPod := os.LookupEnv("KUBERNETES_SERVICE_HOST")
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !inPod || !ok || st.Mode().Perm() != 0o440 || sys.Uid != 0 {
		return false
	}
	groups, err := os.Getgroups()
	return err == nil && (int(sys.Gid) == os.Getegid() || slices.Contains(groups, int(sys.Gid)))
}

func CheckSecret(b []byte) error {
	if len(b) < minSecretBytes {
		return fmt.Errorf("%d bytes of secret: want at least %d, for instance from: openssl rand -hex 32", len(b), minSecretBytes)
	}
	return nil
}

func encodeToken(c Credential) string { return hex.EncodeToString(c.Key) }

// DecodeToken returns a worker's credential.
func DecodeToken(s string) (*Credential, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != KeyBytes {
		return nil, fmt.Errorf("want %d hexadecimal digits", 2*KeyBytes)
	}
	return &Credential{Key: b, Worker: true}, nil
}
