package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/health"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/perf"
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
	health.Selection
	json, strict bool
}

func newDoctorCommand() *cobra.Command {
	var f doctorFlags
	c := &cobra.Command{
		Use:     "doctor",
		Short:   "Check whether the host is ready for a job on its GPUs",
		Long:    fmt.Sprintf(doctorLong, checkNames()),
		Example: doctorExample,
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			anywhere := f.Selection
			anywhere.Job = true // known after the job has started
			if _, err := anywhere.Select(health.Checks); err != nil {
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

// checkNames lists the names of all checks in lines of the help.
func checkNames() string {
	var names []string
	for _, c := range health.Checks {
		names = append(names, c.ID)
	}
	return strings.Join(safe.WrapNames(names, 80), "\n  ")
}

// print writes the report, and returns the exit code of a host that is not
// ready as its error.
func (f *doctorFlags) print(out io.Writer, r *health.Report) error {
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

const (
	readTime     = 4500 * time.Millisecond // limit of all checks that only read
	exchangeTime = 30 * time.Second        // limit of the exchanges between hosts
)

// A visit is the part of one process in the check of all hosts of a job. A process alone is a job
// of one host.
type visit struct {
	*doctorFlags
	m      *member
	store  *cluster.Store
	nodes  []string // names of the hosts by node
	checks []*health.Check
	host   *health.Host // nil unless this process has local rank 0
}

// findings are the message of one host to rank 0.
type findings struct {
	Results []health.Result
	Facts   *health.Facts
}

// run checks this host, and in a job all hosts, whose results rank 0 prints.
func (f *doctorFlags) run(ctx context.Context, out io.Writer) error {
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	v := &visit{doctorFlags: f, m: &member{Session: sess}, store: sess.Prefix("doctor"), nodes: hostNames(sess.Members())}
	if err := v.prepare(); err != nil {
		return err
	}
	report, err := v.examine(ctx)
	if err != nil {
		return err
	}
	if report != nil {
		err = f.print(out, report)
	}
	return errors.Join(err, sess.Shutdown(ctx))
}

// hostNames returns a name for each node, different also for two agents on one
// machine.
func hostNames(members []cluster.Member) []string {
	var list []string
	for _, m := range members {
		for m.Node >= len(list) {
			list = append(list, "")
		}
		list[m.Node] = m.Host
	}
	for i, name := range list {
		if slices.Index(list, name) < i {
			list[i] = fmt.Sprintf("%s/%d", name, i)
		}
	}
	return list
}

// prepare selects the checks and opens the host.
func (v *visit) prepare() (err error) {
	v.Job = len(v.nodes) > 1
	if v.checks, err = v.Select(health.Checks); err != nil {
		return usage(err)
	}
	if v.m.LocalRank() != 0 {
		return nil
	}
	if v.host, err = health.NewHost(); err != nil {
		return err
	}
	if v.m.Size() == 1 {
		v.nodes = []string{v.host.Name}
	} else {
		v.host.Name, v.host.Ranks = v.nodes[v.m.Node()], v.m.LocalSize()
	}
	return nil
}

// examine runs the checks, and returns the report on rank 0 and nil on the
// others.
func (v *visit) examine(ctx context.Context) (*health.Report, error) {
	if v.host != nil {
		if err := v.read(ctx); err != nil {
			return nil, err
		}
	}
	var report *health.Report
	if v.m.isFirst() {
		var err error
		if report, err = v.collect(ctx); err != nil {
			return nil, err
		}
	}
	if v.Measure {
		if err := v.measure(ctx, report); err != nil {
			return nil, err
		}
	}
	if report != nil {
		report.Counts = health.Count(report.Results)
	}
	return report, nil
}

// read checks this host without loading it, and sends the findings.
func (v *visit) read(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	reads := slices.DeleteFunc(slices.Clone(v.checks), func(c *health.Check) bool { return c.Measures })
	mine := findings{Results: health.Run(limited, v.host, reads)}
	if v.Job {
		mine.Facts = v.host.Facts(limited, reads)
		exchanging, cancel := context.WithTimeout(ctx, exchangeTime)
		defer cancel()
		health.Exchange(exchanging, v.store, v.host, mine.Facts, v.m.Node(), len(v.nodes))
	}
	if err := ctx.Err(); err != nil { // interrupted: the results are not complete
		return err
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	return v.store.Set(ctx, resultsKey(v.m.Node()), text)
}

func resultsKey(node int) string { return fmt.Sprintf("results/%d", node) }

// collect returns the findings of all hosts.
func (v *visit) collect(ctx context.Context) (*health.Report, error) {
	r := &health.Report{Version: version(), Hosts: v.nodes}
	var facts []*health.Facts
	for node, name := range v.nodes {
		text, err := v.store.Get(ctx, resultsKey(node))
		if err != nil {
			return nil, err
		}
		var one findings
		if err := json.Unmarshal(text, &one); err != nil {
			return nil, fmt.Errorf("the results of host %s: %w", name, err)
		}
		if v.Job && one.Facts == nil {
			return nil, fmt.Errorf("the results of host %s have no facts to compare: use one version of Chorus on all hosts", name)
		}
		safe.Record(&one)
		r.Results, facts = append(r.Results, one.Results...), append(facts, one.Facts)
	}
	if v.Job {
		r.Results = append(r.Results, health.Compare(v.checks, facts)...)
	}
	return r, nil
}

// measure measures all GPUs together, unless the results of rank 0 have a reason against it.
func (v *visit) measure(ctx context.Context, report *health.Report) error {
	if report != nil {
		if err := v.store.Set(ctx, "measure", []byte(health.CanMeasure(report.Results))); err != nil {
			return err
		}
	}
	refusal, err := v.store.Get(ctx, "measure")
	if err != nil {
		return err
	}
	measured := notMeasured(safe.Text(string(refusal)))
	if len(refusal) == 0 {
		measured = v.m.measured(ctx)
	}
	if report != nil {
		v.host.Measured = measured
		loads := slices.DeleteFunc(slices.Clone(v.checks), func(c *health.Check) bool { return !c.Measures })
		report.Results = append(report.Results, health.Run(ctx, v.host, loads)...)
	}
	return ctx.Err()
}

// peers tests the copies between all pairs of GPUs of this process.
func (m *member) peers() health.Speed {
	if len(m.devs) == 1 {
		return health.Speed{Missing: "each process has one GPU: start chorus doctor --measure without chorus run"}
	}
	if env.P2P.Value() == "off" {
		return health.Speed{Missing: env.P2P.Name + "=off: direct copies are not in use"}
	}
	tested := 0
	for i, a := range m.devs {
		for _, b := range m.devs[:i] {
			can, err := a.CanAccessPeer(b)
			if err != nil {
				return health.Speed{Missing: err.Error()}
			}
			if !can {
				continue
			}
			works, err := gpu.DeviceOf(a).PeerWorks(gpu.DeviceOf(b))
			if err != nil {
				return health.Speed{Missing: err.Error()}
			}
			if !works {
				return health.Speed{Reason: fmt.Sprintf("wrong data between GPUs %d and %d", b.Ordinal(), a.Ordinal())}
			}
			tested++
		}
	}
	if tested == 0 {
		return health.Speed{OK: true, Reason: "no pair has direct access"}
	}
	return health.Speed{OK: true, Reason: fmt.Sprintf("direct copies between all %d pairs bring the right data", tested)}
}

// copiesInTurn measures the copies of all ranks: the processes of a host one after the other.
func (m *member) copiesInTurn(ctx context.Context, g *comm.Group) ([]health.Copy, error) {
	most := 1
	for _, x := range m.Members() {
		most = max(most, x.LocalSize)
	}
	var mine []health.Copy
	for i := range most {
		if i == m.LocalRank() {
			mine = m.copies(ctx)
		}
		if err := g.Barrier(ctx); err != nil {
			return nil, err
		}
	}
	all, err := comm.GatherValues(ctx, g, nil, mine...)
	safe.Record(&all)
	for rank := range all {
		all[rank].Rank = rank
	}
	return all, err
}

// copies measures the copies of the GPUs of this process, one after the other.
func (m *member) copies(ctx context.Context) []health.Copy {
	list := make([]health.Copy, len(m.devs))
	bytes := 256 << 20
	if m.virtual() {
		bytes = 1 << 10
	}
	for i, d := range m.devs {
		c, err := measureCopy(ctx, d, bytes)
		if err != nil {
			c.Missing = err.Error()
		}
		c.Rank, c.OnlyMemory = i, m.virtual()
		list[i] = c
	}
	return list
}

// measureCopy measures copies of pinned memory in both directions.
func measureCopy(ctx context.Context, d *device.Device, bytes int) (c health.Copy, err error) {
	p, err := d.Properties()
	if err != nil {
		return c, err
	}
	c.Product = p.Name
	c.ToGPU, c.FromGPU, err = perf.HostBandwidth(ctx, d, bytes)
	return c, err
}

// notMeasured returns measurements that have a reason for their absence.
func notMeasured(reason string) *health.Measured {
	none := health.Speed{Missing: reason}
	return &health.Measured{Peers: none, Pairs: none, AllReduce: none, Pinned: none}
}

// measured measures the GPUs of all processes together, so all processes must
// call it.
func (m *member) measured(ctx context.Context) *health.Measured {
	if err := m.find(0); err != nil {
		return notMeasured(err.Error())
	}
	if m.Size() == 1 && len(m.devs) == 1 {
		all := notMeasured("one GPU: the check needs two")
		all.Copies, all.Pinned = m.copies(ctx), m.pinned()
		return all
	}
	g, err := m.group(ctx, nil)
	if err != nil {
		return notMeasured(err.Error())
	}
	defer g.Close()
	all := &health.Measured{Peers: m.peers(), Pinned: m.pinned()}
	if all.Copies, err = m.copiesInTurn(ctx, g); err != nil {
		return notMeasured(err.Error())
	}
	all.Pairs = speedOf(measurePairs(ctx, g, m.virtual()))
	all.AllReduce = speedOf(measureAllReduce(ctx, g, m.virtual()))
	if err := g.Shutdown(ctx); err != nil {
		return notMeasured(err.Error())
	}
	return all
}

// virtual reports whether the devices are virtual, and then small sizes suffice.
func (m *member) virtual() bool { return m.devs[0].System().Backend() != gpu.CUDA }

func measurePairs(ctx context.Context, g *comm.Group, virtual bool) (*perf.Report, error) {
	p := &perf.PairPlan{Bytes: 64 << 20, Iterations: 5, Warmups: 1}
	if virtual {
		p.Bytes, p.Iterations = 1<<10, 1
	}
	return perf.MeasurePairs(ctx, g, p)
}

func measureAllReduce(ctx context.Context, g *comm.Group, virtual bool) (*perf.Report, error) {
	bytes, iterations := 1<<30, 10
	if virtual {
		bytes, iterations = 1<<10, 1
	}
	return perf.Run(ctx, g, &perf.Plan{Operations: []string{"all_reduce"}, MinBytes: bytes, Iterations: iterations, Warmups: 2, Checks: 1}, nil)
}

// speedOf returns the verdict of a report, unless the devices are virtual,
// whose times say nothing about a host.
func speedOf(r *perf.Report, err error) health.Speed {
	switch {
	case err != nil:
		return health.Speed{Missing: err.Error()}
	case r.Verdict == nil:
		return health.Speed{Missing: "no known bandwidth of the links of " + r.Device}
	case r.Backend != gpu.CUDA:
		return health.Speed{Missing: r.Verdict.Reason}
	}
	return health.Speed{OK: r.Verdict.OK, Reason: r.Verdict.Reason}
}

// pinned pins memory for the first GPU of this process and frees it.
func (m *member) pinned() health.Speed {
	most, err := env.GDSPinned.Int()
	if err != nil {
		return health.Speed{Missing: err.Error()}
	}
	for _, n := range []int{64 << 20, most} {
		x, err := memory.MakePinned[byte](m.devs[0], n)
		if err != nil {
			return health.Speed{Reason: fmt.Sprintf("%d MiB cannot be pinned: %v", n>>20, err)}
		}
		if err := x.Close(); err != nil {
			return health.Speed{Missing: err.Error()}
		}
	}
	return health.Speed{OK: true, Reason: fmt.Sprintf("64 MiB and %d MiB were pinned", most>>20)}
}
