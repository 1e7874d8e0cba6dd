package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/handle"
)

// The test binary runs itself again as a worker with its deed as argument and
// the environment of a launcher.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "worker" {
		os.Exit(workerMain(os.Args[2]))
	}
	if len(os.Args) > 3 && os.Args[1] == "agent" {
		os.Exit(agentMain(os.Args[2], os.Args[3]))
	}
	if len(os.Args) > 3 && os.Args[1] == "elastic" {
		os.Exit(elasticMain(os.Args[2], os.Args[3]))
	}
	if len(os.Args) > 4 && os.Args[1] == "flood" {
		os.Exit(floodMain(os.Args[2], os.Args[3], os.Args[4]))
	}
	if len(os.Args) > 2 && os.Args[1] == "launcher" {
		n, _ := strconv.Atoi(os.Args[2])
		os.Exit(launcherMain(n))
	}
	if len(os.Args) > 1 && os.Args[1] == "good" {
		os.Exit(goodMain())
	}
	if len(os.Args) > 4 && os.Args[1] == "other-user" {
		os.Exit(otherUserMain(os.Args[2], os.Args[3], os.Args[4]))
	}
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		fmt.Fprintf(os.Stderr, "no role of this test program: %q\n", os.Args[1:]) // otherwise it would run all tests, and start programs for ever
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
		if (strings.Contains(s, "chorus/cluster.") || strings.Contains(s, "internal/job.") || strings.Contains(s, "memberlist.")) && !strings.Contains(s, "cluster.TestMain") {
			left = append(left, s)
		}
	}
	return strings.Join(left, "\n\n")
}

// awaitVar names a value that the worker waits for before its deed.
const awaitVar = "CLUSTER_TEST_AWAIT"

func workerMain(what string) int {
	if deed, ok := strings.CutPrefix(what, "member-"); ok {
		return memberMain(deed)
	}
	if deed, ok := strings.CutPrefix(what, "member-"); ok {
		return memberMain(deed)
	}
	s, err := Attach(context.Background())
	if err != nil {
		fmt.Println("attach:", err)
		return 41
	}
	fmt.Println("attached", s.Rank())
	if key := os.Getenv(awaitVar); key != "" { // what rank 0 does before it is to lose this one
		if _, err := s.Get(context.Background(), key); err != nil {
			fmt.Println("get:", err)
			return 42
		}
	}
	switch what {
	case "exit3":
		return 3
	case "kill":
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "stop":
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-s.Context().Done()
		fmt.Println("after SIGCONT:", context.Cause(s.Context()))
		return 44
	case "close":
		s.Close()
		return 0
	case "shutdown":
		fmt.Println("attached", s.Rank(), "of", s.Size())
		if err := s.Shutdown(context.Background()); err != nil {
			fmt.Println("shut down:", err)
			return 47
		}
		return 0
	case "count":
		return countMain(s)
	}
	<-s.Context().Done()
	return 43
}

// countMain adds to a sum until a rank gets SIGUSR1, and checks what it added.
func countMain(s *Session) int {
	ctx := context.Background()
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	for i := int64(1); ; i++ {
		select {
		case <-asked:
			if err := s.Set(ctx, "stop", []byte("yes")); err != nil {
				fmt.Println("set:", err)
				return 48
			}
		default:
		}
		own, err := s.Add(ctx, fmt.Sprint("of ", s.Rank()), 1)
		if err != nil || own != i {
			fmt.Println("added", i, "times, the sum is", own, err)
			return 45
		}
		if i == 1 {
			fmt.Println("counting")
		}
		stopped, err := s.CompareAndSwap(ctx, "stop", []byte("yes"), []byte("yes"))
		if err != nil {
			fmt.Println("stop:", err)
			return 46
		}
		if stopped {
			break
		}
		time.Sleep(700 * time.Millisecond) // most jobs have little to tell the coordinator
	}
	if err := s.Shutdown(ctx); err != nil {
		fmt.Println("shut down:", err)
		return 47
	}
	return 0
}

// spawn starts a worker in its own process as rank of a world whose rank 0 is
// in this one.
func spawn(t *testing.T, what string, vars ...string) (*exec.Cmd, *strings.Builder) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "worker", what)
	cmd.Env = append(os.Environ(), vars...)
	out := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return cmd, out
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
