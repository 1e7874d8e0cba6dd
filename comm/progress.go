package comm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/nccl"
)

// A RankProgress is how far a rank had come by its own last word.
type RankProgress struct {
	Rank        int
	Collectives uint64        // how many it had told of
	Operation   string        // the last that it issued, such as "ncclAllReduce(8 x float32, sum) as collective 7"; "none"
	Age         time.Duration // since then, by its clock and this one's
	Why         string        // why it is named, such as "is behind"
}

func (p RankProgress) String() string {
	if p.Operation == "none" {
		return fmt.Sprintf("rank %d %s: it has issued nothing", p.Rank, p.Why)
	}
	return fmt.Sprintf("rank %d %s: the last operation that it told of is %s, %v ago", p.Rank, p.Why, p.Operation, p.Age.Round(time.Millisecond))
}

// A CulpritError names the ranks, in other processes, for which a group could not go
// on, with their last operations. It wraps the error that was noticed: a
// *nccl.TimeoutError, or what the Rendezvous says of a lost rank.
type CulpritError struct {
	Culprits []RankProgress
	Err      error
}

func (e *CulpritError) Error() string {
	parts := make([]string, len(e.Culprits))
	for i, p := range e.Culprits {
		parts[i] = p.String()
	}
	return fmt.Sprintf("%s: %v", strings.Join(parts, "; "), e.Err)
}

// Unwrap returns what was noticed.
func (e *CulpritError) Unwrap() error { return e.Err }

// A word is what a rank tells the others about itself.
type word struct {
	Collectives uint64
	Operation   string
	At          time.Time
}

func wordOf(c *nccl.Communicator) word {
	last := c.Progress().Issued
	return word{last.Collective, last.String(), last.Created}
}

// words is how the ranks of a group over processes tell each other how far they have
// come: each one writes it down once in a while, for the time when something fails.
type words struct {
	r      Rendezvous
	prefix string
	world  []int // the ranks of r that are the group's, by rank; nil: all
	end    context.CancelFunc

	finding sync.Mutex // held by failed
	found   error      // what it has found out, or nil
}

// verdict returns what failed has found out; it waits for it if that is under way. A
// rank that was done with it and ended is not to blame.
func (w *words) verdict() error {
	w.finding.Lock()
	defer w.finding.Unlock()
	return w.found
}

// hook is what a communicator calls when it fails: nothing for a group in one
// process, of which NCCL's package knows all ranks.
func (w *words) hook() func(*nccl.Communicator, error) error {
	if w == nil {
		return nil
	}
	return w.failed
}

const (
	// often is how often a rank writes down what has changed.
	often = 500 * time.Millisecond
	// lateWord is how long to wait for the words of all others when something failed.
	lateWord = time.Second
)

// speak begins to write down how far a communicator has come, until end is called.
func (w *words) speak(c *nccl.Communicator) {
	var ctx context.Context
	ctx, w.end = context.WithCancel(w.r.Context())
	go func() {
		tick := time.NewTicker(often)
		defer tick.Stop()
		for said := (word{Operation: "?"}); ; {
			if now := wordOf(c); now.Operation != said.Operation || now.Collectives != said.Collectives {
				if w.say(ctx, c.Rank(), now) == nil {
					said = now
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
}

func (w *words) say(ctx context.Context, rank int, x word) error {
	return put(ctx, w.r, w.key(rank), x)
}

func (w *words) key(rank int) string { return fmt.Sprint(w.prefix, "progress/", rank) }

// all returns the last words of the other ranks. A rank that is not in it has none, or
// the store is gone with the rank that has it.
func (w *words) all(c *nccl.Communicator) map[int]word {
	ctx, cancel := context.WithTimeout(context.Background(), lateWord)
	defer cancel()
	var mu sync.Mutex
	all := map[int]word{}
	var wg sync.WaitGroup
	for rank := range c.Size() {
		if rank == c.Rank() {
			continue
		}
		wg.Go(func() {
			x, err := w.last(ctx, rank)
			if err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			all[rank] = x
		})
	}
	wg.Wait()
	return all
}

// last returns a rank's last word. A Rendezvous that can still be read when a rank is
// lost has a method for it.
func (w *words) last(ctx context.Context, rank int) (x word, err error) {
	read := w.r.Get
	if r, ok := w.r.(interface {
		Last(ctx context.Context, key string) ([]byte, error)
	}); ok {
		read = r.Last
	}
	b, err := read(ctx, w.key(rank))
	if err != nil {
		return x, err
	}
	return x, json.Unmarshal(b, &x)
}

// failed is told of the failure of the communicator and finds out whose fault it is.
func (w *words) failed(c *nccl.Communicator, err error) error {
	t, ok := errors.AsType[*nccl.TimeoutError](err)
	if !ok {
		return err
	}
	w.finding.Lock()
	defer w.finding.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), lateWord)
	defer cancel()
	mine := wordOf(c)
	_ = w.say(ctx, c.Rank(), mine) // the others look for it
	// What a rank did just before is written down by then.
	told := time.NewTimer(2 * often)
	defer told.Stop()
	select {
	case <-told.C:
	case <-w.r.Context().Done(): // another one has found out and ended
	}
	w.found = blame(culprits(t.Operation, mine, w.all(c)), err)
	return w.found
}

// culprits are the ranks that have not issued what this one waits for, or something
// else in its place.
func culprits(op nccl.Operation, mine word, all map[int]word) (list []RankProgress) {
	transfer := strings.Contains(op.Name, "Send") || strings.Contains(op.Name, "Recv")
	for rank, x := range all {
		why := ""
		switch {
		case transfer && rank == op.Root:
			why = "is the peer"
		case transfer:
		case x.Collectives < op.Collective:
			why = "is behind"
		case x.Collectives == mine.Collectives && x.Operation != mine.Operation:
			why = "differs"
		}
		if why != "" {
			list = append(list, x.progress(rank, why))
		}
	}
	return list
}

// lost adds to the loss of a rank what its last word was.
func (w *words) lost(c *nccl.Communicator, err error) error {
	var l interface{ LostRank() int }
	if !errors.As(err, &l) {
		return err
	}
	rank := l.LostRank()
	if w.world != nil {
		rank = slices.Index(w.world, rank)
	}
	x, ok := w.all(c)[rank]
	if !ok {
		return err
	}
	return blame([]RankProgress{x.progress(rank, "was lost")}, err)
}

func (x word) progress(rank int, why string) RankProgress {
	return RankProgress{Rank: rank, Collectives: x.Collectives, Operation: x.Operation, Age: time.Since(x.At), Why: why}
}

func blame(list []RankProgress, err error) error {
	if len(list) == 0 {
		return err
	}
	slices.SortFunc(list, func(a, b RankProgress) int { return a.Rank - b.Rank })
	return &CulpritError{list, err}
}
