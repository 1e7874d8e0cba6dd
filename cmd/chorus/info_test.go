package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/launch"
)

func TestInfo(t *testing.T) {
	t.Setenv("CHORUS_BACKEND", "virtual")
	t.Setenv("CHORUS_VIRTUAL_DEVICES", "2")
	sys, err := device.NewSystem(nil)
	require.NoError(t, err)
	r, err := inspect(sys, "a note")
	require.NoError(t, err)
	var out bytes.Buffer
	require.NoError(t, r.print(&out))
	for _, want := range []string{"a note", "TELEMETRY", "virtual:1", "0 MiB used", "process ",
		"the utilization of virtual:0 needs a GPU; this machine has virtual devices"} {
		require.Contains(t, out.String(), want)
	}
	text, err := json.Marshal(r)
	require.NoError(t, err)
	require.Contains(t, string(text), `"memory_used_bytes":0`)
	require.NotContains(t, string(text), "temperature", "what is not known is absent")
	require.Contains(t, string(text), `"nccl_defects":[]`)
	require.NotContains(t, out.String(), "DEFECTS")
	require.Empty(t, defectsOf("no version"))
	r.Defects = defectsOf("2.28.3")
	out.Reset()
	require.NoError(t, r.print(&out))
	require.Regexp(t, `\nDEFECTS OF THE LOADED NCCL\nsymmetric-in-graphs \(2\.28\.\d to before 2\.30\.7\): symmetric kernels may read data that`, out.String())
	require.Regexp(t, `DEFECTS(?s:.*)LINKS`, out.String(), "in the order of the help")
}

func TestReading(t *testing.T) {
	n := func(v int) *int { return &v }
	used := uint64(3 << 30)
	r := &reading{Utilization: n(97), MemoryActivity: n(31), Temperature: n(36), PowerDraw: n(76543), ClockRate: n(1980),
		MemoryUsed: &used, NVLinks: []bool{true, false, true}, Processes: []device.Process{{PID: 7, MemoryBytes: 5 << 20}}}
	require.Equal(t, "busy 97%, memory active 31%, 36 °C, 77 W, 1980 MHz, 3072 MiB used, 2 of 3 NVLinks up, process 7 uses 5 MiB", r.String())
	require.Equal(t, "3072 MiB used, no processes are running", (&reading{MemoryUsed: &used}).String())
	require.Empty(t, (&reading{Missing: "no library"}).String())
}

func TestVersion(t *testing.T) {
	var b strings.Builder
	require.NoError(t, printVersion(&b, &debug.BuildInfo{Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.time", Value: "2026-11-26T00:00:00Z"}, {Key: "vcs.modified", Value: "true"},
		{Key: "CGO_ENABLED", Value: "0"}, {Key: "-trimpath", Value: "true"},
	}}))
	require.Equal(t, "chorus v1.2.3\ncommit     abc, with changes\ncommitted  2026-11-26T00:00:00Z\ngo         "+runtime.Version()+
		"\nplatform   "+runtime.GOOS+"/"+runtime.GOARCH+"\ncgo_enabled 0\ntrimpath   true\n", b.String())
	b.Reset()
	require.NoError(t, printVersion(&b, nil))
	require.Contains(t, b.String(), "chorus (devel)\ngo ")
	released, commit = "v9", "def"
	defer func() { released, commit = "", "" }()
	b.Reset()
	require.NoError(t, printVersion(&b, nil))
	require.Contains(t, b.String(), "chorus v9\ncommit     def\ngo ")
	out, errs, code := chorusCommand(t, nil, "version")
	require.Zero(t, code, errs)
	require.Contains(t, out, runtime.Version())
	_, errs, code = chorusCommand(t, nil, "version", "now")
	require.Equal(t, 64, code)
	require.Contains(t, errs, `unknown argument "now"`)
}

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
	_, err = findDevices(100)
	require.ErrorAs(t, err, &u)
	require.EqualError(t, err, "--nproc-per-node 100: each process has a virtual device, and there are at most 64 of them")
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
