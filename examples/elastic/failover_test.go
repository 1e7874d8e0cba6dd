package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testhost"
)

// asLauncher has a launcherConfig in JSON. The test binary is then a launcher.
const asLauncher = "ELASTIC_TEST_LAUNCHER"

// A launcherConfig describes the launcher of a host.
type launcherConfig struct {
	Job, Host, Bind        string
	Nodes, Procs, Restarts int
	Seeds, Args, Env       []string
}

// variable returns the environment variable for the configuration.
func (c launcherConfig) variable() string {
	b, err := json.Marshal(c)
	if err != nil {
		panic(err)
	}
	return asLauncher + "=" + string(b)
}

// launcher runs the workers of a host.
func launcher(config string) int {
	var c launcherConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		panic(err)
	}
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	os.Unsetenv(asLauncher)
	signals := make(chan os.Signal, 10)
	signal.Notify(signals, syscall.SIGTERM)
	return launch.Run(context.Background(), &launch.Config{
		Program: append([]string{self}, c.Args...),
		Procs:   c.Procs,
		Devices: launch.Devices{Count: c.Procs, Backend: "virtual", Env: c.Env},
		Cluster: job.Config{Job: c.Job, Nodes: c.Nodes, MinNodes: 1, Host: c.Host, Seeds: c.Seeds, Bind: c.Bind, MaxRestarts: c.Restarts,
			Secret: []byte("sixteen bytes or more")},
		Stdout:  os.Stdout,
		Stderr:  os.Stderr,
		Signals: signals,
	})
}

// A line is a line of output of a launcher.
type line struct {
	host int
	text string
	at   time.Time
}

// launchHost starts a launcher, and sends its output to lines.
func launchHost(t *testing.T, i, port int, lines chan<- line) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	at := launcherConfig{Job: "failover", Host: fmt.Sprint("h", i), Bind: fmt.Sprintf("127.0.0.%d:%d", i+1, port), Nodes: 3, Procs: 2, Seeds: []string{fmt.Sprintf("127.0.0.1:%d", port)},
		Args: []string{"-pause", "20ms", "-epochs", "6"}, Env: []string{asWorker + "=1", "CHORUS_BACKEND=virtual"}}
	cmd.Env = append(os.Environ(), at.variable(), "CHORUS_LOST_AFTER=20s") // no process is silent
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = cmd.Stdout
	require.NoError(t, cmd.Start())
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			lines <- line{i, s.Text(), time.Now()}
		}
		_ = cmd.Wait() // the test compares the exit code
		lines <- line{host: i, text: fmt.Sprint("exit ", cmd.ProcessState.ExitCode())}
	}()
	t.Cleanup(func() { cmd.Process.Kill() })
	return cmd
}

// The launcher that coordinates is killed during the training. The ranks of the other hosts go on
// in the same processes, and end with equal parameters.
func TestTrainingSurvivesTheCoordinator(t *testing.T) {
	port := testhost.Reserve(t)
	lines := make(chan line, 10000)
	var cmds []*exec.Cmd
	for i := range 3 {
		cmds = append(cmds, launchHost(t, i, port, lines))
	}
	var text strings.Builder
	var killed, noticed, next time.Time
	deadline := time.After(2 * time.Minute)
	for ended := 0; ended < 3; {
		select {
		case l := <-lines:
			fmt.Fprintf(&text, "h%d: %s\n", l.host, l.text)
			switch {
			case strings.HasPrefix(l.text, "exit "):
				ended++
				require.True(t, l.host == 0 || l.text == "exit 0", text.String())
			case stepOf.MatchString(l.text) && killed.IsZero() && strings.Contains(text.String(), "of 6, pid"):
				require.NoError(t, cmds[0].Process.Kill())
				killed = time.Now()
			case noticed.IsZero() && strings.Contains(l.text, "choose another coordinator"):
				noticed = l.at
			case l.host > 0 && next.IsZero() && stepOf.MatchString(l.text):
				next = l.at
			}
		case <-deadline:
			require.FailNow(t, "the job has not ended", text.String())
		}
	}
	out := text.String()
	require.False(t, next.IsZero(), out)
	t.Logf("noticed after %v, first step after %v", noticed.Sub(killed), next.Sub(killed))
	sums := map[string]int{}
	for _, m := range sumOf.FindAllStringSubmatch(out, -1) {
		sums[m[2]]++
	}
	require.Len(t, sums, 1, out)
	for _, n := range sums {
		require.Equal(t, 4, n, out)
	}
	pids := map[string]bool{} // of the workers on the other hosts
	for _, m := range regexp.MustCompile(`(?m)^h[12]: .*, pid (\d+), goes on`).FindAllStringSubmatch(out, -1) {
		pids[m[1]] = true
	}
	require.Len(t, pids, 4, "no process was started again: %s", out)
	require.Contains(t, out, "ranks 0, 1 of host h0 left: its host was lost: ")
	require.Regexp(t, `epoch \d+: 4 processes on 2 hosts; `, out) // a launcher that is slow joins one epoch later
}
