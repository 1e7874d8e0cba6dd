package fabric

import "fmt"

// An Algorithm is a way to reduce to all ranks.
type Algorithm int

// The algorithms. Packets are words of 8 bytes that carry, beside each half, a mark
// that they have come, and so go without any other wait but take twice the bytes.
const (
	Auto           Algorithm = iota // by the number of bytes and ranks
	OneShot                         // each rank sends all it has to all, by packets
	TwoShotPackets                  // each rank reduces a share and sends that to all, by packets
	TwoShot                         // the same as plain bytes, between barriers
	TwoShotLines                    // the same by lines of 128 bytes, of which 8 are a mark, where NVLink joins all GPUs
	algorithms
)

// String returns the name of the algorithm, such as "one-shot".
func (a Algorithm) String() string {
	if names := [algorithms]string{"auto", "one-shot", "two-shot-packets", "two-shot", "two-shot-lines"}; a >= 0 && a < algorithms {
		return names[a]
	}
	return fmt.Sprintf("algorithm %d", int(a))
}

// spans has, by the number of ranks, up to how many bytes OneShot and TwoShotPackets
// are the fastest: measured for 2 H200s, and guessed from a prototype's figures for more.
var spans = [maxRanks + 1][2]int{
	2: {1 << 20, 1 << 20},
	3: {128 << 10, 256 << 10}, 4: {128 << 10, 256 << 10},
	5: {32 << 10, 256 << 10}, 6: {32 << 10, 256 << 10}, 7: {32 << 10, 256 << 10}, 8: {32 << 10, 256 << 10},
}

// lineSpans has, by the number of ranks, beyond and up to how many bytes TwoShotLines is
// the fastest, where it can be had: measured for 2 H200s, and guessed for more from what
// lines took on 4 when their kernel was a longer one.
var lineSpans = [maxRanks + 1][2]int{
	2: {384 << 10, 4 << 20}, 3: {128 << 10, 4 << 20}, 4: {128 << 10, 4 << 20},
	5: {128 << 10, 4 << 20}, 6: {128 << 10, 4 << 20}, 7: {128 << 10, 4 << 20}, 8: {128 << 10, 4 << 20},
}

// choose returns the algorithm for so many bytes, which TwoShot has room for.
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

// Limits are the most bytes that an operation may have.
type Limits struct {
	// Of AllReduce, by its algorithm; TwoShotLines is 0 where that cannot be had.
	OneShot, TwoShotPackets, TwoShot, TwoShotLines int

	// Part is for one rank's part of the other collectives: what a rank contributes
	// to AllGather, gets of ReduceScatter, or sends to one other.
	Part int
}

// AllReduce is the most bytes that AllReduce may have by some algorithm.
func (l Limits) AllReduce() int { return l.TwoShot }

// Limits returns the most bytes that an operation of r may have, alike on all ranks.
func (r *Rank) Limits() Limits {
	// A share, in packets or lines, fits in a slot, and those of all ranks in a whole.
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

// steps returns for how many words, cells or lanes of lines the algorithm needs a thread.
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

// A grid is how many blocks a kernel gets, of how many threads.
type grid struct{ blocks, threads uint32 }

// grid returns the grid for so many steps of a thread, alike on all ranks. Blocks are
// small, and lie on as many multiprocessors as possible, until each of those has one.
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
