package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/plain"
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

// one makes the function of a check with a single result.
func one(check func(h *Host) Result) func(context.Context, *Host) []Result {
	return func(_ context.Context, h *Host) []Result { return []Result{check(h)} }
}

// perGPU makes the function of a check with a result for each GPU.
func perGPU(check func(ctx context.Context, h *Host, g *GPU) Result) func(context.Context, *Host) []Result {
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

// Run runs the checks of a host. Checks that do not finish before ctx ends are unknown. Text in
// the results has no control characters. Run leaves out the checks of [Compare].
func Run(ctx context.Context, h *Host, checks []*Check) []Result {
	runs := make(map[string]*run, len(checks))
	for _, c := range checks {
		if c.Run != nil {
			runs[c.ID] = &run{Check: c, done: make(chan struct{})}
		}
	}
	for _, r := range runs {
		go r.start(ctx, h, runs)
	}
	var all []Result
	for _, c := range checks {
		r := runs[c.ID]
		if r == nil {
			continue
		}
		<-r.done
		all = append(all, r.results...)
	}
	plain.Record(&all)
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
	if failed := r.failedNeed(runs); failed != "" {
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

// failedNeed waits for the needs of the check and returns the first that failed, or "". Needs
// that do not run do not matter.
func (r *run) failedNeed(runs map[string]*run) string {
	for _, id := range r.Needs {
		need := runs[id]
		if need == nil {
			continue
		}
		<-need.done
		if slices.ContainsFunc(need.results, func(x Result) bool { return x.Verdict == Fail }) {
			return id
		}
	}
	return ""
}
