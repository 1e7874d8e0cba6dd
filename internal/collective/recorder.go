package collective

import (
	"math/bits"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/timeline"
	"github.com/gochorus/chorus/stream"
)

// A Recorder is the flight recorder of one rank: a ring of the last operations with their
// progress. It is independent of the communicator, so that a trace can be written after
// the communicator has ended. Operations are recorded by the call that holds the
// communicator's lock; mu is only held briefly.
type Recorder struct {
	Rank, Size int
	Device     string
	UUID       string // of the device; "" if the driver does not know it
	Name       string // of the communicator's Config
	Group      string // the same on all ranks of the communicator; different for every other communicator
	Number     int64  // number of communicators that the process made before
	Library    string // version of the library
	Frames     bool   // record call stacks
	hidden     bool   // the ring is used only for error messages

	timeout   atomic.Int64 // nanoseconds; 0 means none
	blindTime atomic.Int64 // total nanoseconds during which a capture prevented queries of the streams
	lastQuery atomic.Int64 // when the watchdog last queried, or tried to

	mu          sync.Mutex
	world       []int // by rank; nil if not known
	worldSize   int
	ring        []Entry
	last        uint64 // the record of the last operation, from 1
	lastCreated int64  // when it was scheduled
	batch       uint64 // record of the first operation of its batch
	enqueued    uint64 // the latest operation that NCCL has accepted
	running     uint64 // the latest accepted operation that is not captured
	resolved    uint64 // operations up to this one need no more queries: they have completed, or lost is later
	lost        uint64 // the latest operation whose completion can no longer be determined; 0 means none
	collectives uint64 // number of collectives
	transfers   uint64
	completed   uint64 // the latest collective that is known to have completed, with all before it
	totals      totals
	stream      *stream.Stream // stream of the operation waiting, retained; nil if none is pending
	watched     bool           // a goroutine watches the operations
	closed      bool           // the communicator has ended
	end         string         // how it ended here, for dumps
	endFollows  bool           // the cause may be another rank
	finalState  State          // of operations that are not known to have completed
	timedOut    uint64         // the operation that caused the timeout, if known
	shortest    time.Duration  // the shortest timeout of the operations that are watched; 0 means none
	lastTimeout time.Duration  // of the latest operation that runs

	unordered      bool    // operations of several streams may complete in any order
	lastStream     uintptr // the stream of the latest operation that runs
	severalStreams bool    // the operations are on several streams
	graphs         bool    // a graph has captured operations; its launches are not recorded
	launches       []*launchStream

	launchesLeft bool // at the end of the communicator, a launch was not known to have ended

	launchedCollectives atomic.Uint64 // by launches of graphs

	shown   atomic.Pointer[timeline.Recorder] // the timeline that knows the rank
	ordinal int                               // of the device, for shown
}

// An Entry is an operation in the ring.
type Entry struct {
	Request
	ID         uint64
	Collective uint64 // its number; for a transfer, the number of the preceding collective
	Transfer   uint64
	Created    int64 // from Now
	Begun      int64 // from the recorder's clock
	started    int64 // when its stream was observed to have reached it; 0 means not known
	completed  int64
	took       int64  // nanoseconds between the marks around it; 0 means not known
	batch      uint64 // record of the first operation of its batch
	in, out    int
	timeout    time.Duration // 0 means none
	stream     uintptr
	state      State
	queued     bool // its stream had not reached it when the stream was observed last
	refused    bool
}

const (
	// MaxFrames is the maximum depth of a recorded call stack.
	MaxFrames = 16
	// fewEntries is the size of the ring for error messages if the trace is off.
	fewEntries = 64
)

// NewRecorder returns a Recorder for that many operations, or for a few, which
// error messages need, if entries is 0.
func NewRecorder(entries int) *Recorder {
	r := &Recorder{hidden: entries <= 0}
	if r.hidden {
		entries = fewEntries
	}
	r.ring = make([]Entry, entries)
	return r
}

// SetWorld sets the world ranks of the communicator's ranks, by rank, and the
// world size. The caller must not change the list later.
func (r *Recorder) SetWorld(ranks []int, size int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.world, r.worldSize = ranks, size
}

// Clock is Now minus the time during which the streams could not be queried. Deadlines use
// Clock, because a completion during that time is observed only later.
func (r *Recorder) Clock() int64 { return Now() - r.blindTime.Load() }

// StartWatch starts the queries of the watchdog.
func (r *Recorder) StartWatch() { r.lastQuery.Store(Now()) }

// RecordQuery records a query of the watchdog. If it was blind, because the
// streams could not be queried, the time since the last query does not count.
func (r *Recorder) RecordQuery(blind bool) {
	t := Now()
	if blind {
		r.blindTime.Add(t - r.lastQuery.Load())
	}
	r.lastQuery.Store(t)
}

// Schedule records an operation that is about to be issued to NCCL. watch reports whether
// the caller must start the watchdog. leaves reports whether the earlier operations need a
// mark, because later operations on another stream, or with another timeout, say nothing
// about them. The communicator is entered.
func (r *Recorder) Schedule(o *Call, t int64) (watch, leaves bool) {
	r.mu.Lock()
	r.last++
	if Kinds[o.Kind].Peer {
		r.transfers++
	} else {
		r.collectives++
	}
	o.Record, o.Number = r.last, r.collectives
	if !o.Batched || t != r.lastCreated {
		r.batch = r.last
	}
	r.lastCreated = t
	e := r.at(r.last)
	e.Request, e.batch = o.Request, r.batch
	e.ID, e.Collective, e.Transfer = r.last, r.collectives, r.transfers
	e.Created, e.Begun, e.started, e.completed, e.took = t, t-r.blindTime.Load(), 0, 0, 0
	e.in, e.out, e.stream = o.In, o.Out, uintptr(gpu.StreamOf(o.Stream).Raw())
	e.state, e.queued, e.refused = Scheduled, false, false
	if !o.Captured {
		r.totals.add(o)
	}
	if e.stream != r.lastStream && !o.Captured {
		leaves = r.unordered && r.running > r.resolved
		r.severalStreams, r.lastStream = r.severalStreams || r.lastStream != 0, e.stream
	}
	if e.timeout = r.timeoutOf(o); e.timeout != r.lastTimeout && !o.Captured {
		leaves = leaves || r.running > r.resolved
		r.lastTimeout = e.timeout
	}
	if e.timeout > 0 && (r.shortest == 0 || e.timeout < r.shortest) {
		r.shortest = e.timeout
	}
	watch = !r.watched && !r.closed
	r.watched = r.watched || watch
	r.mu.Unlock()
	if t := timeline.Current(); t != nil && !o.Captured {
		r.open(t, o)
	}
	return watch, leaves
}

// Remove removes an operation that NCCL has refused. All operations scheduled
// after it must have been refused before.
func (r *Recorder) Remove(id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.find(id)
	if e == nil {
		return
	}
	e.refused = true
	if !e.Captured {
		r.refuseOpen(e)
		r.totals.remove(e)
	}
	if Kinds[e.Kind].Peer {
		r.transfers--
	} else {
		r.collectives--
	}
}

// Accept records that NCCL has accepted an operation.
func (r *Recorder) Accept(o *Call) {
	if t := timeline.Current(); t != nil && !o.Captured {
		gpu.StreamOf(o.Stream).ShutCollective(t)
	}
	r.mu.Lock()
	r.enqueued = o.Record
	if o.Captured {
		r.graphs = true
		r.mu.Unlock()
		return
	}
	r.running = o.Record
	if r.stream == o.Stream {
		r.mu.Unlock()
		return
	}
	old := r.stream
	r.stream = nil
	if gpu.StreamOf(o.Stream).Retain() {
		r.stream = o.Stream
	}
	r.mu.Unlock()
	if old != nil {
		_ = gpu.StreamOf(old).Release()
	}
}

// at returns the ring position of a record; find returns the entry if the ring still has
// it. mu is held.
func (r *Recorder) at(id uint64) *Entry { return &r.ring[id%uint64(len(r.ring))] }

func (r *Recorder) find(id uint64) *Entry {
	if e := r.at(id); e.ID == id && id > 0 {
		return e
	}
	return nil
}

// ordered reports whether the operations complete in the order they were issued.
// mu is held.
func (r *Recorder) ordered() bool { return !r.unordered || !r.severalStreams }

// SetUnordered records that operations on several streams may complete in any order: operations
// of a single rank are copies, and operations of NCCL and of other backends are not
// ordered.
func (r *Recorder) SetUnordered() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unordered = true
}

// InOrder is ordered for callers that do not hold mu.
func (r *Recorder) InOrder() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ordered()
}

// runs reports whether the entry is an operation that runs on a stream.
func (e *Entry) runs() bool { return !e.Captured && !e.refused }

// first returns the first record after settled that the ring may still have. mu is held.
func (r *Recorder) first(last uint64) uint64 {
	from := r.resolved + 1
	if n := uint64(len(r.ring)); last > n {
		from = max(from, last-n+1)
	}
	return from
}

// Complete records that the operations on a stream up to a record have
// completed. If operations complete in order, this includes operations on other
// streams.
func (r *Recorder) Complete(id uint64, on uintptr) {
	t := Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	ordered := r.ordered()
	for k := r.first(id); k <= id; k++ {
		if e := r.find(k); e != nil && e.runs() && e.state != Completed && (ordered || e.stream == on) {
			e.state, e.queued, e.completed = Completed, false, t
			if e.started == 0 {
				e.started = t
			}
		}
	}
	if e := r.find(id); ordered && e != nil {
		r.completed = max(r.completed, e.Collective)
	}
	if ordered {
		if r.resolved = max(r.resolved, id); id >= r.lost {
			r.lost = 0
		}
		return
	}
	for r.resolved < r.running {
		e := r.find(r.resolved + 1)
		if e != nil && e.runs() && e.state == Scheduled {
			return
		}
		if r.resolved++; e == nil {
			r.lost = r.resolved
		}
	}
}

// SetReached records what marks say about the starts of operations. A stream that has passed a mark
// has reached the operation directly behind it, with the rest of its batch. A stream that has
// not passed a mark has not reached any operation behind it.
func (r *Recorder) SetReached(passed, ahead []Mark) {
	t := Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range passed {
		r.setStarted(&passed[i], t)
	}
	for id := r.first(r.last); id <= r.last; id++ {
		e := r.find(id)
		if e == nil || !e.runs() || e.state != Scheduled || e.started != 0 {
			continue
		}
		e.queued = slices.ContainsFunc(ahead, func(k Mark) bool { return k.Next > 0 && k.Next <= id && k.Stream == e.stream })
	}
}

// SetStarted is SetReached for a single mark that its stream has passed.
func (r *Recorder) SetStarted(passed Mark) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setStarted(&passed, Now())
}

// setStarted records that a stream has passed a mark. mu is held.
func (r *Recorder) setStarted(k *Mark, t int64) {
	first := r.find(k.Next)
	if !k.Direct || first == nil {
		return
	}
	for id := k.Next; id <= r.last; id++ {
		e := r.find(id)
		if e == nil || e.batch != first.batch {
			return
		}
		if e.stream == k.Stream && e.started == 0 {
			e.started, e.queued = t, false
		}
	}
}

// NextRecord returns the record that the next operation will have, while no other is issued.
func (r *Recorder) NextRecord() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last + 1
}

// SetUnknown records that the completion of the operations up to a record can no longer be
// determined.
func (r *Recorder) SetUnknown(id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k := r.first(id); k <= id; k++ {
		if e := r.find(k); e != nil && e.runs() && e.state == Scheduled {
			e.state = Unknown
		}
	}
	if id > r.resolved {
		r.resolved, r.lost = id, id
	}
}

// SetFinalState records that the communicator aborts its operations: all that are not known to have
// completed get the state fate. Only the first call has an effect.
func (r *Recorder) SetFinalState(fate State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.finalState == Scheduled {
		r.finalState = fate
	}
	if t := timeline.Current(); t != nil {
		t.Forget(r.Group)
	}
}

// maxEnd limits the text of SetEnd in bytes.
const maxEnd = 1024

// SetEnd records how the communicator ended on this rank. follows says that the cause may be another rank, which
// has ended or which an operation waited for. Only the first call has an effect.
func (r *Recorder) SetEnd(end string, follows bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.end == "" {
		r.end, r.endFollows = strings.ToValidUTF8(end[:min(len(end), maxEnd)], ""), follows
	}
}

// TimedOut records the operation that caused the communicator's timeout.
func (r *Recorder) TimedOut(record uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timedOut = record
}

// AllCompleted reports whether all operations on a stream up to a record have completed.
func (r *Recorder) AllCompleted(id uint64, on uintptr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.graphs || r.lost > 0 {
		return false
	}
	for k := r.resolved + 1; k <= id; k++ {
		if e := r.find(k); e == nil || e.runs() && e.state != Completed && (r.ordered() || e.stream == on) {
			return false
		}
	}
	return true
}

// Pending reports whether an operation is not known to have ended.
func (r *Recorder) Pending() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.running > r.resolved
}

// Progress returns the last operation that NCCL has accepted, and the last one up to which all are known to have ended.
func (r *Recorder) Progress() (issued, ended uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.running, r.resolved
}

// LastOn returns the latest operation on the stream that NCCL has accepted, or 0. lost
// reports that the ring may have overwritten it.
func (r *Recorder) LastOn(s *stream.Stream) (id uint64, lost bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream == s {
		return r.running, false
	}
	for id = r.running; id > 0; id-- {
		e := r.find(id)
		if e == nil {
			return 0, true
		}
		if e.runs() && e.stream == uintptr(gpu.StreamOf(s).Raw()) {
			return id, false
		}
	}
	return 0, false
}

// oldest returns the first operation that has not completed. mu is held.
func (r *Recorder) oldest() (e *Entry) {
	for id := r.first(r.enqueued); id <= r.enqueued; id++ {
		if e := r.find(id); e != nil && e.runs() && e.state == Scheduled {
			return e
		}
	}
	return nil
}

// Unaccepted returns the operation that was issued to NCCL and is not accepted yet. A rank's
// first operations may wait in NCCL for the other ranks, even if they are captured.
func (r *Recorder) Unaccepted() (e Entry, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.find(r.last); e != nil && r.last > r.enqueued && !e.refused {
		return *e, true
	}
	return Entry{}, false
}

// InCall reports whether a call is in NCCL.
func (r *Recorder) InCall() bool {
	_, yes := r.Unaccepted()
	return yes
}

// Close releases the stream when the communicator ends.
func (r *Recorder) Close() {
	r.mu.Lock()
	s := r.stream
	r.stream, r.closed, r.launchesLeft = nil, true, r.launchesPending()
	launches := r.takeLaunches()
	r.mu.Unlock()
	endLaunches(launches)
	if s != nil {
		_ = gpu.StreamOf(s).Release()
	}
	if t := timeline.Current(); t != nil {
		t.Flush() // the process may end now
	}
}

// Latest returns the latest operation that runs. If it is not known to have ended, behind
// is true, and s is its stream, which the caller must release. held is false if the stream
// was destroyed.
func (r *Recorder) Latest() (last uint64, s *stream.Stream, behind, held bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	behind = r.running > r.resolved
	return r.running, r.stream, behind, behind && r.stream != nil && gpu.StreamOf(r.stream).Retain()
}

// StopWatch ends the watchdog if no operation is pending, and reports whether
// it did.
func (r *Recorder) StopWatch() bool {
	r.mu.Lock()
	if r.running > r.resolved || r.last > r.enqueued && !r.at(r.last).refused || r.launchesPending() {
		r.mu.Unlock()
		return false
	}
	s := r.stream
	r.watched, r.stream, r.shortest = false, nil, 0
	launches := r.takeLaunches()
	r.mu.Unlock()
	endLaunches(launches)
	if s != nil {
		_ = gpu.StreamOf(s).Release()
	}
	return true
}

// Entry returns the operation of a record that was scheduled most recently.
func (r *Recorder) Entry(record uint64) Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	return *r.at(record)
}

const (
	numServices = 5
	numSizes    = 6
)

// SizeNames are the names of the classes of sizes, in bytes. The largest class has no limit.
var SizeNames = [numSizes]string{"le_1KiB", "le_32KiB", "le_1MiB", "le_32MiB", "le_1GiB", "gt_1GiB"}

// A Total counts operations and their bytes. An operation counts the larger of its buffers.
type Total struct{ Count, Bytes uint64 }

// totals are the operations that were issued, without captured ones. Operations count when
// they are issued, because the ring may lose them before the watchdog sees that they completed.
type totals [NumKinds][numServices][numSizes]Total

func (t *totals) add(o *Call) {
	n := uint64(max(o.In, o.Out) * o.DType.Size())
	x := t.of(o.Kind, o.Service, n)
	x.Count++
	x.Bytes += n
}

func (t *totals) remove(e *Entry) {
	n := uint64(max(e.in, e.out) * e.DType.Size())
	x := t.of(e.Kind, e.Service, n)
	x.Count--
	x.Bytes -= n
}

func (t *totals) of(k Kind, s Service, bytes uint64) *Total {
	return &t[min(k, NumKinds-1)][min(s, numServices-1)][sizeClass(bytes)]
}

// sizeClass returns the index in SizeNames of a size, whose classes are each 32
// times larger than the one before.
func sizeClass(bytes uint64) int {
	if bytes <= 1<<10 {
		return 0
	}
	return min((bits.Len64(bytes-1)-6)/5, numSizes-1)
}

// A Standing is the progress of a rank at one moment.
type Standing struct {
	WorldRank int    // -1 if not known
	Issued    uint64 // collectives
	Completed uint64 // collectives that are known to have completed, with all before them
	State     State  // Scheduled while the communicator works
	Oldest    Operation
	Kind      Kind          // of Oldest
	Age       time.Duration // of Oldest, which is in flight; its Record is 0 if there is none
	Idle      time.Duration // since the last operation was issued; 0 if there was none
	Launched  uint64        // collectives that launches of graphs have enqueued
	Waits     time.Duration // for which no launch is known to have ended while some are pending; 0 if none is
}

// Standing returns the progress of the rank.
func (r *Recorder) Standing() Standing {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := Now()
	s := Standing{WorldRank: -1, Launched: r.LaunchedCollectives(), Waits: r.waitsForLaunches(), Issued: r.collectives, Completed: r.completed, State: r.finalState, Oldest: Operation{Root: -1}}
	if r.Rank < len(r.world) {
		s.WorldRank = r.world[r.Rank]
	}
	e := r.oldest()
	if last := r.find(r.last); e == nil && last != nil && r.last > r.enqueued && !last.refused {
		e = last // in a call of NCCL
	}
	switch {
	case e != nil:
		s.Oldest, s.Kind, s.Age = e.Operation(), e.Kind, time.Duration(now-e.Created)
	case r.lost == 0 && r.finalState == Scheduled:
		s.Completed = s.Issued
	}
	if r.last > 0 {
		s.Idle = max(time.Duration(now-r.at(r.last).Created), 0)
	}
	s.Age = max(s.Age, 0)
	return s
}

// Totals calls visit for each total that is not zero.
func (r *Recorder) Totals(visit func(Kind, Service, int, Total)) {
	r.mu.Lock()
	all := r.totals
	r.mu.Unlock()
	for k := range all {
		for s := range all[k] {
			for size, t := range all[k][s] {
				if t.Count > 0 {
					visit(Kind(k), Service(s), size, t)
				}
			}
		}
	}
}

// SetTimeout sets the timeout of operations that are scheduled from now on,
// where 0 and less mean none.
func (r *Recorder) SetTimeout(d time.Duration) { r.timeout.Store(int64(max(d, 0))) }

// timeoutOf returns the timeout of an operation; 0 means none.
func (r *Recorder) timeoutOf(o *Call) time.Duration {
	if o.Timeout != 0 {
		return max(o.Timeout, 0)
	}
	return time.Duration(r.timeout.Load())
}

// shortestTimeout returns the shortest timeout of the operations that are watched; 0 means
// none.
func (r *Recorder) shortestTimeout() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.shortest
}

// setTimeout sets the timeout of a suspicion: the longest one of the operations that may
// hang, since it is not known which of them hangs.
func (x *Suspicion) setTimeout(r *Recorder) {
	r.mu.Lock()
	defer r.mu.Unlock()
	x.Timeout = x.First.timeout
	for id := x.First.ID; id <= x.Last.ID; id++ {
		e := r.find(id)
		if e == nil || !e.runs() || e.state != Scheduled {
			continue
		}
		if e.timeout == 0 {
			x.Timeout = 0
			return
		}
		x.Timeout = max(x.Timeout, e.timeout)
	}
}

// exceeded reports whether an age is longer than a timeout.
func exceeded(age, timeout time.Duration) bool { return timeout > 0 && age > timeout }

// The functions of this file are for the tests of packages that record operations.

// Unwatched prevents Schedule from asking for a watchdog, and sets the timeout.
func (r *Recorder) Unwatched(timeout time.Duration) {
	r.watched = true
	r.SetTimeout(timeout)
}

// Resize replaces the ring by an empty one.
func (r *Recorder) Resize(entries int) { r.ring = make([]Entry, entries) }

// Age sets the start of an operation back.
func (r *Recorder) Age(record uint64, by time.Duration) { r.find(record).Begun -= int64(by) }

// LastQuery returns the time of the last query, after moving it into the past by the given
// duration.
func (r *Recorder) LastQuery(by time.Duration) int64 {
	return r.lastQuery.Add(-int64(by))
}

// Age sets the times of the marks back.
func (m *Marks) Age(by time.Duration) {
	for i := range m.list {
		m.list[i].At -= int64(by)
	}
}
