package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/cmd/chorus/internal/monitor"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/launch"
)

const runLong = `Start one process for each device of this host, or of several hosts, and supervise
them until they exit.

Each process learns its rank from cluster.Attach or from torchrun's variables (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), and uses the device whose ordinal is its
local rank. Each line of output starts with the rank that wrote it.

If a process fails, the others have the time of --grace to report the failure and to
exit. Then chorus asks the processes on all hosts to stop, and kills them after the same
time again. The last lines of the output name the first failure and its cause.

--log-dir also writes the output of each rank to files, in a folder with the name of the job, in
which a slash is written as %2F. Files of an earlier job are overwritten, and those of a job that
is running are refused. In a program that calls cluster.Run, a process that comes later has no
rank when it starts: its files are new-<host>-<local rank>.out and .err, or
new-<host>-<local rank>.restart-<k>.out and .err.

With --max-restarts, chorus then starts the processes on all hosts again, with a growing
delay between failures in a row, and prints the cause of each restart. A host that was lost
can come back: start chorus there again. The loss of the host that coordinates the job
ends the job, unless its program calls cluster.Run.

Programs that call cluster.Run keep the processes that did not fail: only the failed one
is started again, and without --max-restarts the others go on without it. A process that exits
with 0 has succeeded, as with torchrun: even in the middle of an epoch it is not started again,
and the job may still end with 0. With --nnodes
MIN:MAX, a job starts with MIN hosts, and others can join and leave while it runs. SIGTERM
to one chorus then makes its host leave at the end of a step, and SIGTERM to all of them
ends the job; SIGINT to one stops the whole job.
If the host that coordinates such a job is lost, the other hosts choose another one, if they
are more than half of the hosts. A host whose processes fail again and again is excluded for
a growing time.

For several hosts, use the same --job, --nnodes, --seeds and secret on every host. The
seeds are the hosts that may coordinate the job at the start; the smallest reachable seed
coordinates.
One seed is enough. If another launcher starts chorus on several hosts, such as srun or mpirun,
--nnodes is needed: without it, each of them would run a job of its own, so chorus
refuses that. --nnodes 1 permits it. Without these flags, chorus reads torchrun's variables PET_NNODES,
PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MAX_RESTARTS, PET_MASTER_ADDR and PET_MASTER_PORT, which
Kubeflow sets.

Exit codes:
  0        all processes exited with 0
  n        exit code of the first process that failed
  128+n    signal n killed the first process that failed, or chorus received signal n
  1        a process or host was lost without an exit code, or chorus could not go on, for example
           because a port is in use or a log file cannot be written
  64       mistake in the command line, or command lines of the hosts differ
  69       some hosts of the job did not join in time, or a limit of processes (pids.max, ulimit -u) is too low
  77       the seeds have another secret or another job
  126, 127 the program cannot be executed, or does not exist`

const runExample = `  chorus run -- ./train --epochs 3
  chorus run --max-restarts 3 -- ./train
  chorus run --nnodes 2:4 --seeds node1 --job mnist --secret-file ~/.chorus-secret -- ./train
  chorus run --nproc-per-node 2 --log-dir logs -- ./train
  CHORUS_BACKEND=virtual chorus run --nproc-per-node 8 -- ./train
  chorus run --nnodes 2 --seeds node1 --job mnist --secret-file ~/.chorus-secret -- ./train`

// runFlags are the flags of chorus run.
type runFlags struct {
	nnodes      string
	nproc       string
	nodeRank    int
	maxRestarts int
	seeds       []string
	bind        string
	advertise   string
	job         string
	secretFile  string
	insecure    bool
	raw         bool
	logDir      string
	metrics     string
	joinTimeout time.Duration
	grace       time.Duration
	noPrefix    bool
	logFormat   string
}

func newRunCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:     "run [flags] -- program [args...]",
		Short:   "Start one process for each device and supervise them",
		Long:    runLong,
		Example: runExample,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			cfg, err := f.config(cmd, args)
			if f.logFormat == "json" {
				defer func() { err = f.logError(err) }()
			}
			if err != nil {
				return err
			}
			exits := &monitor.Exits{}
			cfg.Exited, cfg.Restarted = exits.Add, exits.AddRestart
			source := monitor.NewSource(cfg.Cluster.Job, max(cfg.Cluster.MinNodes, 1))
			if cfg.Joined, err = monitored(cmd.Context(), orEnv(f.metrics, env.Metrics), source, exits, func(level, text string) { cfg.Log(level, nil, text) }); err != nil {
				return err
			}
			return start(cmd, cfg)
		},
	}
	f.add(cmd)
	return cmd
}

// logError writes an error of this command as JSON, and returns its exit code.
func (f *runFlags) logError(err error) error {
	if _, told := err.(exitCode); err == nil || told {
		return err
	}
	cfg := &launch.Config{JSON: true, Stderr: os.Stderr}
	cfg.Cluster.Job = orEnv(f.job, env.Job)
	cfg.Log("ERROR", nil, err.Error())
	return exitCode(codeOf(err))
}

func (f *runFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.SetInterspersed(false) // later flags belong to the program
	fs.StringVar(&f.nnodes, "nnodes", "1", "number of hosts of the job, or the least and the greatest number, such as 2:4")
	fs.StringVar(&f.nproc, "nproc-per-node", "auto", "number of processes on this host; auto: one for each device")
	fs.IntVar(&f.nodeRank, "node-rank", -1, "this host's index; -1: hosts are ordered by name")
	fs.IntVar(&f.maxRestarts, "max-restarts", 0, "number of restarts in the whole job: of all processes after a failure or, if they call cluster.Run, of single ones; the same on all hosts")
	fs.StringSliceVar(&f.seeds, "seeds", nil, "host[:port] of the hosts that may coordinate the job, the same on all hosts ("+env.Seeds.Name+")")
	fs.StringVar(&f.bind, "bind", "", "IP[:port] to listen on ("+env.Bind.Name+")")
	fs.StringVar(&f.advertise, "advertise", "", "IP[:port] under which other hosts reach this one ("+env.Advertise.Name+")")
	fs.StringVar(&f.job, "job", "", "job name, the same on all hosts ("+env.Job.Name+")")
	fs.StringVar(&f.secretFile, "secret-file", "", "file with the job's secret, mode 0600 ("+env.SecretFile.Name+")")
	fs.BoolVar(&f.insecure, "insecure", false, "permission for a job on several hosts to run without a secret ("+env.Insecure.Name+"=yes)")
	fs.StringVar(&f.logDir, "log-dir", "", "directory for a copy of the output in <dir>/<job>/rank-<n>.out and .err, after restart k in rank-<n>.restart-<k>.out and .err ("+env.LogDir.Name+")")
	fs.StringVar(&f.metrics, "metrics", "", "host:port of the job's metrics and web page, such as 127.0.0.1:9400 ("+env.Metrics.Name+"); empty: off")
	fs.DurationVar(&f.joinTimeout, "join-timeout", 0, "time to wait for all hosts and processes, such as 30s ("+env.JoinTimeout.Name+", default "+env.JoinTimeout.Default+")")
	fs.DurationVar(&f.grace, "grace", 0, "time from a failure until the others are asked to stop, and again until they are killed, such as 5s ("+env.Grace.Name+", default "+env.Grace.Default+")")
	fs.BoolVar(&f.raw, "raw", false, "output without quoting control characters; with --no-prefix, byte for byte")
	fs.StringVar(&f.logFormat, "log-format", "text", "format of chorus's own lines: text, or json with time, level, msg, job, host and rank")
	fs.BoolVar(&f.noPrefix, "no-prefix", false, "output without the rank at the start of each line")
}

// config builds the launcher's configuration, in which flags override the
// environment.
func (f *runFlags) config(cmd *cobra.Command, args []string) (*launch.Config, error) {
	if err := f.setPET(cmd); err != nil {
		return nil, err
	}
	if err := f.check(); err != nil {
		return nil, err
	}
	least, most, _ := f.nodes()
	if !cmd.Flags().Changed("nnodes") {
		least, most = 0, 0 // one host, unless another launcher has started several of us
	}
	procs, err := f.procs()
	if err != nil {
		return nil, err
	}
	cfg := &launch.Config{Program: args, Procs: procs, NoPrefix: f.noPrefix, Raw: f.raw, JSON: f.logFormat == "json",
		LogDir: orEnv(f.logDir, env.LogDir), Stdout: os.Stdout, Stderr: os.Stderr}
	if cfg.Grace = f.grace; cfg.Grace == 0 {
		if cfg.Grace, err = env.Grace.Duration(); err != nil {
			return nil, usage(err)
		}
	}
	if cfg.Devices, err = findDevices(procs); err != nil {
		return nil, err
	}
	cfg.Cluster = job.Config{
		Job: orEnv(f.job, env.Job), Nodes: most, MinNodes: least, MaxRestarts: f.maxRestarts, Seeds: f.seeds,
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

// nodes returns the range of --nnodes.
func (f *runFlags) nodes() (least, most int, err error) {
	first, last, isRange := strings.Cut(f.nnodes, ":")
	if !isRange {
		last = first
	}
	least, err1 := strconv.Atoi(first)
	most, err2 := strconv.Atoi(last)
	if err1 == nil && err2 == nil && least > most && most > 0 {
		return 0, 0, &launch.UsageError{Reason: fmt.Sprintf("--nnodes %s: the range is reversed: want %d:%d", f.nnodes, most, least)}
	}
	if err1 != nil || err2 != nil || least < 1 || most < 1 {
		return 0, 0, &launch.UsageError{Reason: fmt.Sprintf("--nnodes %s: want a number of at least 1, or a range such as 2:4", f.nnodes)}
	}
	if most > job.MaxSize {
		return 0, 0, &launch.UsageError{Reason: fmt.Sprintf("--nnodes %s: want at most %d", f.nnodes, job.MaxSize)}
	}
	return least, most, nil
}

// procs returns the value of --nproc-per-node, or 0 for auto.
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

// start runs the job and forwards this process's signals to it.
func start(cmd *cobra.Command, cfg *launch.Config) error {
	signals := make(chan os.Signal, 16)
	for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2} {
		if !signal.Ignored(s) { // as under nohup or in the background of a shell
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)
	cfg.Signals = signals
	// The reader of our output, such as head, may exit before the job ends. Catch
	// SIGPIPE instead of ignoring it: workers would inherit an ignored signal.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)
	if code := launch.Run(cmd.Context(), cfg); code != 0 {
		return exitCode(code)
	}
	return nil
}

// monitored serves the state of a job: to chorus status always, and as metrics and a page at addr
// unless it is empty. It does so at once, so that chorus status finds a job whose hosts join. The
// result is called when all hosts have joined.
func monitored(ctx context.Context, addr string, source *monitor.Source, exits *monitor.Exits, say func(level, text string)) (func(*job.Agent) func(), error) {
	var metrics net.Listener
	if addr != "" {
		ln, public, err := monitor.Listen(ctx, addr)
		if errors.Is(err, monitor.ErrAddress) {
			return nil, usage(err)
		}
		if err != nil { // another attempt may succeed
			return nil, err
		}
		metrics = ln
		say("INFO", fmt.Sprintf("metrics and a page of the job: http://%s/", ln.Addr()))
		if public {
			say("WARN", fmt.Sprintf("warning: everyone who reaches %s can read the names of hosts and groups, and the progress and memory of the job", ln.Addr()))
		}
	}
	s := monitor.NewServer(source, monitor.Labels{Version: version(), Exits: exits})
	if local, err := monitor.ListenLocal(); err != nil {
		say("WARN", fmt.Sprintf("chorus status will not find this job: %v", err))
	} else {
		s.Serve(local, nil)
	}
	if metrics != nil {
		s.Serve(metrics, monitor.TrustedHosts(addr))
	}
	return func(a *job.Agent) func() {
		source.Join(a)
		return func() { _ = s.Close() } // the process ends
	}, nil
}

// petFlags are the variables with which torchrun's flags can be set, and Kubeflow's torch policy
// sets nothing else.
var petFlags = []struct{ name, flag string }{
	{"PET_NNODES", "nnodes"}, {"PET_NPROC_PER_NODE", "nproc-per-node"}, {"PET_NODE_RANK", "node-rank"}, {"PET_MAX_RESTARTS", "max-restarts"},
}

// setPET sets the flags that the command line does not have to the values of
// torchrun's variables, which Chorus's own variables precede.
func (f *runFlags) setPET(cmd *cobra.Command) error {
	for _, p := range petFlags {
		value, ok := os.LookupEnv(p.name)
		if !ok || value == "" || cmd.Flags().Changed(p.flag) {
			continue
		}
		if p.flag == "nproc-per-node" && value == "gpu" {
			value = "auto"
		}
		err := cmd.Flags().Set(p.flag, value)
		if err == nil {
			err = f.check()
		}
		if err != nil {
			return &launch.UsageError{Reason: fmt.Sprintf("%s=%q: %v", p.name, value, err)}
		}
	}
	if host := os.Getenv("PET_MASTER_ADDR"); host != "" && len(f.seeds) == 0 && env.Seeds.Value() == "" && f.nnodes != "1" {
		if port := os.Getenv("PET_MASTER_PORT"); port != "" {
			host = net.JoinHostPort(host, port)
		}
		f.seeds = []string{host}
	}
	return nil
}

// check validates the numbers of hosts, processes and restarts.
func (f *runFlags) check() error {
	_, most, err := f.nodes()
	if err != nil {
		return err
	}
	procs, err := f.procs()
	if err != nil {
		return err
	}
	if procs > job.MaxSize/most {
		return &launch.UsageError{Reason: fmt.Sprintf("--nnodes %s with --nproc-per-node %s: a job has at most %d processes", f.nnodes, f.nproc, job.MaxSize)}
	}
	if f.logFormat != "text" && f.logFormat != "json" {
		return &launch.UsageError{Reason: fmt.Sprintf("--log-format %s: want text or json", f.logFormat)}
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"grace", f.grace}, {"join-timeout", f.joinTimeout}} {
		if d.value < 0 {
			return &launch.UsageError{Reason: fmt.Sprintf("--%s %v: want more than 0", d.name, d.value)}
		}
	}
	if f.maxRestarts < 0 {
		return &launch.UsageError{Reason: fmt.Sprintf("--max-restarts %d: want 0 or more", f.maxRestarts)}
	}
	return nil
}
