package nccl

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// rootTimeout is the time that the root of a unique id waits for its ranks.
const rootTimeout = 10 * time.Minute

// failedGrace is the time that a failed meeting stays open for ranks that come
// late.
const failedGrace = 3 * time.Second

// A meeting gathers the ranks that create communicators together: one
// communicator for a unique id, and one for each color for a split.
type meeting struct {
	mu      sync.Mutex
	joiners map[int]joiner
	conns   map[int]net.Conn
	failed  *verdict // the reply to late ranks of a failed meeting
	came    int
}

func newMeeting() *meeting {
	return &meeting{joiners: map[int]joiner{}, conns: map[int]net.Conn{}}
}

// admit adds a rank. It replies to all ranks when they are complete or cannot
// become complete, and reports whether no other rank is expected.
func (g *meeting) admit(conn net.Conn, j *joiner) (over bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.came++
	if g.failed == nil {
		g.failed = g.objection(j)
	}
	if g.failed != nil {
		for _, waiting := range g.conns {
			answer(waiting, g.failed)
		}
		clear(g.conns)
		answer(conn, g.failed)
		return g.came >= j.Ranks
	}
	g.joiners[j.Rank], g.conns[j.Rank] = *j, conn
	if len(g.joiners) < j.Ranks {
		return false
	}
	g.seat()
	return true
}

// fail replies to all ranks that they cannot become complete.
func (g *meeting) fail(v *verdict) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.failed = v
	for _, waiting := range g.conns {
		answer(waiting, v)
	}
	clear(g.conns)
}

func (g *meeting) hasFailed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failed != nil
}

// objection returns the reason why the joiner does not match the others, or nil.
func (g *meeting) objection(j *joiner) *verdict {
	invalid := func(format string, args ...any) *verdict {
		return &verdict{Result: ncclapi.InvalidUsage, Text: fmt.Sprintf(format, args...)}
	}
	for _, other := range g.joiners {
		if other.Note != j.Note && other.Note != "" && j.Note != "" {
			a, b := inOrder(other, *j)
			return invalid("rank %d has %s, rank %d has %s", a.Rank, a.Note, b.Rank, b.Note)
		}
		if other.Ranks != j.Ranks {
			a, b := inOrder(other, *j)
			return invalid("rank %d expects %d ranks in the communicator, rank %d expects %d", a.Rank, a.Ranks, b.Rank, b.Ranks)
		}
	}
	if j.Rank < 0 || j.Rank >= j.Ranks {
		return invalid("rank %d is not one of %d ranks", j.Rank, j.Ranks)
	}
	if other, taken := g.joiners[j.Rank]; taken {
		return invalid("two processes or threads joined as rank %d: one on the device with bus id %s and one on %s",
			j.Rank, other.Member.BusID, j.Member.BusID)
	}
	return nil
}

func inOrder(a, b joiner) (joiner, joiner) {
	if a.Rank > b.Rank {
		a, b = b, a
	}
	return a, b
}

// seat sends each joiner its communicator.
func (g *meeting) seat() {
	colors := map[int][]joiner{}
	for _, j := range g.joiners {
		if j.Color < 0 {
			answer(g.conns[j.Rank], &verdict{Rank: -1})
			continue
		}
		colors[j.Color] = append(colors[j.Color], j)
	}
	for _, seats := range colors {
		slices.SortFunc(seats, func(a, b joiner) int { return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Rank, b.Rank)) })
		v := table(seats)
		for rank, j := range seats {
			v.Rank = rank
			answer(g.conns[j.Rank], v)
		}
	}
	clear(g.conns)
}

// table lists the members, and rejects two of one host that have the same
// device.
func table(seats []joiner) *verdict {
	v := &verdict{}
	first := map[[2]string]int{}
	for rank, j := range seats {
		place := [2]string{j.Member.Host, j.Member.UUID}
		if other, twice := first[place]; twice {
			return &verdict{Result: ncclapi.InvalidUsage,
				Text: fmt.Sprintf("Duplicate GPU: rank %d and rank %d are both on the device with bus id %s", other, rank, j.Member.BusID)}
		}
		first[place] = rank
		v.Members = append(v.Members, j.Member)
		if j.Note != "" {
			v.Note = j.Note
		}
	}
	return v
}

func answer(conn net.Conn, v *verdict) {
	_ = conn.SetWriteDeadline(time.Now().Add(greetTimeout))
	_ = writeMessage(conn, v)
	_ = conn.Close()
}

// close disconnects the waiting ranks.
func (g *meeting) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, conn := range g.conns {
		_ = conn.Close()
	}
	clear(g.conns)
}

// failedRoots has the verdicts of the roots of this process that could not accept connections, by token. Such a root cannot answer the
// ranks of this process either, whose connections it never accepts.
var failedRoots sync.Map

// startRoot opens the meeting of a new unique id. It closes when all ranks have
// joined, after rootTimeout, or when the process exits.
func (l *lib) startRoot() (ncclapi.UniqueID, error) {
	ln, address, err := l.listen()
	if err != nil {
		return ncclapi.UniqueID{}, err
	}
	t := randomToken()
	id, err := makeID(t, address)
	// The reserved descriptor is for a reply if there are no others: ranks of this process would wait for ever.
	reserved, errReserved := os.Open(os.DevNull)
	if err := errors.Join(err, withCure(errReserved)); err != nil {
		_ = ln.Close()
		return id, err
	}
	g := newMeeting()
	over := make(chan struct{})
	var once sync.Once
	end := func() { once.Do(func() { close(over) }) }
	timer := time.AfterFunc(rootTimeout, end)
	a := newAcceptor(ln, t, func(conn net.Conn, h *hello) {
		switch {
		case h.Join == nil || h.Join.Ranks < 1:
			_ = conn.Close()
		case g.admit(conn, h.Join):
			end()
		case g.hasFailed():
			timer.Reset(failedGrace)
		}
	}, func(err error) {
		if !g.hasFailed() {
			v := &verdict{Result: ncclapi.SystemError, Text: fmt.Sprintf("the root cannot accept a connection: %v", err)}
			failedRoots.Store(t, v)
			g.fail(v)
			_ = reserved.Close()
			timer.Reset(failedGrace)
		}
	})
	go func() {
		<-over
		timer.Stop()
		a.close()
		g.close()
		_ = reserved.Close() // perhaps again
	}()
	return id, nil
}

// join joins a meeting and waits for its verdict.
func join(address string, t token, j *joiner) (*verdict, error) {
	conn, err := greet(address, &hello{Token: t, Use: "join", Rank: j.Rank, Join: j})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	v := new(verdict)
	if err := readMessage(conn, v, longestMessage); err != nil {
		if why, failed := failedRoots.Load(t); failed {
			return why.(*verdict), nil
		}
		return v, err
	}
	return v, v.check()
}

// check returns an error if the rank is not one of the members.
func (v *verdict) check() error {
	if v.Result == ncclapi.Success && v.Rank >= len(v.Members) {
		return fmt.Errorf("the reply contains rank %d of %d", v.Rank, len(v.Members))
	}
	return nil
}
