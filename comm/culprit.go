package comm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/nccl"
)

// A CulpritError names the ranks of a group over several processes that stopped it, with their
// last operations. It wraps the original error: a *nccl.TimeoutError, or the Rendezvous's
// error about a lost rank.
type CulpritError struct {
	Culprits []RankProgress
	Err      error
}

func (e *CulpritError) Error() string {
	parts := make([]string, len(e.Culprits))
	for i, p := range e.Culprits {
		parts[i] = p.String()
	}
	return fmt.Sprintf("%s: %v", strings.Join(parts, "; "), e.Err)
}

// Unwrap returns the original error.
func (e *CulpritError) Unwrap() error { return e.Err }

// Is reports true for ErrLeft if one of the culprits has closed the group.
func (e *CulpritError) Is(target error) bool {
	return target == ErrLeft && slices.ContainsFunc(e.Culprits, func(p RankProgress) bool { return p.End == closedGroup })
}

// diagnose handles the failure of the communicator and determines which rank caused it.
func (w *reporter) diagnose(c *nccl.Communicator, err error) error {
	if bad, ok := errors.AsType[*nccl.NaNError](err); ok {
		w.reportNaN(bad)
		return err
	}
	t, late := errors.AsType[*nccl.TimeoutError](err)
	refused, inside := errors.AsType[*nccl.Error](err)
	if late && t.Stream != "" && t.Graph == "" {
		return err // the flight recorders do not have one-sided operations, so nothing shows the rank that is behind
	}
	if !late && (!inside || refused.Async || refused.Err == nccl.ErrorRemote) {
		return err // if a rank was lost, that may explain more
	}
	w.diagnosing.Lock()
	defer w.diagnosing.Unlock()
	if w.diagnosis != nil { // of another local rank
		return w.diagnosis
	}
	ctx, cancel := context.WithTimeout(context.Background(), exchangeTime)
	defer cancel()
	mine := reportOf(c)
	_ = w.write(ctx, c.Rank(), mine) // the other ranks look for it
	for _, local := range w.comms {
		if local != c {
			_ = w.write(ctx, local.Rank(), reportOf(local))
		}
	}
	var service <-chan []string
	if late {
		service = w.askService(c) // beside the exchange of the flight recorders
		w.askForDumps(ctx, c)
	}
	// Wait until every rank has reported its latest operation.
	wait := time.NewTimer(2 * reportInterval)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-w.r.Context().Done(): // another rank has finished its search and ended
	}
	if late {
		found := w.culpritError(lateCulprits(t, mine, w.readAll(c)), err)
		ctx, cancel := context.WithTimeout(context.Background(), exchangeTime)
		defer cancel()
		w.diagnosis = w.analyzed(ctx, c, service, found)
		return w.diagnosis
	}
	list := mismatched(nccl.Operation{Name: refused.Op, Collective: mine.Collectives}, mine, w.readAll(c))
	if len(list) > 0 {
		w.diagnosis = w.culpritError(list, err)
		return w.diagnosis
	}
	return err
}

// lateCulprits returns the culprits of a timeout.
func lateCulprits(t *nccl.TimeoutError, mine report, all map[int]report) (list []RankProgress) {
	if t.Graph == "" {
		return culprits(firstPending(t), mine, all)
	}
	for rank, x := range all {
		if x.Launched < mine.Launched {
			list = append(list, x.progress(rank, fmt.Sprintf("has launched %d collectives in graphs, and this rank %d", x.Launched, mine.Launched)))
		}
	}
	return list
}

// firstPending returns the operation of the error, with the number of the first collective that is not
// known to have completed. The error may name a later one that NCCL has not accepted, because the stream is
// full and waits for an earlier one.
func firstPending(t *nccl.TimeoutError) nccl.Operation {
	op := t.Operation
	op.Collective = min(op.Collective, t.Completed.Collective+1)
	return op
}

// mismatched returns the culprits that issued something incompatible with this rank's
// operation. NCCL failed within that operation, perhaps because another rank stopped
// waiting for it. A rank that is only behind is not reported, since no rank has waited for
// it. Transfers are not compared, because they have no number.
func mismatched(op nccl.Operation, mine report, all map[int]report) []RankProgress {
	return slices.DeleteFunc(culprits(op, mine, all), func(p RankProgress) bool {
		return p.Why == behind || p.Why == peer || p.Why == differs && (isTransfer(mine.Operation) || isTransfer(p.Operation))
	})
}

func isTransfer(operation string) bool {
	return strings.Contains(operation, "Send") || strings.Contains(operation, "Recv")
}

// The reasons why a rank is a culprit, except a different backend.
const (
	behind  = "is behind"
	peer    = "is the peer"
	differs = "differs"
)

// culprits returns the ranks that have not issued the operation that this rank waits for,
// issued another operation instead, or use a different backend for it.
func culprits(op nccl.Operation, mine report, all map[int]report) (list []RankProgress) {
	transfer := isTransfer(op.Name)
	waited := awaited(op.Collective, mine.Collectives, all)
	for rank, x := range all {
		why := ""
		if !transfer {
			why = mine.differentService(op.Collective, &x)
		}
		switch {
		case transfer && rank == op.Root:
			why = peer
		case transfer || why != "":
		case x.Collectives < waited:
			why = behind
		case x.Collectives == mine.Collectives && x.Operation != mine.Operation:
			why = differs
		}
		if why != "" {
			list = append(list, x.progress(rank, why))
		}
	}
	return list
}

// awaited returns the collective that this rank waits for. op is the first one that is not
// known to have completed, last the last one that this rank issued. If all ranks have
// issued op, it completes, and a later one hangs: the first that another rank has not
// issued.
func awaited(op, last uint64, all map[int]report) uint64 {
	fewest := last
	for _, x := range all {
		fewest = min(fewest, x.Collectives)
	}
	return max(op, min(fewest+1, last))
}

// firstEnded returns the rank that was the first to report its end, if any. It may be the
// reason why the other ranks ended. A rank that has shut the group down is the reason only if no rank ended otherwise.
func firstEnded(all map[int]report) (list []RankProgress) {
	first := -1
	for rank, x := range all {
		switch shut := x.End == shutGroup; {
		case x.End == "":
		case first < 0, all[first].End == shutGroup && !shut, (all[first].End == shutGroup) == shut && x.Written.Before(all[first].Written):
			first = rank
		}
	}
	if first < 0 {
		return nil
	}
	return []RankProgress{all[first].progress(first, "has left")}
}

// lossCulprits returns the lost ranks, those of a process, and the rank that left while this one waited for it. The lost
// ranks may have ended because of the other one.
func lossCulprits(lost []int, mine report, all map[int]report) []RankProgress {
	list := slices.DeleteFunc(firstEnded(all), func(p RankProgress) bool { return slices.Contains(lost, p.Rank) || p.Collectives >= mine.Collectives })
	for _, rank := range lost {
		if x, ok := all[rank]; ok {
			list = append(list, x.progress(rank, "was lost"))
		}
	}
	return list
}

// explainLoss adds the last report of the lost rank to the error. To a broken connection it adds
// the report of the rank that has left.
func (w *reporter) explainLoss(c *nccl.Communicator, err error) error {
	var l interface{ LostRank() int }
	if !errors.As(err, &l) {
		if errors.Is(err, nccl.ErrorRemote) {
			return w.culpritError(firstEnded(w.readAll(c)), err)
		}
		return err
	}
	var lost []int
	for rank, at := range w.worldRanks() {
		if w.process[at] == l.LostRank() {
			lost = append(lost, rank)
		}
	}
	return w.culpritError(lossCulprits(lost, reportOf(c), w.readAll(c)), err)
}

func (x report) progress(rank int, why string) RankProgress {
	return RankProgress{Rank: rank, Collectives: x.Collectives, Operation: x.Operation, Age: time.Since(x.At), Reported: time.Since(x.Written), Why: why, End: x.End}
}

func (w *reporter) culpritError(list []RankProgress, err error) error {
	if len(list) == 0 {
		return err
	}
	for i, p := range list {
		list[i].World = w.worldRanks()[p.Rank]
		list[i].Process = w.process[list[i].World]
	}
	slices.SortFunc(list, func(a, b RankProgress) int { return a.Rank - b.Rank })
	return &CulpritError{list, err}
}
