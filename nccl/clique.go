package nccl

import (
	"cmp"
	"hash/fnv"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"weak"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// A clique is the ranks of one communicator that are in this process. Only they
// can be compared without a word to anybody.
type clique struct {
	key   string
	board [boardSize]atomic.Uint64 // of each of the last collectives its number and signature
	many  atomic.Bool              // there are several

	mu      sync.Mutex
	members []*member // by rank
}

// A member is one rank of a clique. It does not keep the communicator alive.
type member struct {
	*recorder
	comm weak.Pointer[Communicator]
}

// boardSize is how many collectives one rank may be ahead of another and still be
// compared.
const boardSize = 256

var cliques struct {
	mu    sync.Mutex
	byKey map[string]*clique
}

// enterClique adds the rank to those that were made from the same id.
func (c *Communicator) enterClique(key string) {
	cliques.mu.Lock()
	defer cliques.mu.Unlock()
	q := cliques.byKey[key]
	if q == nil {
		q = &clique{key: key}
		if cliques.byKey == nil {
			cliques.byKey = map[string]*clique{}
		}
		cliques.byKey[key] = q
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.members = append(q.members, &member{c.rec, weak.Make(c)})
	slices.SortFunc(q.members, func(a, b *member) int { return cmp.Compare(a.rank, b.rank) })
	q.many.Store(len(q.members) > 1)
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // the key itself is a secret
	c.rec.group = strconv.FormatUint(h.Sum64(), 16)
	c.clique = q
}

// leaveClique forgets the rank, and with the last one the clique.
func (c *Communicator) leaveClique() {
	q := c.clique
	if q == nil {
		return // it never began
	}
	cliques.mu.Lock()
	defer cliques.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.members = slices.DeleteFunc(q.members, func(m *member) bool { return m.recorder == c.rec })
	if len(q.members) == 0 && cliques.byKey[q.key] == q {
		delete(cliques.byKey, q.key)
	}
}

// others are the other ranks of the process.
func (c *Communicator) others() []*member {
	c.clique.mu.Lock()
	defer c.clique.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.clique.members), func(m *member) bool { return m.recorder == c.rec })
}

// liveRecorders are those of all communicators that are not closed, by age.
func liveRecorders() (list []*recorder) {
	cliques.mu.Lock()
	defer cliques.mu.Unlock()
	for _, q := range cliques.byKey {
		q.mu.Lock()
		for _, m := range q.members {
			list = append(list, m.recorder)
		}
		q.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b *recorder) int { return cmp.Compare(a.number, b.number) })
	return list
}

// sign gives the operation a number in which operations differ that do not go together.
func (o *operation) sign() {
	h := uint64(o.kind)<<32 | uint64(uint32(o.root))
	mix := func(v uint64) { h = (h ^ v) * 0x9e3779b97f4a7c15; h ^= h >> 29 }
	mix(uint64(o.wire)<<32 | uint64(uint32(min(o.redop, ncclapi.Avg+1)))) // the factors may differ
	mix(uint64(o.service))
	if o.kind != allToAllV {
		mix(uint64(o.n * o.unit))
		for _, n := range o.sends {
			mix(uint64(n))
		}
	}
	o.signature = uint32(h >> 32)
}

// post compares a collective that was scheduled with what other ranks of the
// process issued under its number, and leaves it for those that come later. It
// takes no lock.
func (q *clique) post(o *operation) (fits bool) {
	if kinds[o.kind].peer || !q.many.Load() {
		return true
	}
	slot := q.slot(o.number)
	mine := posted(o.number, o.signature)
	for {
		theirs := slot.Load()
		if ahead := int32(uint32(theirs>>32) - uint32(o.number)); ahead > 0 {
			return true // this rank is too far behind
		} else if ahead == 0 {
			return theirs == mine
		}
		if slot.CompareAndSwap(theirs, mine) {
			return true
		}
	}
}

// unpost takes back what NCCL did not take.
func (q *clique) unpost(o *operation) {
	if !kinds[o.kind].peer && q.many.Load() {
		q.slot(o.number).CompareAndSwap(posted(o.number, o.signature), posted(o.number-boardSize, 0))
	}
}

// slot is where a collective is compared. Those that follow each other lie in different
// cache lines, so that ranks that are a few apart do not take them from each other.
func (q *clique) slot(number uint64) *atomic.Uint64 {
	const line = 8 // slots
	i := number % boardSize
	return &q.board[i%(boardSize/line)*line+i/(boardSize/line)]
}

func posted(number uint64, signature uint32) uint64 {
	return uint64(uint32(number))<<32 | uint64(signature)
}
