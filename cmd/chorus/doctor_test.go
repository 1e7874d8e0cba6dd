package main

import (
	"encoding/json"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/health"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testhost"
)

func TestDoctorFlags(t *testing.T) {
	for _, args := range [][]string{{"--only", "nothing"}, {"--skip", "nothing"}, {"--only"}, {"argument"}, {"--nope"}, {"--only", "pairs"}, {"--only", "gpu-count"}, {"--only", "xid", "--skip", "xid"}} {
		_, errs, code := chorusCommand(t, nil, append([]string{"doctor"}, args...)...)
		require.Equal(t, launch.ExitUsage, code, "%q: %s", args, errs)
	}
}

// The checks of files that a variable makes fail give the exit codes.
func TestDoctorExitCodes(t *testing.T) {
	for _, x := range []struct {
		env  []string
		args []string
		code int
		text string
	}{
		{nil, []string{"--only", "variables"}, 0, "1 host: 1 pass, 0 warn, 0 fail, 0 unknown\n"},
		{[]string{"NCCL_ALGO=Ring"}, []string{"--only", "variables"}, 0, "NCCL_ALGO=Ring"},
		{[]string{"NCCL_ALGO=Ring"}, []string{"--only", "variables", "--strict"}, 1, "0 pass, 1 warn"},
		{[]string{"NCCL_SOCKET_IFNAME=none"}, []string{"--only", "ifname"}, 1, "NCCL_SOCKET_IFNAME=none"},
		{[]string{"NCCL_ALGO=\x1b[2J"}, []string{"--only", "variables"}, 0, `NCCL_ALGO=\x1b[2J`},
	} {
		out, errs, code := chorusCommand(t, append([]string{"HOME=/nowhere", "NCCL_CONF_FILE=/nowhere"}, x.env...), append([]string{"doctor"}, x.args...)...)
		require.Equal(t, x.code, code, "%s%s", out, errs)
		require.Contains(t, out, x.text)
		require.NotContains(t, out, "\x1b")
	}
}

// The whole command works on any machine, and without a GPU nothing fails because of GPUs.
func TestDoctorJSON(t *testing.T) {
	out, errs, _ := chorusCommand(t, nil, "doctor", "--json")
	var r health.Report
	require.NoError(t, json.Unmarshal([]byte(out), &r), errs)
	name, err := os.Hostname()
	require.NoError(t, err)
	require.Equal(t, []string{name}, r.Hosts)
	require.Equal(t, health.Count(r.Results), r.Counts)
	seen := map[string]bool{}
	for _, x := range r.Results {
		seen[x.ID] = true
		if x.Verdict == health.Unknown {
			require.NotEmpty(t, x.Cause, x.ID)
		}
	}
	checks, err := (&health.Selection{}).Select(health.Checks)
	require.NoError(t, err)
	for _, c := range checks {
		require.True(t, seen[c.ID], c.ID)
	}
}

func TestDoctorHelp(t *testing.T) {
	help := newDoctorCommand().Long
	for _, c := range health.Checks {
		require.Contains(t, strings.ReplaceAll(help, "\n", " "), c.ID)
	}
}

// TestDoctorJob checks two hosts whose variables differ. Rank 0 prints the results of both.
func TestDoctorJob(t *testing.T) {
	seed := net.JoinHostPort("127.0.0.1", strconv.Itoa(testhost.Reserve(t)))
	var outs, errs [2]string
	var codes [2]int
	var wg sync.WaitGroup
	for i := range 2 {
		env := []string{"CHORUS_HOST=host" + strconv.Itoa(i), "NCCL_CONF_FILE=/nowhere", "NCCL_PROTO=" + []string{"Simple", "LL"}[i]}
		wg.Go(func() {
			outs[i], errs[i], codes[i] = chorusCommand(t, env, "run", "--nnodes", "2", "--node-rank", strconv.Itoa(i), "--seeds", seed, "--bind", "127.0.0.1",
				"--job", "doctor", "--insecure", "--nproc-per-node", "2", "--no-prefix", "--", self(t), "doctor", "--json", "--measure")
		})
	}
	wg.Wait()
	require.Equal(t, 1, codes[0], errs[0])
	require.Empty(t, outs[1])
	var r health.Report
	require.NoError(t, json.Unmarshal([]byte(outs[0]), &r), outs[0]+errs[0])
	require.Equal(t, []string{"host0", "host1"}, r.Hosts)
	verdicts := map[string][]health.Verdict{}
	for _, x := range r.Results {
		verdicts[x.ID] = append(verdicts[x.ID], x.Verdict)
		switch x.ID {
		case "variables-protocol":
			require.Equal(t, "host host0: NCCL_PROTO=Simple; host host1: NCCL_PROTO=LL", x.Found)
		case "pairs":
			require.Equal(t, "the check variables-protocol has failed: correct the failures first", x.Cause)
		}
	}
	require.Len(t, verdicts["shm"], 2)
	require.Equal(t, []health.Verdict{health.Pass}, verdicts["clock-skew"])
	require.Equal(t, []health.Verdict{health.Fail}, verdicts["variables-protocol"])
	require.Equal(t, []health.Verdict{health.Unknown}, verdicts["pairs"])
}

// TestDoctorMeasures runs the measurements on virtual devices, whose times prove nothing.
func TestDoctorMeasures(t *testing.T) {
	out, errs, code := chorusCommand(t, []string{"CHORUS_VIRTUAL_DEVICES=2"}, "doctor", "--measure", "--only", "host-copies,peer-data,pairs,all-reduce")
	require.Zero(t, code, errs)
	require.Contains(t, out, "results correct (virtual devices: timings are not meaningful)")
	require.Contains(t, out, "direct copies between all 1 pairs bring the right data")
	require.Contains(t, out, "1 host: 1 pass, 0 warn, 0 fail, 4 unknown")
	out, errs, code = chorusCommand(t, []string{"CHORUS_VIRTUAL_DEVICES=1"}, "doctor", "--measure", "--only", "pairs")
	require.Zero(t, code, errs)
	require.Contains(t, out, "one GPU: the check needs two")
	out, errs, code = chorusCommand(t, nil, "run", "--nproc-per-node", "2", "--no-prefix", "--", self(t), "doctor", "--measure", "--only", "host-copies,peer-data,pairs,all-reduce")
	require.Zero(t, code, errs)
	require.Contains(t, out, "each process has one GPU")
	require.Contains(t, out, "results correct (virtual devices: timings are not meaningful)")
	require.Contains(t, out, "1 host: 0 pass, 0 warn, 0 fail, 5 unknown")
}

// Two agents on one machine have different names.
func TestDoctorHostNames(t *testing.T) {
	require.Equal(t, []string{"a", "b", "a/2"}, hostNames([]cluster.Member{{Node: 2, Host: "a"}, {Node: 0, Host: "a"}, {Node: 1, Host: "b"}, {Node: 0, Host: "a"}}))
}
