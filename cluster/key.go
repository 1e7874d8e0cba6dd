package cluster

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
	"github.com/gochorus/chorus/internal/safefile"
)

const (
	minSecretBytes = 16
	maxSecretBytes = 64 << 10
	keyBytes       = 32
	tagBytes       = 16
)

// keys are derived from the secret of a job, each for one purpose. A worker and
// its children receive only a worker key: they can neither read the gossip nor
// act as a launcher.
type keys struct {
	control credential // for launchers, and for processes that have the secret
}

// gossipKeys are the keys of gossip in one run of a job.
type gossipKeys struct {
	key   []byte // encrypts memberlist's packets
	label string // unencrypted prefix of each packet
}

// deriveKeys derives the keys of a job. The job's name is the salt, so two jobs
// with the same secret have different keys. With an empty secret, anyone who
// knows the name can derive the keys; the caller has checked that this is
// permitted.
func deriveKeys(secret []byte, job string) (keys, error) {
	k, err := hkdf.Key(sha256.New, secret, []byte(job), "chorus control 1", keyBytes)
	if err != nil {
		return keys{}, err
	}
	return keys{credential{key: k}}, nil
}

// ofGossip returns the keys of gossip in a run of the job: packets of an earlier run have another label and another key.
func (k keys) ofGossip(run string) (gossipKeys, error) {
	key, err := hkdf.Expand(sha256.New, k.control.key, "chorus gossip 2 of run "+run, keyBytes)
	if err != nil {
		return gossipKeys{}, err
	}
	label, err := hkdf.Expand(sha256.New, k.control.key, "chorus gossip label 2 of run "+run, tagBytes)
	return gossipKeys{key, hex.EncodeToString(label)}, err
}

// A credential authenticates connections to the coordinator. A worker's
// credential permits only registration as a worker.
type credential struct {
	key    []byte
	worker bool
	run    string // the run of the job whose workers a listener accepts
}

// forWorkers returns the credential of the workers of a run of the job, so that a token does not outlive its run. The
// launchers' credential cannot be derived from it.
func (c credential) forWorkers(run string) (credential, error) {
	if c.worker {
		return c, nil
	}
	k, err := hkdf.Expand(sha256.New, c.key, "chorus worker 2 of run "+run, keyBytes)
	return credential{key: k, worker: true}, err
}

// derive returns a key that all workers of a run of the job can derive, for one purpose.
func (c credential) derive(job, run, purpose string) ([]byte, error) {
	w, err := c.forWorkers(run)
	if err != nil {
		return nil, err
	}
	none, err := deriveKeys(nil, job)
	if err != nil {
		return nil, err
	}
	known, err := none.control.forWorkers(run)
	if err != nil {
		return nil, err
	}
	if subtle.ConstantTimeCompare(known.key, w.key) == 1 {
		return nil, badConfig("key for %s of job %q: the job has no secret, so anyone could derive the key: set %s in all processes", purpose, job, env.SecretFile.Name)
	}
	return hkdf.Expand(sha256.New, w.key, "chorus key 1 for "+purpose, keyBytes)
}

// tag identifies a job and a role on the wire without revealing the name.
func (c credential) tag(job string) [tagBytes]byte {
	if c.worker {
		sum := sha256.Sum256([]byte("chorus worker of job 1\x00" + job))
		return [tagBytes]byte(sum[:tagBytes])
	}
	return jobTag(job)
}

// jobTag returns the tag for processes with the job's secret.
func jobTag(job string) [tagBytes]byte {
	sum := sha256.Sum256([]byte("chorus job 1\x00" + job))
	return [tagBytes]byte(sum[:tagBytes])
}

// readSecretFile reads a shared secret and checks that only the owner can access
// the file. It ignores trailing white space, because editors add a newline and
// pipes do not.
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
	if mode := st.Mode().Perm(); mode&0o077 != 0 && !isPodSecret(st) {
		return nil, badConfig("secret file %s: mode %04o lets others use it: run chmod 600 %[1]s", path, mode)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return nil, badConfig("secret file %s belongs to user %d, who knows the secret: want this user's or root's", path, sys.Uid)
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

func checkSecret(b []byte) error {
	if len(b) < minSecretBytes {
		return fmt.Errorf("%d bytes of secret: want at least %d, for instance from: openssl rand -hex 32", len(b), minSecretBytes)
	}
	return nil
}

func encodeToken(c credential) string { return hex.EncodeToString(c.key) }

// decodeToken returns a worker's credential.
func decodeToken(s string) (*credential, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != keyBytes {
		return nil, fmt.Errorf("want %d hexadecimal digits", 2*keyBytes)
	}
	return &credential{key: b, worker: true}, nil
}
