package timeline

import "time"

// A scope is a collective that is being enqueued on a stream. Everything that is enqueued on the
// stream meanwhile is a part of it, and its time is the time of its parts.
type scope struct {
	rec     Record
	pending int // parts that have not completed
	closed  bool
	ran     bool // a part has completed
	whole   *Ticket
}

// A Ticket is an operation that is enqueued and has not completed.
type Ticket struct {
	r      *Recorder
	rec    Record
	scope  *scope
	silent bool // only its scope is recorded
	ended  bool
}

// Enqueue announces an operation that is about to be enqueued on a stream.
func (r *Recorder) Enqueue(kind, name string, on Stream, bytes uint64) *Ticket {
	t := &Ticket{r: r, rec: Record{Kind: kind, Name: name, Device: on.Device, Stream: on.Handle, Lane: on.Lane, Bytes: bytes}}
	r.mu.Lock()
	defer r.mu.Unlock()
	t.rec.Order = r.order.Add(1)
	r.outstanding++
	r.join(t, on)
	return t
}

// join makes the ticket a part of the collective that is being enqueued. mu is held.
func (r *Recorder) join(t *Ticket, on Stream) {
	if t.scope = r.open[on]; t.scope != nil {
		t.scope.pending++
		t.rec.Parent = t.scope.rec.Order
		t.silent = t.silent || t.rec.Kind == Collective // the library's own name of the same operation
	}
}

// Done records that the operation ran from begin to end.
func (t *Ticket) Done(from, to time.Time) {
	begin, end := t.r.At(from), t.r.At(to)
	t.r.mu.Lock()
	defer t.r.mu.Unlock()
	if t.ended {
		return // its collective was refused
	}
	t.ended = true
	t.r.outstanding--
	if t.rec.Begin, t.rec.End = begin, max(begin, end); !t.silent {
		t.r.add(t.rec)
	}
	if s := t.scope; s != nil {
		if !s.ran {
			s.rec.Begin, s.rec.End, s.ran = begin, t.rec.End, true
		}
		s.rec.Begin, s.rec.End = min(s.rec.Begin, begin), max(s.rec.End, t.rec.End)
		t.r.leave(s)
	}
}

// Cancel forgets an operation that was refused. It does nothing on nil.
func (t *Ticket) Cancel() {
	if t == nil {
		return
	}
	t.r.mu.Lock()
	defer t.r.mu.Unlock()
	t.cancel()
}

// cancel is Cancel for callers that hold mu.
func (t *Ticket) cancel() {
	if t == nil || t.ended {
		return
	}
	t.ended = true
	t.r.outstanding--
	if t.scope != nil {
		t.r.leave(t.scope)
	}
}

// leave ends a part of a collective, and records the collective after its last part. mu is held.
func (r *Recorder) leave(s *scope) {
	if s.pending--; s.closed && s.pending == 0 && s.ran {
		r.add(s.rec)
		if r.observer != nil {
			r.observer(&s.rec)
		}
	}
}

// Open begins a collective on a stream, or adds an operation to the collective that is being
// enqueued there: the operations of a batch. It reports whether it began one.
func (r *Recorder) Open(on Stream, op Op) (began bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.open[on]
	if s == nil {
		s = &scope{rec: Record{Kind: Collective, Name: op.Name, Device: on.Device, Stream: on.Handle, Order: r.order.Add(1)}}
		r.open[on] = s
		began = true
	}
	s.rec.Ops = append(s.rec.Ops, op)
	s.rec.Bytes += op.Bytes
	return began
}

// Whole returns a ticket for the time of the collective that is being enqueued on a stream: of
// all its parts, even if the driver does not see them. It returns nil if there is none.
func (r *Recorder) Whole(on Stream) *Ticket {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &Ticket{r: r, silent: true}
	if r.join(t, on); t.scope == nil {
		return nil
	}
	t.scope.whole = t
	r.outstanding++
	return t
}

// Shut ends the collective on a stream: all its parts are enqueued.
func (r *Recorder) Shut(on Stream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.open[on]; s != nil {
		delete(r.open, on)
		s.closed = true
		s.pending++ // so that leave records it if no part is pending
		r.leave(s)
	}
}

// Refuse removes the latest operation of the collective on a stream, and the collective with its
// only operation.
func (r *Recorder) Refuse(on Stream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.open[on]
	if s == nil {
		return
	}
	last := len(s.rec.Ops) - 1
	s.rec.Bytes -= s.rec.Ops[last].Bytes
	if s.rec.Ops = s.rec.Ops[:last]; last == 0 {
		r.remove(on)
	}
}

// Forget removes the open collectives of a group that has failed.
func (r *Recorder) Forget(group string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for on, s := range r.open {
		if s.rec.Ops[0].Group == group {
			r.remove(on)
		}
	}
}

// remove removes the open collective of a stream and the ticket for its time. mu is held.
func (r *Recorder) remove(on Stream) {
	s := r.open[on]
	delete(r.open, on)
	s.whole.cancel()
}

// unfinished reports whether an operation has not completed.
func (r *Recorder) unfinished() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.outstanding > 0
}
