package launch

import (
	"os/exec"
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
		require.Equal(t, want, c.exit(), script)
		c.killed = true
		require.Equal(t, "killed", c.exit())
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
