package job

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
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

var testToken = strings.Repeat("ab", KeyBytes)

// TestSecretOfAPod reads files as kubelet makes them for a pod with fsGroup: root owns them, and
// the group of the pod can read them.
func TestSecretOfAPod(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can make files with any owner")
	}
	path := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(path, []byte("0123456789abcdef"), 0o600))
	for _, tc := range []struct {
		pod  bool
		uid  int
		gid  int
		mode os.FileMode
		good bool
	}{
		{true, 0, os.Getegid(), 0o440, true},
		{false, 0, os.Getegid(), 0o440, false},
		{true, 0, os.Getegid(), 0o460, false},
		{true, 0, os.Getegid(), 0o444, false},
		{true, 0, 65534, 0o440, false},
		{true, 65534, os.Getegid(), 0o440, false},
	} {
		t.Setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
		if !tc.pod {
			require.NoError(t, os.Unsetenv("KUBERNETES_SERVICE_HOST"))
		}
		require.NoError(t, os.Chown(path, tc.uid, tc.gid))
		require.NoError(t, os.Chmod(path, tc.mode))
		secret, err := ReadSecretFile(path)
		if tc.good {
			require.NoError(t, err, "%+v", tc)
			require.Equal(t, "0123456789abcdef", string(secret))
		} else {
			require.Error(t, err, "%+v", tc)
		}
	}
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

// TestOneJob is `chorus run` without --nnodes under each launcher.
func TestOneJob(t *testing.T) {
	for _, e := range environments {
		vars := strings.ReplaceAll(e.two, "CHORUS_LAUNCHER=chorus", "")
		require.ErrorContains(t, checkOneJob(environ(vars)), "started 2 processes, and each would run a job of its own", e.name)
		require.NoError(t, checkOneJob(environ(vars+" CHORUS_LAUNCHER=none")), e.name)
		require.NoError(t, checkOneJob(environ(e.one)), e.name)
	}
	require.NoError(t, checkOneJob(environ("SLURM_JOB_ID=100 SLURM_PROCID=0 SLURM_NTASKS=7")), "the script of sbatch")
	for name, value := range map[string]string{"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"} {
		t.Setenv(name, value)
	}
	_, err := Start(t.Context(), &Config{Timing: quick})
	require.ErrorContains(t, err, "Slurm started 2 processes")
	a, err := Start(t.Context(), &Config{Nodes: 1, Timing: quick})
	require.NoError(t, err)
	require.NoError(t, a.Close())
}

func TestSplitAddr(t *testing.T) {
	for in, want := range map[string][2]string{
		"n1": {"n1", "7"}, "n1:8": {"n1", "8"}, "10.0.0.1": {"10.0.0.1", "7"}, "10.0.0.1:8": {"10.0.0.1", "8"}, " n1 ": {"n1", "7"},
		"2001:db8::1": {"2001:db8::1", "7"}, "[2001:db8::1]": {"2001:db8::1", "7"}, "[2001:db8::1]:8": {"2001:db8::1", "8"},
		"fe80::77%lo": {"fe80::77%lo", "7"}, "[fe80::77%lo]": {"fe80::77%lo", "7"}, "[fe80::77%lo]:8": {"fe80::77%lo", "8"}, "[::]": {"::", "7"}, "::": {"::", "7"},
	} {
		h, p, err := SplitAddr(in, "7")
		require.NoError(t, err, in)
		require.Equal(t, want, [2]string{h, p}, in)
	}
	for _, in := range []string{"[2001:db8::1", "2001:db8::1]", "2001:db8:1:8", "[::x]:8", "[n1]:8:9"} {
		_, _, err := SplitAddr(in, "7")
		require.EqualError(t, err, "want an IPv6 address as in [2001:db8::1]:7", in)
	}
	for _, in := range []string{"", " "} {
		_, _, err := SplitAddr(in, "7")
		require.EqualError(t, err, "empty address", in)
	}
}
