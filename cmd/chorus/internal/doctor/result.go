package doctor

import (
	"strings"
	"time"
)

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

// reasonOf returns the first line of an error. The others list the places of a search.
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
