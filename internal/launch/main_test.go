package launch

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/internal/job"
)

// The test binary runs itself again as a launcher, with its config in this
// variable, and as the workers of that launcher, with "worker" as argument.
const configVar = "LAUNCH_TEST_CONFIG"

func TestMain(m *testing.M) {
	Guard()
	switch {
	case len(os.Args) > 1 && os.Args[1] == "worker":
		os.Exit(worker(os.Args[2:]))
	case os.Getenv(configVar) != "":
		os.Exit(launcherMain())
	}
	os.Exit(m.Run())
}

// A setup is the part of a Config that can be written down.
type setup struct {
	Program  []string
	Procs    int
	Devices  Devices
	Grace    time.Duration
	LogDir   string
	Raw      bool
	NoPrefix bool
	JSON     bool
	Counts   bool // Exited and Restarted write a line
	Nodes    int
	MinNodes int
	Restarts int
	Job      string
	Host     string
	Bind     string
	Seeds    []string
	Secret   []byte
	Timing   cluster.Timing
}

func (s *setup) config() *Config {
	return &Config{Program: s.Program, Procs: s.Procs, Devices: s.Devices, Grace: s.Grace, LogDir: s.LogDir, Raw: s.Raw, NoPrefix: s.NoPrefix, JSON: s.JSON,
		Cluster: job.Config{Nodes: s.Nodes, MinNodes: s.MinNodes, MaxRestarts: s.Restarts, Job: s.Job, Host: s.Host, Bind: s.Bind, Seeds: s.Seeds,
			Secret: s.Secret, Timing: s.Timing}}
}

func launcherMain() int {
	var st setup
	if err := json.Unmarshal([]byte(os.Getenv(configVar)), &st); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 99
	}
	os.Unsetenv(configVar) // or the workers would be launchers
	cfg := st.config()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	cfg.Stdout, cfg.Stderr, cfg.Signals = os.Stdout, os.Stderr, signals
	if st.Counts {
		cfg.Exited = func(reason string) { fmt.Println("counted exit:", reason) }
		cfg.Restarted = func() { fmt.Println("counted restart") }
	}
	return Run(context.Background(), cfg)
}

// worker attaches and then does what the arguments say: a rank and a deed for
// it. The others wait for the end of their session and say why it ended.
func worker(args []string) int {
	if args[0] == "function" {
		return functionWorker(args[1])
	}
	if args[0] == "elastic" {
		code := elasticWorker(args[1], args[2])
		if len(args) > 3 && code == 0 { // the program goes on until a file exists
			fmt.Println("Run has returned")
			for {
				if _, err := os.Stat(args[3]); err == nil {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
		return code
	}
	s, err := cluster.Attach(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, "attach:", err)
		return 41
	}
	fmt.Printf("attached %d of %d\n", s.Rank(), s.Size())
	if len(args) > 1 && strings.HasSuffix(args[1], "when all have come") {
		if err := s.Barrier(context.Background(), "come"); err != nil {
			fmt.Fprintln(os.Stderr, "barrier:", err)
			return 44
		}
	}
	if args[0] == "shutdown" || args[0] == "restarted" && os.Getenv("CHORUS_RESTART_COUNT") != "0" {
		if err := s.Shutdown(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, "shutdown:", err)
			return 42
		}
		return 0
	}
	if args[0] == "all" || args[0] == fmt.Sprint(s.Rank()) {
		return deed(s, args[1])
	}
	<-s.Context().Done()
	if len(args) > 2 { // how long it needs for its last words
		d, err := time.ParseDuration(args[2])
		if err != nil {
			panic(err)
		}
		time.Sleep(d)
	}
	fmt.Fprintln(os.Stderr, "session:", context.Cause(s.Context()))
	return 43
}

func deed(s *cluster.Session, what string) int {
	switch what {
	case "exit3", "exit3 when all have come":
		fmt.Fprintln(os.Stderr, "the reason is here")
		return 3
	case "exit0":
		return 0
	case "panic":
		panic("a bug")
	case "kill":
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "stop", "stop when all have come":
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case "shutdown when told":
		told := make(chan os.Signal, 1)
		signal.Notify(told, syscall.SIGUSR1)
		fmt.Println("listening", os.Getpid())
		select {
		case <-told:
		case <-s.Context().Done():
			fmt.Fprintln(os.Stderr, "session:", context.Cause(s.Context()))
			return 43
		}
		if err := s.Shutdown(context.Background()); err != nil {
			return 42
		}
		return 0
	case "close":
		s.Close()
		return 0
	}
	select {}
}

// A launched is a launcher's process and what it has written.
type launched struct {
	t    *testing.T
	cmd  *exec.Cmd
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{} // one token when something was written
	code chan int
}

// A busy machine stops a process for seconds. lostAfter is longer, and a killed process is noticed without it.
// Tests whose subject is silence use silentAfter.
const (
	lostAfter   = 20 * time.Second
	silentAfter = 3 * time.Second
)

// base is a job of n workers on virtual devices.
func base(n int, program ...string) *setup {
	return &setup{Program: program, Procs: n, Devices: Devices{Count: n, Backend: "virtual"}, Grace: 10 * time.Second,
		Job: "test", Host: "h0", Timing: cluster.Timing{
			Join: 20 * time.Second, Call: 20 * time.Second, Heartbeat: 100 * time.Millisecond, LostAfter: lostAfter, Backoff: 10 * time.Millisecond}}
}

// workers is base for workers that are this binary.
func workers(n int, args ...string) *setup {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return base(n, append([]string{self, "worker"}, args...)...)
}

// noticingSilence shortens the time after which the job notices silence.
func (s *setup) noticingSilence() *setup {
	s.Timing.LostAfter = silentAfter
	return s
}

func shell(n int, script string) *setup { return base(n, "sh", "-c", script) }

// start starts a launcher, and kills it when the test ends before it.
func start(t *testing.T, cfg *setup, vars ...string) *launched {
	t.Helper()
	return startTo(t, nil, cfg, vars...)
}

// startTo is start with a standard output that the test does not keep.
func startTo(t *testing.T, stdout *os.File, cfg *setup, vars ...string) *launched {
	t.Helper()
	b, err := json.Marshal(cfg)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	l := &launched{t: t, cmd: exec.Command(self), more: make(chan struct{}, 1), code: make(chan int, 1)}
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// The race detector would sleep for a second at each exit.
	l.cmd.Env = append(append(os.Environ(), configVar+"="+string(b), "GORACE=atexit_sleep_ms=0"), vars...)
	l.cmd.Stdout, l.cmd.Stderr = l, l
	if stdout != nil {
		l.cmd.Stdout = stdout
	}
	l.cmd.WaitDelay = 5 * time.Second
	require.NoError(t, l.cmd.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.cmd.Wait()
		l.code <- l.cmd.ProcessState.ExitCode()
	}()
	t.Cleanup(func() {
		l.cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("launcher wrote:\n%s", l.text())
		}
	})
	return l
}

func (l *launched) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(b)
	select {
	case l.more <- struct{}{}:
	default:
	}
	return len(b), nil
}

var _ io.Writer = (*launched)(nil)

func (l *launched) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// until waits until the launcher's output has n of text.
func (l *launched) until(text string, n int) {
	l.t.Helper()
	l.await(func(out string) bool { return strings.Count(out, text) >= n }, "%d of %q", n, text)
}

// await waits until the launcher's output is as the format says.
func (l *launched) await(is func(out string) bool, format string, args ...any) {
	l.t.Helper()
	deadline := time.After(time.Minute)
	for !is(l.text()) {
		select {
		case <-l.more:
		case <-deadline:
			require.FailNow(l.t, "output has not come", "%s in:\n%s", fmt.Sprintf(format, args...), l.text())
		}
	}
}

// untilEpoch waits until an elastic worker is in an epoch of size members after the given epoch, and returns its number.
func (l *launched) untilEpoch(after, size int) (epoch int) {
	l.t.Helper()
	began := regexp.MustCompile(fmt.Sprintf(`epoch (\d+) is rank \d+ of %d pid`, size))
	l.await(func(out string) bool {
		for _, m := range began.FindAllStringSubmatch(out, -1) {
			epoch, _ = strconv.Atoi(m[1])
		}
		return epoch > after
	}, "an epoch of %d members after epoch %d", size, after)
	return epoch
}

// wait returns the exit code and all output.
func (l *launched) wait() (int, string) {
	l.t.Helper()
	select {
	case code := <-l.code:
		l.code <- code
		return code, l.text()
	case <-time.After(2 * time.Minute):
		require.FailNow(l.t, "launcher has not ended", l.text())
		return 0, ""
	}
}

func launchAll(t *testing.T, cfg *setup, vars ...string) (int, string) {
	t.Helper()
	return start(t, cfg, vars...).wait()
}

// pidsIn returns the numbers that follow word in the output.
func pidsIn(t *testing.T, text, word string) []int {
	t.Helper()
	var pids []int
	for line := range strings.Lines(text) {
		if _, rest, ok := strings.Cut(line, word+" "); ok {
			var pid int
			_, err := fmt.Sscan(rest, &pid)
			require.NoError(t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// childrenOf lists the children of a process by their command lines.
func childrenOf(t *testing.T, pid int) map[int]string {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	out := map[int]string{}
	for _, n := range names {
		child, _ := strconv.Atoi(filepath.Base(filepath.Dir(n)))
		if job.ProcessOf(child).Parent == pid {
			b, _ := os.ReadFile(n) // it may have ended
			out[child] = strings.TrimRight(strings.ReplaceAll(string(b), "\x00", " "), " ")
		}
	}
	return out
}

// guardianOf waits for a launcher's guardian.
func guardianOf(t *testing.T, launcher int) (pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		for p, cmd := range childrenOf(t, launcher) {
			if cmd == guardianName {
				pid = p
			}
		}
		return pid != 0
	}, time.Minute, time.Millisecond)
	return pid
}

// requireIgnores waits until a process ignores a signal.
func requireIgnores(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	require.Eventually(t, func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		_, rest, _ := bytes.Cut(b, []byte("\nSigIgn:"))
		mask, _, _ := bytes.Cut(rest, []byte("\n"))
		n, err := strconv.ParseUint(string(bytes.TrimSpace(mask)), 16, 64)
		return err == nil && n>>(sig-1)&1 == 1
	}, time.Minute, time.Millisecond)
}

// requireStopped waits until a process has been stopped.
func requireStopped(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err == nil && bytes.Contains(b, []byte(") T "))
	}, time.Minute, time.Millisecond)
}

// requireGone waits until no process has one of the pids.
func requireGone(t *testing.T, pids []int) {
	t.Helper()
	require.NotEmpty(t, pids)
	require.Eventually(t, func() bool {
		for _, pid := range pids {
			if p := job.ProcessOf(pid); p.Parent != 0 && p.State != 'Z' {
				return false
			}
		}
		return true
	}, time.Minute, 5*time.Millisecond, "some of %v are left", pids)
}
