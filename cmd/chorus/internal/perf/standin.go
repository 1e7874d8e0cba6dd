package perf

import (
	"github.com/gochorus/chorus/kernel"
)

// standIns are the Go implementations of pattern.cu's kernels, by element size in bytes.
var standIns = map[int]func() (fill, check func(*kernel.Call)){
	1: standInsOf[uint8], 2: standInsOf[uint16], 4: standInsOf[uint32], 8: standInsOf[uint64],
}

// codeOf is the function code of pattern.cu.
func codeOf(i uint64, rank, seed, codes, limit uint32) uint32 {
	if rank >= limit {
		return 0
	}
	h := uint32(i)*0x9E3779B1 ^ uint32(i>>32) ^ rank*0x85EBCA77 ^ seed
	h ^= h >> 16
	h *= 0x7FEB352D
	h ^= h >> 15
	h *= 0x846CA68B
	h ^= h >> 16
	return h % codes
}

// tableLen returns the largest possible length of a table of codes.
func tableLen(codes, ranks, weights uint32) int { return int((codes-1)*ranks<<weights) + 1 }

func standInsOf[W uint8 | uint16 | uint32 | uint64]() (fill, check func(*kernel.Call)) {
	fill = func(c *kernel.Call) {
		n, from, rank, seed, codes, limit := int(kernel.Get[uint64](c, 1)), kernel.Get[uint64](c, 2), kernel.Get[uint32](c, 3), kernel.Get[uint32](c, 4), kernel.Get[uint32](c, 5), kernel.Get[uint32](c, 6)
		p, table := kernel.Update[W](c, 0, n), kernel.Read[W](c, 7, int(codes))
		for i := range p {
			p[i] = table[codeOf(from+uint64(i), rank, seed, codes, limit)]
		}
	}
	check = func(c *kernel.Call) {
		n, from, first, ranks, seed := int(kernel.Get[uint64](c, 1)), kernel.Get[uint64](c, 2), kernel.Get[uint32](c, 3), kernel.Get[uint32](c, 4), kernel.Get[uint32](c, 5)
		codes, limit, op, weights := kernel.Get[uint32](c, 6), kernel.Get[uint32](c, 7), kernel.Get[uint32](c, 8), kernel.Get[uint32](c, 9)
		most := int(codes)
		if ranks > 1 && op == codeSum {
			most = tableLen(codes, limit, weights)
		}
		p, table := kernel.Read[W](c, 0, n), kernel.Read[W](c, 10, most)
		bad := uint64(0)
		for i := range p {
			all := codeOf(from+uint64(i), first, seed, codes, limit) << (weights & first & 1)
			for r := first + 1; r < first+ranks; r++ {
				code := codeOf(from+uint64(i), r, seed, codes, limit) << (weights & r & 1)
				switch op {
				case codeSum:
					all += code
				case codeMin:
					all = min(all, code)
				default:
					all = max(all, code)
				}
			}
			want, got := table[all], p[i]
			if uint64(max(want, got)-min(want, got)) > kernel.Get[uint64](c, 11) {
				bad++
			}
		}
		kernel.Update[uint64](c, 12, 1)[0] += bad
	}
	return fill, check
}
