package rng

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// mostCategories is the largest number of categories in torch, the integers of a float32.
const mostCategories = 1 << 24

// mostRows is the number of rows of torch's grid: later rows draw from the same threads again.
const mostRows = 65535

// Multinomial fills x with samples of distributions over categories from 0 to categories-1
// (torch.multinomial). weights has a row of categories for each distribution; weights need not
// add up to 1. x has a row for each distribution, and all rows of x have the same length. Without
// replacement, a row has different categories, in the order they are drawn.
//
// torch waits for the device to check the weights. Here the call does not wait: the samples of a
// row with a negative, infinite or NaN weight, or without a positive weight, are -1. A row of x
// without replacement that is longer than the number of positive weights continues with
// categories of weight 0.
func Multinomial[T Float](g *Generator, s *stream.Stream, x memory.Slice[int64], weights memory.Slice[T], categories int, replacement bool) (err error) {
	m := sampling[T]{g: g, x: x, weights: weights, columns: categories}
	if err := m.open(s, replacement); err != nil || x.Len() == 0 {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	switch {
	case m.samples == 1 || !replacement:
		return m.without()
	default:
		return m.with()
	}
}

// A sampling is one call of Multinomial.
type sampling[T Float] struct {
	launcher
	g       *Generator
	x       memory.Slice[int64]
	weights memory.Slice[T]

	rows, columns, samples int
	temporary              [2]memory.Slice[T]   // parts and prefix sums, or exponential numbers
	bad                    memory.Slice[uint32] // rows that are not a distribution
}

const multinomialOp = "rng: multinomial"

// open validates the arguments and allocates memory.
func (m *sampling[T]) open(s *stream.Stream, replacement bool) (err error) {
	if m.g, err = check(multinomialOp, m.g, s, m.x); err != nil {
		return err
	}
	if err := inside.CheckBuffer(multinomialOp, m.weights.Buffer(), m.weights.Len(), s.Device()); err != nil {
		return fmt.Errorf("weights: %w", err)
	}
	n := m.weights.Len()
	if m.columns < 1 || m.columns > mostCategories || n == 0 || n%m.columns != 0 || n > math.MaxInt32 {
		return fmt.Errorf("%s: %d categories in %d weights: want 1 to %d categories, and rows of as many weights, %d at most in all",
			multinomialOp, m.columns, n, mostCategories, math.MaxInt32)
	}
	m.rows = n / m.columns
	if m.x.Len()%m.rows != 0 || m.x.Len() > math.MaxInt32 {
		return fmt.Errorf("%s: %d samples of %d distributions: want the same number of each, %d at most in all", multinomialOp, m.x.Len(), m.rows, math.MaxInt32)
	}
	if m.samples = m.x.Len() / m.rows; !replacement && m.samples > m.columns {
		return fmt.Errorf("%s: %d samples of %d categories without replacement: want at most as many samples as categories", multinomialOp, m.samples, m.columns)
	}
	if err := apart(multinomialOp, regionOf("weights", m.weights), regionOf("the filled slice", m.x), false); err != nil || m.x.Len() == 0 {
		return err
	}
	if m.launcher, err = launcherOf[T](multinomialOp, s, samplesModule); err != nil {
		return err
	}
	var errs [3]error
	m.temporary[0], errs[0] = memory.Make[T](s, n)
	if replacement && m.samples > 1 {
		m.temporary[1], errs[1] = memory.Make[T](s, n)
	}
	m.bad, errs[2] = memory.Make[uint32](s, m.rows)
	if err := errors.Join(errs[:]...); err != nil {
		return fmt.Errorf("%s: %w", multinomialOp, errors.Join(err, m.close()))
	}
	return nil
}

// close frees the temporary memory behind the stream's pending work.
func (m *sampling[T]) close() error {
	return errors.Join(m.temporary[0].Close(), m.temporary[1].Close(), m.bad.Close())
}

func (m *sampling[T]) blocks() int { return min(m.rows, 4*int(m.policy.blocks)) }

// check finds the rows that are not a distribution, and stores the parts of the others at parts.
func (m *sampling[T]) check(parts kernel.Arg) error {
	threads := min((m.columns+31)/32*32, 1024)
	return m.launch("weight_sums", m.blocks(), threads, kernel.Ptr(m.weights), parts, kernel.Ptr(m.bad), count(m.rows), count(m.columns))
}

// with samples with replacement: a uniform number selects the category by the prefix sums.
func (m *sampling[T]) with() error {
	parts, sums := m.temporary[0], m.temporary[1]
	if err := m.check(kernel.Ptr(parts)); err != nil {
		return err
	}
	err := m.launch("weight_scan", m.blocks(), scanThreads(m.rows, m.columns), kernel.Ptr(parts), kernel.Ptr(sums), count(m.rows), count(m.columns))
	if err != nil {
		return err
	}
	at, err := m.g.draw(m.stream, uint64((m.rows-1)/min(m.rows, mostRows)+1)*4)
	if err != nil {
		return fmt.Errorf("%s: %w", multinomialOp, err)
	}
	span := (m.samples + 127) / 128 * 128 // torch's blocks have 128 threads
	return m.each("sample_rows", m.x.Len(), kernel.Ptr(m.x), kernel.Ptr(sums), kernel.Ptr(parts), kernel.Ptr(m.bad),
		count(m.rows), count(m.columns), count(m.samples), count(span), kernel.Scalar(at.seed), kernel.Scalar(at.offset), at.launch)
}

// scanThreads returns the number of threads that torch.cumsum has for a row.
func scanThreads(rows, columns int) int {
	log := func(n int) int { return bits.Len(uint(n - 1)) }
	return 1 << min(max((9+log(columns)-log(rows))/2, 4), 9)
}

// without samples without replacement, or one sample: the categories with the largest quotients
// of weight and exponentially distributed number.
func (m *sampling[T]) without() error {
	waits := m.temporary[0]
	if err := Exponential(m.g, m.stream, waits, 1); err != nil {
		return err
	}
	if err := m.check(kernel.Address(0)); err != nil {
		return err
	}
	if m.samples == 1 {
		return m.launch("sample_best", m.blocks(), block, kernel.Ptr(m.x), kernel.Ptr(m.weights), kernel.Ptr(waits), kernel.Ptr(m.bad), count(m.rows), count(m.columns))
	}
	return m.sorted(waits)
}

// sorted stores the first categories of each row of sorted quotients.
func (m *sampling[T]) sorted(waits memory.Slice[T]) (err error) {
	l, err := launcherOf[int64](multinomialOp, m.stream, sortModule)
	if err != nil {
		return err
	}
	n := m.weights.Len()
	o, err := newSorter(l, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, o.close()) }()
	if err := m.each("sample_keys", n, kernel.Ptr(o.keys[0]), kernel.Ptr(m.weights), kernel.Ptr(waits), count(n)); err != nil {
		return err
	}
	width := 32
	if formatOf[T]().wide {
		width = 64
	}
	if err := o.sort(width); err != nil {
		return err
	}
	if m.rows > 1 {
		if err := m.each("sample_row_keys", n, kernel.Ptr(o.keys[0]), kernel.Ptr(o.values[0]), count(n), count(m.columns)); err != nil {
			return err
		}
		if err := o.sort(bits.Len(uint(m.rows - 1))); err != nil {
			return err
		}
	}
	return m.each("sample_first", m.x.Len(), kernel.Ptr(m.x), kernel.Ptr(o.values[0]), kernel.Ptr(m.bad), count(m.rows), count(m.columns), count(m.samples))
}

// Permutation fills x with the numbers from 0 to x.Len()-1 in random order
// (torch.randperm). T must be able to represent all of them. It needs 24 bytes
// of temporary memory for each element, from the caching allocator.
func Permutation[T Number](g *Generator, s *stream.Stream, x memory.Slice[T]) (err error) {
	const op = "rng: permutation"
	g, err = check(op, g, s, x)
	if err != nil || x.Len() == 0 {
		return err
	}
	n, f := x.Len(), formatOf[T]()
	if !f.holds(int64(n-1)) || f.IsFloat() && n > 1<<f.Digits+1 {
		return fmt.Errorf("%s: %d elements: %s does not represent all numbers below", op, n, f.dtype)
	}
	if n > math.MaxInt32 {
		return fmt.Errorf("%s: %d elements: want at most %d", op, n, math.MaxInt32)
	}
	l, err := launcherOf[T](op, s, sortModule)
	if err != nil {
		return err
	}
	o, err := newSorter(l, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, o.close()) }()
	bits := keyBits(n)
	if err := o.randomKeys(g, bits); err != nil {
		return err
	}
	if err := o.sort(bits); err != nil {
		return err
	}
	at, err := g.draw(s, uint64(n+3)&^3)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if err := l.each("permutation_ties", n, kernel.Ptr(o.keys[0]), kernel.Ptr(o.values[0]), count(n),
		kernel.Scalar(at.seed), kernel.Scalar(at.offset), at.launch); err != nil {
		return err
	}
	return l.each("permutation_store", n, kernel.Ptr(x), kernel.Ptr(o.values[0]), count(n))
}

// keyBits returns the length of random keys in bits, as torch chooses it: n keys are all
// different with a probability of at least 0.9.
func keyBits(n int) int {
	v := float64(n)
	return min(64, int(math.Ceil(math.Log2(v-(6*v*v+1)/(12*math.Log(0.9))))))
}

// randomKeys draws the keys: torch draws integers of 32 bits if they suffice.
func (o *sorter) randomKeys(g *Generator, bits int) (err error) {
	n := o.keys[0].Len()
	mask := kernel.Scalar(^uint64(0) >> (64 - bits))
	if bits > 32 {
		keys, err := memory.View[int64](o.keys[0].Buffer(), 0, n)
		if err != nil {
			return err
		}
		if err := RandomFromTo(g, o.stream, keys, math.MinInt64, math.MaxInt64); err != nil {
			return err
		}
		return o.each("permutation_keys", n, kernel.Ptr(o.keys[0]), kernel.Address(0), count(n), mask)
	}
	narrow, err := memory.View[int32](o.keys[1].Buffer(), 0, n)
	if err != nil {
		return err
	}
	if err := RandomFromTo(g, o.stream, narrow, math.MinInt32, math.MaxInt32); err != nil {
		return err
	}
	return o.each("permutation_keys", n, kernel.Ptr(o.keys[0]), kernel.Ptr(narrow), count(n), mask)
}

// These constants must agree with sort.cu.
const (
	digits    = 256
	digitBits = 8
	tile      = 4096
)

// mostParts bounds the number of blocks of the sort.
const mostParts = 1024

// A sorter sorts 64-bit keys on the stream of a launcher. The values are the indexes of the keys
// before.
type sorter struct {
	launcher
	keys    [2]memory.Slice[uint64] // the keys, and a copy
	values  [2]memory.Slice[uint32]
	counts  memory.Slice[uint32] // of each digit in each block; then of each digit
	blocks  int
	part    int  // keys of a block
	indexed bool // values are set
}

func newSorter(l launcher, n int) (*sorter, error) {
	o := &sorter{launcher: l}
	o.part = max((n+mostParts-1)/mostParts, 1)
	o.part = (o.part + tile - 1) / tile * tile
	o.blocks = max((n+o.part-1)/o.part, 1)
	var errs [5]error
	for i := range 2 {
		o.keys[i], errs[2*i] = memory.Make[uint64](l.stream, n)
		o.values[i], errs[2*i+1] = memory.Make[uint32](l.stream, n)
	}
	o.counts, errs[4] = memory.Make[uint32](l.stream, digits*(o.blocks+1))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("%s: %w", l.op, errors.Join(err, o.close()))
	}
	return o, nil
}

// close frees the memory behind the stream's pending work.
func (o *sorter) close() error {
	return errors.Join(o.keys[0].Close(), o.keys[1].Close(), o.values[0].Close(), o.values[1].Close(), o.counts.Close())
}

// sort sorts keys[0] by its low bits, with values[0], and keeps the order of
// equal keys.
func (o *sorter) sort(bits int) error {
	n := count(o.keys[0].Len())
	part := count(o.part)
	counts, totals := o.counts.Slice(0, digits*o.blocks), o.counts.Slice(digits*o.blocks, digits*(o.blocks+1))
	for shift := 0; shift < bits; shift += digitBits {
		values := kernel.Address(0)
		if o.indexed {
			values = kernel.Ptr(o.values[0])
		}
		s := kernel.Scalar(uint32(shift))
		err := errors.Join(
			o.launch("sort_count", o.blocks, digits, kernel.Ptr(o.keys[0]), kernel.Ptr(counts), n, part, s),
			o.launch("sort_scan", digits, digits, kernel.Ptr(counts), kernel.Ptr(totals), kernel.Scalar(uint32(o.blocks))),
			o.launch("sort_scatter", o.blocks, digits, kernel.Ptr(o.keys[0]), values, kernel.Ptr(o.keys[1]), kernel.Ptr(o.values[1]),
				kernel.Ptr(counts), kernel.Ptr(totals), n, part, s))
		if err != nil {
			return fmt.Errorf("%s: sort: %w", o.op, err)
		}
		o.keys[0], o.keys[1] = o.keys[1], o.keys[0]
		o.values[0], o.values[1] = o.values[1], o.values[0]
		o.indexed = true
	}
	return nil
}
