package flight

import "time"

// SetTimeout sets the timeout of operations that are scheduled from now on. 0 and less mean
// none.
func (r *Recorder) SetTimeout(d time.Duration) { r.timeout.Store(int64(max(d, 0))) }

// timeoutOf returns the timeout of an operation; 0 means none.
func (r *Recorder) timeoutOf(o *Op) time.Duration {
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
