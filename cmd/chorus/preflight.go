package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/health"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/perf"
)

const preflightLong = `Check, before a job starts, whether the GPUs of this host or of all hosts of a gang compute and
communicate correctly and fast, and name the GPU, the link or the host that does not.

The steps are
  health      the checks of chorus doctor that only read, meanwhile
  devices     each GPU alone: a part of its memory, copies from and to the host, and a matrix
              product that is compared with a reference, if cuBLASLt is installed
  pairs       each two GPUs of a host, and the GPUs of each two hosts, in rounds in which all
              are busy: bandwidth, latency, the data, and the path that NCCL uses
  all-reduce  from 8 bytes to --maxbytes over all GPUs, with the results compared

Started alone, the command checks the GPUs of this host. To check several hosts, start it on all
of them with chorus run, torchrun, Slurm or MPI, or as an indexed Job (deploy/kubernetes). Rank 0
prints, and all processes have the same exit code.

Settings are taken from the flags, then from CHORUS_PREFLIGHT_… variables, and then from the
variables of NVSentinel's checks: BW_THRESHOLD_GBPS, MESSAGE_SIZES, TEST_SIZE_MB and
GANG_TIMEOUT_SECONDS. See docs/ENVIRONMENT.md.

--json writes one object: version, verdict, error_code, findings, and check and health with all
measurements. The error code is NCCL_BW_DEGRADED if everything that was found is slow, and
NCCL_TEST_ERROR otherwise. A finding has
  kind      wrong, slow, hang or broken
  step      the step, or the name of a check of chorus doctor
  gpus      one: this GPU; two: the link between them; with rank, host, uuid, pci and product
  hosts     the hosts, if all their GPUs are affected alike
  measured  the value, and limit: the value of a healthy GPU or link
  reason    a sentence, and cure: what to do

The exit code is 0 if nothing was found; 1 if something was found; 2 for a mistake in a setting;
and 3 if the result could not be written. After Ctrl-C it is 130.`

const preflightExample = `  chorus preflight
  chorus preflight --json --output /dev/termination-log
  chorus run --nnodes 2 --seeds host1 --no-prefix -- chorus preflight --bus-limit 300
  BW_THRESHOLD_GBPS=150 MESSAGE_SIZES=4M,1G chorus preflight --profile full`

// The exit codes of chorus preflight, which are those of NVSentinel's checks.
const (
	exitFound    = 1
	exitSetting  = 2
	exitNoReport = 3
)

// preflightFlags are the flags of chorus preflight.
type preflightFlags struct {
	gpus                              int
	profile                           string
	busLimit, pairLimit, copyLimit    string
	part                              string
	maxBytes                          string
	timeout, gangTimeout, stepTimeout string
	noHealth                          bool
	skip                              []string
	json                              bool
	output, log                       string
}

// A settingError is a mistake in a setting, with the name of its source.
type settingError struct{ error }

func newPreflightCommand() *cobra.Command {
	var f preflightFlags
	c := &cobra.Command{
		Use:     "preflight",
		Short:   "Check GPUs and their links before a job starts",
		Long:    preflightLong,
		Example: preflightExample,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return settingError{fmt.Errorf("unknown argument %q; see chorus preflight --help", args[0])}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := f.settings()
			if err != nil {
				return settingError{err}
			}
			return interruptible(c, p.run)
		},
	}
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return settingError{fmt.Errorf("%w; see chorus preflight --help", err)}
	})
	fs := c.Flags()
	fs.SortFlags = false
	fs.IntVarP(&f.gpus, "ngpus", "g", 0, "GPUs of this process; 0: all, or one if the job has several processes")
	fs.StringVar(&f.profile, "profile", "quick", "quick, which takes seconds, or full: more memory, sizes and iterations")
	fs.StringVar(&f.busLimit, "bus-limit", "", "lowest bus bandwidth of the largest all-reduce in GB/s; default: by the product")
	fs.StringVar(&f.pairLimit, "pair-limit", "", "lowest bandwidth of a pair in each direction in GB/s; default: none")
	fs.StringVar(&f.copyLimit, "copy-limit", "", "lowest bandwidth of copies from and to the host in GB/s; default: none")
	fs.StringVar(&f.part, "part", "", "part of the others' speed that a GPU or a pair must reach; default: 0.75")
	fs.StringVar(&f.maxBytes, "maxbytes", "", "largest all-reduce and transfer; units K, M, G; default: 256M, or 1G in the full profile")
	fs.StringVar(&f.timeout, "timeout", "", "limit of the whole check; default: 5m")
	fs.StringVar(&f.gangTimeout, "gang-timeout", "", "time to wait for the other processes of the job; default: CHORUS_JOIN_TIMEOUT")
	fs.StringVar(&f.stepTimeout, "step-timeout", "", "limit of a step, after which it counts as hanging; default: 30s")
	fs.BoolVar(&f.noHealth, "no-health", false, "leave the checks of chorus doctor out")
	fs.StringSliceVar(&f.skip, "skip", nil, "names of checks of chorus doctor to leave out")
	fs.BoolVar(&f.json, "json", false, "output in JSON")
	fs.StringVar(&f.output, "output", "", "file for the output; default: standard output")
	fs.StringVar(&f.log, "log", "off", "log of the steps on standard error: text, json or off")
	return c
}

// A source is a setting with the place that it comes from.
type source struct{ name, text string }

// setting returns the first source that is set: the flag, or a variable.
func setting(flag, text string, vars ...*env.Var) source {
	if text != "" {
		return source{flag, text}
	}
	for _, v := range vars {
		if v.IsSet() && v.Value() != "" {
			return source{v.Name, v.Value()}
		}
	}
	return source{}
}

// A preflight is a validated configuration.
type preflight struct {
	preflightFlags
	cfg     perf.CheckConfig
	timeout time.Duration
	gang    time.Duration // 0: the default
}

// settings validates flags and variables, and names in its error the source of
// the value that is wrong.
func (f *preflightFlags) settings() (*preflight, error) {
	p := &preflight{preflightFlags: *f, timeout: 5 * time.Minute}
	switch f.profile {
	case "quick":
	case "full":
		p.cfg.MaxBytes, p.cfg.MemoryBytes, p.cfg.Iterations = 1<<30, 4<<30, 20
	default:
		return nil, fmt.Errorf("--profile %q: want quick or full", f.profile)
	}
	if f.gpus < 0 {
		return nil, fmt.Errorf("-g %d: want 1 or more, or 0 for all", f.gpus)
	}
	if !slices.Contains([]string{"text", "json", "off"}, f.log) {
		return nil, fmt.Errorf("--log %q: want text, json or off", f.log)
	}
	anywhere := health.Selection{Skip: f.skip, Job: true}
	if _, err := anywhere.Select(health.Checks); err != nil {
		return nil, fmt.Errorf("--skip: %w", err)
	}
	for _, x := range []struct {
		source
		to *float64
	}{
		{setting("--bus-limit", f.busLimit, env.PreflightBusLimit, env.ThresholdGBps), &p.cfg.Limits.AllReduce},
		{setting("--pair-limit", f.pairLimit), &p.cfg.Limits.Pair},
		{setting("--copy-limit", f.copyLimit), &p.cfg.Limits.HostCopy},
		{setting("--part", f.part), &p.cfg.Limits.Part},
	} {
		if err := x.number(x.to); err != nil {
			return nil, err
		}
	}
	if p.cfg.Limits.Part > 1 {
		return nil, fmt.Errorf("--part %s: want a number above 0 and at most 1", f.part)
	}
	for _, x := range []struct {
		source
		to *time.Duration
	}{
		{setting("--timeout", f.timeout, env.PreflightTimeout), &p.timeout},
		{setting("--gang-timeout", f.gangTimeout, env.PreflightGangTimeout), &p.gang},
		{setting("--step-timeout", f.stepTimeout), &p.cfg.StepTimeout},
	} {
		if err := x.duration(x.to); err != nil {
			return nil, err
		}
	}
	return p, errors.Join(p.gangSeconds(), p.sizes())
}

// number parses a positive number.
func (x source) number(to *float64) error {
	if x.name == "" {
		return nil
	}
	var v float64
	if err := json.Unmarshal([]byte(strings.TrimSpace(x.text)), &v); err != nil || !(v > 0) { // JSON has no NaN and no infinity
		return fmt.Errorf("%s is %q: want a number above 0, such as 150", x.name, x.text)
	}
	*to = v
	return nil
}

// duration parses a positive duration.
func (x source) duration(to *time.Duration) error {
	if x.name == "" {
		return nil
	}
	v, err := time.ParseDuration(x.text)
	if err != nil || v <= 0 {
		return fmt.Errorf("%s is %q: want a duration above 0, such as 90s or 5m", x.name, x.text)
	}
	*to = v
	return nil
}

// gangSeconds takes NVSentinel's variable if no other source is set.
func (p *preflight) gangSeconds() error {
	x := setting("", "", env.GangTimeoutSeconds)
	if p.gang > 0 || x.name == "" {
		return nil
	}
	var seconds float64
	if err := x.number(&seconds); err != nil {
		return err
	}
	p.gang = time.Duration(seconds * float64(time.Second))
	return nil
}

// sizes sets the largest size.
func (p *preflight) sizes() error {
	x := setting("--maxbytes", p.maxBytes, env.PreflightMaxBytes, env.MessageSizes, env.TestSizeMB)
	if x.name == "" {
		return nil
	}
	if x.name == env.TestSizeMB.Name {
		var mib float64
		err := x.number(&mib)
		if mib > 1<<20 {
			err = fmt.Errorf("%s is %q: want at most %d", x.name, x.text, 1<<20)
		}
		p.cfg.MaxBytes = int(mib * (1 << 20))
		return err
	}
	p.cfg.MaxBytes = 0
	for _, one := range strings.Split(x.text, ",") {
		n, err := perf.ParseBytes(strings.TrimSpace(one))
		if err == nil && n < 8 {
			err = fmt.Errorf("%q: want 8 bytes or more", one)
		}
		if err != nil {
			return fmt.Errorf("%s is %q: %w", x.name, x.text, err)
		}
		p.cfg.MaxBytes = max(p.cfg.MaxBytes, n)
	}
	return nil
}

// A preflightReport is the output of chorus preflight.
type preflightReport struct {
	Version   string            `json:"version"`
	Verdict   string            `json:"verdict"`              // pass or fail
	ErrorCode string            `json:"error_code,omitempty"` // of NVSentinel
	Findings  []perf.Finding    `json:"findings"`
	Check     *perf.CheckReport `json:"check,omitempty"`
	Health    *health.Report    `json:"health,omitempty"`
	Took      float64           `json:"took_seconds"`
}

// run checks within the deadline, and writes the report.
func (p *preflight) run(ctx context.Context, out io.Writer) (err error) {
	begun := time.Now()
	limited, cancel := context.WithTimeoutCause(ctx, p.timeout, fmt.Errorf("the check did not end within %v", p.timeout))
	defer cancel()
	ended := make(chan result, 1)
	go func() { ended <- p.check(limited) }() // a call of a broken driver may never return
	var x result
	select {
	case x = <-ended:
	case <-limited.Done():
		select {
		case x = <-ended:
		case <-time.After(3 * time.Second):
			x = brokenResult("deadline", perf.Hang, context.Cause(limited))
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if x.err != nil {
		return x.err
	}
	x.report.complete(begun)
	if x.first {
		err = p.write(out, x.report)
	}
	if x.leave != nil { // a launcher ends the others with the first process that fails
		x.leave()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "chorus: preflight: the result could not be written: %v\n", err)
		return exitCode(exitNoReport)
	}
	if x.report.Verdict != "pass" {
		return exitCode(exitFound)
	}
	return nil
}

// A result is what a process knows at the end of a check.
type result struct {
	report *preflightReport
	first  bool   // whether this process writes the report
	leave  func() // leaves the job when the report is written; nil: there is none
	err    error  // a mistake in a setting
}

// brokenResult is the result of a check that ended early. Every such process reports: rank 0 may be missing.
func brokenResult(step string, k perf.Kind, err error) result {
	return result{first: true, report: &preflightReport{Findings: []perf.Finding{{Kind: k, Step: step, Reason: err.Error()}}}}
}

// complete adds the findings of the parts, and the verdict.
func (r *preflightReport) complete(begun time.Time) {
	r.Version, r.Verdict, r.Took = version(), "pass", time.Since(begun).Seconds()
	if r.Findings == nil {
		r.Findings = []perf.Finding{}
	}
	if len(r.Findings) == 0 {
		return
	}
	r.Verdict, r.ErrorCode = "fail", "NCCL_BW_DEGRADED"
	if slices.ContainsFunc(r.Findings, func(f perf.Finding) bool { return f.Kind != perf.Slow }) {
		r.ErrorCode = "NCCL_TEST_ERROR"
	}
}

// check joins the gang and runs all steps.
func (p *preflight) check(ctx context.Context) result {
	if dir, err := os.MkdirTemp("", "chorus-preflight-"); err == nil {
		defer os.RemoveAll(dir)
		_ = perf.RecordPaths(dir) // paths are unknown if the user reads NCCL's log
	}
	if p.gang > 0 {
		if err := os.Setenv(env.JoinTimeout.Name, p.gang.String()); err != nil {
			return result{err: err}
		}
	}
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return brokenResult("gang", perf.Broken, err)
	}
	m := &member{Session: sess}
	p.cfg.Log = p.logger(m.isFirst())
	x := p.steps(ctx, m)
	if x.err != nil || x.leave == nil {
		_ = sess.Close() // the reason is in x
	}
	return x
}

// steps runs all steps of a member of the gang.
func (p *preflight) steps(ctx context.Context, m *member) result {
	if err := m.find(p.gpus); err != nil {
		if _, bad := errors.AsType[*launch.UsageError](err); bad {
			return result{err: settingError{err}}
		}
		return brokenResult("devices", perf.Broken, err)
	}
	if m.note != "" { // virtual devices that nobody asked for are no healthy GPUs
		return brokenResult("devices", perf.Broken, errors.New("no GPU is visible: "+m.note))
	}
	r := &preflightReport{}
	healthy := make(chan error, 1)
	go func() { healthy <- p.health(ctx, m, r) }()
	var err error
	if r.Check, err = p.collectives(ctx, m); err != nil {
		r.Findings = append(r.Findings, perf.Finding{Kind: perf.Broken, Step: "group", Reason: err.Error()})
	}
	if r.Check != nil {
		r.Findings = append(r.Findings, r.Check.Findings...)
	}
	if err := <-healthy; err != nil {
		r.Findings = append(r.Findings, perf.Finding{Kind: perf.Broken, Step: "health", Reason: err.Error()})
	}
	if r.Health != nil { // of rank 0
		r.Findings = append(r.Findings, healthFindings(r.Health)...)
	}
	p.agree(ctx, m, r)
	return result{report: r, first: m.isFirst(), leave: func() { p.leave(m) }}
}

// logger returns the log of the steps, which the first process writes.
func (p *preflight) logger(first bool) *slog.Logger {
	switch {
	case first && p.log == "text":
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	case first && p.log == "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, nil))
	}
	return nil
}

// collectives runs the steps on the GPUs.
func (p *preflight) collectives(ctx context.Context, m *member) (*perf.CheckReport, error) {
	if m.Size() == 1 {
		return perf.CheckDevices(ctx, m.devs, &p.cfg)
	}
	g, err := comm.Join(ctx, m.Session, m.devs[0], nil)
	if err != nil {
		return nil, fmt.Errorf("the group of all ranks cannot be created: %w", err)
	}
	defer g.Close()
	p.cfg.Store = m.Prefix("preflight")
	r, err := perf.Check(ctx, g, &p.cfg)
	if err != nil || slices.ContainsFunc(r.Findings, func(f perf.Finding) bool { return f.Kind == perf.Hang || f.Kind == perf.Broken }) {
		return r, err
	}
	// Other ranks may still be in the last step, and a rank that closed the group now would break it for them.
	limited, cancel := context.WithTimeoutCause(ctx, cmp.Or(p.cfg.StepTimeout, exchangeTime)+exchangeTime, errors.New("another rank did not end its last step"))
	defer cancel()
	if err := g.Shutdown(limited); err != nil {
		return r, fmt.Errorf("the ranks do not leave the group together: %w", err)
	}
	return r, nil
}

// health runs the checks of chorus doctor that only read.
func (p *preflight) health(ctx context.Context, m *member, r *preflightReport) error {
	if p.noHealth {
		return nil
	}
	flags := &doctorFlags{Selection: health.Selection{Skip: slices.Clone(p.skip)}}
	// The GPUs are in use by the check itself, which also loads their clocks.
	flags.Skip = append(flags.Skip, "other-processes", "clocks")
	v := &visit{doctorFlags: flags, m: m, store: m.Prefix("preflight-health"), nodes: hostNames(m.Members())}
	if err := v.prepare(); err != nil {
		return err
	}
	report, err := v.examine(ctx)
	r.Health = report
	return err
}

// healthFindings returns the checks of chorus doctor that failed.
func healthFindings(r *health.Report) (list []perf.Finding) {
	for _, x := range r.Results {
		if x.Verdict != health.Fail {
			continue
		}
		where := "host " + x.Host
		if x.GPU != nil {
			where = fmt.Sprintf("GPU %d of host %s", *x.GPU, x.Host)
		}
		f := perf.Finding{Kind: perf.Broken, Step: x.ID, Cure: x.Cure, Reason: fmt.Sprintf("%s: %s; want %s: %s", where, x.Found, x.Want, x.Cause)}
		if x.Host != "" {
			f.Hosts = []string{x.Host}
		} else {
			f.Reason = strings.TrimPrefix(f.Reason, "host : ")
		}
		list = append(list, f)
	}
	return list
}

// agree gives all processes the findings of rank 0.
func (p *preflight) agree(ctx context.Context, m *member, r *preflightReport) {
	if m.Size() == 1 {
		return
	}
	store := m.Prefix("preflight-verdict")
	fail := func(what string, err error) {
		r.Findings = append(r.Findings, perf.Finding{Kind: perf.Broken, Step: "gang", Reason: what + ": " + err.Error()})
	}
	if m.isFirst() {
		text, err := json.Marshal(r.Findings)
		if err == nil {
			err = store.Set(ctx, "findings", text)
		}
		if err != nil {
			fail("the other processes do not know the result", err)
		}
		return
	}
	text, err := store.Get(ctx, "findings")
	if err != nil {
		fail("no result of rank 0", err)
		return
	}
	var list []perf.Finding
	if err := json.Unmarshal(text, &list); err != nil {
		fail("the result of rank 0 is not readable", err)
		return
	}
	safe.Record(&list)
	r.Findings = list
}

// leave ends the job when rank 0 has written the report.
func (p *preflight) leave(m *member) {
	ctx, cancel := context.WithTimeout(context.Background(), exchangeTime)
	defer cancel()
	if m.Size() > 1 {
		store := m.Prefix("preflight-verdict")
		var err error
		if m.isFirst() {
			err = store.Set(ctx, "written", nil)
		} else {
			_, err = store.Get(ctx, "written")
		}
		if err == nil {
			err = m.Session.Shutdown(ctx)
		}
		if err != nil { // the verdict is known; a process of the gang is lost
			_ = m.Session.Close()
		}
		return
	}
	_ = m.Session.Close()
}

// write writes the report to the output.
func (p *preflight) write(out io.Writer, r *preflightReport) (err error) {
	if p.output != "" {
		file, err := createLate(p.output)
		if err != nil {
			return fmt.Errorf("--output: %w", err)
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		out = file
	}
	if p.json {
		return encode(out, r)
	}
	return r.text(out)
}

// text writes the report as text: a line for each GPU, the pairs, and the findings last.
func (r *preflightReport) text(out io.Writer) error {
	var b strings.Builder
	if c := r.Check; c != nil {
		if c.Backend != gpu.CUDA {
			b.WriteString("virtual devices: the data is checked, and the times say nothing\n")
		}
		for rank, g := range c.GPUs {
			verdict := "pass"
			if len(c.Of(rank)) > 0 || slices.ContainsFunc(c.Findings, func(f perf.Finding) bool { return slices.Contains(f.Hosts, g.Host) }) {
				verdict = "FAIL"
			}
			fmt.Fprintf(&b, "%s  %s: %s", verdict, g, g.Product)
			if rank < len(c.Devices) && c.Devices[rank].ToGPU > 0 {
				fmt.Fprintf(&b, ", host copies %.3g and %.3g GB/s", c.Devices[rank].ToGPU, c.Devices[rank].FromGPU)
			}
			b.WriteString("\n")
		}
		for _, x := range c.Pairs {
			fmt.Fprintf(&b, "      ranks %d and %d: %.3g GB/s each way, %.3g us, %s\n", x.Ranks[0], x.Ranks[1], x.Bandwidth, x.Latency, x.Path)
		}
		if c.AllReduce != nil && len(c.AllReduce.Rows) > 0 {
			row := c.AllReduce.Rows[len(c.AllReduce.Rows)-1]
			fmt.Fprintf(&b, "      all-reduce of %d bytes: %.3g GB/s bus bandwidth\n", row.Bytes, row.OutOfPlace.BusBW)
		}
		for _, s := range c.Skipped {
			fmt.Fprintf(&b, "      not checked: %s\n", s)
		}
	}
	if h := r.Health; h != nil {
		fmt.Fprintf(&b, "      health: %d pass, %d warn, %d fail, %d unknown (chorus doctor)\n", h.Counts.Pass, h.Counts.Warn, h.Counts.Fail, h.Counts.Unknown)
	}
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "%-6s  %s: %s\n", f.Kind, f.Step, f.Reason)
		if f.Cure != "" {
			fmt.Fprintf(&b, "        cure: %s\n", f.Cure)
		}
	}
	fmt.Fprintf(&b, "\n%s after %.1f s", r.Verdict, r.Took)
	if len(r.Findings) > 0 {
		fmt.Fprintf(&b, ": %d findings", len(r.Findings))
	}
	b.WriteString("\n")
	_, err := io.WriteString(out, b.String())
	return err
}
