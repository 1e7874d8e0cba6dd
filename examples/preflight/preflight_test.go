package main

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// The test binary is the program when this is set.
const asProgram = "PREFLIGHT_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// program returns the program, on two virtual devices.
func program(t *testing.T, variables ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), append(variables, asProgram+"=yes", "CHORUS_BACKEND=virtual", "CHORUS_VIRTUAL_DEVICES=2")...)
	return cmd
}

// The program prints a verdict for each GPU, and its exit code says whether the check passed.
func TestVerdicts(t *testing.T) {
	out, err := program(t).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Regexp(t, `(GPU-[-0-9a-f]+ \([0-9a-f:.]+\) of host \S+, rank \d: healthy true\n){2}`, string(out))
}

func TestWrongThreshold(t *testing.T) {
	cmd := program(t, "BW_THRESHOLD_GBPS=fast")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Equal(t, setting, cmd.ProcessState.ExitCode(), string(out))
	require.Contains(t, string(out), `BW_THRESHOLD_GBPS is "fast"`)
}
