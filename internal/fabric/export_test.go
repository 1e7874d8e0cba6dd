package fabric

import "github.com/gochorus/chorus/stream"

// SetEpoch makes the next operation of r that of the epoch after the given one. r is
// idle.
func (r *Rank) SetEpoch(s *stream.Stream, epoch uint64) error {
	return r.control.CopyFrom(s, []uint64{epoch, 0})
}

// Algorithms has those that can be asked for.
var Algorithms = []Algorithm{OneShot, TwoShotPackets, TwoShot}

// Scratches returns how many ranks of the process have scratch memory.
func Scratches() int {
	scratches.mu.Lock()
	defer scratches.mu.Unlock()
	return len(scratches.open)
}
