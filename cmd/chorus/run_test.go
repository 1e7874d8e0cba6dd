package main

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The test binary is the command when this variable is set, and the command's
// guardian by its name.
const commandVar = "CHORUS_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(hangVar) != "" && os.Getenv("RANK") != "" {
		os.Exit(hang(os.Getenv(hangVar)))
	}
	if os.Getenv(commandVar) != "" || strings.HasPrefix(os.Args[0], "chorus: ") {
		main()
	}
	os.Exit(m.Run())
}

// TestRunKilled kills the command, which leaves its workers' children to others.
func TestRunKilled(t *testing.T) {
	cmd := exec.Command(self(t), "run", "--nproc-per-node", "1", "--no-prefix", "--", "sh", "-c", "sleep 7777 & echo $!; wait")
	cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	stat := "/proc/" + strings.TrimSpace(line) + "/stat"
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(stat)
		return err != nil || strings.Contains(string(b), ") Z ")
	}, time.Minute, time.Millisecond)
}

// TestRunReaderGone reads one line of the output and goes, as head does.
func TestRunReaderGone(t *testing.T) {
	dir := t.TempDir()
	// More than pipes hold, so that the first line is read before the last is
	// written.
	cmd := exec.Command(self(t), "run", "--nproc-per-node", "2", "--", "sh", "-c",
		`i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done
sh -c 'kill -PIPE $$'; echo code $? >&2; echo done > `+dir+`/$RANK
[ $RANK = 0 ] || while [ ! -s `+dir+`/0 ]; do sleep 0.01; done; exit $RANK`)
	cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual")
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = bufio.NewReaderSize(io.LimitReader(out, 16), 16).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, out.Close())
	_ = cmd.Wait() // the code is looked at
	require.Equal(t, 1, cmd.ProcessState.ExitCode(), errs.String())
	for _, rank := range []string{"0", "1"} {
		b, err := os.ReadFile(filepath.Join(dir, rank))
		require.NoError(t, err, errs.String())
		require.Equal(t, "done\n", string(b))
	}
	require.Contains(t, errs.String(), "exited with code 1")
	require.Contains(t, errs.String(), "[rank 0] code 141", "workers have not got the launcher's disposition")
}
