package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cmd/chorus/internal/doctor"
)

const doctorLong = `Check whether this host is ready for a job on its GPUs: driver and libraries, the health of
the GPUs and their links, limits of the host, network, storage, and variables that hurt.

Each check returns one of
  pass     no action is needed
  warn     jobs are slower, or may fail later
  fail     jobs fail, or their results are not reliable
  unknown  the evidence could not be read, for the reason given

If a check fails, the checks that depend on it are unknown. --measure adds the checks
host-copies, peer-data, pairs and all-reduce, which load all GPUs for some seconds.

If chorus run, torchrun, Slurm or MPI starts the command on several hosts, rank 0 prints the
results of all hosts once, and the checks with the scope job compare the hosts. chorus run
adds the rank at the start of each line, and with --no-prefix it does not.

docs/DOCTOR.md describes all checks:
  %s

--json writes one object with the fields version, hosts, results and counts. A result has
  id       the name of the check
  scope    host, gpu, link or job
  host     the name of the host; left out if the result is about all hosts
  gpu      the GPU's number in nvidia-smi, if the result is about one GPU
  verdict  pass, warn, fail or unknown
  found    the evidence, and want: the evidence of a healthy host
  cause    the consequence, or the reason for unknown
  cure     the action that helps
  source   the file or the call that the evidence comes from
  took     the time of the check in ns

The exit code is 0 if no check fails, 1 if one fails (with --strict also if one warns), and
64 for a mistake in the flags.`

const doctorExample = `  chorus doctor
  chorus doctor --measure
  chorus doctor --only xid,nvlink,ecc
  chorus run --nnodes 2 --seeds host1 --no-prefix -- chorus doctor
  chorus doctor --json --strict`

// doctorFlags are the flags of chorus doctor.
type doctorFlags struct {
	doctor.Selection
	json, strict bool
}

func newDoctorCommand() *cobra.Command {
	var f doctorFlags
	c := &cobra.Command{
		Use:     "doctor",
		Short:   "Check whether the host is ready for a job on its GPUs",
		Long:    fmt.Sprintf(doctorLong, doctor.Names(doctor.Checks)),
		Example: doctorExample,
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			anywhere := f.Selection
			anywhere.Job = true // known after the job has started
			if _, err := anywhere.Select(doctor.Checks); err != nil {
				return usageError(c, err)
			}
			return interruptible(c, f.run)
		},
	}
	fs := c.Flags()
	fs.SortFlags = false
	fs.StringSliceVar(&f.Only, "only", nil, "names of the checks to run; default: all")
	fs.StringSliceVar(&f.Skip, "skip", nil, "names of checks to leave out")
	fs.BoolVar(&f.Measure, "measure", false, "also checks that load all GPUs for some seconds")
	fs.BoolVar(&f.json, "json", false, "output in JSON")
	fs.BoolVar(&f.strict, "strict", false, "exit code 1 also for warnings")
	return c
}

// print writes the report. Its error is the exit code of a host that is not ready.
func (f *doctorFlags) print(out io.Writer, r *doctor.Report) error {
	var err error
	switch {
	case f.json:
		err = encode(out, r)
	case isTerminal(os.Stdout) && os.Getenv("NO_COLOR") == "":
		err = r.Write(os.Stdout, true) // out would quote the colours; the results are quoted
	default:
		err = r.Write(out, false)
	}
	if err != nil {
		return err
	}
	if !r.Counts.OK(f.strict) {
		return exitCode(1)
	}
	return nil
}

// isTerminal reports whether a file is a terminal that shows colours.
func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb"
}
