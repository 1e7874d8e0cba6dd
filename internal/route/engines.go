package route

import (
	"errors"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/stream"
)

// openEngines records whether all ranks are in this process and can access each other's memory.
func (rs Routers) openEngines() error {
	if len(rs) != rs[0].comm.Size() {
		return nil
	}
	for i := range rs {
		for j := range i {
			can, err := mem.Reach(rs[i].comm.Device(), rs[j].comm.Device())
			if err != nil || !can {
				return err
			}
		}
	}
	for _, r := range rs {
		r.engines = true
	}
	return nil
}

// copyBetweenRanks performs an all-gather or an all-to-all with copy engines. Each rank fetches
// its parts, from the next rank first, so that no two ranks fetch from the same rank at
// the same time. The streams meet before, so that all sources are ready, and after, so
// that no source changes before all ranks have fetched it.
func copyBetweenRanks(ss []*stream.Stream, xs []ranks.Collective) error {
	if err := synchronize(ss); err != nil {
		return err
	}
	n, part := len(ss), xs[0].Bytes()
	for step := range n {
		for to := range n {
			from := (to + step) % n
			src, dst := xs[from].Src, xs[to].Dst+uint64(from*part)
			if xs[0].Kind == flight.AllToAll {
				src += uint64(to * part)
			}
			if src == dst {
				continue // in place
			}
			if err := copyBytes(ss[to], dst, src, part); err != nil {
				return errors.Join(err, synchronize(ss)) // copies that are already enqueued use the other ranks' memory
			}
		}
	}
	return synchronize(ss)
}

// synchronize makes each stream wait for all others.
func synchronize(ss []*stream.Stream) error {
	if err := gpu.Join(ss[0], ss); err != nil {
		return err
	}
	return gpu.Fork(ss[0], ss)
}
