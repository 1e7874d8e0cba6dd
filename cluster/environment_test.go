package cluster

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// environ makes a lookup of "A=1 B=2".
func environ(text string) func(string) (string, bool) {
	m := map[string]string{}
	for v := range strings.FieldsSeq(text) {
		name, value, _ := strings.Cut(v, "=")
		m[name] = value
	}
	return func(name string) (string, bool) {
		v, ok := m[name]
		return v, ok
	}
}

var testToken = strings.Repeat("ab", job.KeyBytes)

func TestDetect(t *testing.T) {
	type place struct{ rank, size, local, localSize int }
	for _, tc := range []struct {
		name, env string
		want      place
		addr      string
		serve     bool
		source    string
	}{
		{"nothing", "", place{-1, 0, -1, 0}, "", false, "no launcher's variables are set: a world of one process"},
		{"none", "CHORUS_LAUNCHER=none RANK=1 WORLD_SIZE=2", place{-1, 0, -1, 0}, "", false, "CHORUS_LAUNCHER=none: a world of one process"},
		{"chorus", "CHORUS_RANK=3 CHORUS_WORLD_SIZE=8 CHORUS_LOCAL_RANK=1 CHORUS_LOCAL_SIZE=2 CHORUS_NODE=1 CHORUS_ADDR=10.0.0.1:5 CHORUS_TOKEN=" + testToken + " RANK=3 WORLD_SIZE=8 SLURM_JOB_ID=1 SLURM_PROCID=7 SLURM_STEP_NODELIST=a",
			place{3, 8, 1, 2}, "10.0.0.1:5", false, "chorus run: CHORUS_RANK=3, CHORUS_WORLD_SIZE=8, CHORUS_LOCAL_RANK=1, CHORUS_NODE=1; coordinator at 10.0.0.1:5"},
		{"torchrun on one host", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=some.host MASTER_PORT=29500",
			place{0, 2, 0, 2}, "127.0.0.1:29500", true, "torchrun: RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2; coordinator at 127.0.0.1:29500"},
		{"torchrun's store has the port", "RANK=5 WORLD_SIZE=16 LOCAL_RANK=5 LOCAL_WORLD_SIZE=8 MASTER_ADDR=n0 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True",
			place{5, 16, 5, 8}, "n0:29501", false, "torchrun: RANK=5, WORLD_SIZE=16, LOCAL_RANK=5, LOCAL_WORLD_SIZE=8; coordinator at n0:29501"},
		{"PyTorchJob's master", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=23456 KUBERNETES_SERVICE_HOST=10.0.0.1",
			place{0, 2, -1, 0}, "localhost:23456", true, "torchrun: RANK=0, WORLD_SIZE=2; coordinator at localhost:23456"},
		{"torchrun of one", "RANK=0 WORLD_SIZE=1", place{0, 1, -1, 0}, "", false, "torchrun: RANK=0, WORLD_SIZE=1"},
		{"slurm", "SLURM_JOB_ID=100 SLURM_STEP_ID=2 SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NODELIST=g[01-02] SLURM_STEP_TASKS_PER_NODE=4,3",
			place{5, 7, 1, 3}, "g01:61542", false, "Slurm: SLURM_PROCID=5, SLURM_NTASKS=7, SLURM_LOCALID=1, SLURM_NODEID=1; coordinator at g01:61542"},
		{"slurm on one host", "SLURM_JOB_ID=4096 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=9 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NODELIST=g1",
			place{0, 2, 0, 0}, "127.0.0.1:61440", true, "Slurm: SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=2, SLURM_LOCALID=0, SLURM_NODEID=0; coordinator at 127.0.0.1:61440"},
		{"script of sbatch", "SLURM_JOB_ID=100 SLURM_PROCID=0 SLURM_NTASKS=7", place{-1, 0, -1, 0}, "", false, "no launcher's variables are set: a world of one process"},
		{"script of sbatch without --ntasks", "SLURM_JOB_ID=100 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0", place{-1, 0, -1, 0}, "", false, "no launcher's variables are set: a world of one process"},
		{"shell in an allocation", "SLURM_JOB_ID=100 SLURM_NTASKS=7 SLURM_JOB_NODELIST=a", place{-1, 0, -1, 0}, "", false, "no launcher's variables are set: a world of one process"},
		{"none in spite of half", "CHORUS_LAUNCHER=none RANK=0", place{-1, 0, -1, 0}, "", false, "CHORUS_LAUNCHER=none: a world of one process"},
		{"open mpi", "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 CHORUS_SEEDS=n0:7000",
			place{1, 4, 1, 2}, "n0:7000", false, "Open MPI: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=1; coordinator at n0:7000"},
		{"pmi", "PMI_RANK=0 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 CHORUS_SEEDS=n0,n1",
			place{0, 4, 0, 2}, "n0:29477", true, "MPI (PMI): PMI_RANK=0, PMI_SIZE=4, MPI_LOCALRANKID=0; coordinator at n0:29477"},
		{"kubernetes", "JOB_COMPLETION_INDEX=2 CHORUS_WORLD_SIZE=4 CHORUS_SEEDS=j-0.svc:9", place{2, 4, -1, 0}, "j-0.svc:9", false, "Kubernetes: JOB_COMPLETION_INDEX=2, CHORUS_WORLD_SIZE=4; coordinator at j-0.svc:9"},
		{"any indexed job", "JOB_COMPLETION_INDEX=2", place{-1, 0, -1, 0}, "", false, "JOB_COMPLETION_INDEX is set, but neither CHORUS_WORLD_SIZE nor CHORUS_SEEDS: a world of one process"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := detect(environ(tc.env))
			require.NoError(t, err)
			require.Equal(t, tc.want, place{job.Deref(c.Rank, -1), c.Size, job.Deref(c.LocalRank, -1), c.LocalSize})
			require.Equal(t, tc.addr, c.Addr)
			require.Equal(t, tc.serve, c.Serve)
			require.Equal(t, tc.source, c.source)
		})
	}
}

func TestDetectContradictions(t *testing.T) {
	for env, want := range map[string]string{
		"RANK=0 WORLD_SIZE=1048577 LOCAL_RANK=0":                                                                  `WORLD_SIZE="1048577": a world has at most 1048576 processes`,
		"RANK=0 WORLD_SIZE=2000000000 LOCAL_WORLD_SIZE=2000000000":                                                `WORLD_SIZE="2000000000": a world has at most 1048576 processes`,
		"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1048577":                                                     `OMPI_COMM_WORLD_SIZE="1048577": a world has at most`,
		"PMI_RANK=0 PMI_SIZE=1048577 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1048577":                                   `PMI_SIZE="1048577": a world has at most`,
		"SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_NTASKS=1048577 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NODELIST=a": `SLURM_NTASKS="1048577": a world has at most`,
		"JOB_COMPLETION_INDEX=2 CHORUS_WORLD_SIZE=1048577 CHORUS_SEEDS=j-0.svc:9":                                 `CHORUS_WORLD_SIZE="1048577": a world has at most`,
		"CHORUS_RANK=3 CHORUS_WORLD_SIZE=1048577 CHORUS_ADDR=10.0.0.1:5 CHORUS_TOKEN=" + testToken:                `CHORUS_WORLD_SIZE="1048577": a world has at most`,
		"RANK=4 WORLD_SIZE=4":                                 `RANK="4" and WORLD_SIZE="4": the rank must be less than the size`,
		"RANK=x WORLD_SIZE=4":                                 `RANK="x": want a whole number of at least 0`,
		"RANK=0 WORLD_SIZE=0":                                 `WORLD_SIZE="0": want a whole number of at least 1`,
		"RANK=0 WORLD_SIZE=2":                                 `MASTER_ADDR (unset): a world of several`,
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=a":                   `MASTER_PORT (unset): want a whole number`,
		"RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2": `LOCAL_RANK="2" and LOCAL_WORLD_SIZE="2": the local rank must be less`,
		"RANK=1 WORLD_SIZE=4 LOCAL_RANK=2":                    `LOCAL_RANK="2" and RANK="1": the local rank cannot exceed the rank`,
		"RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=8":              `LOCAL_WORLD_SIZE="8" and WORLD_SIZE="2": a host cannot have more`,
		"CHORUS_RANK=1 CHORUS_WORLD_SIZE=2 CHORUS_ADDR=a:1 RANK=0 CHORUS_TOKEN=" + testToken: `CHORUS_RANK="1" and RANK="0": two launchers`,
		"CHORUS_RANK=1": `CHORUS_WORLD_SIZE (unset): `,
		"CHORUS_RANK=1 CHORUS_WORLD_SIZE=2 CHORUS_ADDR=a:1 CHORUS_TOKEN=zz":                           `CHORUS_TOKEN: want 64 hexadecimal digits`,
		"SLURM_JOB_ID=1 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NODELIST=a[":                         `SLURM_STEP_NODELIST="a[": node list "a[" has an unclosed bracket`,
		"SLURM_JOB_ID=1 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NODELIST=a,b SLURM_TASKS_PER_NODE=4": `SLURM_TASKS_PER_NODE="4" and SLURM_STEP_NODELIST="a,b": the first lists 1 hosts, the second 2`,
		"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2":                  `CHORUS_SEEDS (unset): the launcher provides no address`,
		"JOB_COMPLETION_INDEX=2 CHORUS_SEEDS=a:1":                                                     `CHORUS_WORLD_SIZE (unset): want a whole number`,
		"WORLD_SIZE=2":                              `WORLD_SIZE="2" and RANK (unset): only some of torchrun's variables are set`,
		"RANK=0":                                    `RANK="0" and WORLD_SIZE (unset): only some of torchrun's`,
		"LOCAL_RANK=0":                              `LOCAL_RANK="0" and RANK (unset) and WORLD_SIZE (unset): only some of torchrun's`,
		"RANK=0 LOCAL_WORLD_SIZE=2":                 `RANK="0" and LOCAL_WORLD_SIZE="2" and WORLD_SIZE (unset): only some of torchrun's`,
		"CHORUS_WORLD_SIZE=2":                       `CHORUS_WORLD_SIZE="2" and CHORUS_RANK (unset): only some of `,
		"CHORUS_LOCAL_RANK=0":                       `CHORUS_LOCAL_RANK="0" and CHORUS_RANK (unset): only some of `,
		"SLURM_PROCID=0":                            `SLURM_PROCID="0" and SLURM_JOB_ID (unset): only some of Slurm's`,
		"SLURM_JOB_ID=7 SLURM_PROCID=1":             `SLURM_PROCID="1" and SLURM_STEP_NODELIST (unset): only some of Slurm's`,
		"OMPI_COMM_WORLD_RANK=1":                    `OMPI_COMM_WORLD_RANK="1" and OMPI_COMM_WORLD_SIZE (unset): only some of Open MPI's`,
		"PMI_RANK=1":                                `PMI_RANK="1" and PMI_SIZE (unset): only some of MPI (PMI)'s`,
		"PMI_RANK=1 PMI_SIZE=4":                     `PMI_SIZE="4" and CHORUS_SEEDS (unset): the launcher provides no address`,
		"PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_SIZE=2":    `PMI_SIZE="2" and CHORUS_JOB (unset): the launcher gives the job no name`,
		"FLUX_JOB_SIZE=2":                           `FLUX_JOB_SIZE="2": Flux started several processes`,
		"MV2_COMM_WORLD_SIZE=2":                     `MV2_COMM_WORLD_SIZE="2": MVAPICH started several`,
		"PMIX_RANK=1 RANK=0 WORLD_SIZE=1":           `PMIX_RANK="1": a launcher with PMIx started several`,
		"CHORUS_LAUNCHER=mpich":                     `CHORUS_LAUNCHER="mpich": want one of auto, none, chorus`,
		"CHORUS_LAUNCHER=slurm RANK=0 WORLD_SIZE=1": `SLURM_PROCID (unset)`,
	} {
		_, err := detect(environ(env))
		var e *ConfigError
		require.ErrorAs(t, err, &e, env)
		require.Contains(t, err.Error(), want, env)
		require.NotContains(t, err.Error(), testToken)
	}
}

func TestDetectSecret(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, []byte(text), 0o600))
		require.NoError(t, os.Chmod(p, mode))
		return p
	}
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	base := "RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=5 "
	c, err := detect(environ(base + "CHORUS_SECRET_FILE=" + write("good", "0123456789abcdef\n", 0o600)))
	require.NoError(t, err)
	require.Equal(t, "0123456789abcdef", string(c.Secret))
	for file, want := range map[string]string{
		write("short", "0123456789abcde\n", 0o600): "15 bytes of secret: want at least 16",
		write("open", "0123456789abcdef", 0o640):   "mode 0640 lets others use it: run chmod 600",
		filepath.Join(dir, "none"):                 "no such file",
		dir:                                        "not a regular file but a directory",
		pipe:                                       "not a regular file but a named pipe",
	} {
		_, err := detect(environ(base + "CHORUS_SECRET_FILE=" + file))
		require.ErrorContains(t, err, want)
	}
	if os.Geteuid() == 0 {
		others := write("others", "0123456789abcdef", 0o600)
		require.NoError(t, os.Chown(others, 65534, 65534))
		_, err := detect(environ(base + "CHORUS_SECRET_FILE=" + others))
		require.ErrorContains(t, err, "belongs to user 65534, who knows the secret")
	}
	c, err = detect(environ(base))
	require.NoError(t, err)
	_, err = Join(t.Context(), c)
	require.ErrorContains(t, err, "no secret for the coordinator at 10.0.0.1:5: set CHORUS_SECRET_FILE")
}

// environments are what the launchers set for the second process of a world of two and for the only
// process of a world, as recorded from Open MPI 4.1, MPICH 4.0 and Slurm 22.05 (srun, and srun --mpi=pmi2).
// The variables that Chorus does not read are omitted.
var environments = []struct{ name, two, one string }{
	{"chorus", "CHORUS_LAUNCHER=chorus CHORUS_RANK=1 CHORUS_WORLD_SIZE=2 CHORUS_LOCAL_RANK=1 CHORUS_LOCAL_SIZE=2 CHORUS_NODE=0 CHORUS_NODES=1 CHORUS_ADDR=127.0.0.1:5 CHORUS_TOKEN=" + testToken + " RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=6",
		"CHORUS_LAUNCHER=chorus CHORUS_RANK=0 CHORUS_WORLD_SIZE=1 CHORUS_LOCAL_RANK=0 CHORUS_LOCAL_SIZE=1 CHORUS_NODE=0 CHORUS_NODES=1 CHORUS_ADDR=127.0.0.1:5 CHORUS_TOKEN=" + testToken + " RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=6"},
	{"torchrun", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=n1 MASTER_PORT=7 TORCHELASTIC_RUN_ID=none",
		"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 MASTER_ADDR=n1 MASTER_PORT=7 TORCHELASTIC_RUN_ID=none"},
	{"openmpi", "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 PMIX_NAMESPACE=552861697 PMIX_RANK=1",
		"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_NODE_RANK=0 PMIX_NAMESPACE=552861698 PMIX_RANK=0"},
	{"pmi", "PMI_RANK=1 PMI_SIZE=2 PMI_FD=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 HYDI_CONTROL_FD=7 CHORUS_JOB=mine",
		"PMI_RANK=0 PMI_SIZE=1 PMI_FD=6 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 HYDI_CONTROL_FD=7"},
	{"slurm", "SLURM_JOB_ID=2 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_TASKS_PER_NODE=1(x2) SLURMD_NODENAME=n2",
		"SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NODELIST=n1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1 SLURMD_NODENAME=n1"},
	{"kubernetes", "JOB_COMPLETION_INDEX=1 CHORUS_WORLD_SIZE=2 CHORUS_SEEDS=j-0.j:9", "JOB_COMPLETION_INDEX=0 CHORUS_WORLD_SIZE=1"},
}

// pmiOfSlurm are the variables that srun --mpi=pmi2 adds to its own.
const pmiOfSlurm = " PMI_RANK=1 PMI_SIZE=2 PMI_FD=11 PMI_JOBID=2.0 SLURM_MPI_TYPE=pmi2"

// TestNestedLaunchers has each launcher inside of each other one. Two launchers whose variables have
// different names leave no trace of their order, so the order of launchers decides.
func TestNestedLaunchers(t *testing.T) {
	for outer := len(environments) - 1; outer > 0; outer-- {
		for inner := range outer {
			in, out := environments[inner], environments[outer]
			for _, tc := range []struct {
				vars, want string
				size       int
			}{
				{out.two + " " + in.two, in.name, 2},
				{out.one + " " + in.two, in.name, 2},
				{out.one + " " + in.one, in.name, 1},
				{out.two + " " + in.one, out.name, 2},
			} {
				want, size := tc.want, tc.size
				switch {
				case in.name == "chorus":
					want, size = "chorus", map[bool]int{true: 2, false: 1}[strings.Contains(tc.vars, "CHORUS_RANK=1")] // it sets CHORUS_LAUNCHER
				case out.name == "kubernetes" && strings.Contains(tc.vars, "CHORUS_SEEDS=") && want == in.name && in.name != "torchrun" && in.name != "slurm":
					continue // MPI would use this seed; nobody sets one for both
				}
				cfg, err := detect(environ(tc.vars))
				require.NoError(t, err, tc.vars)
				require.True(t, strings.HasPrefix(cfg.source, map[string]string{"chorus": "chorus run: ", "torchrun": "torchrun: ", "openmpi": "Open MPI: ",
					"pmi": "MPI (PMI): ", "slurm": "Slurm: ", "kubernetes": "Kubernetes: "}[want]), "%s in %s: %s", in.name, out.name, cfg.source)
				require.Equal(t, size, cfg.Size, tc.vars)
			}
		}
	}
	slurm := environments[4]
	cfg, err := detect(environ(slurm.two + pmiOfSlurm))
	require.NoError(t, err)
	require.Equal(t, "n1:61442", cfg.Addr, "Slurm's variables contain an address, PMI's do not")
	// The proxies of MPICH are a step of Slurm with a task for each host.
	cfg, err = detect(environ(slurm.two + " PMI_RANK=3 PMI_SIZE=4 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 CHORUS_SEEDS=n1:8"))
	require.NoError(t, err)
	require.Equal(t, []int{3, 4, 1}, []int{*cfg.Rank, cfg.Size, *cfg.LocalRank})
}

// TestTwoJobsOfMPICH starts two jobs at the same time, each with the variables of Hydra and below a proxy
// of its own. Their names and ports differ, so each has a world of its own.
func TestTwoJobsOfMPICH(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	proxy := filepath.Join(t.TempDir(), "hydra_pmi_proxy")
	require.NoError(t, os.WriteFile(proxy, []byte(`#!/bin/sh
for rank in 0 1; do
	PMI_RANK=$rank PMI_SIZE=2 MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=2 sh -c '"$0" worker shutdown; echo "left $?"' "$1" &
done
wait
`), 0o755))
	var outs [2]strings.Builder
	var cmds [2]*exec.Cmd
	for i := range cmds {
		cmds[i] = exec.Command(proxy, self)
		cmds[i].Stdout, cmds[i].Stderr = &outs[i], &outs[i]
		require.NoError(t, cmds[i].Start())
	}
	for i := range cmds {
		require.NoError(t, cmds[i].Wait())
		require.Equal(t, 2, strings.Count(outs[i].String(), "left 0"), outs[i].String())
		require.Contains(t, outs[i].String(), "attached 1 of 2")
	}
}

func TestParseNodeList(t *testing.T) {
	for in, want := range map[string]string{
		"n1":                      "n1",
		"n1,n2":                   "n1 n2",
		"gpu[01-03]":              "gpu01 gpu02 gpu03",
		"gpu[9-11]":               "gpu9 gpu10 gpu11",
		"gpu[01-02,07],login":     "gpu01 gpu02 gpu07 login",
		"r[1-2]n[0-1]":            "r1n0 r1n1 r2n0 r2n1",
		"a[1-2]-ib,b":             "a1-ib a2-ib b",
		"node-[099-101].example.": "node-099.example. node-100.example. node-101.example.",
		"[1-2]":                   "1 2",
	} {
		got, err := parseNodeList(in)
		require.NoError(t, err, in)
		require.Equal(t, want, strings.Join(got, " "), in)
	}
	for _, in := range []string{"", ",", "a,", ",a", "a[", "a]", "a[]", "a[1", "a[[1]]", "a[2-1]", "a[x]", "a[1-]",
		"a[-1]", "a[1-99999999]", "a[0-9999]b[0-9999]", "a[1,,2]", "a[1-4294967296]"} {
		_, err := parseNodeList(in)
		require.Error(t, err, in)
	}
}

func TestParseTasksPerNode(t *testing.T) {
	for in, want := range map[string][]int{"4": {4}, "4(x2),3": {4, 4, 3}, "1,2,3": {1, 2, 3}, "2(x1)": {2}} {
		got, err := parseTasksPerNode(in)
		require.NoError(t, err, in)
		require.Equal(t, want, got, in)
	}
	for _, in := range []string{"", "x", "4(x0)", "4(x)", "4(x2", "4x2", "4(x99999999)", "-1", "4,,3"} {
		_, err := parseTasksPerNode(in)
		require.Error(t, err, in)
	}
}

func FuzzParseNodeList(f *testing.F) {
	for _, s := range []string{"gpu[01-03,7],login", "r[1-2]n[0-1]", "a[", "a]b[1-2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		hosts, err := parseNodeList(s)
		if err != nil {
			return
		}
		require.NotEmpty(t, hosts)
		require.LessOrEqual(t, len(hosts), maxListed)
		for _, h := range hosts {
			require.NotContains(t, h, "[")
			require.NotContains(t, h, ",")
		}
	})
}

func FuzzParseTasksPerNode(f *testing.F) {
	f.Add("4(x2),3")
	f.Add("4(x")
	f.Fuzz(func(t *testing.T, s string) {
		counts, err := parseTasksPerNode(s)
		require.True(t, err != nil || len(counts) > 0 && len(counts) <= maxListed)
	})
}
