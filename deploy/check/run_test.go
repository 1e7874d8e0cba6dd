package check

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/unit"
	trainer "github.com/kubeflow/trainer/v2/pkg/apis/trainer/v1alpha1"
	"github.com/stretchr/testify/require"
	batch "k8s.io/api/batch/v1"
)

func itoa[T int | int32](n T) string { return strconv.Itoa(int(n)) }

// A bench has the command, a program and a secret in a folder, which comes first in PATH.
type bench struct{ dir, program, secret string }

// built is a folder with the command and a program.
var built string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if built, err = os.MkdirTemp("", "deploy"); err != nil {
			panic(err)
		}
		defer os.RemoveAll(built)
		for name, pkg := range map[string]string{"chorus": "cmd/chorus", "train": "examples/ring", "elastic": "examples/elastic"} {
			build := exec.Command("go", "build", "-o", filepath.Join(built, name), "./"+pkg)
			build.Dir = filepath.Join("..", "..")
			build.Env = append(os.Environ(), "CGO_ENABLED=0")
			build.Stderr = os.Stderr
			if err := build.Run(); err != nil {
				return 1
			}
		}
		return m.Run()
	}())
}

func newBench(t *testing.T) *bench {
	b := &bench{dir: t.TempDir()}
	for _, name := range []string{"chorus", "train", "elastic"} {
		require.NoError(t, os.Symlink(filepath.Join(built, name), filepath.Join(b.dir, name)))
	}
	b.program, b.secret = filepath.Join(b.dir, "train"), filepath.Join(b.dir, "secret")
	require.NoError(t, os.WriteFile(b.secret, []byte("the secret of this test, of enough bytes\n"), 0o600))
	return b
}

// script adds a program to the folder.
func (b *bench) script(t *testing.T, name, text string) {
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, name), []byte("#!/bin/bash\nset -euo pipefail\n"+text), 0o755))
}

func (b *bench) command(ctx context.Context, env []string, name string, args ...string) *exec.Cmd {
	if name == "chorus" {
		name = filepath.Join(b.dir, name)
	}
	c := exec.CommandContext(ctx, name, args...)
	c.Env = append([]string{"PATH=" + b.dir + ":" + os.Getenv("PATH"), "HOME=" + b.dir, "CHORUS_BACKEND=virtual", "CHORUS_VIRTUAL_DEVICES=2"}, env...)
	c.Cancel, c.WaitDelay = func() error { return c.Process.Signal(os.Interrupt) }, 30*time.Second
	return c
}

// hosts runs a command for each host at the same time, and returns what they have printed.
func (b *bench) hosts(t *testing.T, n int, command func(ctx context.Context, host int) *exec.Cmd) string {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	outs, done := make([]bytes.Buffer, n), make(chan error, n)
	for i := range n {
		c := command(ctx, i)
		c.Stdout, c.Stderr = &outs[i], &outs[i]
		go func() {
			err := c.Run()
			if err != nil {
				cancel()
				err = fmt.Errorf("host %d: %w\n%s", i, err, outs[i].String())
			}
			done <- err
		}()
	}
	var text strings.Builder
	for range n {
		require.NoError(t, <-done)
	}
	for i := range outs {
		_, _ = io.Copy(&text, &outs[i])
	}
	return text.String()
}

// ranks checks that the program has run with so many ranks, each once.
func ranks(t *testing.T, out string, n int) {
	t.Helper()
	seen := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^(?:\[\D*(\d+)\] )?.*rank (\d+) of (\d+)`).FindAllStringSubmatch(out, -1) {
		require.Equal(t, itoa(n), m[3], "%s", out)
		seen[m[2]] = true
	}
	require.Len(t, seen, n, "%s", out)
}

// freePort returns a port that nothing uses, nor the port above it.
func freePort(t *testing.T) int {
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		port := l.Addr().(*net.TCPAddr).Port
		next, err := net.Listen("tcp", "127.0.0.1:"+itoa(port+1))
		require.NoError(t, l.Close())
		if err == nil {
			require.NoError(t, next.Close())
			return port
		}
	}
}

// The arguments of the Job run on two hosts, with the names of this test.
func TestJobRuns(t *testing.T) {
	b, port := newBench(t), freePort(t)
	args := decode[batch.Job](t, "job.yaml", 1).Spec.Template.Spec.Containers[0].Args
	out := b.hosts(t, 2, func(ctx context.Context, host int) *exec.Cmd {
		mine := slices.Clone(args)
		for i := range mine {
			mine[i] = strings.NewReplacer("$(JOB_COMPLETION_INDEX)", itoa(host), "train-0.train", "127.0.0.1:"+itoa(port),
				"/secret/key", b.secret, "/app/train", b.program).Replace(mine[i])
		}
		return b.command(ctx, []string{"CHORUS_HOST=train-" + itoa(host), "JOB_COMPLETION_INDEX=" + itoa(host)}, "chorus", mine...)
	})
	ranks(t, out, 4)
}

// The arguments of the TrainJob run with the variables of Kubeflow's torch runtime.
func TestTrainJobRuns(t *testing.T) {
	b, port := newBench(t), freePort(t)
	job := decode[trainer.TrainJob](t, "trainjob.yaml", 0)
	out := b.hosts(t, 2, func(ctx context.Context, host int) *exec.Cmd {
		mine := slices.Clone(job.Spec.Trainer.Args)
		for i := range mine {
			mine[i] = strings.NewReplacer("/secret/key", b.secret, "/app/train", b.program).Replace(mine[i])
		}
		return b.command(ctx, []string{"PET_NNODES=2", "PET_NODE_RANK=" + itoa(host), "PET_NPROC_PER_NODE=2", "PET_MASTER_ADDR=127.0.0.1",
			"PET_MASTER_PORT=" + itoa(port), "CHORUS_HOST=node-" + itoa(host)}, "chorus", mine...)
	})
	ranks(t, out, 4)
}

// The scripts of Slurm run with a srun that starts the tasks of both nodes on this host.
func TestSlurmScriptsRun(t *testing.T) {
	b := newBench(t)
	b.script(t, "scontrol", `[ "$*" = "show hostnames node[1-2]" ]; echo 127.0.0.1; echo node2`+"\n")
	b.script(t, "srun", `
echo "$*" > $HOME/srun-args
while [[ "$1" == --* ]]; do shift; done
pids=()
for ((rank = 0; rank < 2 * TEST_TASKS; rank++)); do
	node=$((rank / TEST_TASKS))
	SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$((rank % TEST_TASKS)) SLURM_NODEID=$node SLURM_STEP_NODELIST="node[1-2]" \
	SLURM_STEP_NUM_TASKS=$((2 * TEST_TASKS)) SLURM_STEP_TASKS_PER_NODE="$TEST_TASKS(x2)" SLURMD_NODENAME=node$((node + 1)) \
	CHORUS_HOST=node$((node + 1)) "$@" & pids+=($!)
done
for p in "${pids[@]}"; do wait "$p"; done
`)
	for file, tasks := range map[string]int{"train.sbatch": 1, "direct.sbatch": 2} {
		t.Run(file, func(t *testing.T) {
			port := freePort(t)
			out := b.hosts(t, 1, func(ctx context.Context, _ int) *exec.Cmd {
				path, err := filepath.Abs(filepath.Join("..", "slurm", file))
				require.NoError(t, err)
				c := b.command(ctx, []string{"CHORUS_SECRET_FILE=" + b.secret, "SLURM_JOB_ID=71", "SLURM_NNODES=2", "SLURM_CPUS_PER_TASK=8", "SLURM_RESTART_COUNT=3",
					"SLURM_JOB_NODELIST=node[1-2]", "TEST_TASKS=" + itoa(tasks), "CHORUS_SEEDS=127.0.0.1:" + itoa(port)}, "bash", path, b.program)
				c.Dir = b.dir
				return c
			})
			ranks(t, out, 4)
			if file == "train.sbatch" {
				args, err := os.ReadFile(filepath.Join(b.dir, "srun-args"))
				require.NoError(t, err)
				require.Contains(t, string(args), "--seeds 127.0.0.1:29622 ", "the port of job 71")
				require.FileExists(t, filepath.Join(b.dir, "logs", "attempt-3", "slurm-71", "rank-3.out"))
			}
		})
	}
}

// Slurm's warning leaves the time that chorus run gives to the program, and some more for itself.
func TestSlurmGrace(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "slurm", "train.sbatch"))
	require.NoError(t, err)
	warning := regexp.MustCompile(`(?m)^#SBATCH --signal=TERM@(\d+)$`).FindSubmatch(text)
	grace := regexp.MustCompile(`--grace (\S+)`).FindSubmatch(text[bytes.LastIndex(text, []byte("exec srun")):])
	require.NotNil(t, warning)
	require.NotNil(t, grace)
	before, err := time.ParseDuration(string(warning[1]) + "s")
	require.NoError(t, err)
	until, err := time.ParseDuration(string(grace[1]))
	require.NoError(t, err)
	require.GreaterOrEqual(t, until, before/2, "the program gets most of the time")
	require.GreaterOrEqual(t, before-until, 20*time.Second, "chorus run ends before the limit")
}

// The real mpirun of each implementation that is installed starts the ranks, without a seed and without
// a secret. Two jobs of an implementation run at the same time.
func TestMPIRuns(t *testing.T) {
	for _, mpi := range []struct {
		name string
		args []string
	}{{"mpirun.openmpi", []string{"--oversubscribe"}}, {"mpirun.mpich", nil}} {
		t.Run(mpi.name, func(t *testing.T) {
			path, err := exec.LookPath(mpi.name)
			if err != nil {
				t.Skip(err)
			}
			b := newBench(t)
			env := []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"}
			b.hosts(t, 2, func(ctx context.Context, host int) *exec.Cmd {
				check := `out=$("$@"); echo "$out"; [ $(echo "$out" | grep -c "of 2 is hop") = 2 ]`
				return b.command(ctx, env, "bash", append([]string{"-c", check, "check", path, "-np", "2"}, append(mpi.args, b.program)...)...)
			})
			c := b.command(t.Context(), env, path, append(slices.Clone(mpi.args), "-np", "2", filepath.Join(b.dir, "chorus"), "run", "--nproc-per-node", "1", "--", b.program)...)
			out, err := c.CombinedOutput()
			require.Error(t, err)
			require.Contains(t, string(out), "each would run a job of its own")
		})
	}
}

// The script for Open MPI runs with a mpirun that starts all ranks on this host, as in an allocation of
// Slurm: the variables of the step that has started Open MPI's daemon on each host are there, too.
func TestOpenMPIScriptRuns(t *testing.T) {
	b, port := newBench(t), freePort(t)
	b.script(t, "mpirun", `
[ "$1 $2" = "--host node1:2,node2:2" ]; shift 2
while [ "$1" = -x ]; do case "$2" in *=*) export "$2";; esac; shift 2; done
[ "$CHORUS_SEEDS" != node1:29477 ]
for rank in 0 1 2 3; do
	SLURM_JOB_ID=4 SLURM_STEP_ID=0 SLURM_PROCID=$((rank / 2)) SLURM_NODEID=$((rank / 2)) SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST="node[1-2]" SLURM_STEP_TASKS_PER_NODE="1(x2)" \
	OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=$((rank % 2)) OMPI_COMM_WORLD_LOCAL_SIZE=2 CHORUS_HOST=node$((rank / 2 + 1)) "$@" & pids+=($!)
done
for p in "${pids[@]}"; do wait "$p"; done
`)
	out := b.hosts(t, 1, func(ctx context.Context, _ int) *exec.Cmd {
		return b.command(ctx, []string{"HOSTS=node1:2,node2:2", "CHORUS_SECRET_FILE=" + b.secret, "CHORUS_SEEDS=127.0.0.1:" + itoa(port)},
			filepath.Join("..", "launchers", "openmpi.sh"), b.program)
	})
	ranks(t, out, 4)
}

// The script for torchrun runs with a torchrun that starts the ranks of one host.
func TestTorchrunScriptRuns(t *testing.T) {
	b, port := newBench(t), freePort(t)
	b.script(t, "torchrun", `
[ "$*" = "--no-python --nnodes 1 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint node1:29400 $TEST_PROGRAM" ]
for rank in 0 1; do
	RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$TEST_PORT "$TEST_PROGRAM" & pids+=($!)
done
for p in "${pids[@]}"; do wait "$p"; done
`)
	out := b.hosts(t, 1, func(ctx context.Context, _ int) *exec.Cmd {
		return b.command(ctx, []string{"TEST_PROGRAM=" + b.program, "TEST_PORT=" + itoa(port)},
			filepath.Join("..", "launchers", "torchrun.sh"), "1", "node1", b.program)
	})
	ranks(t, out, 2)
}

// The unit's command runs on one host, and the unit has no key twice.
func TestUnit(t *testing.T) {
	f, err := os.Open(filepath.Join("..", "systemd", "chorus.service"))
	require.NoError(t, err)
	defer f.Close()
	options, err := unit.DeserializeOptions(f)
	require.NoError(t, err)
	by := map[string]string{}
	for _, o := range options {
		require.Empty(t, by[o.Name], o.Name)
		by[o.Name] = o.Value
	}
	require.Equal(t, "64 77 126 127", by["RestartPreventExitStatus"])
	require.Equal(t, "143", by["SuccessExitStatus"], "128 + SIGTERM: systemctl stop is no failure")
	text, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Contains(t, string(text), "#   install -d -m 0700 "+filepath.Dir("/etc/chorus/secret")+"\n", "the folder of the secret")
	args := strings.Fields(by["ExecStart"])
	require.Equal(t, "/usr/local/bin/chorus", args[0])
	b, port := newBench(t), freePort(t)
	out := b.hosts(t, 2, func(ctx context.Context, host int) *exec.Cmd {
		mine := slices.Clone(args[1:])
		for i := range mine {
			mine[i] = strings.NewReplacer("node1,node2", "127.0.0.1:"+itoa(port), "/etc/chorus/secret", b.secret,
				"/usr/local/bin/serve", b.program).Replace(mine[i])
		}
		return b.command(ctx, []string{"CHORUS_HOST=node" + itoa(host+1)}, "chorus", mine...)
	})
	ranks(t, out, 4)
}

// The files that the Dockerfile copies exist, and its Go is new enough.
func TestDockerfile(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "docker", "Dockerfile"))
	require.NoError(t, err)
	mod, err := os.ReadFile(filepath.Join("..", "..", "go.mod"))
	require.NoError(t, err)
	want := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(mod)[1]
	require.Contains(t, string(text), "FROM golang:"+string(want)+" AS build")
	for _, pkg := range regexp.MustCompile(`\./(cmd|examples)/\w+`).FindAllString(string(text), -1) {
		require.DirExists(t, filepath.Join("..", "..", pkg))
	}
	stages := regexp.MustCompile(`(?m)^FROM \S+ AS (\w+)`).FindAllStringSubmatch(string(text), -1)
	for _, m := range regexp.MustCompile(`--from=(\w+)`).FindAllStringSubmatch(string(text), -1) {
		require.True(t, slices.ContainsFunc(stages, func(s []string) bool { return s[1] == m[1] }), m[1])
	}
}
