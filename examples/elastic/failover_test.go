package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/internal/launch"
)

// asLauncher is the index of a host. The test binary is then its launcher, with the port of the
// job in portVar.
const asLauncher, portVar = "ELASTIC_TEST_LAUNCHER", "ELASTIC_TEST_PORT"

// launcher runs two workers.
func launcher(host string) int {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	port := os.Getenv(portVar)
	i, _ := strconv.Atoi(host)
	os.Unsetenv(asLauncher)
	return launch.Run(context.Background(), &launch.Config{
		Program: []string{self, "-pause", "20ms", "-epochs", "6"},
		Procs:   2,
		Devices: launch.Devices{Count: 2, Backend: "virtual", Env: []string{asWorker + "=1", "CHORUS_BACKEND=virtual"}},
		Cluster: cluster.Config{Job: "failover", Nodes: 3, MinNodes: 1, Host: "h" + host, Seeds: []string{"127.0.0.1:" + port},
			Bind: fmt.Sprintf("127.0.0.%d:%s", i+1, port), Secret: []byte("sixteen bytes or more")},
		Stdout: os.Stdout,
		Stderr: os.Stderr,
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
	cmd.Env = append(os.Environ(), fmt.Sprint(asLauncher, "=", i), fmt.Sprint(portVar, "=", port))
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
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := ln.Addr().(*net.TCPAddr).Port
	ln.Close()
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
	require.Less(t, noticed.Sub(killed), time.Second)
	require.Less(t, next.Sub(killed), 3*time.Second)
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
	require.Contains(t, out, "epoch 2: 4 processes on 2 hosts; ranks 0, 1 of host h0 left: its host was lost: ")
}
