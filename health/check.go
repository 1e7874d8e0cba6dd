package health

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/safe"
)

// A Check looks for one hazard.
type Check struct {
	ID     string
	Scope  Scope
	Hazard string   // one sentence for users
	Source string   // where the evidence comes from
	Needs  []string // checks whose failure makes this one meaningless

	// Measures marks checks that load the GPUs.
	Measures bool

	Run func(ctx context.Context, h *Host) []Result

	// Checks with the scope job have compare instead of Run: it compares the facts of all hosts,
	// and value reads one of them, if the check needs it.
	value   func(ctx context.Context, h *Host) (string, error)
	compare func(hosts []*Facts) []Result
}

// one adapts a function with a single result to a check.
func one(check func(h *Host) Result) func(context.Context, *Host) []Result {
	return func(_ context.Context, h *Host) []Result { return []Result{check(h)} }
}

// perGPU adapts a function with a result for each GPU to a check.
func perGPU(check func(ctx context.Context, h *Host, g *gpu) Result) func(context.Context, *Host) []Result {
	return func(ctx context.Context, h *Host) []Result {
		gpus, err := h.gpus()
		if err != nil {
			return []Result{unread(err)}
		}
		results := make([]Result, len(gpus))
		done := make(chan struct{})
		for i, g := range gpus { // some checks wait between two readings
			go func() {
				results[i] = check(ctx, h, g)
				results[i].GPU = &g.Index
				done <- struct{}{}
			}()
		}
		for range gpus {
			<-done
		}
		return results
	}
}

// A Selection chooses checks.
type Selection struct {
	Only, Skip []string
	Measure    bool // includes checks that load the GPUs
	Job        bool // includes checks that compare hosts
}

// Select returns the checks with the names of Only, or all checks without names, except the
// checks of Skip. Its error is a mistake of the user.
func (s *Selection) Select(checks []*Check) ([]*Check, error) {
	for _, name := range slices.Concat(s.Only, s.Skip) {
		i := slices.IndexFunc(checks, func(c *Check) bool { return c.ID == name })
		if i < 0 {
			return nil, fmt.Errorf("unknown check %q: the checks are %s", name, strings.Join(names(checks), ", "))
		}
		switch only := slices.Contains(s.Only, name); {
		case only && checks[i].Measures && !s.Measure:
			return nil, fmt.Errorf("the check %s needs --measure", name)
		case only && checks[i].Scope == ScopeJob && !s.Job:
			return nil, fmt.Errorf("the check %s compares the hosts of a job, and this is one host: start it with chorus run", name)
		}
	}
	var list []*Check
	for _, c := range checks {
		wanted := (len(s.Only) == 0 || slices.Contains(s.Only, c.ID)) && !slices.Contains(s.Skip, c.ID)
		if wanted && (s.Measure || !c.Measures) && (s.Job || c.Scope != ScopeJob) {
			list = append(list, c)
		}
	}
	if len(list) == 0 {
		return nil, errors.New("no check is left to run: skip fewer checks, or name others")
	}
	return list, nil
}

func names(checks []*Check) []string {
	list := make([]string, len(checks))
	for i, c := range checks {
		list[i] = c.ID
	}
	return list
}

// A run is a check that runs.
type run struct {
	*Check
	done    chan struct{} // closed when results are valid
	results []Result
}

// Run runs the checks of a host, except those of [Compare]. Checks that do not
// finish before ctx ends are unknown. Text in the results has no control
// characters.
func Run(ctx context.Context, h *Host, checks []*Check) []Result {
	named := make(map[string]*run, len(checks))
	var runs []*run
	for _, c := range checks {
		if c.Run != nil {
			r := &run{Check: c, done: make(chan struct{})}
			runs, named[c.ID] = append(runs, r), r
		}
	}
	for _, r := range runs {
		go r.start(ctx, h, named)
	}
	var all []Result
	for _, r := range runs {
		<-r.done
		all = append(all, r.results...)
	}
	safe.Record(&all)
	return all
}

// noAnswer begins the reason of a check that did not finish.
const noAnswer = "no answer within"

// CanMeasure returns the reason why the GPUs must not be loaded after the checks, or "": a check
// has failed, or a call of the driver hangs.
func CanMeasure(results []Result) string {
	for _, r := range results {
		switch {
		case r.Verdict == Fail:
			return "the check " + r.ID + " has failed: correct the failures first"
		case strings.HasPrefix(r.Cause, noAnswer):
			return "the check " + r.ID + " did not finish"
		}
	}
	return ""
}

// start runs the check when its needs are done, and completes its results.
func (r *run) start(ctx context.Context, h *Host, runs map[string]*run) {
	defer close(r.done)
	begin := time.Now()
	failed := r.failedNeed(ctx, runs)
	if failed != "" {
		r.results = []Result{unknown("depends on " + failed + ", which failed")}
	} else {
		ended := make(chan []Result, 1) // a call of a broken driver may never return
		go func() { ended <- r.Run(ctx, h) }()
		select {
		case r.results = <-ended:
		case <-ctx.Done():
			r.results = []Result{unknown(fmt.Sprintf("%s %v", noAnswer, time.Since(begin).Round(time.Millisecond)))}
		}
	}
	for i := range r.results {
		x := &r.results[i]
		x.ID, x.Scope, x.Host, x.Source, x.Took = r.ID, r.Scope, h.Name, r.Source, time.Since(begin)
	}
}

// failedNeed waits for the needs of the check and returns the first that
// failed, or "". It ignores needs that do not run, or that are not done when
// ctx ends, such as two checks that need each other: the check is then not
// done.
func (r *run) failedNeed(ctx context.Context, runs map[string]*run) string {
	for _, id := range r.Needs {
		need := runs[id]
		if need == nil {
			continue
		}
		select {
		case <-need.done:
		case <-ctx.Done():
			return ""
		}
		if slices.ContainsFunc(need.results, func(x Result) bool { return x.Verdict == Fail }) {
			return id
		}
	}
	return ""
}

// A Verdict is the outcome of a check.
type Verdict string

// The verdicts. Unknown means that the evidence could not be read.
const (
	Pass    Verdict = "pass"
	Warn    Verdict = "warn"
	Fail    Verdict = "fail"
	Unknown Verdict = "unknown"
)

// A Scope is the kind of thing that a result is about.
type Scope string

// The scopes.
const (
	ScopeHost Scope = "host"
	ScopeGPU  Scope = "gpu"
	ScopeLink Scope = "link" // a network port, or a connection between GPUs
	ScopeJob  Scope = "job"  // a difference between hosts
)

// A Result is one finding.
type Result struct {
	ID      string        `json:"id"`
	Scope   Scope         `json:"scope"`
	Host    string        `json:"host,omitempty"` // "" if the result is about all hosts
	GPU     *int          `json:"gpu,omitempty"`  // NVML's index
	Verdict Verdict       `json:"verdict"`
	Found   string        `json:"found,omitempty"`
	Want    string        `json:"want,omitempty"`
	Cause   string        `json:"cause,omitempty"` // the consequence, or the reason for Unknown
	Cure    string        `json:"cure,omitempty"`
	Source  string        `json:"source"` // where the evidence comes from
	Took    time.Duration `json:"took"`   // in ns
}

// pass returns a result that needs no action.
func pass(found, want string) Result { return Result{Verdict: Pass, Found: found, Want: want} }

// warn returns a result that costs time or may become a failure.
func warn(found, want, cause, cure string) Result {
	return Result{Verdict: Warn, Found: found, Want: want, Cause: cause, Cure: cure}
}

// fail returns a result that breaks jobs.
func fail(found, want, cause, cure string) Result {
	return Result{Verdict: Fail, Found: found, Want: want, Cause: cause, Cure: cure}
}

// unknown returns a result without evidence.
func unknown(reason string) Result { return Result{Verdict: Unknown, Cause: reason} }

// unread is unknown for an error.
func unread(err error) Result { return unknown(reasonOf(err)) }

// reasonOf returns the first line of an error, whose other lines list the
// places of a search.
func reasonOf(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return strings.TrimSuffix(line, "; tried:")
}

// Counts has the number of results of each verdict.
type Counts struct {
	Pass    int `json:"pass"`
	Warn    int `json:"warn"`
	Fail    int `json:"fail"`
	Unknown int `json:"unknown"`
}

// Count counts results.
func Count(results []Result) (c Counts) {
	for _, r := range results {
		switch r.Verdict {
		case Pass:
			c.Pass++
		case Warn:
			c.Warn++
		case Fail:
			c.Fail++
		default:
			c.Unknown++
		}
	}
	return c
}

// OK reports whether no result failed, and with strict no result is a warning.
func (c Counts) OK(strict bool) bool { return c.Fail == 0 && (!strict || c.Warn == 0) }

// Checks lists all checks in output order. docs/DOCTOR.md has a table of them.
var Checks = []*Check{
	deviceNodes, driverMismatch, libraryCopies, ncclDefects,
	fabricManager, mig, computeMode, otherProcesses, persistence,
	recoveryAction, rowRemap, ecc, xid, nvlink, clocks, powerLimit, pcie,
	shm, memlock, openFiles, processes, stack, cgroupMemory, cgroupCPU, hugePages,
	numa, iommu, clockSync, variables,
	ifname, hostname, rdmaPort, gdr, gds,
	gpuCount, gpuProducts, driverVersions, ncclVersions, powerCaps, mtus, subnets, seedNames, protocols, otherVariables, clockSkew, ports,
	pinned, disk, hostCopies, peerData, pairs, allReduce,
}

// A Report has the results of one host, or of all hosts of a job.
type Report struct {
	Version string   `json:"version"` // of chorus
	Hosts   []string `json:"hosts"`
	Results []Result `json:"results"`
	Counts  Counts   `json:"counts"`
}

// colours are the escape sequences of the verdicts on a terminal.
var colours = map[Verdict]string{Pass: "\x1b[32m", Warn: "\x1b[33m", Fail: "\x1b[31m", Unknown: "\x1b[2m"}

// A finding is a line of the text: equal results of several GPUs or hosts.
type finding struct {
	ids     []string
	verdict Verdict
	found   string // of the first result
	text    string
	notes   []string
	results []Result
}

// Write writes a line for each finding, and the counts last.
func (r *Report) Write(w io.Writer, colour bool) error {
	list := r.findings()
	width := 0
	for _, f := range list {
		if len(f.ids) == 1 {
			width = max(width, len(f.ids[0]))
		}
	}
	var b strings.Builder
	for _, f := range list {
		name := fmt.Sprintf("%-7s", f.verdict)
		if colour {
			name = colours[f.verdict] + name + "\x1b[0m"
		}
		if len(f.ids) > 1 { // only unknown results are folded over checks
			f.text, f.notes = f.text+":", safe.WrapNames(f.ids, 80)
			fmt.Fprintf(&b, "%s  %s\n", name, f.text)
		} else {
			fmt.Fprintf(&b, "%s  %-*s  %s\n", name, width, f.ids[0], r.places(f.results)+f.text)
		}
		for _, n := range f.notes {
			fmt.Fprintf(&b, "%*s%s\n", width+11, "", n)
		}
	}
	c := r.Counts
	fmt.Fprintf(&b, "\n%s: %d pass, %d warn, %d fail, %d unknown\n", plural(len(r.Hosts), "host"), c.Pass, c.Warn, c.Fail, c.Unknown)
	_, err := io.WriteString(w, b.String())
	return err
}

func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// findings folds equal results. Results that pass are folded even if their evidence differs, and
// unknown results with the same reason are folded over all checks.
func (r *Report) findings() []*finding {
	var list []*finding
	byKey := map[string]*finding{}
	for _, x := range r.Results {
		key := strings.Join([]string{x.ID, string(x.Verdict), x.Found, x.Want, x.Cause, x.Cure}, "\x00")
		switch x.Verdict {
		case Pass:
			key = x.ID + "\x00" + string(Pass)
		case Unknown:
			key = string(Unknown) + "\x00" + x.Cause
		}
		f := byKey[key]
		if f == nil {
			f = newFinding(x)
			byKey[key] = f
			list = append(list, f)
		}
		if !slices.Contains(f.ids, x.ID) {
			f.ids = append(f.ids, x.ID)
		}
		if x.Verdict == Pass && x.Found != f.found && !strings.HasSuffix(f.text, ", …") {
			f.text += ", …"
		}
		f.results = append(f.results, x)
	}
	slices.SortStableFunc(list, func(a, b *finding) int { return cmp.Compare(weight[a.verdict], weight[b.verdict]) })
	return list
}

// weight orders the findings: those that need an action come last, next to the counts.
var weight = map[Verdict]int{Unknown: 0, Pass: 1, Warn: 2, Fail: 3}

func newFinding(x Result) *finding {
	f := &finding{verdict: x.Verdict, found: x.Found, text: x.Found}
	switch x.Verdict {
	case Unknown:
		f.text = x.Cause
	case Warn, Fail:
		f.text += "; want " + x.Want
		f.notes = append(f.notes, x.Cause, "cure: "+x.Cure)
	}
	return f
}

// places names the hosts and GPUs of results: "hosts a, b: GPUs 0-7: ". It leaves out the hosts of
// a report of one host, and the places of unknown results of several checks.
func (r *Report) places(results []Result) string {
	var hosts []string
	gpus := map[string][]int{}
	for _, x := range results {
		if !slices.Contains(hosts, x.Host) {
			hosts = append(hosts, x.Host)
		}
		if x.GPU != nil && !slices.Contains(gpus[x.Host], *x.GPU) {
			gpus[x.Host] = append(gpus[x.Host], *x.GPU)
		}
	}
	byGPUs := map[string][]string{}
	var order []string
	for _, h := range hosts {
		g := gpuText(gpus[h])
		if byGPUs[g] == nil {
			order = append(order, g)
		}
		byGPUs[g] = append(byGPUs[g], h)
	}
	var parts []string
	for _, g := range order {
		text := g
		if len(r.Hosts) > 1 && byGPUs[g][0] != "" {
			text = strings.TrimSuffix(hostText(byGPUs[g])+" "+g, " ")
		}
		if text != "" {
			parts = append(parts, text)
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return strings.Join(parts, ", ") + ": "
}

func hostText(names []string) string {
	if len(names) == 1 {
		return "host " + names[0]
	}
	return "hosts " + strings.Join(names, ", ")
}

// gpuText writes the numbers of GPUs as ranges.
func gpuText(list []int) string {
	if len(list) == 0 {
		return ""
	}
	slices.Sort(list)
	var parts []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		text := fmt.Sprint(list[i])
		if j > i {
			text += fmt.Sprintf("-%d", list[j])
		}
		parts, i = append(parts, text), j+1
	}
	if len(list) == 1 {
		return "GPU " + parts[0]
	}
	return "GPUs " + strings.Join(parts, ",")
}
