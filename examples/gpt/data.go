package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A source returns the function that writes the tokens of sequence i of all sequences of a
// training: those of the first step, of the second step, and so on.
type source func(p *preset) func(to []int32, i int)

// The vocabulary of sums is the characters of its text.
const vocabulary = "0123456789+=."

// sums is lines of sums, such as "12+07=019.".
func sums(*preset) func(to []int32, i int) {
	return func(to []int32, i int) {
		var text strings.Builder
		for line := range 4 {
			at := uint64(i*4+line) * 2
			a, b := splitmix64(at)%100, splitmix64(at+1)%100
			fmt.Fprintf(&text, "%02d+%02d=%03d.", a, b, a+b)
		}
		for k, c := range text.String() {
			to[k] = int32(strings.IndexRune(vocabulary, c))
		}
	}
}

// splitmix64 returns number x of a pseudorandom sequence.
func splitmix64(x uint64) uint64 {
	z := x + 0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// chain is a Markov chain, the same in each run. Three of four tokens are one of four successors
// of the token before, and the others have about Zipf's frequencies.
func chain(p *preset) func(to []int32, i int) {
	text, last := make([]uint16, 1<<20), 0
	for i := range text {
		r := splitmix64(uint64(i))
		if r%4 != 0 {
			last = (last*31 + int(r>>8%4) + 7) % p.Vocab
		} else {
			last = int(math.Pow(float64(p.Vocab), float64(r>>11)/(1<<53))) - 1
		}
		text[i] = uint16(last)
	}
	return p.slices(text)
}

// slices returns the source that cuts a text. Sequences overlap by a token,
// which the first predicts and the second reads. At the end of the text, the
// source begins anew.
func (p *preset) slices(text []uint16) func(to []int32, i int) {
	usable := len(text) - p.Context // places where a sequence can begin
	return func(to []int32, i int) {
		at := i * p.Context % usable
		for k, x := range text[at : at+p.Line()] {
			to[k] = int32(x)
		}
	}
}

// readText returns the source of a file of tokens: little-endian numbers of 16 bits.
func (p *preset) readText(file string) (func(to []int32, i int), error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if len(b)%2 != 0 || len(b) < 2*p.Line() {
		return nil, fmt.Errorf("data %s: %d bytes: want tokens of 2 bytes, at least %d", file, len(b), p.Line())
	}
	text := make([]uint16, len(b)/2)
	for i := range text {
		if text[i] = binary.LittleEndian.Uint16(b[2*i:]); int(text[i]) >= p.Vocab {
			return nil, fmt.Errorf("data %s: token %d at byte %d: want less than %d, the size of the vocabulary", file, text[i], 2*i, p.Vocab)
		}
	}
	return p.slices(text), nil
}

// share returns the part of n that number i of size parts has, where parts
// differ by at most one.
func share(n, i, size int) (from, to int) { return n * i / size, n * (i + 1) / size }

// A feed copies a rank's part of each batch to its device, from pinned memory, so that the
// host prepares the next batches while the device works.
type feed struct {
	text     func(to []int32, i int)
	line     int                 // tokens of a sequence, and the one after it
	batch    int                 // sequences of a step, over all ranks
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

// open allocates the memory, after the fields text, line, batch, from and to
// are set.
func (f *feed) open(s *stream.Stream) (err error) {
	n := (f.to - f.from) * f.line
	if f.tokens, err = memory.Make[int32](s, n); err != nil {
		return err
	}
	for i := range f.slots {
		if f.slots[i].tokens, err = memory.MakePinned[int32](s.Device(), n); err != nil {
			return err
		}
		if f.slots[i].copied, err = stream.NewEvent(s.Device(), nil); err != nil {
			return err
		}
	}
	return nil
}

// load enqueues the copy of the next batch on s. The host waits only if it is as many steps
// ahead of the device as there are slots.
func (f *feed) load(ctx context.Context, s *stream.Stream) error {
	x := &f.slots[f.next%len(f.slots)]
	if err := x.copied.Sync(ctx); err != nil {
		return err
	}
	for i := f.from; i < f.to; i++ {
		f.text(x.tokens.Data()[(i-f.from)*f.line:][:f.line], f.next*f.batch+i)
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
