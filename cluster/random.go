package cluster

import (
	"crypto/rand"
	"encoding/hex"
)

// randomBytes returns n cryptographically random bytes.
func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails: crypto/rand exits the process instead
	return b
}

// newName generates a name for a job: short for log lines, and long enough to be
// unique among the jobs of a user.
func newName() string { return "job-" + hex.EncodeToString(randomBytes(5)) }

// newUUID returns an identifier for one start of an agent; a restarted agent has another one.
func newUUID() string { return hex.EncodeToString(randomBytes(16)) }
