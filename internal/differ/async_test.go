package differ

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// A host-asynchronous program has several ranks and goroutines that never wait for a device. Its steps
// are plain data in an order in which they could run one after the other. A plan says which goroutine
// enqueues what, and which event or other goroutine it must wait for. Everything else happens in any
// order: partners of collectives are enqueued late, and memory is freed while work is pending.
type asyncProgram struct {
	Seed  uint64
	Index int
	Ranks int
	Mode  asyncMode
	Steps []asyncStep
}

// An asyncMode divides the work among goroutines.
type asyncMode int

const (
	oneGoroutine   asyncMode = iota // enqueues the work of all ranks, several steps of a rank at a time
	goroutineEach                   // one for each rank
	goroutinesMore                  // two for each rank, with two streams and a communicator each
	asyncModes
)

const (
	asyncStreams = 4 // of a rank
	asyncBuffers = 6 // of a rank; the first one is in a window of communicator 0
	asyncComms   = 2
	asyncLen     = 16 * 3 * 4 * 5 // elements of a buffer, a multiple of each number of ranks
)

// An asyncStep is one operation, on one rank or on all.
type asyncStep struct {
	Kind   string
	Rank   int // of a local operation, the root of a collective, or the sender
	Stream int
	Comm   int
	X, Y   int // buffers: destination and source
	N      int // elements
	A, B   uint32
	Flush  bool // a single goroutine has enqueued the work of all ranks up to here
}

var asyncLocal = []string{"axpb", "copy", "renew", "fetch", "drop", "callback"}

var asyncCollective = []string{"allreduce", "broadcast", "allgather", "reducescatter", "reduce", "sendrecv", "batch"}

func (s *asyncStep) collective() bool { return slices.Contains(asyncCollective, s.Kind) }

// generateAsync draws the program of a seed and an index.
func generateAsync(seed uint64, index, ranks int) *asyncProgram {
	r := source(seed, index)
	p := &asyncProgram{Seed: seed, Index: index, Ranks: ranks, Mode: asyncMode(r.IntN(int(asyncModes)))}
	for range 4 + r.IntN(30) {
		p.Steps = append(p.Steps, drawAsync(r, ranks))
	}
	return p
}

func drawAsync(r *rand.Rand, ranks int) asyncStep {
	s := asyncStep{Rank: r.IntN(ranks), Stream: r.IntN(asyncStreams), Comm: r.IntN(asyncComms), A: r.Uint32(), B: r.Uint32(),
		N: []int{0, 12, 240, asyncLen}[r.IntN(4)], Flush: r.IntN(4) == 0}
	at := r.Perm(asyncBuffers)
	s.X, s.Y = at[0], at[1]
	if r.IntN(2) == 0 {
		s.Kind = asyncLocal[r.IntN(len(asyncLocal))]
		s.N = max(s.N, 12)
		if s.Kind == "renew" && s.X == 0 {
			s.Kind = "axpb" // a buffer in a window stays
		}
		return s
	}
	s.Kind = asyncCollective[r.IntN(len(asyncCollective))]
	s.Stream = s.Comm%2 + 2*r.IntN(2) // of the goroutine that uses the communicator
	if s.Kind == "allreduce" && r.IntN(3) == 0 {
		s.Y = s.X
	}
	return s
}

// An asyncPart is the part of a step that one rank enqueues.
type asyncPart struct {
	step         *asyncStep
	rank, stream int
	goroutine    int
	needs        []int // parts that must come before
	orders       bool  // parts on other streams wait for its event
	fetched      int   // number of the fetch of the rank
}

// A plan has what each goroutine enqueues: lists of parts, of which several form one batch.
type asyncPlan struct {
	parts   []asyncPart
	queues  [][][]int
	memory  [][][]int32 // by rank and buffer, in the end
	fetches [][][]int32 // by rank
	calls   int
}

// asyncStart is the first content of a buffer.
func asyncStart(rank, buffer int) []int32 {
	x := make([]int32, asyncLen)
	for i := range x {
		x[i] = int32(i*7 + 1000*buffer + 100_000*rank)
	}
	return x
}

// uses returns the buffers that a rank's part of a step reads and writes.
func (s *asyncStep) uses(rank int) (reads, writes []int) {
	switch s.Kind {
	case "callback":
	case "fetch", "drop":
		reads = []int{s.Y}
	case "renew":
		writes = []int{s.X}
	case "reduce":
		reads = []int{s.Y}
		if rank == s.Rank {
			writes = []int{s.X}
		}
	case "batch": // the second collective uses the next two buffers
		reads, writes = []int{s.Y, s.more(1)}, []int{s.X, s.more(0)}
	default:
		reads, writes = []int{s.Y}, []int{s.X}
	}
	return reads, writes
}

// more returns the buffers of a batch's second collective.
func (s *asyncStep) more(i int) int {
	for b := range asyncBuffers {
		if b != s.X && b != s.Y {
			if i == 0 {
				return b
			}
			i--
		}
	}
	panic("a batch has too few buffers")
}

// home is the stream of a buffer's memory.
func home(buffer int) int { return buffer % asyncStreams }

// plan divides the program among goroutines, and predicts its results.
func (p *asyncProgram) plan() *asyncPlan {
	l := &asyncPlan{memory: make([][][]int32, p.Ranks), fetches: make([][][]int32, p.Ranks)}
	type history struct{ writes, reads []int }
	uses := make([][asyncBuffers]history, p.Ranks)
	for rank := range p.Ranks {
		for b := range asyncBuffers {
			l.memory[rank] = append(l.memory[rank], asyncStart(rank, b))
		}
	}
	goroutine := func(rank, stream int) int {
		return [...]int{oneGoroutine: 0, goroutineEach: rank, goroutinesMore: 2*rank + stream%2}[p.Mode]
	}
	l.queues = make([][][]int, [...]int{oneGoroutine: 1, goroutineEach: p.Ranks, goroutinesMore: 2 * p.Ranks}[p.Mode])
	seen := map[string]bool{}
	waiting := make([][]int, p.Ranks) // of a single goroutine
	flush := func() {
		for rank, list := range waiting {
			for _, id := range list {
				l.queues[0] = append(l.queues[0], []int{id})
			}
			waiting[rank] = nil
		}
	}
	for i := range p.Steps {
		s := &p.Steps[i]
		var ids []int
		for rank := range p.Ranks {
			if !s.collective() && rank != s.Rank {
				continue
			}
			part := asyncPart{step: s, rank: rank, stream: s.Stream}
			if s.Kind == "renew" {
				part.stream = home(s.X)
			}
			part.goroutine = goroutine(rank, part.stream)
			id := len(l.parts)
			reads, writes := s.uses(rank)
			for _, b := range reads {
				part.needs = append(part.needs, uses[rank][b].writes...)
			}
			for _, b := range writes {
				part.needs = append(part.needs, slices.Concat(uses[rank][b].writes, uses[rank][b].reads)...)
			}
			for _, b := range reads {
				uses[rank][b].reads = append(uses[rank][b].reads, id)
			}
			for _, b := range writes {
				uses[rank][b] = history{writes: []int{id}}
			}
			slices.Sort(part.needs)
			part.needs = slices.Compact(part.needs)
			for _, n := range part.needs {
				l.parts[n].orders = l.parts[n].orders || l.parts[n].stream != part.stream
			}
			if s.Kind == "fetch" {
				part.fetched = len(l.fetches[rank])
			}
			l.parts = append(l.parts, part)
			ids = append(ids, id)
		}
		s.effect(l)
		// The first operation of a kind connects the ranks, for which one goroutine needs a batch.
		first := fmt.Sprint(s.Kind, s.Comm, s.N, s.Rank)
		switch {
		case p.Mode != oneGoroutine:
			for _, id := range ids {
				g := l.parts[id].goroutine
				l.queues[g] = append(l.queues[g], []int{id})
			}
		case s.collective() && !seen[first]:
			flush()
			l.queues[0] = append(l.queues[0], ids)
			seen[first] = true
		default:
			for _, id := range ids {
				waiting[l.parts[id].rank] = append(waiting[l.parts[id].rank], id)
			}
			if s.Flush {
				flush()
			}
		}
	}
	if p.Mode == oneGoroutine {
		flush()
	}
	return l
}

// effect changes the memory of a plan as the step does.
func (s *asyncStep) effect(l *asyncPlan) {
	ranks := len(l.memory)
	share := s.N / ranks
	x := func(rank int) []int32 { return l.memory[rank][s.X] }
	y := func(rank int) []int32 { return l.memory[rank][s.Y] }
	sum := func(buffer, n int) []int32 {
		t := make([]int32, n)
		for rank := range ranks {
			for i := range t {
				t[i] += l.memory[rank][buffer][i]
			}
		}
		return t
	}
	switch s.Kind {
	case "axpb":
		for i, v := range y(s.Rank)[:s.N] {
			x(s.Rank)[i] = int32(s.A*uint32(v) + s.B)
		}
	case "copy":
		copy(x(s.Rank)[:s.N], y(s.Rank))
	case "renew":
		for i := range x(s.Rank) {
			x(s.Rank)[i] = int32(s.A*uint32(i) + s.B)
		}
	case "fetch":
		l.fetches[s.Rank] = append(l.fetches[s.Rank], slices.Clone(y(s.Rank)[:s.N]))
	case "callback":
		l.calls++
	case "allreduce":
		t := sum(s.Y, s.N)
		for rank := range ranks {
			copy(x(rank), t)
		}
	case "reduce":
		copy(x(s.Rank), sum(s.Y, s.N))
	case "broadcast":
		t := slices.Clone(y(s.Rank)[:s.N])
		for rank := range ranks {
			copy(x(rank), t)
		}
	case "allgather":
		for rank := range ranks {
			for from := range ranks {
				copy(x(rank)[from*share:], y(from)[:share])
			}
		}
	case "reducescatter":
		t := sum(s.Y, share*ranks)
		for rank := range ranks {
			copy(x(rank)[:share], t[rank*share:])
		}
	case "sendrecv": // a ring
		for rank := range ranks {
			copy(x(rank)[:s.N], y((rank+ranks-1)%ranks))
		}
	case "batch": // an all-reduce, and a broadcast
		t, u := sum(s.Y, s.N), slices.Clone(l.memory[s.Rank][s.more(1)][:s.N])
		for rank := range ranks {
			copy(x(rank), t)
			copy(l.memory[rank][s.more(0)], u)
		}
	}
}
