package fabric

import "fmt"

// An Algorithm is an algorithm for all-reduces.
type Algorithm int

// The algorithms. Packets are words of 8 bytes, sent as two halves with a mark each. The
// marks show that the data has arrived, so no other wait is necessary, but packets take
// twice the bytes.
const (
	Auto           Algorithm = iota // chosen by the numbers of bytes and ranks
	OneShot                         // each rank sends all its elements to all ranks, in packets
	TwoShotPackets                  // each rank reduces a part and sends the result to all ranks, in packets
	TwoShot                         // the same with plain bytes, between barriers
	TwoShotLines                    // the same in lines of 128 bytes with marks of 8 bytes; requires NVLink between all GPUs
	algorithms
)

// String returns the name of the algorithm, such as "one-shot".
func (a Algorithm) String() string {
	if names := [algorithms]string{"auto", "one-shot", "two-shot-packets", "two-shot", "two-shot-lines"}; a >= 0 && a < algorithms {
		return names[a]
	}
	return fmt.Sprintf("algorithm %d", int(a))
}

// spans has, by the number of ranks, the maximum sizes for OneShot and for TwoShotPackets:
// they are the fastest algorithms up to there. The values are measured for 2 H200s, and
// otherwise estimated from a prototype. Fused norms must be smaller: see algorithmOf.
var spans = [maxRanks + 1][2]int{
	2: {1 << 20, 1 << 20},
	3: {128 << 10, 256 << 10}, 4: {128 << 10, 256 << 10},
	5: {32 << 10, 256 << 10}, 6: {32 << 10, 256 << 10}, 7: {32 << 10, 256 << 10}, 8: {32 << 10, 256 << 10},
}

// lineSpans has, by the number of ranks, the range of sizes for TwoShotLines, if it is
// supported: above the first size, up to the second one. The values are measured for 2
// H200s. The others are estimates from measurements of an earlier, longer kernel on 4.
var lineSpans = [maxRanks + 1][2]int{
	2: {384 << 10, 4 << 20}, 3: {128 << 10, 4 << 20}, 4: {128 << 10, 4 << 20},
	5: {128 << 10, 4 << 20}, 6: {128 << 10, 4 << 20}, 7: {128 << 10, 4 << 20}, 8: {128 << 10, 4 << 20},
}

// choose returns the algorithm for a size, which must not exceed the limit of TwoShot.
func (r *Rank) choose(bytes int) Algorithm {
	l, span, lines := r.Limits(), spans[r.ranks], lineSpans[r.ranks]
	switch {
	case bytes > lines[0] && bytes <= min(lines[1], l.TwoShotLines):
		return TwoShotLines
	case bytes <= min(span[0], l.OneShot):
		return OneShot
	case bytes <= min(span[1], l.TwoShotPackets):
		return TwoShotPackets
	}
	return TwoShot
}

// Limits are the maximum sizes of operations in bytes.
type Limits struct {
	// Of AllReduce, by algorithm; TwoShotLines is 0 if it is not supported.
	OneShot, TwoShotPackets, TwoShot, TwoShotLines int

	// Part is for one rank's part of the other collectives: the elements that a rank
	// contributes to AllGather, gets from ReduceScatter, or sends to one other rank.
	Part int
}

// AllReduce returns the maximum size of AllReduce with any algorithm.
func (l Limits) AllReduce() int { return l.TwoShot }

// Limits returns the maximum sizes of operations of r, the same on all ranks.
func (r *Rank) Limits() Limits {
	// A share, in packets or lines, must fit in a slot, and the shares of all ranks in a
	// whole.
	share := func(bytes int) int { return min(r.slot/bytes, r.whole/bytes/r.ranks) }
	l := Limits{OneShot: r.slot / 2, TwoShotPackets: share(packetBytes) * r.ranks * 8, TwoShot: r.whole, Part: r.slot / 2}
	if r.noLines == "" {
		l.TwoShotLines = share(lineBytes) * r.ranks * lineWords * 8
	}
	return l
}

func (l *Limits) of(a Algorithm) int {
	switch a {
	case OneShot:
		return l.OneShot
	case TwoShotPackets:
		return l.TwoShotPackets
	case TwoShotLines:
		return l.TwoShotLines
	}
	return l.TwoShot
}

// steps returns the number of threads that the algorithm can use: one for each word, cell or
// line lane.
func (a Algorithm) steps(bytes, ranks int) int {
	switch a {
	case TwoShotPackets:
		return over(over(bytes, 8), ranks)
	case TwoShot:
		return over(over(bytes, 16), ranks)
	case TwoShotLines:
		return over(over(bytes, lineWords*8), ranks) * lineLanes
	}
	return over(bytes, 8)
}

// A grid is the number of blocks of a kernel, and of threads per block.
type grid struct{ blocks, threads uint32 }

// grid returns the grid for the given number of steps, the same on all ranks. Blocks are
// small, to use as many multiprocessors as possible, until each multiprocessor has one.
func (r *Rank) grid(steps int) grid {
	if r.forced.threads != 0 {
		return r.forced
	}
	threads := min(over(steps, warp)*warp, 4*warp)
	for threads < maxThreads && steps > threads*r.blocks {
		threads *= 2
	}
	return grid{uint32(min(over(steps, threads), r.blocks)), uint32(threads)}
}

// over is n / by, rounded up.
func over(n, by int) int { return (n + by - 1) / by }
