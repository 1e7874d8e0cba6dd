package ras

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

const (
	maxFindings = 2 // of a communicator
	maxNamed    = 4 // ranks that a finding names
	maxClasses  = 3 // different counts that a finding lists
)

// results has the names of the failures in a Status, by ncclResult_t.
var results = map[int]string{
	1: "ncclUnhandledCudaError", 2: "ncclSystemError", 3: "ncclInternalError", 4: "ncclInvalidArgument",
	5: "ncclInvalidUsage", 6: "ncclRemoteError",
}

// failed reports whether an ncclResult_t is neither ncclSuccess nor ncclInProgress.
func failed(result int) bool { return result != 0 && result != 7 }

func resultName(result int) string { return cmp.Or(results[result], fmt.Sprint("NCCL error ", result)) }

// Findings describes the faults of the communicators, in sentences without a period: ranks that do not
// answer, ranks with errors, and counts of operations that differ. The most important ones come
// first. name names a rank of a communicator.
func (a *Answer) Findings(name func(c *Communicator, rank int) string) (list []string) {
	for i := range a.Communicators {
		n := &namer{&a.Communicators[i], name}
		all := slices.Concat(n.silent(), n.errors(), n.counts())
		for _, text := range all[:min(len(all), maxFindings)] {
			if !slices.Contains(list, text) {
				list = append(list, text)
			}
		}
	}
	return list
}

// A namer names the ranks of a communicator.
type namer struct {
	*Communicator
	name func(c *Communicator, rank int) string
}

func (n *namer) rank(r *Rank) string {
	text := n.name(n.Communicator, r.Rank)
	if r.PID > 0 {
		text += fmt.Sprintf(" (process %d on host %s)", r.PID, r.Host)
	}
	return text
}

// ranks joins the names of ranks, a few of them.
func (n *namer) ranks(list []*Rank) string {
	var texts []string
	for _, r := range list[:min(len(list), maxNamed)] {
		texts = append(texts, n.rank(r))
	}
	text := strings.Join(texts, ", ")
	if more := len(list) - maxNamed; more > 0 {
		text += fmt.Sprintf(" and %d more ranks", more)
	}
	return text
}

// silent names the processes that do not answer the service. A process that answers and has closed the
// communicator is not one of them: each rank closes it after a timeout.
func (n *namer) silent() (list []string) {
	var dead, silent []*Rank
	for i := range n.Missing {
		switch r := &n.Missing[i]; {
		case r.Status.Dead:
			dead = append(dead, r)
		case r.Status.Unresponsive:
			silent = append(silent, r)
		}
	}
	if len(dead) > 0 {
		list = append(list, n.ranks(dead)+plural(len(dead), " is", " are")+" dead or unreachable")
	}
	if len(silent) > 0 {
		list = append(list, n.ranks(silent)+plural(len(silent), " does", " do")+" not answer")
	}
	return list
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// errors names the ranks with errors of the first kind that occurs.
func (n *namer) errors() []string {
	for _, kind := range []struct {
		text string
		of   func(*Status) int
	}{
		{"failed to initialize", func(s *Status) int { return s.InitState }},
		{"had an asynchronous error", func(s *Status) int { return s.AsyncError }},
	} {
		var list []*Rank
		for i := range n.Ranks {
			if r := &n.Ranks[i]; failed(kind.of(&r.Status)) {
				list = append(list, r)
			}
		}
		if len(list) > 0 {
			return []string{fmt.Sprintf("%s %s: %s", n.ranks(list), kind.text, resultName(kind.of(&list[0].Status)))}
		}
	}
	return nil
}

// counts names the ranks that have launched fewer operations of a kind than other ranks.
func (n *namer) counts() []string {
	kinds := map[string]bool{}
	for i := range n.Ranks {
		for kind := range n.Ranks[i].Counts {
			kinds[kind] = true
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		classes := map[uint64][]*Rank{}
		for i := range n.Ranks {
			r := &n.Ranks[i]
			classes[r.Counts[kind]] = append(classes[r.Counts[kind]], r)
		}
		if len(classes) > 1 {
			return []string{fmt.Sprintf("the ranks have launched different numbers of %s: %s", kind, n.classes(classes))}
		}
	}
	return nil
}

// classes lists counts, the smallest first, and names the ranks of all but the largest.
func (n *namer) classes(classes map[uint64][]*Rank) string {
	counts := slices.Sorted(maps.Keys(classes))
	last := counts[len(counts)-1]
	var texts []string
	for _, count := range counts[:min(len(counts)-1, maxClasses-1)] {
		texts = append(texts, fmt.Sprintf("%s %d", n.ranks(classes[count]), count))
	}
	who := fmt.Sprintf("%d other ranks", len(classes[last]))
	if len(classes[last]) == 1 {
		who = n.rank(classes[last][0])
	}
	return strings.Join(append(texts, fmt.Sprintf("%s %d", who, last)), ", ")
}
