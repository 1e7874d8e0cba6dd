package rng

import (
	"errors"
	"fmt"
	"math"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Permutation fills x with the numbers from 0 to x.Len()-1 in random order (torch.randperm). T
// must represent x.Len()-1. It needs 24 bytes of temporary memory for each element, from the
// caching allocator.
func Permutation[T Number](g *Generator, s *stream.Stream, x memory.Slice[T]) (err error) {
	const op = "rng: permutation"
	g, err = check(op, g, s, x)
	if err != nil || x.Len() == 0 {
		return err
	}
	n, f := x.Len(), formatOf[T]()
	if !f.holds(int64(n-1)) || f.digits > 0 && n > 1<<f.digits+1 {
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
