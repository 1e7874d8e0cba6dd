package differ

import "slices"

// An mCapture is a capture that has not ended.
type mCapture struct {
	origin  *mStream
	streams []*mStream
	nodes   []mNode
	mode    int // 0 thread-local, 1 global, 2 relaxed
	thread  int
	invalid bool
	ended   bool
	vague   bool // its state is unknown
	freed   bool // memory that it allocated was closed in it
	pool    *mPool
	draws   []*mDraw
	exec    *mExec
	refs    int // how many graphs have taken its operations over
}

type mNode struct {
	work
	s      *mStream
	direct uint64 // the nodes on which it depends directly
}

// maxNodes is how many nodes a model's capture has room for.
const maxNodes = 60

// An mExec is a graph that can be launched.
type mExec struct {
	closed bool
	doubt  bool // its existence and its operations are unknown
	nodes  []mNode
	draws  []*mDraw
	ends   clock // of its launches
	owner  *mCapture
	others []*mExec // that it got its nodes from
}

// An mDraw counts the numbers that one capture draws from one generator.
type mDraw struct {
	gen   *mGen
	total uint64
	last  *mStream // of the launch before
}

// A launch has the places at which the random numbers of one launch begin.
type launch struct{ base map[*mDraw]place }

type place struct{ seed, offset uint64 }

// record adds work to the capture of a stream.
func (m *model) record(s *mStream, w work) want {
	c := s.cap
	if c.vague {
		m.vague = true
		return want{any: true}
	}
	if c.invalid {
		return errs(cuInvalidated)
	}
	if len(c.nodes) >= maxNodes {
		m.conflict = &conflict{s: s, slot: -1}
		return fine
	}
	for i, n := range c.nodes {
		if s.tail&(1<<i) != 0 {
			continue
		}
		for _, a := range w.accesses {
			if slices.ContainsFunc(n.accesses, a.conflicts) {
				m.conflict = &conflict{s: s, slot: -1, with: n.s}
				return fine
			}
		}
	}
	for _, a := range w.accesses {
		if a.gone() || a.m.born == c && a.m.after&^s.tail != 0 || a.m.born != c && a.m.reused {
			m.conflict = &conflict{s: s, slot: -1}
			return fine
		}
	}
	if w.sig == "" {
		return fine
	}
	c.nodes = append(c.nodes, mNode{w, s, s.direct})
	s.direct = 1 << (len(c.nodes) - 1)
	s.tail |= s.direct
	return fine
}

// begin begins a capture.
func (m *model) begin(s *mStream, mode, thread int, pool *mPool) *mCapture {
	c := &mCapture{origin: s, mode: mode, thread: thread, pool: pool, exec: &mExec{ends: clock{}}}
	c.exec.owner = c
	c.join(s, 0, 0)
	m.open = append(m.open, c)
	if mode != 2 {
		m.threads[thread] = c
	}
	return c
}

func (c *mCapture) join(s *mStream, tail, direct uint64) {
	if !slices.Contains(c.streams, s) {
		c.streams = append(c.streams, s)
	}
	s.cap, s.tail, s.direct = c, s.tail|tail, s.direct|direct
}

// finish takes the streams out of a capture and says what its end returns.
func (m *model) finish(c *mCapture) want {
	all := uint64(1)<<len(c.nodes) - 1
	joined := c.origin.tail&all == all
	c.ended = true
	for _, s := range c.streams {
		if s.cap == c {
			s.cap, s.tail, s.direct = nil, 0, 0
		}
	}
	m.open = slices.DeleteFunc(m.open, func(o *mCapture) bool { return o == c })
	if m.threads[c.thread] == c {
		m.threads[c.thread] = nil
	}
	switch {
	case c.vague:
		m.vague = true
		return want{any: true}
	case c.invalid:
		return errs(cuInvalidated)
	case !joined:
		return errs(cuUnjoined)
	}
	return fine
}

// drop frees the memory for the random numbers of a capture or of its graph.
func (m *model) drop(c *mCapture) {
	m.stats.bytes -= len(c.draws) * roundSize(16, nil)
	m.stats.requested -= len(c.draws) * 16
	m.stats.blocks -= len(c.draws)
	c.draws = nil
}

// waitFor is StreamWaitEvent.
func (m *model) waitFor(s *mStream, e *mEvent) want {
	switch {
	case s.cap != nil && s.cap.vague || e.cap != nil && e.cap.vague:
		m.vague = true
		return want{any: true}
	case s.cap != nil && s.cap.invalid:
		return errs(cuInvalidated)
	case e.cap == nil && !e.recorded:
		return fine
	case e.cap == nil && s.cap == nil:
		m.wait(s, e.at)
		return fine
	case e.cap == nil:
		s.cap.invalid = true
		return errs(cuIsolation)
	case e.cap.ended || e.cap.invalid:
		if s.cap != nil {
			s.cap.invalid = true
		}
		return errs(cuValue)
	case s.cap == nil:
		e.cap.join(s, e.nodes, e.direct)
		return fine
	case s.cap != e.cap:
		s.cap.invalid, e.cap.invalid = true, true
		return errs(cuMerge)
	}
	s.tail, s.direct = s.tail|e.nodes, s.direct|e.direct
	return fine
}

// mark is EventRecord.
func (m *model) mark(e *mEvent, s *mStream) want {
	switch {
	case s.cap == nil:
		s.seen.join(m.host)
		s.at++
		e.recorded, e.at, e.cap = true, s.now(), nil
		return fine
	case s.cap.vague:
		m.vague = true
		return want{any: true}
	case s.cap.invalid:
		return errs(cuInvalidated)
	}
	e.recorded, e.cap, e.nodes, e.direct = true, s.cap, s.tail, s.direct
	return fine
}

// forbidden reports whether a capture forbids unsafe calls to the calling thread, such
// as to wait.
func (m *model) forbidden() bool {
	return slices.ContainsFunc(m.open, func(c *mCapture) bool {
		return c.mode != 2 && c.thread == m.thread || c.mode == 1
	})
}
