package main

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
)

const runLong = `Start one process for each device of this host, or of several hosts, and stay
with them to the end.

Each process finds its rank with cluster.Attach, or in torchrun's variables
(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), and uses the device whose
ordinal is its local rank. When one fails, the others have the time of --grace to end
by themselves and say what they know of it; then all are asked to stop on all
hosts, and killed after as long again. The last lines say which was first and
why. Lines of output begin with the rank that wrote them.

On several hosts give every host the same --job, --nnodes, --seeds and secret.
The seeds are the hosts that may coordinate the job; the smallest that is
reachable does, and one is enough.

Exit codes:
  0        all processes exited with 0
  n        the first process that failed exited with n
  128+n    it was killed by signal n, or chorus received signal n
  1        a process or host was lost without an exit code
  64       mistake in the command line, or hosts whose command lines disagree
  69       the hosts of the job did not all come in time
  77       another secret, or another job, at the seeds
  126, 127 the program cannot be run, or is not there`

const runExample = `  chorus run -- ./train --epochs 3
  chorus run --nproc-per-node 2 --log-dir logs -- ./train
  CHORUS_BACKEND=virtual chorus run --nproc-per-node 8 -- ./train
  chorus run --nnodes 2 --seeds node1 --job mnist --secret-file ~/.chorus-secret -- ./train`

// runFlags are the flags of chorus run.
type runFlags struct {
	nnodes      int
	nproc       string
	nodeRank    int
	seeds       []string
	bind        string
	advertise   string
	job         string
	secretFile  string
	insecure    bool
	raw         bool
	logDir      string
	joinTimeout time.Duration
	grace       time.Duration
	noPrefix    bool
}

func newRunCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:     "run [flags] -- program [args...]",
		Short:   "Start one process for each device and stay with them",
		Long:    runLong,
		Example: runExample,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := f.config(cmd, args)
			if err != nil {
				return err
			}
			return start(cmd, cfg)
		},
	}
	f.add(cmd)
	return cmd
}

func (f *runFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.SetInterspersed(false) // what follows the program is the program's
	fs.IntVar(&f.nnodes, "nnodes", 1, "hosts that make the job")
	fs.StringVar(&f.nproc, "nproc-per-node", "auto", "processes on this host; auto: one for each device")
	fs.IntVar(&f.nodeRank, "node-rank", -1, "this host's number; -1: hosts are ordered by name")
	fs.StringSliceVar(&f.seeds, "seeds", nil, "host[:port] of the hosts that may coordinate, the same on all hosts ("+env.Seeds.Name+")")
	fs.StringVar(&f.bind, "bind", "", "IP[:port] to listen on ("+env.Bind.Name+")")
	fs.StringVar(&f.advertise, "advertise", "", "IP[:port] under which other hosts reach this one ("+env.Advertise.Name+")")
	fs.StringVar(&f.job, "job", "", "the job's name, the same on all hosts ("+env.Job.Name+")")
	fs.StringVar(&f.secretFile, "secret-file", "", "file with the job's secret, of mode 0600 ("+env.SecretFile.Name+")")
	fs.BoolVar(&f.insecure, "insecure", false, "let a job on several hosts run without a secret ("+env.Insecure.Name+"=yes)")
	fs.StringVar(&f.logDir, "log-dir", "", "also write each rank's output to <dir>/<job>/rank-<n>.out and .err ("+env.LogDir.Name+")")
	fs.DurationVar(&f.joinTimeout, "join-timeout", 0, "how long to wait for all hosts and processes ("+env.JoinTimeout.Name+", "+env.JoinTimeout.Default+")")
	fs.DurationVar(&f.grace, "grace", 0, "when one fails: until the others are asked to stop, and from then until they are killed ("+env.Grace.Name+", "+env.Grace.Default+")")
	fs.BoolVar(&f.raw, "raw", false, "write lines byte for byte; otherwise control characters are quoted")
	fs.BoolVar(&f.noPrefix, "no-prefix", false, "write lines without the rank before them")
}

// config makes the launcher's config of flags and environment. Flags win.
func (f *runFlags) config(cmd *cobra.Command, args []string) (*launch.Config, error) {
	if f.nnodes < 1 {
		return nil, &launch.UsageError{Reason: fmt.Sprintf("--nnodes %d: want at least 1", f.nnodes)}
	}
	procs, err := f.procs()
	if err != nil {
		return nil, err
	}
	cfg := &launch.Config{Program: args, Procs: procs, NoPrefix: f.noPrefix, Raw: f.raw,
		LogDir: orEnv(f.logDir, env.LogDir), Stdout: os.Stdout, Stderr: os.Stderr}
	if cfg.Grace = f.grace; cfg.Grace == 0 {
		if cfg.Grace, err = env.Grace.Duration(); err != nil {
			return nil, usage(err)
		}
	}
	if cfg.Devices, err = findDevices(procs); err != nil {
		return nil, err
	}
	cfg.Cluster = cluster.Config{
		Job: orEnv(f.job, env.Job), Nodes: f.nnodes, Seeds: f.seeds,
		Bind: orEnv(f.bind, env.Bind), Advertise: orEnv(f.advertise, env.Advertise),
		SecretFile: orEnv(f.secretFile, env.SecretFile),
		Insecure:   f.insecure || env.Insecure.Value() == "yes",
		Timing:     cluster.Timing{Join: f.joinTimeout},
	}
	if v := env.Seeds.Value(); len(f.seeds) == 0 && v != "" {
		cfg.Cluster.Seeds = strings.Split(v, ",")
	}
	if f.nodeRank >= 0 {
		cfg.Cluster.NodeRank = &f.nodeRank
	}
	return cfg, nil
}

// procs returns --nproc-per-node, 0 for auto.
func (f *runFlags) procs() (int, error) {
	if f.nproc == "auto" {
		return 0, nil
	}
	n, err := strconv.Atoi(f.nproc)
	if err != nil || n < 1 {
		return 0, &launch.UsageError{Reason: fmt.Sprintf("--nproc-per-node %s: want a number of at least 1, or auto", f.nproc)}
	}
	return n, nil
}

func orEnv(flag string, v *env.Var) string {
	if flag != "" {
		return flag
	}
	return v.Value()
}

func usage(err error) error { return &launch.UsageError{Reason: err.Error()} }

// start runs the job with this process's signals.
func start(cmd *cobra.Command, cfg *launch.Config) error {
	signals := make(chan os.Signal, 16)
	for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2} {
		if !signal.Ignored(s) { // nohup, or a shell's background, has asked for it
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)
	cfg.Signals = signals
	// Who reads our output may go before the job ends, such as head. Ignoring the
	// signal would be passed on to the workers; catching it is not.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)
	if code := launch.Run(cmd.Context(), cfg); code != 0 {
		return exitCode(code)
	}
	return nil
}
