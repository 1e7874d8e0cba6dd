package comm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/nccl"
)

// A RankProgress is the last progress report of a rank. A rank reports twice a second, so
// it may have progressed further before it ended.
type RankProgress struct {
	Rank        int           // in the group
	World       int           // rank in the group that Join returned; differs from Rank if the group was split
	Process     int           // the rank of its process in the Rendezvous; differs from World if a process has several ranks
	Collectives uint64        // number of collectives reported
	Operation   string        // the last one reported, such as "ncclAllReduce(8 x float32, sum) as collective 7"; "none"
	Age         time.Duration // since the operation was issued; compares two clocks
	Reported    time.Duration // since the last report; compares two clocks
	Why         string        // why the rank is named, such as "is behind" or "runs collective 7 with NCCL and this rank with Chorus kernels, ..."
	End         string        // how it ended by its own report, such as "closed the group"; "" if it reported no end
}

func (p RankProgress) String() string {
	who := fmt.Sprint("rank ", p.Rank)
	switch {
	case p.World != p.Rank && p.Process != p.World:
		who += fmt.Sprintf(" (rank %d of the world, in process %d)", p.World, p.Process)
	case p.World != p.Rank:
		who += fmt.Sprintf(" (rank %d of the world)", p.World)
	case p.Process != p.World:
		who += fmt.Sprintf(" (in process %d)", p.Process)
	}
	text := fmt.Sprintf("%s %s: its last reported operation is %s, %v ago", who, p.Why, p.Operation, p.Age.Round(time.Millisecond))
	if p.Operation == "none" {
		text = fmt.Sprintf("%s %s: it had reported no operation", who, p.Why)
	}
	text += fmt.Sprintf(" (as of %v ago)", p.Reported.Round(time.Millisecond))
	if p.End != "" {
		text += "; by then it had " + p.End
	}
	return text
}

// How a rank has ended: its process has closed an intact group, or shut it down together with the others.
const (
	closedGroup = "closed the group"
	shutGroup   = "shut the group down"
)

// A report is the progress report of a rank.
type report struct {
	Collectives uint64
	Operation   string
	At          time.Time // when the operation was issued
	Written     time.Time
	End         string
	First       uint64               // the number of the first collective in Services
	Services    []collective.Service // the backends of the last collectives
	Signed      uint64               // the number of the first collective in Signatures
	Signatures  []uint32             // of the last collectives
	Launched    uint64               // collectives that launches of graphs have enqueued
}

// reportedServices is the number of collectives whose backend and signature are reported.
const reportedServices = 64

func reportOf(c *nccl.Communicator) report {
	last := c.Progress().Issued
	x := report{Collectives: last.Collective, Operation: last.String(), At: last.Created, Launched: collective.Of(c).LaunchedCollectives()}
	x.First, x.Services = collective.Of(c).Services(reportedServices)
	x.Signed, x.Signatures = collective.Of(c).Signatures(reportedServices)
	return x
}

// service returns the backend of a collective, if the report has it.
func (x *report) service(collective uint64) (s collective.Service, found bool) {
	if collective < x.First || collective-x.First >= uint64(len(x.Services)) {
		return 0, false
	}
	return x.Services[collective-x.First], true
}

// differentService describes the first collective, beginning with number from,
// that this rank and another one execute with different backends, so that both
// wait forever, or returns "".
func (x *report) differentService(from uint64, other *report) string {
	for n := max(from, x.First, other.First); ; n++ {
		mine, here := x.service(n)
		theirs, there := other.service(n)
		switch {
		case !here || !there:
			return ""
		case n == x.Collectives && n == other.Collectives && x.Operation != other.Operation:
			return "" // the two ranks issued different operations, which explains more
		case mine != theirs:
			return fmt.Sprintf("runs collective %d with %s and this rank with %s, for example because it was issued by package nccl or because the batches differ",
				n, collective.ServiceName(theirs), collective.ServiceName(mine))
		}
	}
}

// differentCollective returns the first collective that this rank and another one issued differently, or 0.
func (x *report) differentCollective(other *report) uint64 {
	for n := max(x.Signed, other.Signed, 1); ; n++ {
		if n-x.Signed >= uint64(len(x.Signatures)) || n-other.Signed >= uint64(len(other.Signatures)) {
			return 0
		}
		if x.Signatures[n-x.Signed] != other.Signatures[n-other.Signed] {
			return n
		}
	}
}

// reporter exchanges progress reports between the processes of a group. Each rank writes its
// report periodically; the others read it when an operation fails.
type reporter struct {
	r       Rendezvous
	prefix  string
	hosts   []int                // the host of each rank of the world, the group that Join returned
	process []int                // the rank in r of the process of each rank of the world
	world   []int                // the ranks of the world in the group, by rank; nil means all
	comms   []*nccl.Communicator // of the local ranks
	stop    context.CancelFunc
	nan     chan error // the NaN that another process reports; nil without checks

	leaving    sync.Once   // writes how the rank leaves
	ended      atomic.Bool // another rank has ended the group, other than by a shutdown
	diagnosing sync.Mutex  // held while diagnose runs
	diagnosis  error       // the result of diagnose, or nil
	dumps      dumps
}

// child returns a reporter for a group that is split from this one.
func (w *reporter) child(prefix string) *reporter {
	return &reporter{r: w.r, hosts: w.hosts, process: w.process, world: w.world, prefix: w.prefix + prefix}
}

// worldRanks returns the ranks of the world in the group, by rank.
func (w *reporter) worldRanks() []int {
	if w.world != nil {
		return w.world
	}
	all := make([]int, len(w.process))
	for rank := range all {
		all[rank] = rank
	}
	return all
}

// firstRanks returns the first rank of each process in the group, beginning with rank 0.
func (w *reporter) firstRanks() (list []int) {
	seen := map[int]bool{}
	for rank, at := range w.worldRanks() {
		if p := w.process[at]; !seen[p] {
			seen[p] = true
			list = append(list, rank)
		}
	}
	return list
}

// result returns the result of diagnose and waits for a call in progress. It runs first
// because a rank that has already reported the failure and ended is not the culprit.
func (w *reporter) result() error {
	w.diagnosing.Lock()
	defer w.diagnosing.Unlock()
	return w.diagnosis
}

// onFailure returns the failure callback of a communicator. It is nil for a group in one
// process, because package nccl then knows all ranks.
func (w *reporter) onFailure() func(*nccl.Communicator, error) error {
	if w == nil {
		return nil
	}
	return w.diagnose
}

const (
	// reportInterval is the interval of the reports.
	reportInterval = 500 * time.Millisecond
	// lastReportTime is the maximum time to write the last report, without which the others do not know how this rank has ended.
	lastReportTime = time.Second
	// readReportsTime is the maximum time to wait for the reports of all other ranks after a
	// failure. They are in the store since the ranks began, so only a store whose process stands still
	// needs it.
	readReportsTime = 3 * time.Second
	// exchangeTime limits the parts of an exchange in which a rank may be stopped.
	exchangeTime = time.Second
)

// start starts to report the progress of the local ranks periodically, until stop is called. It
// calls fail if another process reports a NaN.
func (w *reporter) start(comms []*nccl.Communicator, fail func(error) error) {
	var ctx context.Context
	ctx, w.stop = context.WithCancel(w.r.Context())
	w.diagnosing.Lock() // a communicator may fail at the same time
	w.comms = comms
	w.diagnosing.Unlock()
	if collective.Of(comms[0]).ChecksNaN() {
		w.nan = make(chan error, 1)
		go w.awaitNaN(ctx, fail)
	}
	go w.awaitDump(ctx)
	for _, c := range comms {
		go w.report(ctx, c, fail)
	}
}

// report reports the progress of a local rank until ctx ends.
func (w *reporter) report(ctx context.Context, c *nccl.Communicator, fail func(error) error) {
	tick := time.NewTicker(reportInterval)
	defer tick.Stop()
	var look comparison
	for written := (report{Operation: "?"}); ; {
		if now := reportOf(c); now.Operation != written.Operation || now.Collectives != written.Collectives || now.Launched != written.Launched {
			look = comparison{}
			if w.write(ctx, c.Rank(), now) == nil {
				written = now
			}
		} else if err := look.compare(ctx, w, c, &now); err != nil {
			_ = fail(err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// A comparison looks for ranks that issued different operations, while a rank does not progress. Backends other than NCCL, and
// NCCL itself on GPUs, do not notice a mismatch between processes: the ranks would wait until their deadline. Each rank reads only the
// report of the next one, so that the reads grow with the number of ranks: if not all ranks agree, two neighbors differ.
type comparison struct {
	ticks, next int    // since the last progress
	suspect     uint64 // the collective that differed at the last look: the report may be older than a refused operation
}

// compare is called at each tick without progress, and returns the error of a
// mismatch that two looks have found.
func (x *comparison) compare(ctx context.Context, w *reporter, c *nccl.Communicator, mine *report) error {
	if x.ticks++; x.ticks < x.next || c.Size() == 1 || mine.Collectives == c.Progress().Completed.Collective {
		return nil
	}
	x.next = 2 * x.ticks
	ctx, cancel := context.WithTimeout(ctx, exchangeTime)
	defer cancel()
	peer := (c.Rank() + 1) % c.Size()
	theirs, err := w.read(ctx, peer)
	if err != nil {
		return nil // the rank has not reported yet, or the job ends
	}
	n := mine.differentCollective(&theirs)
	if n == 0 || n != x.suspect {
		if x.suspect = n; n != 0 {
			x.next = x.ticks + 1
		}
		return nil
	}
	why := cmp.Or(mine.differentService(n, &theirs), differs)
	what := "another operation"
	if n == mine.Collectives {
		what = mine.Operation
	}
	return w.culpritError([]RankProgress{theirs.progress(peer, why)}, fmt.Errorf("comm: the ranks do not issue the same operations as collective %d: rank %d of %d issued %s: %w",
		n, c.Rank(), c.Size(), what, nccl.ErrorInvalidUsage))
}

// finish writes the last reports, with how the process ends the group.
func (w *reporter) finish(end string) {
	w.stop()
	if w.r.Context().Err() != nil {
		return // the others already know of an end
	}
	if end == closedGroup && w.ended.Load() {
		end = "" // the rank that has ended the group before must stay named, also if both did so at the same time
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastReportTime)
	defer cancel()
	for _, c := range w.comms {
		x := reportOf(c)
		x.End = end
		_ = w.write(ctx, c.Rank(), x) // a rank that misses it has an older report
	}
	first := w.comms[0].Rank()
	_ = w.leave(ctx, first, cmp.Or(end, "has failed"))
	if end != "" && !w.ended.Load() {
		_ = w.r.Set(ctx, w.endedKey(), fmt.Appendf(nil, "%d %s", first, end))
	}
}

// endedKey is the key that a rank sets that ends the group and reports how, so that the other ranks need not wait for the
// Rendezvous to report its fate. Its value is the rank and how it has ended.
func (w *reporter) endedKey() string { return w.prefix + "ended" }

// endOf returns the reported end for a failure of this rank. A failure that another rank
// caused is not reported, because it would hide that rank.
func endOf(cause error) string {
	var lost interface{ LostRank() int }
	_, culprits := errors.AsType[*CulpritError](cause)
	if culprits || errors.As(cause, &lost) || errors.Is(cause, nccl.ErrorRemote) {
		return ""
	}
	return "failed: " + strings.ReplaceAll(cause.Error(), "\n", "; ") // other ranks show one line
}

// endOf is the function of that name, except that the input of another process that was not a number is not this one's failure.
func (g *Group) endOf(cause error) string {
	nan, ok := errors.AsType[*nccl.NaNError](cause)
	if ok && !slices.ContainsFunc(g.comms(), func(c *nccl.Communicator) bool { return c.Rank() == nan.Rank }) {
		return ""
	}
	return endOf(cause)
}

func (w *reporter) write(ctx context.Context, rank int, x report) error {
	x.Written = time.Now()
	return put(ctx, w.r, w.key(rank), x)
}

func (w *reporter) key(rank int) string { return fmt.Sprint(w.prefix, "progress/", rank) }

// readAll returns the last reports of the other ranks. A rank without a report is missing, and
// so are all ranks of other processes if the process with the store has ended.
func (w *reporter) readAll(c *nccl.Communicator) map[int]report {
	ctx, cancel := context.WithTimeout(context.Background(), readReportsTime)
	defer cancel()
	var mu sync.Mutex
	all := map[int]report{}
	var wg sync.WaitGroup
	for _, local := range w.comms {
		all[local.Rank()] = reportOf(local)
	}
	var remote []int
	for rank := range c.Size() {
		if _, local := all[rank]; !local && rank != c.Rank() {
			remote = append(remote, rank)
		}
	}
	for _, rank := range remote {
		wg.Go(func() {
			x, err := w.read(ctx, rank)
			if err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			all[rank] = x
		})
	}
	wg.Wait()
	delete(all, c.Rank())
	return all
}

// last returns the value of a key, which can still be read after a rank is lost
// if the Rendezvous has a method Last.
func (w *reporter) last(ctx context.Context, key string) ([]byte, error) {
	if r, ok := w.r.(interface {
		Last(ctx context.Context, key string) ([]byte, error)
	}); ok {
		return r.Last(ctx, key)
	}
	return w.r.Get(ctx, key)
}

// await waits for a key until ctx ends, with repeated calls of the Rendezvous,
// because each may have a shorter limit.
func (w *reporter) await(ctx context.Context, key string) ([]byte, bool) {
	for ctx.Err() == nil {
		if b, err := w.r.Get(ctx, key); err == nil {
			return b, true
		}
		select {
		case <-ctx.Done():
		case <-time.After(reportInterval):
		}
	}
	return nil, false
}

// read returns the last report of a rank.
func (w *reporter) read(ctx context.Context, rank int) (x report, err error) {
	b, err := w.last(ctx, w.key(rank))
	if err != nil {
		return x, err
	}
	err = json.Unmarshal(b, &x)
	safe.Record(&x)
	return x, err
}
