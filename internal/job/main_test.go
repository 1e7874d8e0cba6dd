package job

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/testhost"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 3 && os.Args[1] == "attack" {
		os.Exit(attackMain(os.Args[2], os.Args[3]))
	}
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		// Without this, a program that a test starts from its own file would run all tests, and start programs for ever.
		fmt.Fprintf(os.Stderr, "no role of this test program: %q\n", os.Args[1:])
		os.Exit(2)
	}
	handle.OnLeak = func(l handle.Leak) {
		fmt.Fprintf(os.Stderr, "leaked %s\n%s", l, l.Stack)
		os.Exit(99)
	}
	before := openFiles()
	code := m.Run()
	if code == 0 {
		code = leaks(before)
	}
	os.Exit(code)
}

func openFiles() int {
	names, _ := os.ReadDir("/proc/self/fd")
	return len(names)
}

// leaks waits for goroutines and files to go, memberlist's last probe too.
func leaks(files int) int {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		// The first file may be the poller's own, opened on first use.
		g, f := ours(), openFiles()
		if g == "" && f <= files+4 {
			return 0
		}
		if time.Now().After(deadline) {
			fmt.Fprintf(os.Stderr, "%d files are open, %d were; goroutines left:\n%s\n", f, files, g)
			return 99
		}
	}
}

// ours returns the stacks of this package's goroutines.
func ours() string {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	var left []string
	for s := range strings.SplitSeq(string(buf), "\n\n") {
		if (strings.Contains(s, "internal/job.") || strings.Contains(s, "memberlist.")) && !strings.Contains(s, "job.TestMain") {
			left = append(left, s)
		}
	}
	return strings.Join(left, "\n\n")
}

func requireCause[E error](t *testing.T, ctx context.Context) E {
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(time.Minute):
		require.FailNow(t, "context has not ended")
	}
	e, ok := errors.AsType[E](context.Cause(ctx))
	require.True(t, ok, "cause is %T: %v", context.Cause(ctx), context.Cause(ctx))
	return e
}

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
