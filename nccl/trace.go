package nccl

import (
	"fmt"
	"path"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/memory"
)

// A State is how far an operation has come, or how it ended, as far as the host knows.
type State uint8

// The states of an operation. Progress is looked at about once a second, so an
// operation may have completed some time before it is known. What has not completed
// when its communicator ends is not called completed later, although its stream goes on.
const (
	Scheduled State = iota // not known to have completed; a captured operation stays so
	Completed              // with its result
	TimedOut               // it had not completed within Config.Timeout
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

// torch returns the name in PyTorch's traces, which have no other ends.
func (s State) torch() string {
	if s == Completed {
		return "completed"
	}
	return "scheduled"
}

// An Operation is what the flight recorder has of one.
type Operation struct {
	Record     uint64       // the how-manieth of the communicator, from 1; 0 is none
	Collective uint64       // the how-manieth collective, or how many came before a send or a receive
	Transfer   uint64       // the how-manieth send or receive, or how many came before a collective
	Name       string       // such as ncclAllReduce
	DType      memory.DType // of the elements
	Count      int          // elements, as NCCL counts them for the operation
	In, Out    int          // elements of the source and of the destination
	Reduction  string       // such as "sum", or ""
	Root       int          // or the peer of a send or a receive; -1 where there is none
	Stream     uintptr      // the CUstream
	State      State
	Captured   bool      // into a graph: it did not run, and its launches are not recorded
	Created    time.Time // when it was issued
	Completed  time.Time // when its end was noticed
	Frames     []Frame   // who issued it, where Config.TraceFrames asks for that

	kind kind
}

// A Frame is one function of a call stack, from the inside to the outside.
type Frame struct {
	Name     string `json:"name"`
	Filename string `json:"filename"`
	Line     int    `json:"line"`
}

// String is such as "ncclAllReduce(1024 x float32, sum) as collective 7".
func (o Operation) String() string {
	if o.Record == 0 {
		return "none"
	}
	if kinds[o.kind].peer {
		return fmt.Sprintf("%s as transfer %d", o.call(), o.Transfer)
	}
	return fmt.Sprintf("%s as collective %d", o.call(), o.Collective)
}

// call is such as "ncclAllReduce(1024 x float32, sum)".
func (o Operation) call() string {
	d := &kinds[o.kind]
	text := fmt.Sprintf("%s(%d x %s", o.Name, o.Count, o.DType)
	if o.Reduction != "" {
		text += ", " + o.Reduction
	}
	switch {
	case o.kind == send:
		text += fmt.Sprintf(", to rank %d", o.Root)
	case d.peer:
		text += fmt.Sprintf(", from rank %d", o.Root)
	case d.rooted:
		text += fmt.Sprintf(", root %d", o.Root)
	}
	return text + ")"
}

// operation is the entry as the caller gets it.
func (e *entry) operation() Operation {
	if e.id == 0 {
		return Operation{Root: -1}
	}
	d := &kinds[e.kind]
	o := Operation{
		Record: e.id, Collective: e.collective, Transfer: e.transfer, Name: d.name, DType: e.dtype, Count: e.n, In: e.in, Out: e.out,
		Root: -1, Stream: e.stream, State: e.state, Captured: e.captured,
		Created: moment(e.created), Completed: moment(e.completed), kind: e.kind,
	}
	if d.reduces {
		o.Reduction = e.op.text()
	}
	if d.rooted {
		o.Root = int(e.root)
	}
	if e.callers != nil {
		o.Frames = framesOf(e.callers[:])
	}
	return o
}

// folder is where this package's source was compiled.
var folder = sync.OnceValue(func() string {
	_, file, _, _ := runtime.Caller(0)
	return path.Dir(file)
})

// framesOf names the callers outside of this package.
func framesOf(pcs []uintptr) (list []Frame) {
	n := 0
	for n < len(pcs) && pcs[n] != 0 {
		n++
	}
	for frames := runtime.CallersFrames(pcs[:n]); ; {
		f, more := frames.Next()
		if len(list) > 0 || path.Dir(f.File) != folder() || strings.HasSuffix(f.File, "_test.go") {
			list = append(list, Frame{f.Function, f.File, f.Line})
		}
		if !more {
			return list
		}
	}
}

// Trace returns the last operations that were issued on c, from the oldest on: as
// many as Config.TraceSize. It may be called at any time by any goroutine, also
// after the end of c.
func (c *Communicator) Trace() []Operation {
	if c == nil {
		return nil
	}
	return c.rec.trace()
}

func (r *recorder) trace() (list []Operation) {
	if r.hidden {
		return nil
	}
	r.mu.Lock()
	entries := make([]entry, 0, len(r.ring))
	for i := range uint64(len(r.ring)) {
		if e := r.at(r.last + 1 + i); e.id != 0 && !e.refused {
			entries = append(entries, r.seen(e))
		}
	}
	r.mu.Unlock()
	for i := range entries {
		list = append(list, entries[i].operation())
	}
	return list
}

// Progress is how far a rank has come. Those of all ranks together show who is
// behind.
type Progress struct {
	Rank      int
	Issued    Operation // the last that was given to NCCL
	Completed Operation // the last that is known to have completed
}

// Progress returns how far the rank has come. It may be called at any time by any
// goroutine, also after the end of c.
func (c *Communicator) Progress() Progress {
	issued, completed := c.rec.final()
	return Progress{Rank: c.rank, Issued: issued.operation(), Completed: completed.operation()}
}

// Services returns what the communicator's Substitute does for its last collectives, at
// most n, and the number of the first of them. For Chorus's own packages.
func (c *Communicator) Services(n int) (first uint64, list []Service) { return c.rec.services(n) }
