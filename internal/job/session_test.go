package job

import (
	"fmt"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
)

// quick is a timing for tests that lose members; brisk enough to wait for and
// slow enough for two busy cores under the race detector.
var quick = Timing{Join: 90 * time.Second, Call: 90 * time.Second, Heartbeat: 50 * time.Millisecond, LostAfter: 2 * time.Second}

var testSecret = []byte("a secret of 32 bytes for testing")

// freeAddr returns an address that nobody listens on; the port stays reserved
// until the test ends.
func freeAddr(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", testhost.Reserve(t))
}
