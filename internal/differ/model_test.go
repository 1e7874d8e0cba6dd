package differ

import "slices"

// A model predicts the results of a program and the contents of memory, without a
// backend: each stream has a clock, and effects happen when they are enqueued, since a
// program without races cannot tell.
type model struct {
	objs    map[int]any
	slots   []*mStream // by slot; 0 is the host
	legacy  *mStream   // the default stream, if it is used
	host    clock
	hostAt  int
	threads [2]*mCapture // the capture that forbids unsafe calls, by OS thread
	open    []*mCapture
	bodies  []*mCapture // of the functions that run now
	thread  int         // of the operation
	debug   bool        // SyncError holds
	debugs  []bool
	group   *mGroup // that is open
	calls   [maxCallbacks]int
	stats   mStats
	pools   map[int][]*mPool // in use, by stream

	lost bool // the device is
	// conflict is set by an operation that would be a race: then it had no effect.
	conflict *conflict
	// vague is set by operations with unpredictable results.
	vague bool
	fuzzy bool // the statistics are unknown
}

const maxCallbacks = 8

// A conflict is two operations that nothing orders.
type conflict struct {
	s    *mStream // of the operation; nil is the host
	slot int      // of the earlier one, or -1 where waiting does not help
	with *mStream // that the earlier one was captured on
}

// mStats are the statistics that torch's rules say.
type mStats struct{ blocks, bytes, requested int }

func newModel() *model {
	return &model{objs: map[int]any{}, slots: []*mStream{nil}, host: clock{}, pools: map[int][]*mPool{}}
}

// A want is what an operation returns.
type want struct {
	kinds []string // the errors that are right; empty is nil
	any   bool     // every result is right
	out   *mOut    // bytes that it reads, or nil
	text  string   // other results
}

var fine = want{}

func errs(kinds ...string) want { return want{kinds: kinds} }

// An mOut has the bytes of a read. mask says of each byte whether it is undefined,
// defined, or approx: then the backends are compared with each other.
type mOut struct {
	data, mask []byte
	at         int // in the memory
}

const (
	undefined = 0
	defined   = 1
	approx    = 2 // of a float32 that the backends may round differently
)

type mStream struct {
	obj, slot, at int
	priority      int64
	seen          clock
	closed        bool
	cap           *mCapture
	panicked      bool   // a callback did, and no wait has told
	tail          uint64 // the nodes of cap that come before the next node
	direct        uint64 // the nodes on which the next node depends directly
}

type mEvent struct {
	timing, closed bool
	recorded       bool
	at             clock // of the last record
	cap            *mCapture
	nodes, direct  uint64 // tail and direct of the stream
}

// mMem is memory of a device, or pinned memory of the host.
type mMem struct {
	data, mask []byte
	uses       []use
	closed     bool
	pinned     bool
	s          *mStream
	users      []*mStream
	size       int // as the allocator rounds it
	elem       int // the width of its elements
	born       *mCapture
	after      uint64 // the nodes of that capture before its allocation
	pool       *mPool
	doubt      bool // it may be open, or not
	// reused memory may be that of a buffer that its capture has closed. Each launch of
	// the graph writes by both, so only the graph uses it.
	reused bool
}

type mPool struct {
	closed bool
	bytes  int  // of open memory
	whole  bool // each block is a segment
}

// An mRef is a part of memory.
type mRef struct {
	m      *mMem
	lo, hi int
}

func (m *model) stream(n int) *mStream { return object[mStream](m, n) }
func (m *model) event(n int) *mEvent   { return object[mEvent](m, n) }
func (m *model) mem(n int) *mMem       { return object[mMem](m, n) }

func object[T any](m *model, n int) *T {
	o, _ := m.objs[n].(*T)
	return o
}

// ref returns the memory that a Ref names, or nil if there is no such memory or the
// bounds are wrong.
func (m *model) ref(r Ref) *mRef {
	mem := m.mem(r.O)
	if mem == nil || r.Lo < 0 || r.Hi < r.Lo || r.Hi > len(mem.data) {
		return nil
	}
	return &mRef{mem, r.Lo, r.Hi}
}

func (r *mRef) data() []byte { return r.m.data[r.lo:r.hi] }
func (r *mRef) mask() []byte { return r.m.mask[r.lo:r.hi] }

// read returns a copy of the bytes.
func (r *mRef) read() *mOut {
	return &mOut{slices.Clone(r.data()), slices.Clone(r.mask()), r.lo}
}

// set overwrites the bytes. Approximate bytes stay approximate in whole words.
func (r *mRef) set(o *mOut) {
	copy(r.data(), o.data)
	copy(r.mask(), o.mask)
	for i, k := range r.mask() {
		word := (r.lo + i) &^ 3
		if k == approx && ((r.lo-o.at)%4 != 0 || word < r.lo || word+4 > r.hi) {
			r.mask()[i] = undefined
		}
	}
}

// fill sets each byte to fn of its index.
func (r *mRef) fill(fn func(i int) byte) {
	d, k := r.data(), r.mask()
	for i := range d {
		d[i], k[i] = fn(i), defined
	}
}

func (m *model) newStream(obj int) *mStream {
	s := &mStream{obj: obj, slot: len(m.slots), seen: clock{}}
	m.slots = append(m.slots, s)
	return s
}

// A work is something that a stream does.
type work struct {
	sig      string // the type of its node in a graph; "" has none
	accesses []access
	effect   func(*launch)
}

// submit enqueues work on a stream or records it.
func (m *model) submit(s *mStream, w work) want {
	if m.pends(w.accesses) {
		m.conflict = &conflict{s: s, slot: -1}
		return fine
	}
	if s.cap != nil {
		return m.record(s, w)
	}
	if w.sig != "graph" && slices.ContainsFunc(w.accesses, func(a access) bool { return a.m.reused }) {
		m.conflict = &conflict{s: s, slot: -1}
		return fine
	}
	seen := s.seen.clone()
	seen.join(m.host)
	if m.races(s, seen, s.slot, w.accesses) {
		return fine
	}
	s.seen = seen
	s.at++
	for _, a := range w.accesses {
		a.note(s.seen, s.slot, s.at)
	}
	if w.effect != nil {
		w.effect(nil)
	}
	return fine
}

// races sets conflict if an access is not ordered.
func (m *model) races(s *mStream, seen clock, slot int, list []access) bool {
	for _, a := range list {
		if a.gone() {
			m.conflict = &conflict{s: s, slot: -1}
			return true
		}
		if other := a.unordered(seen, slot); other >= 0 {
			m.conflict = &conflict{s: s, slot: other}
			return true
		}
	}
	return false
}

// onHost is a use of memory by the host.
func (m *model) onHost(list ...access) bool {
	if m.races(nil, m.host, 0, list) {
		return false
	}
	m.hostAt++
	m.host[0] = m.hostAt
	for _, a := range list {
		a.note(m.host, 0, m.hostAt)
	}
	return true
}

// now is the point that a stream has reached.
func (s *mStream) now() clock {
	c := s.seen.clone()
	c[s.slot] = s.at
	return c
}

// await blocks the host until a stream is idle.
func (m *model) await(s *mStream) { m.host.join(s.now()) }

// wait orders s after the operations up to a clock.
func (m *model) wait(s *mStream, c clock) {
	s.seen.join(m.host)
	s.seen.join(c)
	s.at++
}

// sealed reports whether all uses of the memory come before a free on its stream, or on
// the streams that were recorded for it.
func (m *model) sealed(x *mMem) bool {
	after := m.host.clone()
	for _, s := range append([]*mStream{x.s}, x.users...) {
		after.join(s.now())
	}
	for _, u := range x.uses {
		if after[u.slot] < u.at {
			m.conflict = &conflict{s: x.s, slot: u.slot}
			return false
		}
	}
	return true
}

// roundSize is the size of the block that the allocator gives out.
func roundSize(n int, p *mPool) int {
	const mib = 1 << 20
	switch {
	case p == nil || !p.whole || n == 0:
		return (n + 511) / 512 * 512
	case n <= mib:
		return 2 * mib
	case n < 10*mib:
		return 20 * mib
	}
	return (n + 2*mib - 1) / (2 * mib) * 2 * mib
}
