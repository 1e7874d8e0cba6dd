package nccl

import (
	"cmp"
	"hash/fnv"
	"slices"
	"strconv"
	"sync"
	"weak"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A clique is the set of ranks of one communicator in this process. Only these ranks can
// be compared without communication.
type clique struct {
	key   string
	board flight.Board // compares the operations that the ranks issue

	mu      sync.Mutex
	members []*member // by rank
}

// A member is one rank of a clique. It does not keep the communicator alive.
type member struct {
	*flight.Recorder
	comm weak.Pointer[Communicator]
}

var cliques struct {
	mu    sync.Mutex
	byKey map[string]*clique
}

// enterClique adds the rank to the clique of the communicators made from the same id.
func (c *Communicator) enterClique(key string) {
	registerStatus()
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
	slices.SortFunc(q.members, func(a, b *member) int { return cmp.Compare(a.Rank, b.Rank) })
	q.board.Ranks(len(q.members))
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // hashed because the key itself is a secret
	c.rec.Group = strconv.FormatUint(h.Sum64(), 16)
	c.clique = q
}

// leaveClique removes the rank, and with the last rank the clique.
func (c *Communicator) leaveClique() {
	q := c.clique
	if q == nil {
		return // it was never added
	}
	cliques.mu.Lock()
	defer cliques.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.members = slices.DeleteFunc(q.members, func(m *member) bool { return m.Recorder == c.rec })
	if len(q.members) == 0 && cliques.byKey[q.key] == q {
		delete(cliques.byKey, q.key)
	}
}

// others returns the other ranks in this process.
func (c *Communicator) others() []*member {
	c.clique.mu.Lock()
	defer c.clique.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.clique.members), func(m *member) bool { return m.Recorder == c.rec })
}

// recorders returns the flight recorders of ranks.
func recorders(list []*member) []*flight.Recorder {
	rs := make([]*flight.Recorder, len(list))
	for i, m := range list {
		rs[i] = m.Recorder
	}
	return rs
}

// liveRecorders returns the recorders of all communicators that are not closed, by age.
func liveRecorders() []*flight.Recorder { return recorders(liveMembers()) }

func liveMembers() (list []*member) {
	cliques.mu.Lock()
	defer cliques.mu.Unlock()
	for _, q := range cliques.byKey {
		q.mu.Lock()
		list = append(list, q.members...)
		q.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b *member) int { return cmp.Compare(a.Number, b.Number) })
	return list
}

// setSignature computes a number that differs between operations that are incompatible.
func (o *operation) setSignature() {
	h := uint64(o.Kind)<<32 | uint64(uint32(o.Root))
	mix := func(v uint64) { h = (h ^ v) * 0x9e3779b97f4a7c15; h ^= h >> 29 }
	mix(uint64(o.wire)<<32 | uint64(uint32(min(o.redop, ncclapi.Avg+1)))) // the factors may differ
	mix(uint64(o.Service))
	if o.Kind != flight.AllToAllV {
		mix(uint64(o.N * o.unit))
		for _, n := range o.sends {
			mix(uint64(n))
		}
	}
	o.Signature = uint32(h >> 32)
}
