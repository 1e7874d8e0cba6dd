package fabric

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/gochorus/chorus/memory"
)

// An Exchange gives each rank what all of them have said, by rank. Open calls it
// several times, in the same order on all ranks.
type Exchange func(ctx context.Context, mine []byte) ([][]byte, error)

// A card is what a rank tells the others of itself.
type card struct {
	Rank, Ranks, Bytes int
	Host, Process      string // in which the rank is
	GPU                string // its UUID
	Blocks             int    // that it has multiprocessors for
	Scratch            uint64 // what scratches has it as, in its process
	Epoch              uint64 // before the first operation, where all take rank 0's
}

// anyEpoch is an epoch to begin after, which no data have by chance: TwoShot leaves those
// of its operation where later ones look for packets of their epoch. Kernels keep it
// times ticks.
func anyEpoch() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // it does not fail
	return binary.LittleEndian.Uint64(b[:])/(2*ticks) | 1<<32
}

// A word is a value that a rank tells the others, or why it has none.
type word[T any] struct {
	verdict
	Value T
}

// confer exchanges values. If a rank has failed before all of them get an error, that
// rank its own.
func confer[T any](ctx context.Context, exchange Exchange, ranks int, mine T, failed error) ([]T, error) {
	text, err := json.Marshal(word[T]{verdictOf(failed), mine})
	if err != nil {
		return nil, err
	}
	all, err := exchange(ctx, text)
	switch {
	case err != nil:
		return nil, errors.Join(failed, fmt.Errorf("exchange: %w", err))
	case failed != nil:
		return nil, failed
	case len(all) != ranks:
		return nil, fmt.Errorf("exchange: it gave what %d ranks have said: want %d", len(all), ranks)
	}
	values := make([]T, ranks)
	for i := range values {
		var said word[T]
		if err := json.Unmarshal(all[i], &said); err != nil {
			return nil, fmt.Errorf("exchange: what rank %d has said: %w", i, err)
		}
		if err := said.err(i); err != nil {
			return nil, err
		}
		values[i] = said.Value
	}
	return values, nil
}

// Confer returns on all ranks an error that names the first one of those that have failed,
// and on these their own. That something is not supported is so on all of them.
func Confer(ctx context.Context, exchange Exchange, ranks int, failed error) error {
	_, err := confer(ctx, exchange, ranks, true, failed)
	return err
}

// agree finds why the ranks cannot be one group, alike on all of them.
func agree(cards []card) error {
	gpus := map[string]int{}
	for i := range cards {
		c := &cards[i]
		other, twice := gpus[c.GPU]
		switch first := &cards[0]; {
		case c.Rank != i:
			return fmt.Errorf("the exchange has rank %d in the place of rank %d", c.Rank, i)
		case c.Ranks != first.Ranks || c.Bytes != first.Bytes:
			return fmt.Errorf("rank %d wants %d ranks and %d bytes, rank 0 wants %d and %d: want the same on all",
				i, c.Ranks, c.Bytes, first.Ranks, first.Bytes)
		case c.Host != first.Host:
			return unsupported("all ranks on one host", fmt.Sprintf("rank %d on another than rank 0", i))
		case twice:
			return unsupported("a GPU for each rank", fmt.Sprintf("one for ranks %d and %d", other, i))
		}
		gpus[c.GPU] = i
	}
	return nil
}

// here names the host and the process.
var here = sync.OnceValues(func() (host, process string) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		id = nil
	}
	name, _ := os.Hostname() // without a name or an id the other says enough
	return strings.TrimSpace(string(id)) + "/" + name, fmt.Sprintf("%d/%s", os.Getpid(), rand.Text())
})

// Host names the host that this process is on, alike in all processes of it and in none
// of another.
func Host() string {
	host, _ := here()
	return host
}

// A scratch is the scratch memory of a rank. That of a rank of this process stays until
// the last rank that has it is closed, since others write to it as long as they work.
type scratch struct {
	id    uint64 // 0 for that of another process
	words memory.Slice[uint64]
	uses  int // scratches.mu guards it
}

var scratches struct {
	mu   sync.Mutex
	last uint64
	open map[uint64]*scratch
}

// newScratch registers memory, with one use of it.
func newScratch(words memory.Slice[uint64]) *scratch {
	t := &scratches
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	x := &scratch{id: t.last, words: words, uses: 1}
	if t.open == nil {
		t.open = map[uint64]*scratch{}
	}
	t.open[x.id] = x
	return x
}

// findScratch returns scratch memory that another rank of this process has registered,
// with one use more.
func findScratch(id uint64) (*scratch, error) {
	t := &scratches
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.open[id]
	if x == nil {
		return nil, errors.New("its scratch memory is gone")
	}
	x.uses++
	return x, nil
}

// close ends one use.
func (x *scratch) close() error {
	if x == nil {
		return nil
	}
	if x.id == 0 {
		return x.words.Close()
	}
	t := &scratches
	t.mu.Lock()
	x.uses--
	last := x.uses == 0
	if last {
		delete(t.open, x.id)
	}
	t.mu.Unlock()
	if !last {
		return nil
	}
	return x.words.Close()
}
