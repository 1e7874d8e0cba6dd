package nccl

import (
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/stream"
)

const (
	longestLook  = time.Second
	shortestLook = time.Millisecond
)

// every is how often the watch looks.
func (c *Communicator) every() time.Duration {
	if c.rec.timeout <= 0 {
		return longestLook
	}
	return min(max(c.rec.timeout/8, shortestLook), longestLook)
}

// watch looks after what c has enqueued, from a goroutine of its own and about once
// a second, so that operations themselves need none. It ends when everything has
// completed, and the next operation begins it again.
func (c *Communicator) watch() {
	tick := time.NewTicker(c.every())
	defer tick.Stop()
	c.rec.begin()
	var asked time.Time
	var answer chan error // nil when nothing was asked
	for {
		var err error
		select {
		case <-c.ending:
			return
		case err = <-answer:
			answer = nil
			if err == nil && c.rec.rest() {
				return
			}
		case <-tick.C:
			if c.Err() != nil || c.over() {
				return
			}
			setClock()
			if answer == nil {
				asked, answer = time.Now(), make(chan error, 1)
				go func(to chan<- error) { to <- c.inspect() }(answer)
			} else {
				err = c.inspectUnanswered(time.Since(asked))
			}
		}
		if err != nil {
			c.breakWith(err)
			return
		}
	}
}

// rest ends the watch if nothing is left to look after.
func (r *recorder) rest() bool {
	r.mu.Lock()
	if r.waiting > r.settled || r.last > r.enqueued && !r.at(r.last).refused {
		r.mu.Unlock()
		return false
	}
	s := r.stream
	r.watched, r.stream = false, nil
	r.mu.Unlock()
	if s != nil {
		_ = s.Release()
	}
	return true
}

// observe notes what has completed. ahead has the marks that their streams have not passed,
// from the oldest on; blind is that a capture keeps the stream of the last operation from
// being asked. Where operations may have ended without completing, nothing is noted.
func (c *Communicator) observe() (ahead []mark, blind bool, err error) {
	passed, ahead, err := c.marks.look(c.rec.inOrder())
	if err != nil {
		return nil, false, err
	}
	for _, k := range passed {
		if c.observed(k.record, k.stream) != nil {
			return nil, false, nil // the end of the communicator says it all
		}
	}
	blind, err = c.follow()
	return ahead, blind, err
}

// inspect notes what has completed, and returns an error for what should have.
func (c *Communicator) inspect() error {
	r := c.rec
	ahead, blind, err := c.observe()
	x, ok := r.suspects(ahead)
	// What waits before a mark that is not passed is known to wait whoever captures.
	blind = blind && ok && !x.marked
	r.look(blind)
	switch {
	case err != nil || r.timeout <= 0:
		return err
	case blind || !ok:
		return c.inspectInside()
	}
	others := c.others()
	x.narrow(c, others)
	if age := time.Duration(r.clock() - x.begun); age > r.timeout {
		return c.timedOut(x, age, others)
	}
	return nil
}

// inspectUnanswered is inspect while the driver has not answered for some time, as it does
// not while a launch waits for room on a stream that is full: perhaps of what hangs.
func (c *Communicator) inspectUnanswered(since time.Duration) error {
	if c.rec.timeout <= 0 {
		return nil
	}
	if err := c.inspectInside(); err != nil || since <= max(c.rec.timeout, longestLook) {
		return err
	}
	if x, ok := c.rec.suspects(nil); ok {
		others := c.others()
		x.narrow(c, others)
		return c.timedOut(x, time.Duration(c.rec.clock()-x.first.begun), others)
	}
	return nil
}

// inspectInside returns an error for an operation that is in NCCL for too long. No stream
// has to be asked of it, so that it counts whoever captures.
func (c *Communicator) inspectInside() error {
	e, ok := c.rec.stuck()
	if !ok {
		return nil
	}
	if age := time.Duration(now() - e.created); age > c.rec.timeout {
		return c.timedOut(suspicion{first: e, last: e}, age, c.others())
	}
	return nil
}

// follow asks whether the last operation is done, and where other work comes behind
// it sets a mark to ask for. blind is a stream that cannot be asked, because of a
// capture.
func (c *Communicator) follow() (blind bool, err error) {
	r := c.rec
	r.mu.Lock()
	last, s := r.waiting, r.stream
	behind := last > r.settled
	held := behind && s != nil && s.Retain()
	r.mu.Unlock()
	if !held {
		if behind {
			r.lose(last) // nobody can ask a stream that is gone
		}
		return false, nil
	}
	defer s.Release()
	blind = true
	stream.Outside(func() {
		if blind, err = c.captured(s); blind || err != nil {
			return
		}
		var done bool
		done, err = asked(c.dev, "cuStreamQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(s.Raw()) })
		switch {
		case done:
			_ = c.observed(last, uintptr(s.Raw())) // if the communicator ends, nothing is noted
		case err == nil && c.marks.newest() < last:
			err = c.marks.set(s, last, r.clock())
		}
	})
	return blind, err
}

// captured reports whether the stream takes part in a capture that is not Chorus's,
// which must not be disturbed.
func (c *Communicator) captured(s *stream.Stream) (bool, error) {
	status := cudadrv.CaptureNone
	told, err := asked(c.dev, "cuStreamIsCapturing", func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, r = drv.StreamIsCapturing(s.Raw())
		return r
	})
	return err == nil && (!told || status != cudadrv.CaptureNone), err
}
