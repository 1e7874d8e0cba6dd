package cluster

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/sockets"
)

// strangerLine returns a line for the user of this host about a process that failed to authenticate. It
// returns "" for connections of other programs, such as port scanners.
func strangerLine(conn net.Conn, why error) string {
	var reason string
	other, foreign := errors.AsType[*sockets.UserError](why)
	switch {
	case foreign:
		reason = other.Error()
	case errors.Is(why, errBadProof):
		reason = "it has a different secret"
	case errors.Is(why, errOldToken):
		reason = "its CHORUS_TOKEN is of another run of the job, or of another secret"
	case errors.Is(why, errOtherJob):
		reason = "it belongs to a different job"
	case errors.Is(why, errOtherVersion):
		reason = errOtherVersion.Error()
	default:
		return ""
	}
	return fmt.Sprintf("refused the process at %s: %s", peerAddr(conn), reason)
}

// maxSaid limits the number of remembered notifications.
const maxSaid = 64

// A lineFilter tells which notifications are new. The lock of its owner guards it.
type lineFilter struct {
	said map[string]time.Time
}

// isNew reports whether the same text about the same host was not said lately, and remembers it.
func (f *lineFilter) isNew(ip, text string) bool {
	if f.said == nil || len(f.said) >= maxSaid {
		f.said = map[string]time.Time{}
	}
	// Ignore digits: a process that retries has another port or pid.
	key := ip + strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, text)
	if last, ok := f.said[key]; ok && time.Since(last) < waitLine {
		return false
	}
	f.said[key] = time.Now()
	return true
}
