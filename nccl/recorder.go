package nccl

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/stream"
)

// A recorder is the flight recorder of one rank: the last operations, in a ring,
// and how far they have come. It is a thing of its own so that a trace can be
// written when the communicator is gone. Operations are written into it by the
// call that holds the communicator's lock; mu is held for moments only.
type recorder struct {
	rank, size int
	device     string
	name       string // of the communicator, as its Config has it
	group      string // the same on all ranks of the communicator, and no other's
	number     int64
	version    int32
	timeout    time.Duration // 0 is none
	frames     bool          // callers are recorded
	hidden     bool          // the ring is only for messages

	unseen atomic.Int64 // nanoseconds in which nobody could ask how far operations are
	looked int64        // when the watch last asked, or tried to

	mu          sync.Mutex
	ring        []entry
	last        uint64 // the record of the last operation, from 1
	enqueued    uint64 // the last that NCCL has taken
	waiting     uint64 // the last of these that is not captured
	settled     uint64 // nobody asks any more for those up to it: they have completed, or lost is later
	lost        uint64 // the last of which nobody can know any more whether it completed; 0 is none
	collectives uint64 // how many were issued
	transfers   uint64
	stream      *stream.Stream // of waiting, retained; nil when nothing is
	watched     bool           // a goroutine looks after what was issued
	over        bool           // the communicator has ended
	fate        State          // of operations that are not known to have completed
	late        uint64         // the one for which the communicator timed out, if that is known

	unordered bool    // operations of several streams may complete in any order
	on        uintptr // the stream of the last operation that runs
	several   bool    // the operations are on more than one
	graphs    bool    // a graph has captured some, whose launches nobody records
}

// An entry is what the recorder has of an operation.
type entry struct {
	request
	id         uint64
	collective uint64 // its number, or that of the collective before a transfer
	transfer   uint64
	created    int64 // in nanoseconds since origin
	begun      int64 // the same by the recorder's clock
	completed  int64
	in, out    int
	stream     uintptr
	state      State
	refused    bool
}

const (
	maxFrames = 16
	// fewEntries are kept for messages where no trace is wanted.
	fewEntries = 64
)

func newRecorder(entries int) *recorder {
	r := &recorder{hidden: entries <= 0}
	if r.hidden {
		entries = fewEntries
	}
	r.ring = make([]entry, entries)
	return r
}

// clock is now, but stands still while nobody can ask. Deadlines count by it: what
// has completed meanwhile may be known only later.
func (r *recorder) clock() int64 { return now() - r.unseen.Load() }

// begin notes that somebody asks from now on.
func (r *recorder) begin() { r.looked = now() }

// look notes that somebody has asked; in blindness that the time since the last look
// does not count.
func (r *recorder) look(blind bool) {
	t := now()
	if blind {
		r.unseen.Add(t - r.looked)
	}
	r.looked = t
}

// schedule records an operation that is about to be given to NCCL, and reports
// whether somebody must begin to look after it, and whether the operations so far need a mark
// since those behind it tell nothing about them. The communicator is entered.
func (r *recorder) schedule(o *operation, t int64) (watch, leaves bool) {
	r.mu.Lock()
	r.last++
	if kinds[o.kind].peer {
		r.transfers++
	} else {
		r.collectives++
	}
	o.record, o.number = r.last, r.collectives
	e := r.at(r.last)
	e.request = o.request
	e.id, e.collective, e.transfer = r.last, r.collectives, r.transfers
	e.created, e.begun, e.completed = t, t-r.unseen.Load(), 0
	e.in, e.out, e.stream = o.src.len, o.dst.len, uintptr(o.stream.Raw())
	e.state, e.refused = Scheduled, false
	if e.stream != r.on && !o.captured {
		leaves = r.unordered && r.waiting > r.settled
		r.several, r.on = r.several || r.on != 0, e.stream
	}
	watch = !r.watched && !r.over
	r.watched = r.watched || watch
	r.mu.Unlock()
	return watch, leaves
}

// refuse takes an operation back, which NCCL did not take, and after which none
// was scheduled that counts.
func (r *recorder) refuse(id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.find(id)
	if e == nil {
		return
	}
	e.refused = true
	if kinds[e.kind].peer {
		r.transfers--
	} else {
		r.collectives--
	}
}

// took notes that NCCL has taken an operation.
func (r *recorder) took(o *operation) {
	r.mu.Lock()
	r.enqueued = o.record
	if o.captured {
		r.graphs = true
		r.mu.Unlock()
		return
	}
	r.waiting = o.record
	if r.stream == o.stream {
		r.mu.Unlock()
		return
	}
	old := r.stream
	r.stream = nil
	if o.stream.Retain() {
		r.stream = o.stream
	}
	r.mu.Unlock()
	if old != nil {
		_ = old.Release()
	}
}

// at is where an entry belongs, find the entry if it is still there. mu is held.
func (r *recorder) at(id uint64) *entry { return &r.ring[id%uint64(len(r.ring))] }

func (r *recorder) find(id uint64) *entry {
	if e := r.at(id); e.id == id && id > 0 {
		return e
	}
	return nil
}

// ordered reports whether the operations complete in the order in which they were issued.
// mu is held.
func (r *recorder) ordered() bool { return !r.unordered || !r.several }

// apart notes that operations on several streams may complete in any order: those of a
// single rank are copies, and nothing orders NCCL's operations and others.
func (r *recorder) apart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unordered = true
}

// inOrder is ordered for who does not hold mu.
func (r *recorder) inOrder() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ordered()
}

// runs reports whether the entry is an operation that runs on a stream.
func (e *entry) runs() bool { return !e.captured && !e.refused }

// first is the first record after settled that the ring may still have. mu is held.
func (r *recorder) first(last uint64) uint64 {
	from := r.settled + 1
	if n := uint64(len(r.ring)); last > n {
		from = max(from, last-n+1)
	}
	return from
}

// complete notes that the operations on a stream up to a record have completed, and with them
// those on other streams where they complete in order. Only Communicator.observed calls it.
func (r *recorder) complete(id uint64, on uintptr) {
	t := now()
	r.mu.Lock()
	defer r.mu.Unlock()
	ordered := r.ordered()
	for k := r.first(id); k <= id; k++ {
		if e := r.find(k); e != nil && e.runs() && e.state != Completed && (ordered || e.stream == on) {
			e.state, e.completed = Completed, t
		}
	}
	if ordered {
		if r.settled = max(r.settled, id); id >= r.lost {
			r.lost = 0
		}
		return
	}
	for r.settled < r.waiting {
		e := r.find(r.settled + 1)
		if e != nil && e.runs() && e.state == Scheduled {
			return
		}
		if r.settled++; e == nil {
			r.lost = r.settled
		}
	}
}

// lose notes that nobody can know any more whether operations up to a record complete.
func (r *recorder) lose(id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k := r.first(id); k <= id; k++ {
		if e := r.find(k); e != nil && e.runs() && e.state == Scheduled {
			e.state = Unknown
		}
	}
	if id > r.settled {
		r.settled, r.lost = id, id
	}
}

// cut notes that the communicator ends its operations: those that are not known to have
// completed have this fate. The first one counts.
func (r *recorder) cut(fate State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fate == Scheduled {
		r.fate = fate
	}
}

// timedOut notes for which operation the communicator timed out, if that is known.
func (r *recorder) timedOut(t *TimeoutError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t.Operation.Record == t.Last.Record && !t.Lost {
		r.late = t.Operation.Record
	}
}

// known reports whether all operations on a stream up to a record have completed.
func (r *recorder) known(id uint64, on uintptr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.graphs || r.lost > 0 {
		return false
	}
	for k := r.settled + 1; k <= id; k++ {
		if e := r.find(k); e == nil || e.runs() && e.state != Completed && (r.ordered() || e.stream == on) {
			return false
		}
	}
	return true
}

// pending reports whether an operation is not known to have ended.
func (r *recorder) pending() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waiting > r.settled
}

// lastOn is the last operation on the stream that NCCL has taken, or 0. lost is that the
// ring may have had it.
func (r *recorder) lastOn(s *stream.Stream) (id uint64, lost bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream == s {
		return r.waiting, false
	}
	for id = r.waiting; id > 0; id-- {
		e := r.find(id)
		if e == nil {
			return 0, true
		}
		if e.runs() && e.stream == uintptr(s.Raw()) {
			return id, false
		}
	}
	return 0, false
}

// oldest returns the first operation that has not completed. mu is held.
func (r *recorder) oldest() (e *entry) {
	for id := r.first(r.enqueued); id <= r.enqueued; id++ {
		if e := r.find(id); e != nil && e.runs() && e.state == Scheduled {
			return e
		}
	}
	return nil
}

// stuck returns the operation that NCCL has been given and has not taken yet: its
// first ones may wait for the other ranks, also where they are captured.
func (r *recorder) stuck() (e entry, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.find(r.last); e != nil && r.last > r.enqueued && !e.refused {
		return *e, true
	}
	return entry{}, false
}

// inside reports whether a call is in NCCL.
func (r *recorder) inside() bool {
	_, yes := r.stuck()
	return yes
}

// collective returns the collective of a number, if it is still in the ring.
func (r *recorder) collective(number uint64) (e entry, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := r.last; id > 0; id-- {
		e := r.find(id)
		if e == nil || e.collective < number {
			break
		}
		if e.collective == number && !e.refused && !kinds[e.kind].peer {
			return *e, true
		}
	}
	return entry{}, false
}

// issued returns how many collectives were issued, and the last operation.
func (r *recorder) issued() (collectives uint64, last entry) {
	last, _ = r.final()
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.collectives, last
}

// final returns the last operation that was given to NCCL, and the last that has
// completed; of none the record is 0.
func (r *recorder) final() (issued, completed entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := r.last; id > 0 && (issued.id == 0 || completed.id == 0); id-- {
		e := r.find(id)
		switch {
		case e == nil:
			return issued, completed
		case e.refused:
			continue
		case issued.id == 0:
			issued = r.seen(e)
		}
		if completed.id == 0 && e.state == Completed {
			completed = *e
		}
	}
	return issued, completed
}

// seen is the entry as others get it. mu is held.
func (r *recorder) seen(e *entry) entry {
	x := *e
	switch {
	case x.state != Scheduled || x.captured:
	case x.id == r.late:
		x.state = TimedOut
	default:
		x.state = r.fate
	}
	return x
}

// services are those of the last collectives, at most n, and the number of the first.
func (r *recorder) services(n int) (first uint64, list []Service) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := r.last; id > 0 && len(list) < n; id-- {
		e := r.find(id)
		if e == nil {
			break
		}
		if !e.refused && !kinds[e.kind].peer {
			first, list = e.collective, append(list, e.service)
		}
	}
	slices.Reverse(list)
	return first, list
}

// end lets go of the stream when the communicator ends.
func (r *recorder) end() {
	r.mu.Lock()
	s := r.stream
	r.stream, r.over = nil, true
	r.mu.Unlock()
	if s != nil {
		_ = s.Release()
	}
}
