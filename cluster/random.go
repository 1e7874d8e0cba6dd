package cluster

import (
	"crypto/rand"
	"encoding/hex"
)

// randomBytes returns n bytes that nobody can guess.
func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails: crypto/rand ends the process instead
	return b
}

// newName makes up a job's name: short enough for a log line, long enough that
// two jobs of a user never share one.
func newName() string { return "job-" + hex.EncodeToString(randomBytes(5)) }

// newUUID names one start of an agent, so that a restarted one is another.
func newUUID() string { return hex.EncodeToString(randomBytes(16)) }
