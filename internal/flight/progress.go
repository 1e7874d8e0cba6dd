package flight

import "slices"

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

// Final returns the latest operation that was issued to NCCL, and the latest that has
// completed. If there is none, the record is 0.
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

// withFinalState returns the entry with its final state. mu is held.
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
