package perf

import (
	"github.com/gochorus/chorus/kernel"
)

// standIns make what pattern.cu does, in Go, for elements of so many bytes.
var standIns = map[int]func() (fill, check func(*kernel.Call)){
	1: inGo[uint8], 2: inGo[uint16], 4: inGo[uint32], 8: inGo[uint64],
}

// codeOf is code of pattern.cu.
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

// tableLen bounds what a table of codes may have.
func tableLen(codes, ranks, weights uint32) int { return int((codes-1)*ranks<<weights) + 1 }

func inGo[W uint8 | uint16 | uint32 | uint64]() (fill, check func(*kernel.Call)) {
	fill = func(c *kernel.Call) {
		n, from, rank, seed, codes, limit := int(c.Uint64(1)), c.Uint64(2), c.Uint32(3), c.Uint32(4), c.Uint32(5), c.Uint32(6)
		p, table := kernel.Update[W](c, 0, n), kernel.Read[W](c, 7, int(codes))
		for i := range p {
			p[i] = table[codeOf(from+uint64(i), rank, seed, codes, limit)]
		}
	}
	check = func(c *kernel.Call) {
		n, from, first, ranks, seed := int(c.Uint64(1)), c.Uint64(2), c.Uint32(3), c.Uint32(4), c.Uint32(5)
		codes, limit, op, weights := c.Uint32(6), c.Uint32(7), c.Uint32(8), c.Uint32(9)
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
			if uint64(max(want, got)-min(want, got)) > c.Uint64(11) {
				bad++
			}
		}
		kernel.Update[uint64](c, 12, 1)[0] += bad
	}
	return fill, check
}
