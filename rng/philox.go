package rng

// philox is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3"): four random words for a counter and a key.
//
//go:norace
func philox(counter [4]uint32, key [2]uint32) [4]uint32 {
	c0, c1, c2, c3 := counter[0], counter[1], counter[2], counter[3]
	k0, k1 := key[0], key[1]
	for range 10 {
		p, q := 0xD2511F53*uint64(c0), 0xCD9E8D57*uint64(c2)
		c0, c1, c2, c3 = uint32(q>>32)^c1^k0, uint32(q), uint32(p>>32)^c3^k1, uint32(p)
		k0 += 0x9E3779B9
		k1 += 0xBB67AE85
	}
	return [4]uint32{c0, c1, c2, c3}
}

// words returns the nth draw of a thread.
//
//go:norace
func words(seed, offset uint64, thread uint32, nth int) [4]uint32 {
	n := offset/4 + uint64(nth)
	return philox([4]uint32{uint32(n), uint32(n >> 32), thread, 0}, [2]uint32{uint32(seed), uint32(seed >> 32)})
}

// unit32 returns a value in (0, 1], the middle of one of 2^32 intervals within
// the precision of float32. The sum is rounded once, as in rng.cu.
func unit32(x uint32) float32 { return float32(float64(float32(x))*0x1p-32 + 0x1p-33) }

// unit64 returns a value in (0, 1], the middle of one of 2^53 intervals.
func unit64(x, y uint32) float64 { return float64(mix(x, y))*0x1p-53 + 0x1p-54 }

// mix returns 53 random bits.
func mix(x, y uint32) uint64 { return uint64(x) ^ uint64(y)<<21 }
