package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/plain"
)

// Facts are the values of one host that a job compares.
type Facts struct {
	Host   string          `json:"host"`
	Values map[string]Fact `json:"values"`           // by the name of the check
	Skew   *Skew           `json:"skew,omitempty"`   // nil: not measured
	Ports  []string        `json:"ports,omitempty"`  // hosts that did not answer, with the reason
	Broken string          `json:"broken,omitempty"` // why the exchange with the other hosts failed
}

// A Fact is a value, or the reason for its absence.
type Fact struct {
	Value   string `json:"value,omitempty"`
	Missing string `json:"missing,omitempty"`
}

// A Skew is the difference between the clocks of rank 0 and of a host. It is known up to half of
// the round trip.
type Skew struct {
	Offset time.Duration `json:"offset"`
	Trip   time.Duration `json:"trip"`
}

// Facts reads the values of this host for the checks that compare hosts.
func (h *Host) Facts(ctx context.Context, checks []*Check) *Facts {
	f := &Facts{Host: h.Name, Values: map[string]Fact{}}
	for _, c := range checks {
		if c.value == nil {
			continue
		}
		type answer struct {
			value string
			err   error
		}
		answers := make(chan answer, 1) // a call of a broken driver may never return
		go func() {
			v, err := c.value(ctx, h)
			answers <- answer{v, err}
		}()
		select {
		case a := <-answers:
			if a.err != nil {
				f.Values[c.ID] = Fact{Missing: reasonOf(a.err)}
			} else {
				f.Values[c.ID] = Fact{Value: a.value}
			}
		case <-ctx.Done():
			f.Values[c.ID] = Fact{Missing: "no answer in time"}
		}
	}
	return f
}

// Compare runs the checks that compare hosts.
func Compare(checks []*Check, hosts []*Facts) []Result {
	var all []Result
	for _, c := range checks {
		if c.compare == nil {
			continue
		}
		begin := time.Now()
		for _, r := range c.compare(hosts) {
			r.ID, r.Scope, r.Source, r.Took = c.ID, c.Scope, c.Source, time.Since(begin)
			all = append(all, r)
		}
	}
	plain.Record(&all)
	return all
}

// same makes a check that all hosts have an equal value. id is the name of the check, which is the
// key of the value.
func same(c Check, verdict Verdict, cause, cure string, value func(ctx context.Context, h *Host) (string, error)) *Check {
	c.Scope, c.value = ScopeJob, value
	c.compare = func(hosts []*Facts) []Result {
		var values []string
		byValue := map[string][]string{}
		for _, f := range hosts {
			v, ok := f.Values[c.ID]
			switch {
			case !ok:
				return []Result{unknown("host " + f.Host + " has no value: it runs another version of chorus, or other checks")}
			case v.Missing != "":
				return []Result{unknown("host " + f.Host + ": " + v.Missing)}
			}
			if byValue[v.Value] == nil {
				values = append(values, v.Value)
			}
			byValue[v.Value] = append(byValue[v.Value], f.Host)
		}
		const want = "the same on all hosts"
		if len(values) <= 1 {
			return []Result{pass(strings.Join(values, ""), want)}
		}
		slices.SortFunc(values, func(a, b string) int { return len(byValue[a]) - len(byValue[b]) }) // the exceptions first
		parts := make([]string, len(values))
		for i, v := range values {
			parts[i] = fmt.Sprintf("%s: %s", hostText(byValue[v]), v)
		}
		return []Result{{Verdict: verdict, Found: strings.Join(parts, "; "), Want: want, Cause: cause, Cure: cure}}
	}
	return &c
}
