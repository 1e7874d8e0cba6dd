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
	completed   uint64 // all up to it have completed
	collectives uint64 // how many were issued
	transfers   uint64
	stream      *stream.Stream // of waiting, retained; nil when nothing is
	watched     bool           // a goroutine looks after what was issued
	over        bool           // the communicator has ended
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
// whether somebody must begin to look after it. The communicator is entered.
func (r *recorder) schedule(o *operation, t int64) (watch bool) {
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
	watch = !r.watched && !r.over
	r.watched = r.watched || watch
	r.mu.Unlock()
	return watch
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

// complete notes that all operations up to a record have completed.
func (r *recorder) complete(id uint64) {
	t := now()
	r.mu.Lock()
	defer r.mu.Unlock()
	from := r.completed + 1
	if n := uint64(len(r.ring)); id > n {
		from = max(from, id-n+1)
	}
	for k := from; k <= id; k++ {
		if e := r.find(k); e != nil && !e.captured && !e.refused {
			e.state, e.completed = Completed, t
		}
	}
	r.completed = max(r.completed, id)
}

// lastOn is the last operation that NCCL has taken, if it is on the stream, or 0: all
// have completed when the stream is past it.
func (r *recorder) lastOn(s *stream.Stream) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream != s {
		return 0
	}
	return r.waiting
}

// oldest returns the first operation that has not completed.
func (r *recorder) oldest() (e entry, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	from := r.completed + 1
	if n := uint64(len(r.ring)); r.enqueued > n {
		from = max(from, r.enqueued-n+1)
	}
	for id := from; id <= r.enqueued; id++ {
		if e := r.find(id); e != nil && !e.captured && !e.refused {
			return *e, true
		}
	}
	return entry{}, false
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
			issued = *e
		}
		if completed.id == 0 && e.state == Completed {
			completed = *e
		}
	}
	return issued, completed
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
