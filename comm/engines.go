package comm

import (
	"errors"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// openEngines notes whether all ranks are here and reach each other's memory.
func (g *Group) openEngines() error {
	if len(g.members) != g.size {
		return nil
	}
	for i := range g.members {
		for j := range i {
			can, err := memory.Reach(g.Device(i), g.Device(j))
			if err != nil || !can {
				return err
			}
		}
	}
	for i := range g.members {
		g.members[i].ways.engines = true
	}
	return nil
}

// exchange carries out an all-gather or an all-to-all: each rank fetches its parts, from
// the rank after it first, so that no two fetch from the same one. Nobody begins before
// all have what they are to give, nor goes on before all have fetched it.
func exchange(ss []*stream.Stream, xs []nccl.Collective) error {
	if err := meet(ss); err != nil {
		return err
	}
	n, part := len(ss), bytesOf(xs[0])
	for step := range n {
		for to := range n {
			from := (to + step) % n
			src, dst := xs[from].Src, xs[to].Dst+uint64(from*part)
			if xs[0].Kind == nccl.AllToAllKind {
				src += uint64(to * part)
			}
			if src == dst {
				continue // in place
			}
			if err := copyBytes(ss[to], dst, src, part); err != nil {
				return errors.Join(err, meet(ss)) // what has begun uses the others' memory
			}
		}
	}
	return meet(ss)
}

// meet lets each stream wait for all others.
func meet(ss []*stream.Stream) error {
	if err := stream.Join(ss[0], ss); err != nil {
		return err
	}
	return stream.Fork(ss[0], ss)
}
