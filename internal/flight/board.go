package flight

import "sync/atomic"

// A Board compares the collectives that the ranks of one process issue.
type Board struct {
	slots   [boardSize]atomic.Uint64 // number and signature of each of the last collectives
	several atomic.Bool              // the process has several ranks
}

// boardSize is the maximum distance between two compared ranks, in collectives.
const boardSize = 256

// Ranks sets the number of ranks in this process.
func (b *Board) Ranks(n int) { b.several.Store(n > 1) }

// Post compares a scheduled collective with the collectives that other ranks of the
// process issued under the same number, and records it for later ranks. It takes no lock.
func (b *Board) Post(o *Op) (fits bool) {
	if Kinds[o.Kind].Peer || !b.several.Load() {
		return true
	}
	slot := b.slot(o.Number)
	mine := posted(o.Number, o.Signature)
	for {
		theirs := slot.Load()
		if ahead := int32(uint32(theirs>>32) - uint32(o.Number)); ahead > 0 {
			return true // this rank is too far behind
		} else if ahead == 0 {
			return theirs == mine
		}
		if slot.CompareAndSwap(theirs, mine) {
			return true
		}
	}
}

// Unpost removes a collective that NCCL has refused.
func (b *Board) Unpost(o *Op) {
	if !Kinds[o.Kind].Peer && b.several.Load() {
		b.slot(o.Number).CompareAndSwap(posted(o.Number, o.Signature), posted(o.Number-boardSize, 0))
	}
}

// slot returns the slot of a collective. Consecutive collectives use different cache
// lines, so that ranks at slightly different positions do not contend for a line.
func (b *Board) slot(number uint64) *atomic.Uint64 {
	const line = 8 // slots
	i := number % boardSize
	return &b.slots[i%(boardSize/line)*line+i/(boardSize/line)]
}

func posted(number uint64, signature uint32) uint64 {
	return uint64(uint32(number))<<32 | uint64(signature)
}
