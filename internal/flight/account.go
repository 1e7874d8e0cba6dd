package flight

import (
	"strings"
	"sync"

	"github.com/gochorus/chorus/internal/status"
	"github.com/gochorus/chorus/internal/timeline"
)

// Reasons of failures of collectives.
const (
	ReasonTimeout  = "timeout"
	ReasonPeerLost = "peer_lost"
	ReasonMismatch = "mismatch" // ranks of this process issued different operations
	ReasonAsync    = "async"    // the operation failed after it was enqueued
	ReasonRefused  = "refused"  // the library did not accept it
)

// account counts the failures and the durations of the process's collectives for the status.
var account struct {
	mu        sync.Mutex
	errors    map[[2]string]uint64 // by group and reason
	durations map[[2]string]*status.Durations
}

var registerAccount = sync.OnceFunc(func() { status.Add("the account of collectives", describeAccount) })

// mostGroups limits the names of groups in metrics; further groups count as "other".
const mostGroups = 32

// CountError counts a failure of a collective.
func (r *Recorder) CountError(reason string) {
	registerAccount()
	group := r.Name
	if group == "" {
		group = "world"
	}
	account.mu.Lock()
	defer account.mu.Unlock()
	if account.errors == nil {
		account.errors = map[[2]string]uint64{}
	}
	if _, known := account.errors[[2]string{group, reason}]; !known && len(account.errors) >= mostGroups {
		group = "other"
	}
	account.errors[[2]string{group, reason}]++
}

// countDuration counts the time of a collective of a timeline. The time of a single
// operation of a batch is not known.
func countDuration(x *timeline.Record) {
	if len(x.Ops) != 1 {
		return
	}
	key := [2]string{plainName(x.Ops[0].Name), SizeNames[sizeClass(x.Bytes)]}
	account.mu.Lock()
	defer account.mu.Unlock()
	if account.durations == nil {
		account.durations = map[[2]string]*status.Durations{}
	}
	d := account.durations[key]
	if d == nil {
		d = &status.Durations{Op: key[0], Size: key[1]}
		account.durations[key] = d
	}
	d.Add(float64(x.End-x.Begin) / 1e9)
}

// plainName returns the name of a kind for metrics, such as all_reduce.
func plainName(name string) string {
	for _, k := range Kinds {
		if k.Name == name {
			return strings.ReplaceAll(k.Plain, "-", "_")
		}
	}
	return name
}

func describeAccount(p *status.Process) {
	account.mu.Lock()
	defer account.mu.Unlock()
	for k, n := range account.errors {
		p.Errors = append(p.Errors, status.Errors{Group: k[0], Reason: k[1], Count: n})
	}
	for _, d := range account.durations {
		p.Durations = append(p.Durations, *d)
	}
}
