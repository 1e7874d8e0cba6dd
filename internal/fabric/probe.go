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

// probeWords is how much is sent to each rank.
const probeWords = unitBytes / 8

// probePlace is where memory of a rank has what another one sends.
func (r *Rank) probePlace(words memory.Slice[uint64], from int) memory.Slice[uint64] {
	return words.Slice(signalBytes/8+from*r.slot/8, signalBytes/8+from*r.slot/8+probeWords)
}

// probePattern is what a rank sends to another one: no zeros, and nothing twice.
func probePattern(from, to int) []uint64 {
	words := make([]uint64, probeWords)
	for i := range words {
		words[i] = scramble(uint64(from)<<48|uint64(to)<<40|uint64(i)) | 1
	}
	return words
}

// probe sends something to all other ranks, from the place in which nobody else writes:
// on some machines the driver maps the memory of another GPU and an IOMMU spoils what
// goes there. When all ranks have done so, probed looks at what has come.
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

// probed compares what has come, and clears it. CHORUS_P2P=force believes the driver.
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
			slog.Warn("chorus: what one GPU stores in the memory of another one arrives spoilt, so own kernels are not used; "+
				"an IOMMU or ACS is the usual cause, and NCCL may need NCCL_P2P_DISABLE=1", "from rank", from, "to", r.String())
			return unsupported("memory of GPUs in which others can store", fmt.Sprintf("something else on %s than what rank %d has sent", r.dev, from))
		}
	}
	return s.Sync(ctx)
}
