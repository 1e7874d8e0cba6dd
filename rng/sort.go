package rng

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

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

// close frees the memory in the order of the stream.
func (o *sorter) close() error {
	return errors.Join(o.keys[0].Close(), o.keys[1].Close(), o.values[0].Close(), o.values[1].Close(), o.counts.Close())
}

// sort sorts keys[0] by its low bits, with values[0]. Equal keys keep their order.
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
