package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/perf"
)

// small makes a check of virtual devices short.
var small = []string{"--maxbytes", "4K", "--no-health"}

func preflightOf(t *testing.T, env []string, args ...string) (r *preflightReport, errs string, code int) {
	t.Helper()
	out, errs, code := chorusCommand(t, env, append(append([]string{"preflight", "--json"}, small...), args...)...)
	r = &preflightReport{}
	require.NoError(t, json.Unmarshal([]byte(out), r), "%s%s", out, errs)
	return r, errs, code
}

func TestPreflight(t *testing.T) {
	r, errs, code := preflightOf(t, nil, "-g", "3", "--log", "json")
	require.Zero(t, code, "%+v", r.Findings)
	require.Equal(t, "pass", r.Verdict)
	require.Empty(t, r.ErrorCode)
	require.Len(t, r.Check.GPUs, 3)
	require.Len(t, r.Check.Pairs, 3)
	steps := map[string]bool{}
	for line := range strings.Lines(errs) {
		var record map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &record), line)
		if name, ok := record["name"].(string); ok {
			steps[name] = true
		}
	}
	require.Equal(t, map[string]bool{"devices": true, "pairs": true, "all-reduce": true}, steps)

	file := filepath.Join(t.TempDir(), "verdict")
	out, errs, code := chorusCommand(t, nil, append([]string{"preflight", "-g", "2", "--output", file}, small...)...)
	require.Zero(t, code, errs)
	require.Empty(t, out)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), "virtual devices: the data is checked, and the times say nothing\n")
	require.Equal(t, 2, strings.Count(string(text), "pass  GPU-"))
	require.Contains(t, string(text), "\npass after ")
}

// What is found fails with the code of NVSentinel, and names the GPU.
func TestPreflightFails(t *testing.T) {
	for name, x := range map[string]struct {
		env  []string
		args []string
		code string
		kind perf.Kind
		rank int // -1: none
		text string
	}{
		"wrong data": {[]string{"CHORUS_VIRTUAL_FAULTS=wrong@ncclRecv:1#*"}, nil, "NCCL_TEST_ERROR", perf.Wrong, 1, "3 of its 3 pairs"},
		"slow":       {[]string{"BW_THRESHOLD_GBPS=1e9"}, []string{"-g", "2"}, "NCCL_BW_DEGRADED", perf.Slow, -1, "want 1e+09"},
		"no driver":  {[]string{"CHORUS_BACKEND=cuda", "CHORUS_LIBCUDA=/nowhere/libcuda.so"}, nil, "NCCL_TEST_ERROR", perf.Broken, -1, "CHORUS_"},
		"no process": {[]string{"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "CHORUS_SEEDS=127.0.0.1:" + strconv.Itoa(testhost.Reserve(t)), "CHORUS_JOB=lonely", "CHORUS_INSECURE=yes", "GANG_TIMEOUT_SECONDS=0.5"}, nil,
			"NCCL_TEST_ERROR", perf.Broken, -1, "missing"},
		"a deadline": {[]string{"CHORUS_VIRTUAL_FAULTS=hang@cuLaunchKernel:0#1"}, []string{"--timeout", "3s"}, "NCCL_TEST_ERROR", "", -1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, errs, code := preflightOf(t, x.env, x.args...)
			require.Equal(t, exitFound, code, errs)
			require.Equal(t, "fail", r.Verdict)
			require.Equal(t, x.code, r.ErrorCode)
			require.NotEmpty(t, r.Findings)
			f := r.Findings[0]
			if x.kind != "" {
				require.Equal(t, x.kind, f.Kind, "%+v", f)
			}
			require.Contains(t, f.Reason, x.text)
			if x.rank >= 0 {
				require.Len(t, f.GPUs, 1)
				require.Equal(t, x.rank, f.GPUs[0].Rank)
			}
		})
	}
	_, errs, code := chorusCommand(t, nil, append([]string{"preflight", "-g", "1", "--output", "/nowhere/verdict"}, small...)...)
	require.Equal(t, exitNoReport, code, errs)
	require.Contains(t, errs, "/nowhere/verdict")
}

// A mistake in a setting has the exit code 2, and the sentence names the value and its source.
func TestPreflightSettings(t *testing.T) {
	for _, x := range []struct {
		env  []string
		args []string
		text string
	}{
		{nil, []string{"--bus-limit", "fast"}, `--bus-limit is "fast": want a number above 0`},
		{nil, []string{"--bus-limit", "-3"}, `--bus-limit is "-3"`},
		{nil, []string{"--pair-limit", "0"}, `--pair-limit is "0"`},
		{nil, []string{"--copy-limit", "1e999"}, `--copy-limit is "1e999"`},
		{nil, []string{"--part", "1.5"}, "--part 1.5: want a number above 0 and at most 1"},
		{[]string{"CHORUS_PREFLIGHT_BUS_LIMIT=NaN"}, nil, `CHORUS_PREFLIGHT_BUS_LIMIT is "NaN"`},
		{[]string{"BW_THRESHOLD_GBPS=150 GB/s"}, nil, `BW_THRESHOLD_GBPS is "150 GB/s": want a number above 0, such as 150`},
		{[]string{"TEST_SIZE_MB=-1"}, nil, `TEST_SIZE_MB is "-1"`},
		{[]string{"TEST_SIZE_MB=99999999"}, nil, `TEST_SIZE_MB is "99999999": want at most`},
		{[]string{"MESSAGE_SIZES=4M,8Q"}, nil, `MESSAGE_SIZES is "4M,8Q": "8Q" is not a size`},
		{[]string{"MESSAGE_SIZES=4"}, nil, `MESSAGE_SIZES is "4": "4": want 8 bytes or more`},
		{[]string{"GANG_TIMEOUT_SECONDS=soon"}, nil, `GANG_TIMEOUT_SECONDS is "soon"`},
		{[]string{"CHORUS_PREFLIGHT_TIMEOUT=5"}, nil, `CHORUS_PREFLIGHT_TIMEOUT is "5": want a duration above 0`},
		{nil, []string{"--timeout", "-1s"}, `--timeout is "-1s"`},
		{nil, []string{"--gang-timeout", "x"}, `--gang-timeout is "x"`},
		{nil, []string{"--profile", "slow"}, `--profile "slow": want quick or full`},
		{nil, []string{"--log", "xml"}, `--log "xml"`},
		{nil, []string{"--skip", "nothing"}, `--skip: unknown check "nothing"`},
		{nil, []string{"-g", "-2"}, "-g -2: want 1 or more"},
		{nil, []string{"-g", "many"}, "many"},
		{[]string{"CHORUS_VIRTUAL_DEVICES=4"}, []string{"-g", "9"}, "-g 9: this machine has 4 devices"},
		{nil, []string{"--fast"}, "--fast"},
		{nil, []string{"all"}, `unknown argument "all"`},
	} {
		out, errs, code := chorusCommand(t, x.env, append([]string{"preflight"}, x.args...)...)
		require.Equal(t, exitSetting, code, "%v %v: %s%s", x.env, x.args, out, errs)
		require.Contains(t, errs, x.text)
		require.Empty(t, out)
	}
	// A flag comes before a variable, and Chorus's variable before NVSentinel's, which is then not read.
	for _, x := range [][]string{
		{"CHORUS_PREFLIGHT_MAX_BYTES=4K", "TEST_SIZE_MB=x", "MESSAGE_SIZES=y"},
		{"MESSAGE_SIZES=1K,4K,2K", "TEST_SIZE_MB=x"},
	} {
		out, errs, code := chorusCommand(t, x, "preflight", "--json", "--no-health", "-g", "2")
		require.Zero(t, code, errs)
		var r preflightReport
		require.NoError(t, json.Unmarshal([]byte(out), &r))
		require.Equal(t, 4<<10, r.Check.Pairs[0].Bytes)
	}
}

// inGang starts the command in each process of a job of several processes on one host.
func inGang(t *testing.T, env []string, script string) (r *preflightReport, errs string, code int) {
	t.Helper()
	cmd := exec.Command(self(t), "run", "--nproc-per-node", "3", "--no-prefix", "--", "sh", "-c", script+` exec "$0" preflight --json --no-health --maxbytes 4K --step-timeout 20s`, self(t))
	cmd.Env = append(os.Environ(), append([]string{commandVar + "=1", "CHORUS_BACKEND=virtual", "CHORUS_GRACE=60s"}, env...)...)
	var out, text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &text
	if err := cmd.Run(); err != nil {
		require.IsType(t, &exec.ExitError{}, err)
	}
	r = &preflightReport{}
	if out.Len() > 0 {
		require.NoError(t, json.NewDecoder(&out).Decode(r), text.String())
	}
	return r, text.String(), cmd.ProcessState.ExitCode()
}

// The processes of a gang have one verdict.
func TestPreflightGang(t *testing.T) {
	for name, x := range map[string]struct {
		env    []string
		script string
		kind   perf.Kind // "": no finding
		rank   int
		text   string
	}{
		"healthy":           {nil, "", "", -1, ""},
		"wrong data":        {[]string{"CHORUS_VIRTUAL_FAULTS=wrong@ncclRecv:1#*"}, "", perf.Wrong, 1, "2 of its 2 pairs"},
		"a device hangs":    {[]string{"CHORUS_VIRTUAL_FAULTS=hang@cuLaunchKernel:2#1"}, "", perf.Hang, 2, "the test of its memory did not finish"},
		"another NCCL":      {nil, `if [ "$CHORUS_RANK" = 1 ]; then export CHORUS_VIRTUAL_NCCL=2.27.3; fi;`, perf.Broken, -1, "2.27.3"},
		"a refused receive": {[]string{"CHORUS_VIRTUAL_FAULTS=ncclRecv:0#1=ncclSystemError"}, "", perf.Broken, 0, "ncclRecv"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, errs, code := inGang(t, x.env, x.script)
			if x.kind == "" {
				require.Empty(t, r.Findings, errs)
				require.Zero(t, code, errs)
				require.Len(t, r.Check.Pairs, 3)
				return
			}
			require.Equal(t, exitFound, code, errs)
			require.NotEmpty(t, r.Findings, errs)
			f := r.Findings[0]
			require.Equal(t, x.kind, f.Kind, "%+v", f)
			require.Contains(t, f.Reason, x.text)
			if x.rank >= 0 {
				require.Len(t, f.GPUs, 1, "%+v", f)
				require.Equal(t, x.rank, f.GPUs[0].Rank)
			}
		})
	}
}

// A process whose last step has ended does not break the group of one that is still in it.
func TestPreflightLeavesTogether(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(testhost.Reserve(t)))
	ctx := testgpu.Context(t)
	var members [2]*member
	var errs [2]error
	var wg sync.WaitGroup
	for rank := range members {
		wg.Go(func() {
			members[rank] = &member{devs: devs[rank : rank+1]}
			members[rank].Session, errs[rank] = cluster.Join(ctx, &cluster.JoinConfig{Job: t.Name(), Size: 2, Rank: &rank, Addr: addr, Serve: rank == 0,
				Insecure: true, Notify: func(string) {}})
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs[:]...))
	defer members[0].Close()
	defer members[1].Close()
	cfg := perf.CheckConfig{MaxBytes: 4 << 10, Iterations: 1}
	other := make(chan error, 1)
	go func() {
		r, err := (&preflight{cfg: cfg}).collectives(ctx, members[1])
		if err == nil && !r.OK() {
			err = fmt.Errorf("findings %+v", r.Findings)
		}
		other <- err
	}()
	g, err := comm.Join(ctx, members[0].Session, devs[0], nil)
	require.NoError(t, err)
	defer g.Close()
	cfg.Store = members[0].Prefix("preflight")
	r, err := perf.Check(ctx, g, &cfg)
	require.NoError(t, err)
	require.Empty(t, r.Findings)
	require.NoError(t, g.Shutdown(ctx))
	require.NoError(t, <-other)
}

// Three agents on one machine are the hosts. What is wrong with all pairs of one host is its fault.
func TestPreflightHosts(t *testing.T) {
	seed := net.JoinHostPort("127.0.0.1", strconv.Itoa(testhost.Reserve(t)))
	outs, errs := make([]bytes.Buffer, 3), make([]bytes.Buffer, 3)
	var wg sync.WaitGroup
	begun := time.Now()
	for i, host := range []string{"a", "b", "c"} {
		wg.Go(func() {
			cmd := exec.Command(self(t), "run", "--nnodes", "3", "--node-rank", strconv.Itoa(i), "--nproc-per-node", "1", "--seeds", seed, "--job", "preflight", "--insecure", "--no-prefix", "--",
				self(t), "preflight", "--json", "--maxbytes", "4K", "--skip", "shm,memlock,open-files,ifname,hostname")
			cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual", "CHORUS_HOST="+host, "CHORUS_GRACE=60s")
			if host == "b" {
				cmd.Env = append(cmd.Env, "CHORUS_VIRTUAL_FAULTS=wrong@ncclRecv#*")
			}
			cmd.Stdout, cmd.Stderr = &outs[i], &errs[i]
			_ = cmd.Run() // fails
		})
	}
	wg.Wait()
	t.Logf("%v", time.Since(begun))
	var r preflightReport
	out := outs[0].String() + outs[1].String() + outs[2].String()
	require.NoError(t, json.NewDecoder(strings.NewReader(out)).Decode(&r), errs[0].String()+errs[1].String()+errs[2].String())
	require.NotEmpty(t, r.Findings)
	require.Equal(t, []string{"b"}, r.Findings[0].Hosts, "%+v", r.Findings)
	require.Contains(t, r.Findings[0].Reason, "host b: ")
	require.Contains(t, r.Findings[0].Reason, "2 of its 2 pairs")
	require.Len(t, r.Health.Hosts, 3)
}
