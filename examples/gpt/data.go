package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A sequence is lines of sums, such as "12+07=019.". The vocabulary is its characters.
const (
	batchSize  = 32 // sequences of a step, over all ranks
	vocabulary = "0123456789+=."
)

// line is the tokens of a sequence, and the one after it.
const line = 40

// sequence writes the tokens of sequence i of a step.
func sequence(to []int32, step, i int) {
	var text strings.Builder
	for l := range line / len("AA+BB=CCC.") {
		at := uint64((step*batchSize+i)*4+l) * 2
		a, b := splitmix64(at)%100, splitmix64(at+1)%100
		fmt.Fprintf(&text, "%02d+%02d=%03d.", a, b, a+b)
	}
	for k, c := range text.String() {
		to[k] = int32(strings.IndexRune(vocabulary, c))
	}
}

// splitmix64 returns number x of a pseudorandom sequence.
func splitmix64(x uint64) uint64 {
	z := x + 0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// share returns the part of n that number i of size parts has. Parts differ by at most one.
func share(n, i, size int) (from, to int) { return n * i / size, n * (i + 1) / size }

// A feed copies a rank's part of each batch to its device, from pinned memory, so that the
// host prepares the next batches while the device works.
type feed struct {
	tokens   memory.Slice[int32] // the batch on the device
	from, to int                 // the rank's sequences of a batch
	slots    [4]slot
	next     int // step
}

// A slot is pinned memory for a batch.
type slot struct {
	tokens *memory.Pinned[int32]
	copied *stream.Event
}

// newFeed returns a feed of the sequences from to to-1.
func newFeed(s *stream.Stream, from, to int) (f *feed, err error) {
	f = &feed{from: from, to: to}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	n := (to - from) * line
	if f.tokens, err = memory.Make[int32](s, n); err != nil {
		return f, err
	}
	for i := range f.slots {
		if f.slots[i].tokens, err = memory.MakePinned[int32](s.Device(), n); err != nil {
			return f, err
		}
		if f.slots[i].copied, err = stream.NewEvent(s.Device(), nil); err != nil {
			return f, err
		}
	}
	return f, nil
}

// load enqueues the copy of the next batch on s. The host waits only if it is as many steps
// ahead of the device as there are slots.
func (f *feed) load(ctx context.Context, s *stream.Stream) error {
	x := &f.slots[f.next%len(f.slots)]
	if err := x.copied.Sync(ctx); err != nil {
		return err
	}
	for i := f.from; i < f.to; i++ {
		sequence(x.tokens.Data()[(i-f.from)*line:], f.next, i)
	}
	f.next++
	if err := f.tokens.CopyFromPinned(s, x.tokens); err != nil {
		return err
	}
	return x.copied.Record(s)
}

func (f *feed) close() error {
	errs := []error{f.tokens.Close()}
	for _, x := range f.slots {
		errs = append(errs, x.tokens.Close(), x.copied.Close())
	}
	return errors.Join(errs...)
}
