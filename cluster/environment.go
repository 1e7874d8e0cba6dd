package cluster

import (
	"bytes"
	"cmp"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/env"
)

// A launcher is a program that starts processes: how to detect it and read its variables.
type launcher struct {
	name   string
	title  string // in messages
	found  func(*reader) bool
	sizes  []string // the first one that is set is the number of processes that it has started
	config func(*reader) (*JoinConfig, error)
}

// launchers from the inside out: mpirun in an allocation of Slurm runs inside of srun or of a batch
// script, whose variables its processes inherit.
var launchers = []launcher{
	{"chorus", "`chorus run`", (*reader).hasChorus, []string{env.WorldSize.Name}, (*reader).chorus},
	{"torchrun", "torchrun", (*reader).hasTorchrun, []string{"WORLD_SIZE"}, (*reader).torchrun},
	{"openmpi", "Open MPI", (*reader).hasOpenMPI, []string{"OMPI_COMM_WORLD_SIZE"}, (*reader).openMPI},
	{"pmi", "MPI (PMI)", (*reader).hasPMI, []string{"PMI_SIZE"}, (*reader).pmi},
	{"slurm", "Slurm", (*reader).hasSlurm, []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, (*reader).slurm},
	{"kubernetes", "Kubernetes", (*reader).hasKubernetes, []string{env.WorldSize.Name}, (*reader).kubernetes},
}

// unsupported lists variables of launchers that Chorus cannot read. A value above alone means that the
// launcher has started several processes.
var unsupported = []struct {
	title, name string
	alone       int
}{
	{"Flux", "FLUX_JOB_SIZE", 1},
	{"MVAPICH", "MV2_COMM_WORLD_SIZE", 1},
	{"a launcher with PMIx", "PMIX_RANK", 0}, // PMIx has no variable for the size
}

// detect derives this process's place in a world from an environment. Launchers can be nested, such as
// mpirun in an allocation of Slurm. The innermost one that has started several processes decides: the
// variables of one that has started a single process only describe that process.
func detect(lookup func(string) (string, bool)) (*JoinConfig, error) {
	r := &reader{lookup: lookup}
	choice := r.text(env.Launcher.Name, env.Launcher.Default)
	if choice == "none" {
		return &JoinConfig{source: env.Launcher.Name + "=none: a world of one process"}, nil
	}
	known := []string{"auto", "none"}
	var alone *launcher // the innermost of those that have started one process
	for i := range launchers {
		l := &launchers[i]
		known = append(known, l.name)
		if choice != l.name && (choice != "auto" || !l.found(r)) {
			continue
		}
		if choice == "auto" && l.name != "chorus" && r.started(l) == 1 {
			alone = cmp.Or(alone, l)
			continue
		}
		return r.configOf(l)
	}
	if !slices.Contains(known, choice) {
		return nil, r.problem("want one of "+strings.Join(known, ", "), env.Launcher.Name)
	}
	for _, u := range unsupported {
		if n := deref(r.optional(u.name, 0), 0); n > u.alone {
			return nil, r.problem(u.title+" started several processes, and Chorus cannot read their places from its variables: start them by `chorus run`, or set "+
				env.Launcher.Name+"=none for a world of one process in each", u.name)
		}
	}
	if alone != nil {
		return r.configOf(alone)
	}
	if err := r.halfSet(); err != nil {
		return nil, err
	}
	source := "no launcher's variables are set: a world of one process"
	if r.isSet("JOB_COMPLETION_INDEX") {
		source = "JOB_COMPLETION_INDEX is set, but neither " + env.WorldSize.Name + " nor " + env.Seeds.Name + ": a world of one process"
	}
	return &JoinConfig{source: source}, nil
}

// configOf reads the variables of a launcher.
func (r *reader) configOf(l *launcher) (*JoinConfig, error) {
	cfg, err := l.config(r)
	if err = cmp.Or(r.err, err); err != nil { // the first error
		return nil, err
	}
	return r.finish(cfg)
}

// started returns the number of processes that a launcher has started, or 0 if its variables do not
// contain it.
func (r *reader) started(l *launcher) int {
	n, err := strconv.Atoi(strings.TrimSpace(r.text(r.firstSet(l.sizes...), "")))
	if err != nil {
		return 0 // config describes the problem
	}
	return n
}

// checkOneJob returns an error if a launcher has started this process beside others, although it would be
// the only host of its job. Each of them would then run a job of its own, and nobody would notice.
func checkOneJob(lookup func(string) (string, bool)) error {
	r := &reader{lookup: lookup}
	if r.text(env.Launcher.Name, env.Launcher.Default) == "none" {
		return nil
	}
	for i := range launchers {
		l := &launchers[i]
		if n := r.started(l); l.found(r) && n > 1 {
			return r.problem(fmt.Sprintf("%s started %d processes, and each would run a job of its own: give all of them the same --nnodes, --seeds and --job, or --nnodes 1 if you want separate jobs", l.title, n),
				r.firstSet(l.sizes...))
		}
	}
	return nil
}

// incompletePairs lists variables that a launcher always sets together. If only some are
// set, the place in the world is unknown, and assuming a world of one process
// would be a guess.
var incompletePairs = []struct {
	launcher string
	set      []string // if any of these is set
	need     []string // all of these must be set
}{
	{"`chorus run`", []string{env.WorldSize.Name, env.LocalRank.Name, env.LocalSize.Name, env.Node.Name}, []string{env.Rank.Name}},
	{"torchrun", []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, []string{"RANK", "WORLD_SIZE"}},
	{"Open MPI", []string{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"}, []string{"OMPI_COMM_WORLD_SIZE"}},
	{"MPI (PMI)", []string{"PMI_RANK", "PMI_SIZE"}, []string{"PMI_RANK", "PMI_SIZE"}},
	{"Slurm", []string{"SLURM_PROCID"}, []string{"SLURM_JOB_ID"}},
}

// halfSet returns an error if only some variables of a launcher are set. A script
// of sbatch is an exception: it has a job and SLURM_PROCID=0 but no step, and is
// a world of one process.
func (r *reader) halfSet() error {
	for _, h := range incompletePairs {
		set, missing := slices.DeleteFunc(slices.Clone(h.set), func(n string) bool { return !r.isSet(n) }),
			slices.DeleteFunc(slices.Clone(h.need), r.isSet)
		if len(set) > 0 && len(missing) > 0 {
			return r.half(h.launcher, append(set, missing...))
		}
	}
	if r.text("SLURM_PROCID", "0") != "0" {
		return r.half("Slurm", []string{"SLURM_PROCID", "SLURM_STEP_NODELIST"})
	}
	return nil
}

func (r *reader) half(launcher string, names []string) error {
	return r.problem("only some of "+launcher+"'s variables are set: set the rest, or "+env.Launcher.Name+"=none for a world of one process", names...)
}

// finish adds the settings that do not depend on the launcher: job, host and secret.
func (r *reader) finish(cfg *JoinConfig) (*JoinConfig, error) {
	if v := r.text(env.Job.Name, ""); v != "" {
		cfg.Job = v
	}
	cfg.Host = r.text(env.HostName.Name, cfg.Host)
	cfg.Insecure = r.text(env.Insecure.Name, "no") == "yes"
	if cfg.token != nil || cfg.Size == 1 && cfg.Addr == "" {
		return cfg, nil
	}
	if path := r.text(env.SecretFile.Name, ""); path != "" {
		secret, err := readSecretFile(path)
		if err != nil {
			return nil, err
		}
		cfg.Secret = secret
	}
	return cfg, nil
}

// A reader reads an environment and keeps the first error.
type reader struct {
	lookup func(string) (string, bool)
	err    error
}

func (r *reader) isSet(name string) bool {
	v, ok := r.lookup(name)
	return ok && v != ""
}

func (r *reader) text(name, unset string) string {
	if v, ok := r.lookup(name); ok && v != "" {
		return v
	}
	return unset
}

// firstSet returns the first of the names that is set, or the last name.
func (r *reader) firstSet(names ...string) string {
	for _, n := range names {
		if r.isSet(n) {
			return n
		}
	}
	return names[len(names)-1]
}

// number returns the value of a required variable: a number of at least low.
func (r *reader) number(name string, low int) int {
	n, err := strconv.Atoi(strings.TrimSpace(r.text(name, "")))
	if err != nil || n < low {
		r.fail(r.problem(fmt.Sprintf("want a whole number of at least %d", low), name))
		return low
	}
	return n
}

// optional is number for an optional variable.
func (r *reader) optional(name string, low int) *int {
	if !r.isSet(name) {
		return nil
	}
	return new(r.number(name, low))
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// problem returns a ConfigError about the named variables.
func (r *reader) problem(reason string, names ...string) error {
	e := &ConfigError{Reason: reason}
	for _, n := range names {
		if v, ok := r.lookup(n); ok {
			e.Vars = append(e.Vars, fmt.Sprintf("%s=%q", n, v))
		} else {
			e.Vars = append(e.Vars, n+" (unset)")
		}
	}
	return e
}

// place reads the four numbers that all launchers provide, and checks their
// consistency.
func (r *reader) place(rank, size, localRank, localSize string) *JoinConfig {
	cfg := &JoinConfig{Rank: new(r.number(rank, 0)), Size: r.number(size, 1),
		LocalRank: r.optional(localRank, 0), LocalSize: deref(r.optional(localSize, 1), 0)}
	switch {
	case r.err != nil:
	case *cfg.Rank >= cfg.Size:
		r.fail(r.problem("the rank must be less than the size", rank, size))
	case cfg.LocalSize > cfg.Size:
		r.fail(r.problem("a host cannot have more processes than the world", localSize, size))
	case cfg.LocalRank != nil && cfg.LocalSize > 0 && *cfg.LocalRank >= cfg.LocalSize:
		r.fail(r.problem("the local rank must be less than the local size", localRank, localSize))
	case cfg.LocalRank != nil && *cfg.LocalRank > *cfg.Rank:
		r.fail(r.problem("the local rank cannot exceed the rank", localRank, rank))
	}
	return cfg
}

// agree fails if two variables are set to different values.
func (r *reader) agree(a, b, reason string) {
	if r.isSet(a) && r.isSet(b) && r.text(a, "") != r.text(b, "") {
		r.fail(r.problem(reason, a, b))
	}
}

// found sets the text of Session.Source.
func (r *reader) found(cfg *JoinConfig, launcher string, names ...string) *JoinConfig {
	var parts []string
	for _, n := range names {
		if r.isSet(n) {
			parts = append(parts, n+"="+r.text(n, ""))
		}
	}
	cfg.source = launcher + ": " + strings.Join(parts, ", ")
	if cfg.Addr != "" {
		cfg.source += "; coordinator at " + cfg.Addr
	}
	return cfg
}

// hostedBy completes the config of a world without a launcher of Chorus: rank 0
// runs the coordinator. A world on one host uses only the loopback, and a world
// of one process needs no coordinator.
func (cfg *JoinConfig) hostedBy(master, port string, local bool) *JoinConfig {
	if cfg.Size == 1 {
		return cfg
	}
	cfg.Serve = deref(cfg.Rank, -1) == 0
	if local {
		cfg.Addr = net.JoinHostPort(loopback(), port)
		return cfg
	}
	cfg.Addr = net.JoinHostPort(master, port)
	if cfg.Serve {
		// The master's name may resolve to different interfaces on different hosts.
		cfg.Listen = net.JoinHostPort("", port)
	}
	return cfg
}

func (cfg *JoinConfig) oneHost() bool { return cfg.LocalSize == cfg.Size }

func (r *reader) hasChorus() bool { return r.isSet(env.Rank.Name) || r.isSet(env.Addr.Name) }

// chorus reads the variables of Agent.WorkerEnv.
func (r *reader) chorus() (*JoinConfig, error) {
	for _, n := range []string{env.Rank.Name, env.WorldSize.Name, env.Addr.Name, env.Token.Name} {
		if !r.isSet(n) {
			return nil, r.problem("a variable of `chorus run` is missing", n)
		}
	}
	cfg := r.place(env.Rank.Name, env.WorldSize.Name, env.LocalRank.Name, env.LocalSize.Name)
	r.agree(env.Rank.Name, "RANK", "two launchers gave this process different ranks; unset one, or choose with "+env.Launcher.Name)
	r.agree(env.WorldSize.Name, "WORLD_SIZE", "two launchers gave this process different worlds; unset one, or choose with "+env.Launcher.Name)
	cfg.Node = r.optional(env.Node.Name, 0)
	cfg.Addr = r.text(env.Addr.Name, "")
	token, err := decodeToken(r.text(env.Token.Name, ""))
	if err != nil { // the value is a secret: show only the name
		return nil, &ConfigError{Vars: []string{env.Token.Name}, Reason: err.Error()}
	}
	cfg.agent, cfg.agentAt = r.text(env.Agent.Name, ""), r.text(env.AgentAddr.Name, "")
	cfg.token, cfg.epoch = token, uint64(deref(r.optional(env.Epoch.Name, firstEpoch), 0))
	return r.found(cfg, "chorus run", env.Rank.Name, env.WorldSize.Name, env.LocalRank.Name, env.Node.Name), nil
}

func (r *reader) hasTorchrun() bool { return r.isSet("RANK") && r.isSet("WORLD_SIZE") }

func (r *reader) torchrun() (*JoinConfig, error) {
	cfg := r.place("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
	cfg.Node = r.optional("GROUP_RANK", 0)
	cfg.Job = r.text("TORCHELASTIC_RUN_ID", "torchrun")
	if r.err == nil && cfg.Size > 1 {
		master := r.text("MASTER_ADDR", "")
		if master == "" {
			return nil, r.problem("a world of several processes needs the address of rank 0's host", "MASTER_ADDR")
		}
		port := r.number("MASTER_PORT", 1)
		// torchrun's own store may listen on MASTER_PORT.
		if strings.EqualFold(r.text("TORCHELASTIC_USE_AGENT_STORE", ""), "true") {
			port++
		}
		local := cfg.oneHost() || cfg.LocalSize == 0 && !r.isSet("KUBERNETES_SERVICE_HOST") && isLoopback(master+":0")
		cfg.hostedBy(master, strconv.Itoa(port), local)
	}
	return r.found(cfg, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), nil
}

// hasSlurm reports whether srun started this process. A script of sbatch has a
// SLURM_PROCID, too, but no step.
func (r *reader) hasSlurm() bool {
	return r.isSet("SLURM_JOB_ID") && r.isSet("SLURM_PROCID") && r.isSet("SLURM_STEP_NODELIST")
}

func (r *reader) slurm() (*JoinConfig, error) {
	sizeVar := r.firstSet("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
	cfg := r.place("SLURM_PROCID", sizeVar, "SLURM_LOCALID", "")
	cfg.Node = r.optional("SLURM_NODEID", 0)
	cfg.Job = "slurm-" + r.text("SLURM_JOB_ID", "") + "." + r.text("SLURM_STEP_ID", "0")
	hosts, err := parseNodeList(r.text("SLURM_STEP_NODELIST", ""))
	if err != nil {
		return nil, r.problem(err.Error(), "SLURM_STEP_NODELIST")
	}
	if err := r.slurmLocalSize(cfg, len(hosts)); err != nil {
		return nil, err
	}
	cfg.Host = r.text("SLURMD_NODENAME", "")
	addr, port, err := r.seed(hosts[0], r.slurmPort())
	if err != nil {
		return nil, err
	}
	cfg.hostedBy(addr, port, len(hosts) == 1)
	return r.found(cfg, "Slurm", "SLURM_PROCID", sizeVar, "SLURM_LOCALID", "SLURM_NODEID"), nil
}

func (r *reader) slurmLocalSize(cfg *JoinConfig, hosts int) error {
	name := r.firstSet("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
	if !r.isSet(name) {
		return nil
	}
	counts, err := parseTasksPerNode(r.text(name, ""))
	if err != nil {
		return r.problem(err.Error(), name)
	}
	if len(counts) != hosts {
		return r.problem(fmt.Sprintf("the first lists %d hosts, the second %d", len(counts), hosts), name, "SLURM_STEP_NODELIST")
	}
	if node := deref(cfg.Node, -1); node >= len(counts) {
		return r.problem("the node's index is not in the list", "SLURM_NODEID", name)
	} else if node >= 0 {
		cfg.LocalSize = counts[node]
	}
	return nil
}

// slurmPort returns a port that all processes of a step compute alike and that
// two steps on one host rarely share. It starts at 61440, above Linux's ephemeral
// ports.
func (r *reader) slurmPort() int {
	job, step := r.number("SLURM_JOB_ID", 0), deref(r.optional("SLURM_STEP_ID", 0), 0)
	return 61440 + (job+step)%4096
}

func (r *reader) hasOpenMPI() bool { return r.isSet("OMPI_COMM_WORLD_SIZE") }

func (r *reader) openMPI() (*JoinConfig, error) {
	cfg := r.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
	cfg.Job = "openmpi-" + r.text(r.firstSet("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), "0")
	if err := r.hostedBySeed(cfg, "OMPI_COMM_WORLD_SIZE"); err != nil {
		return nil, err
	}
	return r.found(cfg, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"), nil
}

// hasPMI reports MPICH, Intel MPI or PALS. Slurm sets PMI_RANK and PMI_SIZE, too (srun --mpi=pmi2), for
// the processes that its own variables describe; those also contain an address. MPICH and Intel MPI
// inside of Slurm set MPI_LOCALNRANKS.
func (r *reader) hasPMI() bool {
	if !r.isSet("PMI_RANK") || !r.isSet("PMI_SIZE") {
		return false
	}
	return !r.hasSlurm() || r.isSet("MPI_LOCALNRANKS") || r.text("PMI_RANK", "") != r.text("SLURM_PROCID", "") ||
		r.text("PMI_SIZE", "") != r.text(r.firstSet("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "")
}

func (r *reader) pmi() (*JoinConfig, error) {
	localRank, localSize := r.firstSet("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), r.firstSet("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
	cfg := r.place("PMI_RANK", "PMI_SIZE", localRank, localSize)
	cfg.Job = "pmi"
	if r.err == nil && cfg.oneHost() && cfg.Size > 1 {
		if cfg.Job = r.pmiJob(); cfg.Job == "" {
			return nil, r.problem("the launcher gives the job no name, so that it could meet another job of this host: set "+env.Job.Name+" to a name that no other job has", "PMI_SIZE", env.Job.Name)
		}
	}
	if err := r.hostedBySeed(cfg, "PMI_SIZE"); err != nil {
		return nil, err
	}
	return r.found(cfg, "MPI (PMI)", "PMI_RANK", "PMI_SIZE", localRank), nil
}

// pmiJob returns a name for a job on this host that no other running job has, or "". PMI's variables
// contain none, but Hydra, the launcher of MPICH and Intel MPI, has one proxy for a job on each host,
// and all processes descend from it.
func (r *reader) pmiJob() string {
	if pid := ancestor("hydra"); pid > 0 {
		return fmt.Sprintf("pmi-%d", pid)
	}
	return r.text(env.Job.Name, "")
}

// ancestor returns the nearest ancestor of this process whose program's name has a prefix, or 0.
func ancestor(prefix string) int {
	for pid := os.Getppid(); pid > 1; {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		// pid (name) state parent ...: the name may contain parentheses.
		first, last := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
		if err != nil || first < 0 || last < first {
			return 0
		}
		if bytes.HasPrefix(text[first+1:], []byte(prefix)) {
			return pid
		}
		rest := bytes.Fields(text[last+1:])
		if len(rest) < 2 {
			return 0
		}
		if pid, err = strconv.Atoi(string(rest[1])); err != nil {
			return 0
		}
	}
	return 0
}

func (r *reader) hasKubernetes() bool {
	return r.isSet("JOB_COMPLETION_INDEX") && (r.isSet(env.WorldSize.Name) || r.isSet(env.Seeds.Name))
}

// kubernetes reads an indexed Job with one process in each pod. No variable
// contains the Job's number of completions, so the user must set it.
func (r *reader) kubernetes() (*JoinConfig, error) {
	cfg := r.place("JOB_COMPLETION_INDEX", env.WorldSize.Name, "", "")
	cfg.Job = "kubernetes"
	if err := r.hostedBySeed(cfg, "JOB_COMPLETION_INDEX"); err != nil {
		return nil, err
	}
	return r.found(cfg, "Kubernetes", "JOB_COMPLETION_INDEX", env.WorldSize.Name), nil
}

// hostedBySeed completes the config of a launcher that provides no address.
func (r *reader) hostedBySeed(cfg *JoinConfig, shown string) error {
	if r.err != nil || cfg.Size == 1 {
		return nil
	}
	if !cfg.oneHost() && !r.isSet(env.Seeds.Name) {
		return r.problem("the launcher provides no address: set "+env.Seeds.Name+" to host:port of rank 0's process", shown, env.Seeds.Name)
	}
	h := fnv.New32a()
	h.Write([]byte(cfg.Job))
	addr, port, err := r.seed(loopback(), 61440+int(h.Sum32()%4096))
	if err != nil {
		return err
	}
	cfg.hostedBy(addr, port, cfg.oneHost() || isLoopback(net.JoinHostPort(addr, port)))
	return nil
}

// seed returns the first address of CHORUS_SEEDS, or host and port if it is unset.
func (r *reader) seed(host string, port int) (string, string, error) {
	if !r.isSet(env.Seeds.Name) {
		return host, strconv.Itoa(port), nil
	}
	first, _, _ := strings.Cut(r.text(env.Seeds.Name, ""), ",")
	h, p, err := splitAddr(first, defaultPort)
	if err != nil {
		return "", "", r.problem(err.Error(), env.Seeds.Name)
	}
	return h, p, nil
}
