package job

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/gochorus/chorus/internal/safe"
)

// maxNameBytes limits the names of jobs, hosts and processes.
const maxNameBytes = 255

// CheckName returns an error if a name cannot be printed unchanged.
func CheckName(of, name string) error {
	switch {
	case len(name) > maxNameBytes:
		return BadConfig("the name of the %s has %d bytes: want at most %d", of, len(name), maxNameBytes)
	case strings.ContainsRune(name, '\\') || safe.Text(name) != name:
		return BadConfig("the name of the %s is %s: want graphic characters, and no backslash", of, safe.Text(name))
	}
	return nil
}

// checkNames validates the names in a registration, whose control characters
// were already replaced by escapes with backslashes.
func checkNames(names ...string) *Refusal {
	for _, n := range names {
		if err := CheckName("host or process", n); err != nil {
			return &Refusal{Reason: strings.TrimPrefix(err.Error(), "cluster: ")}
		}
	}
	return nil
}

// naturalCompare compares names in natural order: node2 before node10. If names
// differ only in leading zeros, it compares them as text, so that only equal
// names compare equal.
func naturalCompare(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		if isDigit(x[0]) && isDigit(y[0]) {
			var m, n string
			m, x = cutDigits(x)
			n, y = cutDigits(y)
			if c := compareDigits(m, n); c != 0 {
				return c
			}
			continue
		}
		if x[0] != y[0] {
			return int(x[0]) - int(y[0])
		}
		x, y = x[1:], y[1:]
	}
	if c := len(x) - len(y); c != 0 {
		return c
	}
	return strings.Compare(a, b)
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func cutDigits(s string) (digits, rest string) {
	i := 0
	for i < len(s) && isDigit(s[i]) {
		i++
	}
	return s[:i], s[i:]
}

// compareDigits compares numbers without conversion, so any length is valid.
func compareDigits(a, b string) int {
	a, b = strings.TrimLeft(a, "0"), strings.TrimLeft(b, "0")
	if c := len(a) - len(b); c != 0 {
		return c
	}
	return strings.Compare(a, b)
}

// RandomBytes returns n cryptographically random bytes.
func RandomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails: crypto/rand exits the process instead
	return b
}

// newName generates a name for a job: short for log lines, and long enough to be
// unique among the jobs of a user.
func newName() string { return "job-" + hex.EncodeToString(RandomBytes(5)) }

// newUUID returns an identifier for one start of an agent; a restarted agent has another one.
func newUUID() string { return hex.EncodeToString(RandomBytes(16)) }

// PeersID identifies a list of peers.
func PeersID(peers []string) string {
	sum := sha256.Sum256([]byte(strings.Join(peers, "\n")))
	return hex.EncodeToString(sum[:8])
}
