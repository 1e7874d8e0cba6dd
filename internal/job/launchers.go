package job

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/env"
)

// A Launcher is a program that starts processes: how to detect it.
type Launcher struct {
	Name  string
	title string // in messages
	Found func(*Environment) bool
	sizes []string // the first one that is set is the number of processes that it has started
}

// Launchers from the inside out: mpirun in an allocation of Slurm runs inside of srun or of a batch
// script, whose variables its processes inherit.
var Launchers = []Launcher{
	{"chorus", "`chorus run`", (*Environment).hasChorus, []string{env.WorldSize.Name}},
	{"torchrun", "torchrun", (*Environment).hasTorchrun, []string{"WORLD_SIZE"}},
	{"openmpi", "Open MPI", (*Environment).hasOpenMPI, []string{"OMPI_COMM_WORLD_SIZE"}},
	{"pmi", "MPI (PMI)", (*Environment).hasPMI, []string{"PMI_SIZE"}},
	{"slurm", "Slurm", (*Environment).hasSlurm, []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}},
	{"kubernetes", "Kubernetes", (*Environment).hasKubernetes, []string{env.WorldSize.Name}},
}

// Started returns the number of processes that a launcher has started, or 0 if its variables do not
// contain it.
func (r *Environment) Started(l *Launcher) int {
	n, err := strconv.Atoi(strings.TrimSpace(r.Text(r.FirstSet(l.sizes...), "")))
	if err != nil {
		return 0 // config describes the problem
	}
	return n
}

// checkOneJob returns an error if a launcher has started this process beside others, although it would be
// the only host of its job. Each of them would then run a job of its own, and nobody would notice.
func checkOneJob(lookup func(string) (string, bool)) error {
	r := &Environment{Lookup: lookup}
	if r.Text(env.Launcher.Name, env.Launcher.Default) == "none" {
		return nil
	}
	for i := range Launchers {
		l := &Launchers[i]
		if n := r.Started(l); l.Found(r) && n > 1 {
			return r.Problem(fmt.Sprintf("%s started %d processes, and each would run a job of its own: give all of them the same --nnodes, --seeds and --job, or --nnodes 1 if you want separate jobs", l.title, n),
				r.FirstSet(l.sizes...))
		}
	}
	return nil
}

func (r *Environment) hasChorus() bool { return r.IsSet(env.Rank.Name) || r.IsSet(env.Addr.Name) }

func (r *Environment) hasTorchrun() bool { return r.IsSet("RANK") && r.IsSet("WORLD_SIZE") }

// hasSlurm reports whether srun started this process. A script of sbatch has a
// SLURM_PROCID, too, but no step.
func (r *Environment) hasSlurm() bool {
	return r.IsSet("SLURM_JOB_ID") && r.IsSet("SLURM_PROCID") && r.IsSet("SLURM_STEP_NODELIST")
}

func (r *Environment) hasOpenMPI() bool { return r.IsSet("OMPI_COMM_WORLD_SIZE") }

// hasPMI reports MPICH, Intel MPI or PALS. Slurm sets PMI_RANK and PMI_SIZE, too (srun --mpi=pmi2), for
// the processes that its own variables describe; those also contain an address. MPICH and Intel MPI
// inside of Slurm set MPI_LOCALNRANKS.
func (r *Environment) hasPMI() bool {
	if !r.IsSet("PMI_RANK") || !r.IsSet("PMI_SIZE") {
		return false
	}
	return !r.hasSlurm() || r.IsSet("MPI_LOCALNRANKS") || r.Text("PMI_RANK", "") != r.Text("SLURM_PROCID", "") ||
		r.Text("PMI_SIZE", "") != r.Text(r.FirstSet("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "")
}

func (r *Environment) hasKubernetes() bool {
	return r.IsSet("JOB_COMPLETION_INDEX") && (r.IsSet(env.WorldSize.Name) || r.IsSet(env.Seeds.Name))
}

// An Environment reads variables and keeps the first error.
type Environment struct {
	Lookup func(string) (string, bool)
	Err    error
}

func (r *Environment) IsSet(name string) bool {
	v, ok := r.Lookup(name)
	return ok && v != ""
}

func (r *Environment) Text(name, unset string) string {
	if v, ok := r.Lookup(name); ok && v != "" {
		return v
	}
	return unset
}

// FirstSet returns the first of the names that is set, or the last name.
func (r *Environment) FirstSet(names ...string) string {
	for _, n := range names {
		if r.IsSet(n) {
			return n
		}
	}
	return names[len(names)-1]
}

// Number returns the value of a required variable: a number of at least low.
func (r *Environment) Number(name string, low int) int {
	n, err := strconv.Atoi(strings.TrimSpace(r.Text(name, "")))
	if err != nil || n < low {
		r.Fail(r.Problem(fmt.Sprintf("want a whole number of at least %d", low), name))
		return low
	}
	return n
}

// Optional is number for an optional variable.
func (r *Environment) Optional(name string, low int) *int {
	if !r.IsSet(name) {
		return nil
	}
	return new(r.Number(name, low))
}

func (r *Environment) Fail(err error) {
	if r.Err == nil {
		r.Err = err
	}
}

// Problem returns a ConfigError about the named variables.
func (r *Environment) Problem(reason string, names ...string) error {
	e := &ConfigError{Reason: reason}
	for _, n := range names {
		if v, ok := r.Lookup(n); ok {
			e.Vars = append(e.Vars, fmt.Sprintf("%s=%q", n, v))
		} else {
			e.Vars = append(e.Vars, n+" (unset)")
		}
	}
	return e
}

// Agree fails if two variables are set to different values.
func (r *Environment) Agree(a, b, reason string) {
	if r.IsSet(a) && r.IsSet(b) && r.Text(a, "") != r.Text(b, "") {
		r.Fail(r.Problem(reason, a, b))
	}
}
