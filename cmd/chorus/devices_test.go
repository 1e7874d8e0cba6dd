package main

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/launch"
)

func TestFindDevices(t *testing.T) {
	noGPU := "no GPU on this machine (no /dev/nvidia*): "
	if files, _ := filepath.Glob("/dev/nvidia[0-9]*"); len(files) > 0 {
		noGPU = `no GPU on this machine (CUDA_VISIBLE_DEVICES=""): `
	}
	t.Setenv("CUDA_VISIBLE_DEVICES", "") // also where there are GPUs
	for _, tc := range []struct {
		name, backend, virtual string
		procs                  int
		want                   launch.Devices
	}{
		{"virtual", "virtual", "", 0, launch.Devices{Count: 4, Backend: "virtual"}},
		{"as many as asked for", "virtual", "", 6, launch.Devices{Count: 6, Backend: "virtual", Env: []string{"CHORUS_VIRTUAL_DEVICES=6"}}},
		{"as many as said", "virtual", "2", 6, launch.Devices{Count: 2, Backend: "virtual"}},
		{"fallback", "auto", "", 0, launch.Devices{Count: 4, Backend: "virtual", Env: []string{"CHORUS_BACKEND=virtual"},
			Note: noGPU + "running on 4 virtual devices in host memory instead; set CHORUS_BACKEND=cuda to require a GPU"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("CHORUS_BACKEND", tc.backend)
			if tc.virtual != "" {
				t.Setenv("CHORUS_VIRTUAL_DEVICES", tc.virtual)
			}
			d, err := findDevices(tc.procs)
			require.NoError(t, err)
			require.Equal(t, tc.want, d)
		})
	}
	t.Setenv("CHORUS_BACKEND", "cuda")
	_, err := findDevices(0)
	require.ErrorContains(t, err, "CHORUS_BACKEND=cuda requires one")
	t.Setenv("CHORUS_BACKEND", "opencl")
	_, err = findDevices(0)
	var u *launch.UsageError
	require.ErrorAs(t, err, &u)
	t.Setenv("CHORUS_BACKEND", "virtual")
	t.Setenv("CHORUS_VIRTUAL_DEVICES", "65")
	_, err = findDevices(0)
	require.ErrorAs(t, err, &u)
}

func TestRunExitCodes(t *testing.T) {
	t.Setenv("CHORUS_BACKEND", "virtual")
	for _, tc := range []struct {
		want int
		args []string
	}{
		{launch.ExitUsage, []string{"run"}},
		{launch.ExitUsage, []string{"run", "--nope", "--", "true"}},
		{launch.ExitUsage, []string{"run", "--nproc-per-node", "x", "--", "true"}},
		{launch.ExitUsage, []string{"run", "--nnodes", "0", "--", "true"}},
		{launch.ExitUsage, []string{"run", "--nnodes", "2", "--", "true"}},
		{launch.ExitUsage, []string{"run", "--secret-file", "/nowhere", "--", "true"}},
		{launch.ExitUsage, []string{"walk"}},
		{0, []string{"--version"}},
		{0, []string{"run", "--help"}},
		{0, []string{"info"}},
		{0, []string{"info", "--json"}},
		{launch.ExitUsage, []string{"info", "all"}},
	} {
		require.Equal(t, tc.want, run(tc.args), "%q", tc.args)
	}
}
