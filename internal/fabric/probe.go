package fabric

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// probeWords is the size of the pattern for each rank.
const probeWords = unitBytes / 8

// probePlace returns the part of a rank's memory that another rank sends its pattern to.
func (r *Rank) probePlace(words memory.Slice[uint64], from int) memory.Slice[uint64] {
	return words.Slice(signalBytes/8+from*r.slot/8, signalBytes/8+from*r.slot/8+probeWords)
}

// probePattern is the data that a rank sends to another one: no zeros, and no repetitions.
func probePattern(from, to int) []uint64 {
	words := make([]uint64, probeWords)
	for i := range words {
		words[i] = scramble(uint64(from)<<48|uint64(to)<<40|uint64(i)) | 1
	}
	return words
}

// probe sends a pattern to all other ranks, from the part of its memory that no other rank
// writes to. On some machines the driver maps the memory of another GPU, but an IOMMU
// corrupts the data. After all ranks have sent theirs, probed compares it.
func (r *Rank) probe(ctx context.Context, s *stream.Stream) error {
	own := r.probePlace(r.peers[0].words, r.rank)
	for k := 1; k < r.ranks; k++ {
		if err := own.CopyFrom(s, probePattern(r.rank, (r.rank+k)%r.ranks)); err != nil {
			return err
		}
		if err := memory.Copy(s, r.probePlace(r.peers[k].words, r.rank), own); err != nil {
			return err
		}
	}
	return s.Sync(ctx)
}

// probed compares the received patterns and clears them. With CHORUS_P2P=force it trusts
// the driver.
func (r *Rank) probed(ctx context.Context, s *stream.Stream) error {
	got := make([]uint64, probeWords)
	for from := range r.ranks {
		place := r.probePlace(r.peers[0].words, from)
		if err := place.CopyTo(s, got); err != nil {
			return err
		}
		if err := place.Zero(s); err != nil {
			return err
		}
		if from != r.rank && !slices.Equal(got, probePattern(from, r.rank)) && env.P2P.Value() != "force" {
			slog.Warn("chorus: data that one GPU writes to the memory of another GPU arrives corrupted, so Chorus kernels are not used; "+
				"an IOMMU or ACS is the usual cause, and NCCL may need NCCL_P2P_DISABLE=1", "from rank", from, "to", r.String())
			return unsupported("GPUs that can write to each other's memory", fmt.Sprintf("corrupted data from rank %d on %s", from, r.dev))
		}
	}
	return s.Sync(ctx)
}
