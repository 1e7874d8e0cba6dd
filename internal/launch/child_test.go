package launch

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
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
