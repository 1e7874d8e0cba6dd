package comm

import (
	"context"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/gochorus/chorus/memory"
)

// A StateError reports that a rank's copy of a state differs from the original. All ranks
// return it.
type StateError struct {
	Rank int // whose copy is wrong
	From int // rank of the original
	Part int // index of the wrong part
}

func (e *StateError) Error() string {
	return fmt.Sprintf("comm: synchronise state: part %d of rank %d differs from rank %d: the checksums do not match", e.Part, e.Rank, e.From)
}

// SyncState gives the state of the most advanced rank to all ranks of a group whose members
// have changed, and returns that rank. version is the progress of this process's state,
// such as the number of its steps, and -1 if it has none. The state consists of the value
// *v and of the memory of parts, such as params.AsBytes(), with the same lengths on all
// ranks. The lowest rank with the highest version sends.
//
// If all ranks have the same version, SyncState copies nothing. If no rank has a state, it
// returns -1. Otherwise it broadcasts the state to all ranks, and each rank compares a
// checksum (CRC-32C) of its copy with the checksum of the sender. Ranks with the sender's
// version must have the same state: it stays valid even if the transfer fails, while the
// state of the other ranks is undefined then.
//
// The group must have one rank in each process. Its stream must be ordered after all
// writes to parts. SyncState waits for the operations on it, and ends early under the same
// conditions as Wait. Errors of the value are as for BroadcastValue. Collective.
func SyncState[T any](ctx context.Context, g *Group, version int64, v *T, parts ...memory.Slice[byte]) (from int, err error) {
	const op = "synchronise state"
	if err := checkValue(g, op, 0, v != nil); err != nil {
		return -1, err
	}
	if len(g.members) != 1 || g.reporter != nil && len(g.reporter.firstRanks()) != g.size {
		return -1, badArgument(op, "a process has several ranks of the group, and this one %d: want one rank in each", len(g.members))
	}
	mine := stateHead{Version: max(version, -1)}
	for _, p := range parts {
		mine.Lengths = append(mine.Lengths, p.Len())
	}
	heads, err := GatherValues(ctx, g, nil, mine)
	if err != nil {
		return -1, err
	}
	from, behind, err := sender(heads)
	if err != nil || from < 0 || !behind {
		return from, err
	}
	if err := BroadcastValue(ctx, g, from, v, nil); err != nil {
		return from, err
	}
	for _, p := range parts {
		if p.Len() == 0 {
			continue
		}
		if err := BroadcastFrom(g, from, p); err != nil {
			return from, err
		}
	}
	return from, verifyState(ctx, g, from, parts)
}

// A stateHead describes the state of a rank to the others.
type stateHead struct {
	Version int64
	Lengths []int // of its parts, in bytes
}

// sender returns the rank that sends, or -1, and whether a rank is behind it.
func sender(heads []stateHead) (from int, behind bool, err error) {
	from = -1
	for r, h := range heads {
		if !slices.Equal(h.Lengths, heads[0].Lengths) {
			return -1, false, badArgument("synchronise state", "rank 0 has parts of %d bytes, and rank %d of %d bytes", heads[0].Lengths, r, h.Lengths)
		}
		if h.Version >= 0 && (from < 0 || h.Version > heads[from].Version) {
			from = r
		}
	}
	if from < 0 {
		return -1, false, nil
	}
	return from, slices.ContainsFunc(heads, func(h stateHead) bool { return h.Version != heads[from].Version }), nil
}

// verifyState compares the checksums of all ranks.
func verifyState(ctx context.Context, g *Group, from int, parts []memory.Slice[byte]) error {
	if err := g.Wait(ctx); err != nil {
		return err
	}
	sums := make([]uint32, 0, len(parts))
	for _, p := range parts {
		s, err := checksum(g, p)
		if err != nil {
			return err
		}
		sums = append(sums, s)
	}
	all, err := GatherValues(ctx, g, nil, sums)
	if err != nil {
		return err
	}
	return g.conclude(ctx, true, compareSums(all, from, len(parts)))
}

// compareSums compares the checksums of n parts with the checksums of rank from.
func compareSums(all [][]uint32, from, n int) error {
	if len(all[from]) != n {
		return &StateError{Rank: from, From: from}
	}
	for r, theirs := range all {
		for i := range n {
			if len(theirs) != n || theirs[i] != all[from][i] {
				return &StateError{Rank: r, From: from, Part: i}
			}
		}
	}
	return nil
}

// checksumBytes is the size of the host buffer for checksums.
const checksumBytes = 8 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum copies memory to the host in pieces and returns the checksum.
func checksum(g *Group, p memory.Slice[byte]) (uint32, error) {
	buf := make([]byte, min(p.Len(), checksumBytes))
	sum := uint32(0)
	for at := 0; at < p.Len(); at += len(buf) {
		piece := p.Slice(at, min(at+len(buf), p.Len()))
		if err := piece.CopyTo(g.members[0].stream, buf[:piece.Len()]); err != nil {
			return 0, err
		}
		sum = crc32.Update(sum, castagnoli, buf[:piece.Len()])
	}
	return sum, nil
}
