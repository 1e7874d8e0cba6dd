package launch

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
)

// TestReasonsOfExits ends processes in different ways. Exit codes above 128 are not signals.
func TestReasonsOfExits(t *testing.T) {
	for script, want := range map[string]string{"true": "ok", "exit 3": "code", "exit 137": "code", "kill -9 $$": "signal"} {
		c := &child{cmd: exec.Command("sh", "-c", script), rankNow: func() int { return -1 }}
		_ = c.cmd.Run() // its state has the result
		c.finish()
		require.Equal(t, want, c.exit(true), script)
		if script == "true" {
			continue
		}
		require.Equal(t, "stopped", c.exit(false), "another one was the first")
		c.killed = true
		require.Equal(t, "killed", c.exit(false))
		c.stopped = true
		require.Equal(t, "stopped", c.exit(true))
	}
}

// TestReasonsOfKills: the reason of an exit says why the launcher has killed the worker, and the first reason counts. A worker that
// was to be killed and has ended by another signal was not killed by the launcher.
func TestReasonsOfKills(t *testing.T) {
	for script, want := range map[string]string{
		"kill -9 $$":  "killed by SIGKILL (by the launcher, after a second signal, SIGTERM)",
		"kill -15 $$": "killed by SIGTERM",
	} {
		for _, stopped := range []bool{false, true} {
			c := &child{cmd: exec.Command("sh", "-c", script), rankNow: func() int { return -1 }, running: true, stopped: stopped}
			c.killedBecause("after a second signal, SIGTERM")
			c.killedBecause("after the grace period of 10s")
			_ = c.cmd.Run() // its state has the result
			c.finish()
			require.Equal(t, want, c.reason(&oomWatch{}))
		}
	}
}

// A worker that the coordinator lost before the launcher noticed its exit gives the job its exit code,
// and its reason is told.
func TestCodeOfLost(t *testing.T) {
	lost := &cluster.MemberLostError{Reason: "its connection ended", ExitCode: -1, Closed: true}
	c := &child{cmd: exec.Command("sh", "-c", "exit 3"), rankNow: func() int { return -1 }, running: true}
	require.Equal(t, ExitFailed, codeOfLost(lost, nil))
	require.Equal(t, ExitFailed, codeOfLost(lost, c), "it is still running")
	require.Equal(t, "was lost after 0s: its connection ended", how(c, lost))
	_ = c.cmd.Run() // its state has the result
	c.finish()
	c.took, c.why = time.Second, "exited with code 3"
	require.Equal(t, 3, codeOfLost(lost, c))
	require.Equal(t, "was lost after 1s: its connection ended; its process: exited with code 3", how(c, lost))
	silent := &cluster.MemberLostError{Reason: "silent", ExitCode: -1}
	require.Equal(t, ExitFailed, codeOfLost(silent, c), "it may have exited because it was given up")
	c.killed = true
	require.Equal(t, ExitFailed, codeOfLost(lost, c), "the launcher has killed it")
	c.killed, c.stopped = false, true
	require.Equal(t, ExitFailed, codeOfLost(lost, c), "the launcher asked it to exit")
	require.Equal(t, "was lost after 1s: its connection ended", how(c, lost))
}

// TestOneFailureCountsOnce kills one of four workers. The others fail because of that.
func TestOneFailureCountsOnce(t *testing.T) {
	t.Parallel()
	st := workers(4, "1", "kill")
	st.Restarts, st.Counts = 1, true
	code, text := launchAll(t, st)
	require.Equal(t, exitSignalOffset+9, code, text)
	require.Equal(t, []int{2, 6, 4}, []int{strings.Count(text, "counted exit: signal\n"), strings.Count(text, "counted exit: stopped\n"), strings.Count(text, "counted restart\n")},
		"in two attempts: %s", text)
	require.Equal(t, 8, strings.Count(text, "counted exit: "))
}

// TestJSONLines reads the lines of the launcher beside those of the workers.
func TestJSONLines(t *testing.T) {
	t.Parallel()
	st := workers(2, "1", "exit3")
	st.JSON, st.Devices.Note = true, "warning: virtual"
	code, text := launchAll(t, st)
	require.Equal(t, 3, code, text)
	var ours []map[string]any
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "[rank ") {
			continue
		}
		m := map[string]any{}
		require.NoError(t, json.Unmarshal([]byte(line), &m), line)
		at, err := time.Parse(time.RFC3339Nano, m["time"].(string))
		require.NoError(t, err)
		require.Less(t, time.Since(at), 5*time.Minute)
		delete(m, "time")
		ours = append(ours, m)
	}
	require.Equal(t, map[string]any{"level": "WARN", "msg": "virtual", "job": "test", "host": "h0"}, ours[0])
	i := slices.IndexFunc(ours, func(m map[string]any) bool { return strings.HasPrefix(m["msg"].(string), "rank 1 (host h0, ") })
	require.GreaterOrEqual(t, i, 0, text)
	require.Equal(t, []any{"ERROR", "test", "h0", 1.0}, []any{ours[i]["level"], ours[i]["job"], ours[i]["host"], ours[i]["rank"]})
}
