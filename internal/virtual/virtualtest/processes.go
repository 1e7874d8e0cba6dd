package virtualtest

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Processes runs this test binary again, once for each rank, with more variables in its
// environment. It returns the output of each process and how it ended. No process runs
// longer than the deadline.
func Processes(t testing.TB, ranks int, variables func(rank int) []string) (out []string, errs []error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmds := make([]*exec.Cmd, ranks)
	stdout, stderr := make([]bytes.Buffer, ranks), make([]bytes.Buffer, ranks)
	for rank := range ranks {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), variables(rank)...)
		cmd.Stdout, cmd.Stderr = &stdout[rank], &stderr[rank]
		require.NoError(t, cmd.Start())
		cmds[rank] = cmd
	}
	for rank, cmd := range cmds {
		errs = append(errs, cmd.Wait())
		out = append(out, stdout[rank].String())
		if s := stderr[rank].String(); s != "" {
			t.Logf("rank %d: %s", rank, s)
		}
	}
	return out, errs
}
