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

// A RankProgress is how far a rank had come by its own last word. A rank tells of what
// it does twice a second, so it may have come further by the time at which it ended.
type RankProgress struct {
	Rank        int           // in the group
	World       int           // in the Rendezvous; another number than Rank where the group was split
	Collectives uint64        // how many it had told of
	Operation   string        // the last that it told of, such as "ncclAllReduce(8 x float32, sum) as collective 7"; "none"
	Age         time.Duration // since that was issued, by its clock and this one's
	Told        time.Duration // since its last word, by its clock and this one's
	Why         string        // why it is named, such as "is behind" or "carries collective 7 out by NCCL and this rank by own kernels, ..."
	End         string        // how it ended by its own word, such as "closed the group"; "" if it told of no end
}

func (p RankProgress) String() string {
	who := fmt.Sprint("rank ", p.Rank)
	if p.World != p.Rank {
		who += fmt.Sprintf(" (rank %d of the world)", p.World)
	}
	text := fmt.Sprintf("%s %s: the last operation that it told of is %s, %v ago", who, p.Why, p.Operation, p.Age.Round(time.Millisecond))
	if p.Operation == "none" {
		text = fmt.Sprintf("%s %s: it had told of no operation", who, p.Why)
	}
	text += fmt.Sprintf(" (as of %v ago)", p.Told.Round(time.Millisecond))
	if p.End != "" {
		text += "; by then it had " + p.End
	}
	return text
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
	At          time.Time // when that was issued
	Told        time.Time
	End         string
	First       uint64         // the number of the first collective of Ways
	Ways        []nccl.Service // by which the last collectives are carried out
}

var wayNames = map[nccl.Service]string{
	nccl.Nothing: "NCCL", nccl.Instead: "own kernels", nccl.Lending: "NCCL's windows", nccl.Whole: "copy engines",
}

// toldWays is of how many collectives a rank tells how they are carried out.
const toldWays = 64

func wordOf(c *nccl.Communicator) word {
	last := c.Progress().Issued
	x := word{Collectives: last.Collective, Operation: last.String(), At: last.Created}
	x.First, x.Ways = c.Services(toldWays)
	return x
}

// way returns by what a collective is carried out, if the word tells.
func (x *word) way(collective uint64) (s nccl.Service, told bool) {
	if collective < x.First || collective-x.First >= uint64(len(x.Ways)) {
		return 0, false
	}
	return x.Ways[collective-x.First], true
}

// otherWay says which is the first collective from one on that another rank carries out
// otherwise than this one, or "": both wait for what does not come.
func (x *word) otherWay(from uint64, other *word) string {
	for n := max(from, x.First, other.First); ; n++ {
		mine, here := x.way(n)
		theirs, there := other.way(n)
		switch {
		case !here || !there:
			return ""
		case n == x.Collectives && n == other.Collectives && x.Operation != other.Operation:
			return "" // they are two operations, which says more
		case mine != theirs:
			return fmt.Sprintf("carries collective %d out by %s and this rank by %s, as for another stream than the group's or with others in one Group",
				n, wayNames[theirs], wayNames[mine])
		}
	}
}

// words is how the ranks of a group over processes tell each other how far they have
// come: each one writes it down once in a while, for the time when something fails.
type words struct {
	r      Rendezvous
	prefix string
	hosts  []int // on which the ranks of r are
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
	// lastWord is how long a rank that ends may take to say so.
	lastWord = 250 * time.Millisecond
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

// farewell writes down how far a rank has come and how it ends, which may be now.
func (w *words) farewell(c *nccl.Communicator, end string) {
	w.end()
	if w.r.Context().Err() != nil {
		return // the others know of an end already
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastWord)
	defer cancel()
	x := wordOf(c)
	x.End = end
	_ = w.say(ctx, c.Rank(), x) // whoever misses it has an older one
}

// endBy is what a rank tells of a failure of its own: one that it has because of
// another rank would only hide that one.
func endBy(cause error) string {
	var lost interface{ LostRank() int }
	_, culprits := errors.AsType[*CulpritError](cause)
	if culprits || errors.As(cause, &lost) || errors.Is(cause, nccl.ErrorRemote) {
		return ""
	}
	return "failed: " + cause.Error()
}

func (w *words) say(ctx context.Context, rank int, x word) error {
	x.Told = time.Now()
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
	t, late := errors.AsType[*nccl.TimeoutError](err)
	refused, inside := errors.AsType[*nccl.Error](err)
	if !late && (!inside || refused.Async || refused.Err == nccl.ErrorRemote) {
		return err // of which the loss of a rank may tell more
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
	if late {
		w.found = w.blame(culprits(t.Operation, mine, w.all(c)), err)
		return w.found
	}
	list := mismatched(nccl.Operation{Name: refused.Op, Collective: mine.Collectives}, mine, w.all(c))
	if len(list) > 0 {
		w.found = w.blame(list, err)
		return w.found
	}
	return err
}

// mismatched are those of the culprits that cannot do what this rank has issued. NCCL has
// failed within that, perhaps because another rank gave up waiting for it; that one is
// behind is no reason, since nobody has waited for it, and transfers have no number.
func mismatched(op nccl.Operation, mine word, all map[int]word) []RankProgress {
	return slices.DeleteFunc(culprits(op, mine, all), func(p RankProgress) bool {
		return p.Why == behind || p.Why == peer || p.Why == differs && (isTransfer(mine.Operation) || isTransfer(p.Operation))
	})
}

func isTransfer(operation string) bool {
	return strings.Contains(operation, "Send") || strings.Contains(operation, "Recv")
}

// Why a rank is a culprit, if it is not for the way in which it carries an operation out.
const (
	behind  = "is behind"
	peer    = "is the peer"
	differs = "differs"
)

// culprits are the ranks that have not issued what this one waits for, or something
// else in its place, or carry it out in another way.
func culprits(op nccl.Operation, mine word, all map[int]word) (list []RankProgress) {
	transfer := isTransfer(op.Name)
	waited := awaited(op.Collective, mine.Collectives, all)
	for rank, x := range all {
		why := ""
		if !transfer {
			why = mine.otherWay(op.Collective, &x)
		}
		switch {
		case transfer && rank == op.Root:
			why = peer
		case transfer || why != "":
		case x.Collectives < waited:
			why = behind
		case x.Collectives == mine.Collectives && x.Operation != mine.Operation:
			why = differs
		}
		if why != "" {
			list = append(list, x.progress(rank, why))
		}
	}
	return list
}

// awaited is the collective that this rank waits for, where the first that is not
// known to have completed is op. If all ranks have issued that, it is done or on its
// way, and a later one of the last that this rank issued hangs: the first that another
// rank has not.
func awaited(op, last uint64, all map[int]word) uint64 {
	fewest := last
	for _, x := range all {
		fewest = min(fewest, x.Collectives)
	}
	return max(op, min(fewest+1, last))
}

// left is the rank that was the first to tell of its end, if any: the others may have
// ended because of it.
func left(all map[int]word) (list []RankProgress) {
	first := -1
	for rank, x := range all {
		if x.End != "" && (first < 0 || x.Told.Before(all[first].Told)) {
			first = rank
		}
	}
	if first < 0 {
		return nil
	}
	return []RankProgress{all[first].progress(first, "has left")}
}

// gone are a rank that was lost and the one that has left though this one waits for it: the
// lost one may have ended because of that.
func gone(lost int, mine word, all map[int]word) []RankProgress {
	list := slices.DeleteFunc(left(all), func(p RankProgress) bool { return p.Rank == lost || p.Collectives >= mine.Collectives })
	if x, ok := all[lost]; ok {
		list = append(list, x.progress(lost, "was lost"))
	}
	return list
}

// lost adds to the loss of a rank what its last word was, and to a broken connection
// that of the rank that has left.
func (w *words) lost(c *nccl.Communicator, err error) error {
	var l interface{ LostRank() int }
	if !errors.As(err, &l) {
		if errors.Is(err, nccl.ErrorRemote) {
			return w.blame(left(w.all(c)), err)
		}
		return err
	}
	rank := l.LostRank()
	if w.world != nil {
		rank = slices.Index(w.world, rank)
	}
	return w.blame(gone(rank, wordOf(c), w.all(c)), err)
}

func (x word) progress(rank int, why string) RankProgress {
	return RankProgress{Rank: rank, Collectives: x.Collectives, Operation: x.Operation, Age: time.Since(x.At), Told: time.Since(x.Told), Why: why, End: x.End}
}

func (w *words) blame(list []RankProgress, err error) error {
	if len(list) == 0 {
		return err
	}
	for i := range list {
		if list[i].World = list[i].Rank; w.world != nil {
			list[i].World = w.world[list[i].Rank]
		}
	}
	slices.SortFunc(list, func(a, b RankProgress) int { return a.Rank - b.Rank })
	return &CulpritError{list, err}
}
