package memory

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/stream"
)

// The environment is read by the first allocation of a process.
func TestSettingsOfTheEnvironment(t *testing.T) {
	if os.Getenv("CHORUS_TEST_ALLOC") != "" {
		sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
		require.NoError(t, err)
		s, err := stream.New(sys.Devices()[0], nil)
		require.NoError(t, err)
		b, err := Alloc(s, 8)
		fmt.Println("result:", err)
		require.NoError(t, errors.Join(b.Close(), s.Close()))
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	for _, c := range []struct {
		vars []string
		want string
	}{
		{nil, "result: <nil>"},
		{[]string{"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}, "result: <nil>"},
		{[]string{"PYTORCH_CUDA_ALLOC_CONF=bad:1"}, `result: memory: PYTORCH_CUDA_ALLOC_CONF: there is no option "bad"`},
		{[]string{"CHORUS_ALLOC_CONF=worse:1", "PYTORCH_CUDA_ALLOC_CONF=bad:1"}, `result: memory: CHORUS_ALLOC_CONF: there is no option "worse"`},
		{[]string{"CHORUS_ALLOC_CONF=", "PYTORCH_CUDA_ALLOC_CONF=bad:1"}, "result: <nil>"},
	} {
		cmd := exec.Command(self, "-test.run", "^TestSettingsOfTheEnvironment$", "-test.v")
		cmd.Env = append(os.Environ(), append(c.vars, "CHORUS_TEST_ALLOC=1")...)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Contains(t, string(out), c.want)
	}
}
