package route

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
)

// expertRanks are the ranks that OpenExperts has opened for a local rank. An abort of the communicator ends their operations.
type expertRanks struct {
	mu   sync.Mutex
	list []*fabric.Rank
}

func (x *expertRanks) all() []*fabric.Rank {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Clone(x.list)
}

// OpenExperts opens a rank of Chorus kernels for a layer of experts for each local rank, with slots of so many bytes. It returns none
// if Chorus kernels do not execute the group's collectives, or if the devices do not support them, alike on all ranks. The caller
// closes them with CloseExperts; otherwise Close does. Collective.
func (rs Routers) OpenExperts(ctx context.Context, slot int, exchange func(local int) collective.Exchange) ([]*fabric.Rank, error) {
	if len(rs) == 0 || rs[0].kernels == nil || !rs[0].ownKernels() {
		return nil, nil
	}
	ranks := make([]*fabric.Rank, len(rs))
	err := rs.each(ctx, func(ctx context.Context, i int) (err error) {
		r := rs[i]
		ranks[i], err = fabric.Open(ctx, r.stream, r.comm.Rank(), r.comm.Size(), exchange(i), &fabric.Config{Slot: slot, Blocks: r.blocks})
		return err
	})
	for i, r := range rs {
		if ranks[i] != nil {
			r.layers.mu.Lock()
			r.layers.list = append(r.layers.list, ranks[i])
			r.layers.mu.Unlock()
		}
	}
	if err == nil {
		return ranks, nil
	}
	closed := rs.CloseExperts(ranks)
	if errors.Is(err, errors.ErrUnsupported) {
		return nil, closed
	}
	return nil, errors.Join(err, closed)
}

// CloseExperts closes ranks of OpenExperts when the streams have passed their
// operations, and fails while a graph has captured some.
func (rs Routers) CloseExperts(ranks []*fabric.Rank) error {
	var errs []error
	for i, r := range ranks {
		if r == nil {
			continue
		}
		if err := r.Close(); err != nil {
			errs = append(errs, err)
			continue
		}
		x := &rs[i].layers
		x.mu.Lock()
		x.list = slices.DeleteFunc(x.list, func(other *fabric.Rank) bool { return other == r })
		x.mu.Unlock()
	}
	return errors.Join(errs...)
}
