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

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/plain"
	"github.com/gochorus/chorus/memory"
)

// An Exchange sends each rank's message to all ranks and returns all messages, by rank.
// Open calls it several times, in the same order on all ranks.
type Exchange func(ctx context.Context, mine []byte) ([][]byte, error)

// A card describes a rank to the other ranks.
type card struct {
	Rank, Ranks, Bytes int
	Host, Process      string // of the rank
	GPU                string // its UUID
	Shares             bool   // whether it may share its GPU with other ranks
	Blocks             int    // number of blocks that its multiprocessors can run at once
	Scratch            uint64 // id of its scratch memory in its process
	Epoch              uint64 // the initial epoch; all ranks use rank 0's
}

// anyEpoch returns a random initial epoch, so that data is unlikely to contain it: TwoShot
// leaves data where later operations look for packets of their epoch. Kernels store it
// multiplied by ticks.
func anyEpoch() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails
	return binary.LittleEndian.Uint64(b[:])/(2*ticks) | 1<<32
}

// A word is a value of a rank for the other ranks, or its failure.
type word[T any] struct {
	verdict
	Value T
}

// confer exchanges values. If a rank has failed, that rank returns its own error and the
// others return an error that names it.
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
		plain.Record(&said)
		if err := said.err(i); err != nil {
			return nil, err
		}
		values[i] = said.Value
	}
	return values, nil
}

// Confer returns an error on all ranks if a rank has failed. The failed ranks get their own
// error, and the others get an error that names the first failed rank. All ranks agree on
// whether it matches errors.ErrUnsupported.
func Confer(ctx context.Context, exchange Exchange, ranks int, failed error) error {
	_, err := confer(ctx, exchange, ranks, true, failed)
	return err
}

// agree returns the reason why the ranks cannot form a group, the same on all ranks.
func agree(cards []card) error {
	gpus := map[string]int{} // the first rank on each GPU
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
		case c.Shares != first.Shares:
			return fmt.Errorf("ranks 0 and %d differ in %s: set it alike for all", i, env.ShareGPUs.Name)
		case twice && !c.Shares:
			return unsupported("a GPU for each rank, or "+env.ShareGPUs.Name+"=yes for tests", fmt.Sprintf("one for ranks %d and %d", other, i))
		case !twice:
			gpus[c.GPU] = i
		}
	}
	return nil
}

// blocksOf returns the maximum number of blocks of a kernel, the same on all ranks. A kernel
// waits for the kernels of the other ranks, so the kernels of all ranks on one GPU must be
// resident at once. They leave some multiprocessors to copies and other kernels.
func blocksOf(cards []card) int {
	ranks := map[string]int{}
	for i := range cards {
		ranks[cards[i].GPU]++
	}
	blocks := maxBlocks
	for i := range cards {
		parts := 1
		if n := ranks[cards[i].GPU]; n > 1 {
			parts = n + 1
		}
		blocks = min(blocks, max(cards[i].Blocks/parts, 1))
	}
	return blocks
}

// here returns identifiers of the host and the process.
var here = sync.OnceValues(func() (host, process string) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		id = nil
	}
	name, _ := os.Hostname() // without the name, the other identifiers are sufficient
	return strings.TrimSpace(string(id)) + "/" + name, fmt.Sprintf("%d/%s", os.Getpid(), rand.Text())
})

// Host returns an identifier of this host: the same in all its processes, and different on
// other hosts.
func Host() string {
	host, _ := here()
	return host
}

// A scratch is the scratch memory of a rank. If the rank is in this process, its memory
// stays until all ranks that use it are closed, because they write to it.
type scratch struct {
	id    uint64 // 0 for memory of another process
	words memory.Slice[uint64]
	uses  int // guarded by scratches.mu

	unaccount func() // ends the account of the memory
}

var scratches struct {
	mu   sync.Mutex
	last uint64
	open map[uint64]*scratch
}

// newScratch registers memory, with one use.
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
	use := mem.Use{Owner: "memory of Chorus kernels for collectives", Bytes: uint64(words.Bytes()), Inside: true}
	x.unaccount = mem.Account(words.Device(), func() (mem.Use, bool) { return use, true })
	return x
}

// findScratch returns scratch memory that another rank of this process has registered, and
// adds a use.
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
	x.unaccount()
	return x.words.Close()
}
