package perf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// A PairResult is the exchange of two ranks, which send to each other at the same time.
type PairResult struct {
	Ranks     [2]int   `json:"ranks"`
	Bytes     int      `json:"size"`
	Bandwidth float64  `json:"bandwidth"` // in each direction, 10^9 bytes a second; 0: not measured
	Latency   float64  `json:"latency"`   // of an exchange of 8 bytes, in µs
	Wrong     [2]int64 `json:"nwrong"`    // bytes that arrived wrong at each of the ranks
	Path      Path     `json:"path"`
}

// A pairState is how far a rank has come in the rounds.
type pairState struct {
	Round   int         `json:"round"`   // that runs now or ended the step
	Partner int         `json:"partner"` // in this round; -1: none
	Done    bool        `json:"done"`    // all rounds have ended
	Error   string      `json:"error,omitempty"`
	Culprit int         `json:"culprit"` // rank that the error names, or victim
	Results []pairShare `json:"results,omitempty"`
}

// A pairShare is the part of one rank in a PairResult.
type pairShare struct {
	Partner int     `json:"partner"`
	Time    float64 `json:"time"` // of an exchange in µs
	Latency float64 `json:"latency"`
	Wrong   int64   `json:"nwrong"`
	Sent    uint64  `json:"sent"`    // bytes that the rank has sent
	NVLink  uint64  `json:"nvlink"`  // bytes that the rank's GPU has sent over NVLink meanwhile
	Counted bool    `json:"counted"` // NVLink is known

	Transport string `json:"transport,omitempty"` // of NCCL, to the partner; "": unknown
}

// victim is the culprit of a rank whose error only says that another rank, or the connection to it, failed.
const victim = -1

// fail notes an error, with the rank that it names.
func (s *pairState) fail(err error, rank int) {
	s.Error, s.Culprit = err.Error(), rank
	if e, ok := errors.AsType[*nccl.Error](err); ok {
		if s.Culprit = e.Rank; e.Err == nccl.ErrorRemote {
			s.Culprit = victim
		}
	}
	if errors.Is(err, device.ErrClosed) { // the check has closed the group after another rank's error
		s.Culprit = victim
	}
}

// roundsOf returns the partner of each rank in each round, or -1, such that
// each pair meets once. On several hosts with as many ranks each, ranks of a
// host meet first, and then those with the same place on each other host.
func roundsOf(gpus []GPU) (rounds [][]int) {
	hosts := hostsOf(gpus)
	places := make([][]int, len(hosts)) // ranks by host
	for rank, g := range gpus {
		h := slices.Index(hosts, g.Host)
		places[h] = append(places[h], rank)
	}
	local := len(places[0])
	if len(hosts) == 1 || slices.ContainsFunc(places, func(p []int) bool { return len(p) != local }) {
		return tournament(len(gpus))
	}
	for _, round := range tournament(local) {
		partners := make([]int, len(gpus))
		for _, ranks := range places {
			for i, rank := range ranks {
				if partners[rank] = -1; round[i] >= 0 {
					partners[rank] = ranks[round[i]]
				}
			}
		}
		rounds = append(rounds, partners)
	}
	for _, round := range tournament(len(hosts)) {
		partners := make([]int, len(gpus))
		for h, ranks := range places {
			for i, rank := range ranks {
				if partners[rank] = -1; round[h] >= 0 {
					partners[rank] = places[round[h]][i]
				}
			}
		}
		rounds = append(rounds, partners)
	}
	return rounds
}

// tournament returns the rounds in which each two of n meet once, by the circle method.
func tournament(n int) (rounds [][]int) {
	if n < 2 {
		return nil
	}
	even := n + n%2 // with an odd number, who meets the last one rests
	for r := range even - 1 {
		partners := make([]int, even)
		partners[even-1], partners[r] = r, even-1
		for i := 1; i < even/2; i++ {
			a, b := (r+i)%(even-1), (r+even-1-i)%(even-1)
			partners[a], partners[b] = b, a
		}
		for i, p := range partners {
			if p >= n {
				partners[i] = -1
			}
		}
		rounds = append(rounds, partners[:n])
	}
	return rounds
}

// pairs measures the rounds on the local ranks, exchanges the results, and
// reports whether all of them ended.
func (c *checker) pairs(ctx context.Context, g *comm.Group) bool {
	rounds := roundsOf(c.report.GPUs)
	c.cfg.Log.Info("step", "name", "pairs", "rounds", len(rounds), "bytes", c.cfg.MaxBytes)
	bytes := (c.cfg.MaxBytes + step - 1) / step * step
	states := make([]pairState, g.Locals())
	err := spmd(ctx, g, bytes, unregistered, func(ctx context.Context, r *rank) error {
		state := &states[r.local]
		*state = pairState{Partner: -1}
		err := c.rounds(ctx, r, rounds, state)
		if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, errStep) {
			state.fail(err, r.c.Rank())
		}
		return err
	})
	if err != nil && !errors.Is(err, errStep) {
		for i := range states { // also a rank that has not begun, or was stopped
			if s := &states[i]; !s.Done && s.Error == "" {
				s.fail(err, victim)
			}
		}
	}
	if ctx.Err() != nil {
		return false
	}
	logged := loggedTransports()
	for i := range states {
		for j := range states[i].Results {
			x := &states[i].Results[j]
			x.Transport = logged[[2]int{g.Communicator(i).Rank(), x.Partner}]
		}
	}
	all, err := exchange(ctx, c, "pairs", states)
	if err != nil {
		c.found(Finding{Kind: Broken, Step: "pairs", Reason: err.Error()})
		return false
	}
	byRank := make([]*pairState, g.Size())
	for first, list := range all {
		for i := range list {
			byRank[first+i] = &list[i]
		}
	}
	c.report.Pairs = merge(byRank, bytes)
	for i := range c.report.Pairs {
		p := &c.report.Pairs[i]
		p.Path = pathOf(p, byRank)
	}
	unfinished := judgeStates(c.report.GPUs, byRank, c.cfg.StepTimeout)
	c.found(unfinished...)
	c.found(judgePairs(c.report.GPUs, c.report.Pairs, c.limits())...)
	return len(unfinished) == 0
}

// rounds runs the rounds of one rank.
func (c *checker) rounds(ctx context.Context, r *rank, rounds [][]int, state *pairState) error {
	kernels, err := r.kernelsFor(1)
	if err != nil {
		return err
	}
	data, err := newDataTables(r.s, kernels, newPattern(memory.Uint8, moves, r.c.Size()), 1)
	if err != nil {
		return err
	}
	r.later(data.close)
	for k, partners := range rounds {
		p := partners[r.c.Rank()]
		if state.Round, state.Partner = k, p; p < 0 {
			continue
		}
		limited, cancel := context.WithTimeoutCause(ctx, c.cfg.StepTimeout, errStep)
		share, err := c.meet(limited, r, data, p, uint32(k))
		if cause := context.Cause(limited); err != nil && cause != nil {
			err = cause
		}
		cancel()
		if err != nil {
			return err
		}
		state.Results = append(state.Results, *share)
	}
	state.Done = true
	return nil
}

// meet exchanges data with a partner, compares it, and measures the exchange.
func (c *checker) meet(ctx context.Context, r *rank, data *dataTables, partner int, seed uint32) (*pairShare, error) {
	share := &pairShare{Partner: partner}
	n := r.bufs[0].Len()
	trade := func(bytes int) func() error {
		dst, src := r.bufs[0].Slice(0, bytes), r.bufs[1].Slice(0, bytes)
		return func() error { return exchangeWith(r, partner, dst, src) }
	}
	whole := trade(n)
	if err := data.fill(r.s, r.bufs[1], n, r.c.Rank(), seed); err != nil {
		return nil, err
	}
	if err := poison(r.s, r.bufs[0]); err != nil {
		return nil, err
	}
	if err := r.wrong.Zero(r.s); err != nil {
		return nil, err
	}
	if err := whole(); err != nil { // connects the ranks
		return nil, err
	}
	if err := data.check(r.s, r.bufs[0], piece{n: n, first: partner, ranks: 1}, seed, r.wrong); err != nil {
		return nil, err
	}
	if err := r.waitIdle(ctx); err != nil {
		return nil, err
	}
	var wrong [1]uint64
	if err := r.wrong.CopyTo(r.s, wrong[:]); err != nil {
		return nil, err
	}
	share.Wrong = int64(wrong[0])
	before, counted := nvlinkSent(r.dev)
	best, err := fastest(ctx, r.s, c.cfg.Iterations, whole)
	if err != nil {
		return nil, err
	}
	if after, ok := nvlinkSent(r.dev); ok && counted {
		share.NVLink, share.Counted = after-before, true
	}
	share.Time, share.Sent = micros(best), uint64(c.cfg.Iterations*n)
	if best, err = fastest(ctx, r.s, c.cfg.Iterations, trade(min(n, LatencyBytes))); err != nil {
		return nil, err
	}
	share.Latency = micros(best)
	return share, r.c.Err()
}

// exchangeWith sends to a rank and receives from it at the same time.
func exchangeWith(r *rank, partner int, dst, src memory.Slice[uint8]) error {
	return exchangeOf(nil, r.c, r.s, src, partner, dst, partner)
}

// merge combines the shares of both ranks.
func merge(byRank []*pairState, bytes int) (list []PairResult) {
	for rank, s := range byRank {
		if s == nil {
			continue
		}
		for _, x := range s.Results {
			if x.Partner < rank {
				continue
			}
			other := byRank[x.Partner]
			if other == nil {
				continue
			}
			i := slices.IndexFunc(other.Results, func(y pairShare) bool { return y.Partner == rank })
			if i < 0 {
				continue
			}
			y := other.Results[i]
			list = append(list, PairResult{Ranks: [2]int{rank, x.Partner}, Bytes: bytes, Bandwidth: float64(bytes) / 1e3 / max(x.Time, y.Time, 1e-3),
				Latency: max(x.Latency, y.Latency), Wrong: [2]int64{x.Wrong, y.Wrong}})
		}
	}
	slices.SortFunc(list, func(a, b PairResult) int {
		return cmp.Or(cmp.Compare(a.Ranks[0], b.Ranks[0]), cmp.Compare(a.Ranks[1], b.Ranks[1]))
	})
	return list
}

// judgeStates finds ranks that did not answer or failed, and pairs that did not finish. A rank that waits for a
// partner in an earlier round is a victim.
func judgeStates(gpus []GPU, byRank []*pairState, limit any) (list []Finding) {
	const cure = "chorus doctor on the named hosts: xid, nvlink, rdma-port, ports, ifname"
	first, victims := -1, "" // the earliest round that did not end
	for rank, s := range byRank {
		about := rank
		switch {
		case s == nil:
			list = append(list, Finding{Kind: Broken, Step: "pairs", GPUs: gpus[rank : rank+1], Reason: gpus[rank].String() + ": its process did not answer", Cure: cure})
			continue
		case s.Error != "" && s.Culprit == victim:
			victims = cmp.Or(victims, s.Error)
			continue
		case s.Error != "":
			about = s.Culprit
		case !s.Done && (first < 0 || s.Round < first):
			first = s.Round
			continue
		default:
			continue
		}
		known := slices.ContainsFunc(list, func(f Finding) bool { return f.GPUs[0].Rank == about })
		if about < len(gpus) && !known {
			list = append(list, Finding{Kind: Broken, Step: "pairs", GPUs: gpus[about : about+1], Reason: gpus[about].String() + ": " + s.Error, Cure: cure})
		}
	}
	if len(list) == 0 && victims != "" {
		list = append(list, Finding{Kind: Broken, Step: "pairs", Reason: victims, Cure: cure})
	}
	if len(list) > 0 {
		return list
	}
	for rank, s := range byRank {
		if s == nil || s.Done || s.Error != "" || s.Round != first || s.Partner < 0 {
			continue
		}
		other := byRank[s.Partner]
		mutual := other != nil && other.Round == s.Round && !other.Done
		if mutual && s.Partner < rank {
			continue // reported by the other rank
		}
		list = append(list, Finding{Kind: Hang, Step: "pairs", GPUs: []GPU{gpus[rank], gpus[s.Partner]}, Cure: cure,
			Reason: fmt.Sprintf("the link between %s and %s: the exchange did not finish within %v", gpus[rank], gpus[s.Partner], limit)})
	}
	return list
}
