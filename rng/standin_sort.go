package rng

import (
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below are the Go implementation of sort.cu for virtual devices.

// sortKernels returns the kernels of sort.cu for an element type.
func sortKernels[T memory.Element]() []kernel.Def {
	p, u32, u64 := kernel.Pointer, kernel.U32, kernel.U64
	return []kernel.Def{
		{Name: "sort_count", Params: []kernel.Param{p, p, u64, u64, u32}, Go: countStandIn},
		{Name: "sort_scan", Params: []kernel.Param{p, p, u32}, Go: scanStandIn},
		{Name: "sort_scatter", Params: []kernel.Param{p, p, p, p, p, p, u64, u64, u32}, Go: scatterStandIn},
		{Name: "permutation_keys", Params: []kernel.Param{p, p, u64, u64}, Go: keysStandIn},
		{Name: "permutation_ties", Params: []kernel.Param{p, p, u64, u64, u64, p}, Go: tiesStandIn},
		{Name: "permutation_store", Params: []kernel.Param{p, p, u64}, Go: func(c *kernel.Call) {
			n, of := int(kernel.Get[uint64](c, 2)), counter[T]()
			out := kernel.Update[T](c, 0, n)
			for i, v := range kernel.Read[uint32](c, 1, n) {
				out[i] = of(int64(v))
			}
		}},
	}
}

func digitOf(key uint64, shift uint32) int { return int(key>>shift) % digits }

func countStandIn(c *kernel.Call) {
	n, part, shift := int(kernel.Get[uint64](c, 2)), int(kernel.Get[uint64](c, 3)), kernel.Get[uint32](c, 4)
	blocks := int(c.Grid().Blocks[0])
	keys, counts := kernel.Read[uint64](c, 0, n), kernel.Update[uint32](c, 1, digits*blocks)
	clear(counts)
	for i, key := range keys {
		counts[digitOf(key, shift)*blocks+i/part]++
	}
}

func scanStandIn(c *kernel.Call) {
	blocks := int(kernel.Get[uint32](c, 2))
	counts, totals := kernel.Update[uint32](c, 0, digits*blocks), kernel.Update[uint32](c, 1, digits)
	for d := range digits {
		sum := uint32(0)
		for b := range blocks {
			at := &counts[d*blocks+b]
			*at, sum = sum, sum+*at
		}
		totals[d] = sum
	}
}

func scatterStandIn(c *kernel.Call) {
	n, part, shift := int(kernel.Get[uint64](c, 6)), int(kernel.Get[uint64](c, 7)), kernel.Get[uint32](c, 8)
	blocks := int(c.Grid().Blocks[0])
	keys, keysOut, valuesOut := kernel.Read[uint64](c, 0, n), kernel.Update[uint64](c, 2, n), kernel.Update[uint32](c, 3, n)
	counts, totals := kernel.Read[uint32](c, 4, digits*blocks), kernel.Read[uint32](c, 5, digits)
	var values []uint32
	if c.Address(1) != 0 {
		values = kernel.Read[uint32](c, 1, n)
	}
	base := make([]uint32, digits*blocks)
	sum := uint32(0)
	for d := range digits {
		for b := range blocks {
			base[d*blocks+b] = sum + counts[d*blocks+b]
		}
		sum += totals[d]
	}
	for i, key := range keys {
		to := &base[digitOf(key, shift)*blocks+i/part]
		keysOut[*to], valuesOut[*to] = key, uint32(i)
		if values != nil {
			valuesOut[*to] = values[i]
		}
		*to++
	}
}

func keysStandIn(c *kernel.Call) {
	n, mask := int(kernel.Get[uint64](c, 2)), kernel.Get[uint64](c, 3)
	keys := kernel.Update[uint64](c, 0, n)
	if c.Address(1) == 0 {
		for i := range keys {
			keys[i] = (keys[i] ^ 1<<63) & mask
		}
		return
	}
	for i, v := range kernel.Read[int32](c, 1, n) {
		keys[i] = uint64(uint32(v)^1<<31) & mask
	}
}

func tiesStandIn(c *kernel.Call) {
	n := int(kernel.Get[uint64](c, 2))
	keys, values := kernel.Read[uint64](c, 0, n), kernel.Update[uint32](c, 1, n)
	seed, offset := drawn(c, 3)
	for first := 0; first < n; {
		end := first + 1
		for end < n && keys[end] == keys[first] {
			end++
		}
		s := &sequence{seed: seed, offset: offset, thread: uint32(first)}
		for k := end - first - 1; k > 0; k-- {
			other := int(s.next() % uint32(k+1))
			values[first+k], values[first+other] = values[first+other], values[first+k]
		}
		first = end
	}
}
