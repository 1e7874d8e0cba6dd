package cluster

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/job"
)

// configs are the launchers' readers of a place in a world.
var configs = map[string]func(*reader) (*JoinConfig, error){
	"chorus": (*reader).chorus, "torchrun": (*reader).torchrun, "openmpi": (*reader).openMPI,
	"pmi": (*reader).pmi, "slurm": (*reader).slurm, "kubernetes": (*reader).kubernetes,
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
	r := &reader{&job.Environment{Lookup: lookup}}
	choice := r.Text(env.Launcher.Name, env.Launcher.Default)
	if choice == "none" {
		return &JoinConfig{source: env.Launcher.Name + "=none: a world of one process"}, nil
	}
	known := []string{"auto", "none"}
	var alone *job.Launcher // the innermost of those that have started one process
	for i := range job.Launchers {
		l := &job.Launchers[i]
		known = append(known, l.Name)
		if choice != l.Name && (choice != "auto" || !l.Found(r.Environment)) {
			continue
		}
		if choice == "auto" && l.Name != "chorus" && r.Started(l) == 1 {
			alone = cmp.Or(alone, l)
			continue
		}
		return r.configOf(l)
	}
	if !slices.Contains(known, choice) {
		return nil, r.Problem("want one of "+strings.Join(known, ", "), env.Launcher.Name)
	}
	for _, u := range unsupported {
		if n := job.Deref(r.Optional(u.name, 0), 0); n > u.alone {
			return nil, r.Problem(u.title+" started several processes, and Chorus cannot read their places from its variables: start them by `chorus run`, or set "+
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
	if r.IsSet("JOB_COMPLETION_INDEX") {
		source = "JOB_COMPLETION_INDEX is set, but neither " + env.WorldSize.Name + " nor " + env.Seeds.Name + ": a world of one process"
	}
	return &JoinConfig{source: source}, nil
}

// configOf reads the variables of a launcher.
func (r *reader) configOf(l *job.Launcher) (*JoinConfig, error) {
	cfg, err := configs[l.Name](r)
	if err = cmp.Or(r.Err, err); err != nil { // the first error
		return nil, err
	}
	return r.finish(cfg)
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
		set, missing := slices.DeleteFunc(slices.Clone(h.set), func(n string) bool { return !r.IsSet(n) }),
			slices.DeleteFunc(slices.Clone(h.need), r.IsSet)
		if len(set) > 0 && len(missing) > 0 {
			return r.half(h.launcher, append(set, missing...))
		}
	}
	if r.Text("SLURM_PROCID", "0") != "0" {
		return r.half("Slurm", []string{"SLURM_PROCID", "SLURM_STEP_NODELIST"})
	}
	return nil
}

func (r *reader) half(launcher string, names []string) error {
	return r.Problem("only some of "+launcher+"'s variables are set: set the rest, or "+env.Launcher.Name+"=none for a world of one process", names...)
}

// finish adds the settings that do not depend on the launcher: job, host and secret.
func (r *reader) finish(cfg *JoinConfig) (*JoinConfig, error) {
	if v := r.Text(env.Job.Name, ""); v != "" {
		cfg.Job = v
	}
	cfg.Host = r.Text(env.HostName.Name, cfg.Host)
	cfg.Insecure = r.Text(env.Insecure.Name, "no") == "yes"
	if cfg.token != nil || cfg.Size == 1 && cfg.Addr == "" {
		return cfg, nil
	}
	if path := r.Text(env.SecretFile.Name, ""); path != "" {
		secret, err := job.ReadSecretFile(path)
		if err != nil {
			return nil, err
		}
		cfg.Secret = secret
	}
	return cfg, nil
}

// place reads the four numbers that all launchers provide, and checks their
// consistency.
func (r *reader) place(rank, size, localRank, localSize string) *JoinConfig {
	cfg := &JoinConfig{Rank: new(r.Number(rank, 0)), Size: r.Number(size, 1),
		LocalRank: r.Optional(localRank, 0), LocalSize: job.Deref(r.Optional(localSize, 1), 0)}
	switch {
	case r.Err != nil:
	case cfg.Size > job.MaxSize:
		r.Fail(r.Problem(fmt.Sprintf("a world has at most %d processes", job.MaxSize), size))
	case *cfg.Rank >= cfg.Size:
		r.Fail(r.Problem("the rank must be less than the size", rank, size))
	case cfg.LocalSize > cfg.Size:
		r.Fail(r.Problem("a host cannot have more processes than the world", localSize, size))
	case cfg.LocalRank != nil && cfg.LocalSize > 0 && *cfg.LocalRank >= cfg.LocalSize:
		r.Fail(r.Problem("the local rank must be less than the local size", localRank, localSize))
	case cfg.LocalRank != nil && *cfg.LocalRank > *cfg.Rank:
		r.Fail(r.Problem("the local rank cannot exceed the rank", localRank, rank))
	}
	return cfg
}

// found sets the text of Session.Source.
func (r *reader) found(cfg *JoinConfig, launcher string, names ...string) *JoinConfig {
	var parts []string
	for _, n := range names {
		if r.IsSet(n) {
			parts = append(parts, n+"="+r.Text(n, ""))
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
	cfg.Serve = job.Deref(cfg.Rank, -1) == 0
	if local {
		cfg.Addr = net.JoinHostPort(job.Loopback(), port)
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

// chorus reads the variables of Agent.WorkerEnv.
func (r *reader) chorus() (*JoinConfig, error) {
	for _, n := range []string{env.Rank.Name, env.WorldSize.Name, env.Addr.Name, env.Token.Name} {
		if !r.IsSet(n) {
			return nil, r.Problem("a variable of `chorus run` is missing", n)
		}
	}
	cfg := r.place(env.Rank.Name, env.WorldSize.Name, env.LocalRank.Name, env.LocalSize.Name)
	r.Agree(env.Rank.Name, "RANK", "two launchers gave this process different ranks; unset one, or choose with "+env.Launcher.Name)
	r.Agree(env.WorldSize.Name, "WORLD_SIZE", "two launchers gave this process different worlds; unset one, or choose with "+env.Launcher.Name)
	cfg.Node = r.Optional(env.Node.Name, 0)
	cfg.Addr = r.Text(env.Addr.Name, "")
	token, err := job.DecodeToken(r.Text(env.Token.Name, ""))
	if err != nil { // the value is a secret: show only the name
		return nil, &ConfigError{Vars: []string{env.Token.Name}, Reason: err.Error()}
	}
	cfg.agent, cfg.agentAt = r.Text(env.Agent.Name, ""), r.Text(env.AgentAddr.Name, "")
	cfg.token, cfg.epoch = token, uint64(job.Deref(r.Optional(env.Epoch.Name, job.FirstEpoch), 0))
	return r.found(cfg, "chorus run", env.Rank.Name, env.WorldSize.Name, env.LocalRank.Name, env.Node.Name), nil
}

func (r *reader) torchrun() (*JoinConfig, error) {
	cfg := r.place("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
	cfg.Node = r.Optional("GROUP_RANK", 0)
	cfg.Job = r.Text("TORCHELASTIC_RUN_ID", "torchrun")
	if r.Err == nil && cfg.Size > 1 {
		master := r.Text("MASTER_ADDR", "")
		if master == "" {
			return nil, r.Problem("a world of several processes needs the address of rank 0's host", "MASTER_ADDR")
		}
		port := r.Number("MASTER_PORT", 1)
		// torchrun's own store may listen on MASTER_PORT.
		if strings.EqualFold(r.Text("TORCHELASTIC_USE_AGENT_STORE", ""), "true") {
			port++
		}
		local := cfg.oneHost() || cfg.LocalSize == 0 && !r.IsSet("KUBERNETES_SERVICE_HOST") && isLoopback(master+":0")
		cfg.hostedBy(master, strconv.Itoa(port), local)
	}
	return r.found(cfg, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), nil
}

func (r *reader) slurm() (*JoinConfig, error) {
	sizeVar := r.FirstSet("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
	cfg := r.place("SLURM_PROCID", sizeVar, "SLURM_LOCALID", "")
	cfg.Node = r.Optional("SLURM_NODEID", 0)
	cfg.Job = "slurm-" + r.Text("SLURM_JOB_ID", "") + "." + r.Text("SLURM_STEP_ID", "0")
	hosts, err := parseNodeList(r.Text("SLURM_STEP_NODELIST", ""))
	if err != nil {
		return nil, r.Problem(err.Error(), "SLURM_STEP_NODELIST")
	}
	if err := r.slurmLocalSize(cfg, len(hosts)); err != nil {
		return nil, err
	}
	cfg.Host = r.Text("SLURMD_NODENAME", "")
	addr, port, err := r.seed(hosts[0], r.slurmPort())
	if err != nil {
		return nil, err
	}
	cfg.hostedBy(addr, port, len(hosts) == 1)
	return r.found(cfg, "Slurm", "SLURM_PROCID", sizeVar, "SLURM_LOCALID", "SLURM_NODEID"), nil
}

func (r *reader) slurmLocalSize(cfg *JoinConfig, hosts int) error {
	name := r.FirstSet("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
	if !r.IsSet(name) {
		return nil
	}
	counts, err := parseTasksPerNode(r.Text(name, ""))
	if err != nil {
		return r.Problem(err.Error(), name)
	}
	if len(counts) != hosts {
		return r.Problem(fmt.Sprintf("the first lists %d hosts, the second %d", len(counts), hosts), name, "SLURM_STEP_NODELIST")
	}
	if node := job.Deref(cfg.Node, -1); node >= len(counts) {
		return r.Problem("the node's index is not in the list", "SLURM_NODEID", name)
	} else if node >= 0 {
		cfg.LocalSize = counts[node]
	}
	return nil
}

// slurmPort returns a port from 61440 on, above Linux's ephemeral ports, that
// all processes of a step compute alike and that two steps on one host rarely
// share.
func (r *reader) slurmPort() int {
	job, step := r.Number("SLURM_JOB_ID", 0), job.Deref(r.Optional("SLURM_STEP_ID", 0), 0)
	return 61440 + (job+step)%4096
}

func (r *reader) openMPI() (*JoinConfig, error) {
	cfg := r.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
	cfg.Job = "openmpi-" + r.Text(r.FirstSet("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), "0")
	if err := r.hostedBySeed(cfg, "OMPI_COMM_WORLD_SIZE"); err != nil {
		return nil, err
	}
	return r.found(cfg, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"), nil
}

func (r *reader) pmi() (*JoinConfig, error) {
	localRank, localSize := r.FirstSet("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), r.FirstSet("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
	cfg := r.place("PMI_RANK", "PMI_SIZE", localRank, localSize)
	cfg.Job = "pmi"
	if r.Err == nil && cfg.oneHost() && cfg.Size > 1 {
		if cfg.Job = r.pmiJob(); cfg.Job == "" {
			return nil, r.Problem("the launcher gives the job no name, so that it could meet another job of this host: set "+env.Job.Name+" to a name that no other job has", "PMI_SIZE", env.Job.Name)
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
	return r.Text(env.Job.Name, "")
}

// ancestor returns the nearest ancestor of this process whose program's name has a prefix, or 0.
func ancestor(prefix string) int {
	for pid := os.Getppid(); pid > 1; {
		p := job.ProcessOf(pid)
		if strings.HasPrefix(p.Name, prefix) {
			return pid
		}
		pid = p.Parent
	}
	return 0
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
	if r.Err != nil || cfg.Size == 1 {
		return nil
	}
	if !cfg.oneHost() && !r.IsSet(env.Seeds.Name) {
		return r.Problem("the launcher provides no address: set "+env.Seeds.Name+" to host:port of rank 0's process", shown, env.Seeds.Name)
	}
	h := fnv.New32a()
	h.Write([]byte(cfg.Job))
	addr, port, err := r.seed(job.Loopback(), 61440+int(h.Sum32()%4096))
	if err != nil {
		return err
	}
	cfg.hostedBy(addr, port, cfg.oneHost() || isLoopback(net.JoinHostPort(addr, port)))
	return nil
}

// seed returns the first address of CHORUS_SEEDS, or host and port if it is unset.
func (r *reader) seed(host string, port int) (string, string, error) {
	if !r.IsSet(env.Seeds.Name) {
		return host, strconv.Itoa(port), nil
	}
	first, _, _ := strings.Cut(r.Text(env.Seeds.Name, ""), ",")
	h, p, err := job.SplitAddr(first, job.DefaultPort)
	if err != nil {
		return "", "", r.Problem(err.Error(), env.Seeds.Name)
	}
	return h, p, nil
}

// A reader derives a place from an environment.
type reader struct{ *job.Environment }

// maxListed limits the expansion of a node list.
const maxListed = 1 << 16

// parseNodeList expands Slurm's syntax for a list of host names, such as
// "gpu[01-03,7],login,r[1-2]n[0-1]".
func parseNodeList(s string) ([]string, error) {
	var hosts []string
	for s != "" {
		item, rest, err := cutItem(s)
		if err != nil {
			return nil, err
		}
		names, err := expandItem(item)
		if err != nil {
			return nil, err
		}
		if len(hosts)+len(names) > maxListed {
			return nil, fmt.Errorf("node list names more than %d hosts", maxListed)
		}
		hosts = append(hosts, names...)
		if rest == "" && strings.HasSuffix(s, ",") {
			return nil, fmt.Errorf("node list ends with a comma")
		}
		s = rest
	}
	if len(hosts) == 0 {
		return nil, fmt.Errorf("node list is empty")
	}
	return hosts, nil
}

// cutItem cuts s at the first comma that is not in brackets.
func cutItem(s string) (item, rest string, err error) {
	open := false
	for i := range len(s) {
		switch c := s[i]; {
		case c == '[' && open, c == ']' && !open:
			return "", "", fmt.Errorf("node list has an unexpected %q at byte %d of %q", c, i, s)
		case c == '[':
			open = true
		case c == ']':
			open = false
		case c == ',' && !open:
			return s[:i], s[i+1:], nil
		}
	}
	if open {
		return "", "", fmt.Errorf("node list %q has an unclosed bracket", s)
	}
	return s, "", nil
}

// expandItem expands the brackets of one item; the first bracket varies slowest.
func expandItem(item string) ([]string, error) {
	if item == "" {
		return nil, fmt.Errorf("node list has an empty name")
	}
	names := []string{""}
	for item != "" {
		head, rest, found := strings.Cut(item, "[")
		parts := []string{head}
		if found {
			ranges, after, _ := strings.Cut(rest, "]")
			numbers, err := expandRanges(ranges)
			if err != nil {
				return nil, err
			}
			for i := range numbers {
				numbers[i] = head + numbers[i]
			}
			parts, rest = numbers, after
		}
		if len(names)*len(parts) > maxListed {
			return nil, fmt.Errorf("node list names more than %d hosts", maxListed)
		}
		names = product(names, parts)
		item = rest
	}
	return names, nil
}

func product(heads, tails []string) []string {
	out := make([]string, 0, len(heads)*len(tails))
	for _, h := range heads {
		for _, t := range tails {
			out = append(out, h+t)
		}
	}
	return out
}

// expandRanges expands "01-03,7", where leading zeros set the width, as in
// Slurm.
func expandRanges(s string) ([]string, error) {
	var out []string
	for part := range strings.SplitSeq(s, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		from, err1 := strconv.ParseUint(lo, 10, 32)
		to, err2 := strconv.ParseUint(hi, 10, 32)
		if err1 != nil || err2 != nil || from > to || to-from >= maxListed {
			return nil, fmt.Errorf("node list has the range %q: want numbers such as 01-16", part)
		}
		for n := from; n <= to; n++ {
			out = append(out, fmt.Sprintf("%0*d", len(lo), n))
		}
		if len(out) > maxListed {
			return nil, fmt.Errorf("node list names more than %d hosts", maxListed)
		}
	}
	return out, nil
}

// parseTasksPerNode expands Slurm's task counts, such as "4(x2),3".
func parseTasksPerNode(s string) ([]int, error) {
	var out []int
	for part := range strings.SplitSeq(s, ",") {
		count, times, repeated := strings.Cut(part, "(x")
		reps := uint64(1)
		var err error
		if repeated {
			var closed bool
			if times, closed = strings.CutSuffix(times, ")"); !closed {
				return nil, fmt.Errorf("task counts %q: want the form 4(x2),3", s)
			}
			if reps, err = strconv.ParseUint(times, 10, 32); err != nil || reps == 0 {
				return nil, fmt.Errorf("task counts %q: want the form 4(x2),3", s)
			}
		}
		n, err := strconv.ParseUint(count, 10, 31)
		if err != nil || uint64(len(out))+reps > maxListed {
			return nil, fmt.Errorf("task counts %q: want the form 4(x2),3", s)
		}
		for range reps {
			out = append(out, int(n))
		}
	}
	return out, nil
}
