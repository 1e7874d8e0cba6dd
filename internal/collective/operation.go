package collective

import (
	"fmt"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A State is the progress of an operation, or how it ended.
type State uint8

// The states of an operation. The watchdog checks progress about once a second, so it
// observes a completion with some delay. An operation that has not completed when its
// communicator ends is never reported as completed later, although its stream continues.
const (
	Scheduled State = iota // not known to have completed; a captured operation stays so
	Completed              // with its result
	TimedOut               // it had not completed within its timeout
	Failed                 // the communicator failed before the operation was known to have completed
	Aborted                // this process aborted or closed the communicator before that was known
	Unknown                // its stream was closed before that was known
)

var stateNames = [...]string{"scheduled", "completed", "timed out", "failed", "aborted", "unknown"}

// String returns the name, such as "completed".
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// torch returns the name in PyTorch's traces, which have no states for other ends.
func (s State) torch() string {
	if s == Completed {
		return "completed"
	}
	return "scheduled"
}

// A Reduction is NCCL's number of a reduction.
type Reduction int32

// The reductions that all backends know.
const (
	Sum Reduction = iota
	Prod
	Max
	Min
	Avg // the sum, divided by the number of ranks
	NumReductions
)

var reductions = [NumReductions]string{"sum", "prod", "max", "min", "avg"}

// String returns NCCL's name, such as "sum".
func (x Reduction) String() string {
	if x >= 0 && int(x) < len(reductions) {
		return reductions[x]
	}
	return fmt.Sprintf("op %d", int32(x))
}

// text is String for traces: the number of a reduction with a factor has no meaning there.
func (x Reduction) text() string {
	if int(x) >= len(reductions) {
		return "pre-multiplied sum"
	}
	return x.String()
}

// A Service says which backend executes an operation.
type Service uint8

// A Request describes an operation.
type Request struct {
	Kind      Kind
	DType     memory.DType
	Format    memory.DType // of the 8-bit numbers of an AllReduceQuantized or an AllReduceNorm; otherwise 0
	Service   Service
	Captured  bool // into a graph
	Reduction Reduction
	Signature uint32              // set when it is scheduled
	Detail    uint32              // of an AllReduceNorm the elements of a row, of a Dispatch or Combine the number of the Experts in the group
	Eps       float32             // of an AllReduceNorm
	Root      int                 // or the peer
	N         int                 // elements; the sum over all ranks if the ranks have different numbers
	Callers   *[MaxFrames]uintptr // nil unless they are recorded
}

// A Call is the part of an Op that the flight recorder needs.
type Call struct {
	Request
	Stream  *stream.Stream
	Timeout time.Duration // 0 means the recorder's, a negative value none
	Batched bool          // the operation is of a batch, whose operations are scheduled at the same time
	Marked  bool          // a mark was set before it
	In, Out int           // elements of the source and of the destination
	Record  uint64        // set when it is scheduled: the number of the operation in the recorder,
	Number  uint64        // and the number of the collective
}

// An Operation is an operation in the flight recorder.
type Operation struct {
	Record     uint64       // number of the operation on the communicator, from 1; 0 means none
	Collective uint64       // number of the collective; for a send or a receive, of the preceding collective
	Transfer   uint64       // number of the send or receive; for a collective, of the preceding send or receive
	Name       string       // such as ncclAllReduce
	DType      memory.DType // of the elements
	Format     memory.DType // of the 8-bit numbers that a quantized all-reduce sends, or an all-reduce and norm stores; otherwise 0
	Options    string       // what else must be the same on all ranks, such as "rows of 1024, eps 1e-05"; usually ""
	Count      int          // elements, as NCCL counts them for the operation; for Dispatch and Combine, of the rank's tokens
	In, Out    int          // elements of the source and of the destination
	Reduction  string       // such as "sum", or ""
	Root       int          // or the peer of a send or a receive; -1 if there is none
	Stream     uintptr      // the CUstream
	// State is the progress that the host has observed:
	//   - "scheduled": issued, and it is not known whether its stream has reached it; a captured
	//     operation stays so
	//   - "queued": its stream has not reached it, because earlier work on the stream still runs
	//   - "started": its stream has reached it, and it is not known to have completed
	//   - "completed": completed with its result
	//   - "timed out": it had not completed within its timeout
	//   - "failed": the communicator failed before the operation was known to have completed
	//   - "aborted": this process aborted or closed the communicator before that was known
	//   - "unknown": its stream was closed before that was known
	//
	// The host checks the progress about once a second, so it observes a completion with
	// some delay. An operation that has not completed when its communicator ends is never
	// reported as completed later, although its stream continues. Started and Queued then still say
	// whether its stream had reached it. Of operations that follow each other within 2 ms, the host
	// knows this only for the first, and for those that wait behind an operation that it knows to run.
	State     string
	Started   time.Time     // when the host observed that the stream had reached it; zero if it has not
	Queued    bool          // when the host observed the stream last, it had not reached it
	Captured  bool          // into a graph: it did not run, and its launches are not recorded
	Timeout   time.Duration // 0 means none
	Created   time.Time     // when it was issued
	Completed time.Time     // when its end was observed
	Frames    []Frame       // call stack of the operation, if Config.TraceFrames is set

	kind  Kind
	state State
	batch uint64 // record of the first operation of its batch
}

// A Frame is one function of a call stack. Stacks begin with the innermost function.
type Frame struct {
	Name     string `json:"name"`
	Filename string `json:"filename"`
	Line     int    `json:"line"`
}

// String returns a text such as "ncclAllReduce(1024 x float32, sum) as collective 7".
func (o Operation) String() string {
	if o.Record == 0 {
		return "none"
	}
	if Kinds[o.kind].Peer {
		return fmt.Sprintf("%s as transfer %d", o.call(), o.Transfer)
	}
	return fmt.Sprintf("%s as collective %d", o.call(), o.Collective)
}

// call returns a text such as "ncclAllReduce(1024 x float32, sum)" or "AllReduceQuantized(1024 x float32 in int8, sum)".
func (o Operation) call() string {
	d := &Kinds[o.kind]
	text := fmt.Sprintf("%s(%d x %s", o.Name, o.Count, o.DType)
	if o.Format != 0 {
		text += fmt.Sprintf(" in %s", o.Format)
	}
	if o.Reduction != "" {
		text += ", " + o.Reduction
	}
	if o.Options != "" {
		text += ", " + o.Options
	}
	switch {
	case o.kind == Send:
		text += fmt.Sprintf(", to rank %d", o.Root)
	case d.Peer:
		text += fmt.Sprintf(", from rank %d", o.Root)
	case d.Rooted:
		text += fmt.Sprintf(", root %d", o.Root)
	}
	return text + ")"
}

// Operation converts the entry for the caller.
func (e *Entry) Operation() Operation {
	if e.ID == 0 {
		return Operation{Root: -1}
	}
	d := &Kinds[e.Kind]
	o := Operation{
		Record: e.ID, Collective: e.Collective, Transfer: e.Transfer, Name: d.Name, DType: e.DType, Format: e.Format, Count: e.N, In: e.in, Out: e.out,
		Root: -1, Stream: e.stream, State: e.state.String(), Captured: e.Captured, Timeout: e.timeout,
		Created: Moment(e.Created), Completed: Moment(e.completed), Started: Moment(e.started), Queued: e.queued,
		kind: e.Kind, state: e.state, batch: e.batch,
	}
	switch {
	case e.state != Scheduled:
	case e.started != 0:
		o.State = "started"
	case e.queued:
		o.State = "queued"
	}
	if d.Reduces {
		o.Reduction = e.Reduction.text()
	}
	switch e.Kind {
	case AllReduceNorm:
		o.Options = fmt.Sprintf("rows of %d, eps %g", e.Detail, e.Eps)
	case Dispatch, Combine:
		o.Options = fmt.Sprintf("experts %d", e.Detail)
	}
	if d.Rooted {
		o.Root = e.Root
	}
	if e.Callers != nil {
		o.Frames = framesOf(e.Callers[:])
	}
	return o
}

// folder is the source directory of package nccl, which issues the operations.
var folder = sync.OnceValue(func() string {
	_, file, _, _ := runtime.Caller(0)
	return path.Join(path.Dir(file), "../../nccl")
})

// framesOf returns the frames outside of package nccl.
func framesOf(pcs []uintptr) (list []Frame) {
	n := 0
	for n < len(pcs) && pcs[n] != 0 {
		n++
	}
	for frames := runtime.CallersFrames(pcs[:n]); ; {
		f, more := frames.Next()
		if len(list) > 0 || path.Dir(f.File) != folder() || strings.HasSuffix(f.File, "_test.go") {
			list = append(list, Frame{nameOf(f), f.File, f.Line})
		}
		if !more {
			return list
		}
	}
}

// nameOf returns the name of a function, which tells readers of a dump whether it belongs to Chorus: that of a
// closure that was inlined into a program begins with the package of the program.
func nameOf(f runtime.Frame) string {
	if !handle.OfLibrary(f) || strings.HasPrefix(f.Function, handle.Module) {
		return f.Function
	}
	_, name, _ := strings.Cut(f.Function[strings.LastIndexByte(f.Function, '/')+1:], ".")
	return path.Join(handle.Module, strings.TrimPrefix(path.Dir(f.File), path.Dir(folder()))) + "." + name
}

// Trace returns the recorded operations, the oldest first.
func (r *Recorder) Trace() (list []Operation) {
	if r.hidden {
		return nil
	}
	r.mu.Lock()
	entries := make([]Entry, 0, len(r.ring))
	for i := range uint64(len(r.ring)) {
		if e := r.at(r.last + 1 + i); e.ID != 0 && !e.refused {
			entries = append(entries, r.withFinalState(e))
		}
	}
	r.mu.Unlock()
	for i := range entries {
		list = append(list, entries[i].Operation())
	}
	return list
}

// Between describes the operations from first to last, if one of these operations hangs. lost
// adds that an operation before them may hang.
func Between(first, last Operation, lost bool) string {
	text := first.String()
	switch {
	case last.Record == 0 || last.Record == first.Record:
	case Kinds[first.kind].Peer || Kinds[last.kind].Peer:
		text = fmt.Sprintf("one of the operations from %s to %s", first, last)
	case first.call() == last.call():
		text = fmt.Sprintf("one of collectives %d to %d, such as %s,", first.Collective, last.Collective, first.call())
	default:
		text = fmt.Sprintf("one of collectives %d to %d, from %s to %s,", first.Collective, last.Collective, first.call(), last.call())
	}
	if lost {
		text += " or an earlier operation that the flight recorder no longer has"
	}
	return text
}

// A Kind is the kind of an operation.
type Kind uint8

const (
	AllReduce Kind = iota + 1 // 0 is invalid
	Reduce
	Broadcast
	AllGather
	ReduceScatter
	AllToAll
	Gather
	Scatter
	Send
	Recv
	AllGatherV
	ReduceScatterV
	AllToAllV
	Dispatch           // of tokens to experts, by Chorus kernels
	Combine            // of their results
	AllReduceQuantized // sends blocks of 8-bit numbers
	AllReduceNorm      // with the norms of the sums, by one Chorus kernel
	NumKinds           // the number of kinds plus one
)

// A Sizing is the length of a buffer relative to an operation's count.
type Sizing uint8

const (
	None Sizing = iota
	One         // the count
	All         // the count for each rank
)

// Kinds describes each Kind.
var Kinds = [NumKinds]struct {
	Name     string // NCCL's name, or a similar name if NCCL has none
	Plain    string // the name that users read, such as "all-reduce"
	Torch    string // name in PyTorch's traces, after "nccl:"
	Reduces  bool
	Rooted   bool
	Peer     bool // the root is a peer
	Dst, Src Sizing
	DstRoot  bool // only the root has a destination
	SrcRoot  bool // only the root has a source
	Uneven   bool // the ranks may have different lengths
	NotTorch bool // PyTorch has no such operation: Torch is the name of a similar one
}{
	AllReduce:     {Name: "ncclAllReduce", Plain: "all-reduce", Torch: "all_reduce", Reduces: true, Dst: One, Src: One},
	Reduce:        {Name: "ncclReduce", Plain: "reduce", Torch: "reduce", Reduces: true, Rooted: true, Dst: One, Src: One, DstRoot: true},
	Broadcast:     {Name: "ncclBroadcast", Plain: "broadcast", Torch: "broadcast", Rooted: true, Dst: One, Src: One, SrcRoot: true},
	AllGather:     {Name: "ncclAllGather", Plain: "all-gather", Torch: "_all_gather_base", Dst: All, Src: One},
	ReduceScatter: {Name: "ncclReduceScatter", Plain: "reduce-scatter", Torch: "_reduce_scatter_base", Reduces: true, Dst: One, Src: All},
	AllToAll:      {Name: "ncclAlltoAll", Plain: "all-to-all", Torch: "all_to_all", Dst: All, Src: All},
	Gather:        {Name: "ncclGather", Plain: "gather", Torch: "gather", Rooted: true, Dst: All, Src: One, DstRoot: true},
	Scatter:       {Name: "ncclScatter", Plain: "scatter", Torch: "scatter", Rooted: true, Dst: One, Src: All, SrcRoot: true},
	Send:          {Name: "ncclSend", Plain: "send", Torch: "send", Rooted: true, Peer: true, Src: One},
	Recv:          {Name: "ncclRecv", Plain: "receive", Torch: "recv", Rooted: true, Peer: true, Dst: One},

	AllGatherV:     {Name: "AllGatherV", Plain: "all-gather-v", Torch: "ALLGATHER_coalesced", Dst: All, Src: One, Uneven: true},
	ReduceScatterV: {Name: "ReduceScatterV", Plain: "reduce-scatter-v", Torch: "reduce_scatter_tensor_coalesced", Reduces: true, Dst: One, Src: All, Uneven: true},
	AllToAllV:      {Name: "AllToAllV", Plain: "all-to-all-v", Torch: "all_to_all", Dst: All, Src: All, Uneven: true},

	// The host knows only the rank's own tokens, not the rows of its experts. PyTorch's tools refuse unknown names.
	Dispatch: {Name: "Dispatch", Plain: "dispatch", Torch: "all_to_all", Dst: One, Src: One, Uneven: true, NotTorch: true},
	Combine:  {Name: "Combine", Plain: "combine", Torch: "all_to_all", Dst: One, Src: One, Uneven: true, NotTorch: true},

	AllReduceQuantized: {Name: "AllReduceQuantized", Plain: "quantized all-reduce", Torch: "all_reduce", Reduces: true, Dst: One, Src: One, NotTorch: true},
	AllReduceNorm:      {Name: "AllReduceNorm", Plain: "all-reduce and norm", Torch: "all_reduce", Reduces: true, Dst: One, Src: One, NotTorch: true},
}

// OfExperts reports whether the kind is Dispatch or Combine. Ranks may have different numbers of tokens, or none, and
// wait for all others.
func (k Kind) OfExperts() bool { return k == Dispatch || k == Combine }

// String returns the name for messages, such as ncclAllReduce.
func (k Kind) String() string { return Kinds[k].Name }

// Label returns the name in metrics, such as "all_reduce".
func (k Kind) Label() string { return strings.NewReplacer("-", "_", " ", "_").Replace(k.Plain()) }

// Plain returns the name that users read, such as "all-reduce".
func (k Kind) Plain() string { return Kinds[k].Plain }

// A MismatchTable compares the collectives that the ranks of one process issue.
type MismatchTable struct {
	slots   [mismatchSlots]atomic.Uint64 // number and signature of each of the last collectives
	several atomic.Bool                  // the process has several ranks
}

// mismatchSlots is the maximum distance between two compared ranks, in collectives.
const mismatchSlots = 256

// Ranks sets the number of ranks in this process.
func (b *MismatchTable) Ranks(n int) { b.several.Store(n > 1) }

// Post compares a scheduled collective with the collectives that other ranks of
// the process issued under the same number, and records it for later ranks,
// without a lock.
func (b *MismatchTable) Post(o *Call) (fits bool) {
	if Kinds[o.Kind].Peer || !b.several.Load() {
		return true
	}
	slot := b.slot(o.Number)
	mine := posted(o.Number, o.Signature)
	for {
		theirs := slot.Load()
		if ahead := int32(uint32(theirs>>32) - uint32(o.Number)); ahead > 0 {
			return true // this rank is too far behind
		} else if ahead == 0 {
			return theirs == mine
		}
		if slot.CompareAndSwap(theirs, mine) {
			return true
		}
	}
}

// Unpost removes a collective that NCCL has refused.
func (b *MismatchTable) Unpost(o *Call) {
	if !Kinds[o.Kind].Peer && b.several.Load() {
		b.slot(o.Number).CompareAndSwap(posted(o.Number, o.Signature), posted(o.Number-mismatchSlots, 0))
	}
}

// slot returns the slot of a collective. Consecutive collectives use different cache
// lines, so that ranks at slightly different positions do not contend for a line.
func (b *MismatchTable) slot(number uint64) *atomic.Uint64 {
	const line = 8 // slots
	i := number % mismatchSlots
	return &b.slots[i%(mismatchSlots/line)*line+i/(mismatchSlots/line)]
}

func posted(number uint64, signature uint32) uint64 {
	return uint64(uint32(number))<<32 | uint64(signature)
}

// Services returns the services of the latest collectives, at most n, and the number of
// the first.
func (r *Recorder) Services(n int) (first uint64, list []Service) {
	return latest(r, n, func(e *Entry) Service { return e.Service })
}

// Signatures returns the signatures of the latest collectives, at most n, and the number of the first.
func (r *Recorder) Signatures(n int) (first uint64, list []uint32) {
	return latest(r, n, func(e *Entry) uint32 { return e.Signature })
}

// latest returns a property of the latest collectives, at most n, and the number of the first.
func latest[T any](r *Recorder, n int, of func(*Entry) T) (first uint64, list []T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := r.last; id > 0 && len(list) < n; id-- {
		e := r.find(id)
		if e == nil {
			break
		}
		if !e.refused && !Kinds[e.Kind].Peer {
			first, list = e.Collective, append(list, of(e))
		}
	}
	slices.Reverse(list)
	return first, list
}

// Collective returns the collective with a number, if the ring still has it.
func (r *Recorder) Collective(number uint64) (e Entry, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := r.last; id > 0; id-- {
		e := r.find(id)
		if e == nil || e.Collective < number {
			break
		}
		if e.Collective == number && !e.refused && !Kinds[e.Kind].Peer {
			return *e, true
		}
	}
	return Entry{}, false
}

// Issued returns the number of collectives, and the latest operation.
func (r *Recorder) Issued() (collectives uint64, last Entry) {
	last, _ = r.Final()
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.collectives, last
}

// Final returns the latest operation that was issued to NCCL, and the latest
// that has completed, each with record 0 if there is none.
func (r *Recorder) Final() (issued, completed Entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := r.last; id > 0 && (issued.ID == 0 || completed.ID == 0); id-- {
		e := r.find(id)
		switch {
		case e == nil:
			return issued, completed
		case e.refused:
			continue
		case issued.ID == 0:
			issued = r.withFinalState(e)
		}
		if completed.ID == 0 && e.state == Completed {
			completed = *e
		}
	}
	return issued, completed
}

// started returns the latest operation that is known to have started, or an Entry without an ID.
func (r *Recorder) started() Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := r.last; id > 0; id-- {
		e := r.find(id)
		if e == nil {
			break
		}
		if !e.refused && (e.started != 0 || e.state == Completed) {
			return *e
		}
	}
	return Entry{}
}

// withFinalState returns the entry. If it was still scheduled, its state is the
// one that the end of the communicator gave it. mu is held.
func (r *Recorder) withFinalState(e *Entry) Entry {
	x := *e
	switch {
	case x.state != Scheduled || x.Captured:
	case x.ID == r.timedOut:
		x.state = TimedOut
	default:
		x.state = r.finalState
	}
	return x
}
