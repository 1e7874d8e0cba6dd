package check

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A slurm is a cluster of two nodes on this host. Each daemon has its own namespaces of the host's name and of /etc/hosts, so that it is
// a host of its own to Slurm, and to the processes that it starts. All share a network namespace, in which each node has an address:
// chorus run refuses names of hosts that mean 127.0.0.1.
type slurm struct {
	b      *bench
	dir    string
	inside []string // the begin of a command in the network namespace
}

// daemon starts a program in the foreground, and ends it with the test.
func daemon(t *testing.T, log string, name string, args ...string) {
	t.Helper()
	f, err := os.Create(log)
	require.NoError(t, err)
	c := exec.Command(name, args...)
	c.Stdout, c.Stderr = f, f
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM) // it may have ended
		ended := make(chan struct{})
		go func() { _ = c.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-time.After(time.Minute):
			_ = c.Process.Kill()
			<-ended
		}
		_ = f.Close()
		if text, err := os.ReadFile(log); err == nil && t.Failed() {
			t.Logf("%s:\n%s", filepath.Base(log), text)
		}
	})
}

// newSlurm starts munged, slurmctld and a slurmd for each node, or skips the test where that is not possible.
func newSlurm(t *testing.T) *slurm {
	for _, name := range []string{"munged", "slurmctld", "slurmd", "sbatch", "sinfo", "unshare", "nsenter", "ip"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skip(err)
		}
	}
	if out, err := exec.Command("unshare", "-u", "-m", "hostname", "node1").CombinedOutput(); err != nil {
		t.Skipf("no namespaces for two hosts: %s", out)
	}
	dir, err := os.MkdirTemp("", "slurm") // the paths of sockets must be short
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	s := &slurm{newBench(t), dir, nil}
	network := exec.Command("unshare", "-n", "bash", "-c", "ip link set lo up && ip addr add 10.77.0.1/32 dev lo && ip addr add 10.77.0.2/32 dev lo && echo ready && exec cat")
	hold, err := network.StdinPipe()
	require.NoError(t, err)
	ready, err := network.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, network.Start())
	t.Cleanup(func() { _ = hold.Close(); _ = network.Wait() }) // cat ends with its input
	if line, err := bufio.NewReader(ready).ReadString('\n'); err != nil || line != "ready\n" {
		t.Skip("no network namespace for two hosts")
	}
	s.inside = []string{"nsenter", "-n", "-t", itoa(network.Process.Pid)}
	write := func(name, text string, mode os.FileMode) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), mode))
	}
	write("munge.key", strings.Repeat("a key of this test, ", 20), 0o400)
	write("hosts", "127.0.0.1 localhost\n10.77.0.1 control node1\n10.77.0.2 node2\n", 0o644)
	for i := range 8 {
		write("gpu"+itoa(i), "", 0o600)
	}
	write("gres.conf", "Name=gpu File="+dir+"/gpu[0-7]\n", 0o644)
	write("slurm.conf", fmt.Sprintf(`ClusterName=test
SlurmctldHost=control(10.77.0.1)
SlurmctldPort=%[1]d
AuthType=auth/munge
AuthInfo=socket=%[4]s/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=%[4]s
SlurmdSpoolDir=%[4]s/spool.%%n
SlurmctldPidFile=%[4]s/slurmctld.pid
SlurmdPidFile=%[4]s/slurmd.%%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node1 NodeAddr=10.77.0.1 Port=%[2]d CPUs=64 Gres=gpu:8
NodeName=node2 NodeAddr=10.77.0.2 Port=%[3]d CPUs=64 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES State=UP
`, freePort(t), freePort(t), freePort(t), dir), 0o644)
	path := func(name string) string { return filepath.Join(dir, name) }
	daemon(t, path("munged.log"), "munged", "--foreground", "--force", "--socket", path("munge.sock"), "--key-file", path("munge.key"), "--pid-file", path("munge.pid"),
		"--log-file", path("munge.log"), "--seed-file", path("munge.seed"))
	on := func(host string, args ...string) {
		script := `hostname ` + host + `; mount --bind ` + path("hosts") + ` /etc/hosts; exec "$@"`
		all := slices.Concat(s.inside, []string{"unshare", "-u", "-m", "bash", "-c", script, host}, args)
		daemon(t, path(host+".log"), all[0], all[1:]...)
	}
	on("control", "slurmctld", "-D", "-f", path("slurm.conf"))
	for _, node := range []string{"node1", "node2"} {
		on(node, "slurmd", "-D", "-f", path("slurm.conf"), "-N", node)
	}
	require.Eventually(t, func() bool {
		out, err := s.command(t.Context(), "sinfo", "-h", "-N", "-o", "%T").Output()
		return err == nil && string(out) == "idle\nidle\n"
	}, 2*time.Minute, 100*time.Millisecond, "the nodes are not idle")
	return s
}

func (s *slurm) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	all := slices.Concat(s.inside, []string{name}, args)
	c := s.b.command(ctx, []string{"SLURM_CONF=" + filepath.Join(s.dir, "slurm.conf"), "CHORUS_SECRET_FILE=" + s.b.secret}, all[0], all[1:]...)
	c.Dir = s.b.dir
	return c
}

// The scripts run in jobs of the real Slurm, on two nodes with two ranks each, and without any variable or name of this test.
func TestRealSlurm(t *testing.T) {
	s := newSlurm(t)
	for file, tasks := range map[string]int{"train.sbatch": 1, "direct.sbatch": 2} {
		path, err := filepath.Abs(filepath.Join("..", "slurm", file))
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		var errs bytes.Buffer
		c := s.command(ctx, "sbatch", "--wait", "--parsable", "--output=out-%j", "--ntasks-per-node="+itoa(tasks), "--cpus-per-task=8", path, s.b.program)
		c.Stderr = &errs
		id, err := c.Output()
		cancel()
		name := strings.TrimSpace(string(id))
		out, _ := os.ReadFile(filepath.Join(s.b.dir, "out-"+name)) // the error of the job tells more
		require.NoError(t, err, "%s: %s\n%s", file, errs.String(), out)
		ranks(t, string(out), 4)
		if file == "train.sbatch" {
			require.FileExists(t, filepath.Join(s.b.dir, "logs", "attempt-0", "slurm-"+name, "rank-3.out"))
		}
	}
}

// The script for Open MPI runs with the real mpirun, where it is installed.
func TestRealOpenMPIScript(t *testing.T) {
	path, err := exec.LookPath("mpirun.openmpi")
	if err != nil {
		t.Skip(err)
	}
	b := newBench(t)
	require.NoError(t, os.Symlink(path, filepath.Join(b.dir, "mpirun")))
	out := b.hosts(t, 1, func(ctx context.Context, _ int) *exec.Cmd {
		return b.command(ctx, []string{"HOSTS=localhost:4", "CHORUS_SECRET_FILE=" + b.secret, "CHORUS_VIRTUAL_DEVICES=4", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"},
			filepath.Join("..", "launchers", "openmpi.sh"), b.program)
	})
	ranks(t, out, 4)
}

// body reads all of a response.
func body(t *testing.T, r io.ReadCloser) []byte {
	t.Helper()
	defer r.Close()
	b, err := io.ReadAll(r)
	require.NoError(t, err)
	return b
}
