package comm

import (
	"errors"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// engines exchange the parts of all ranks of a process by copies between their devices.
type engines struct {
	begun, done []*stream.Event // of each rank's stream
}

// openEngines opens them where all ranks are here and reach each other's memory.
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
	x := &engines{}
	for i := range g.members {
		for _, list := range []*[]*stream.Event{&x.begun, &x.done} {
			e, err := stream.NewEvent(g.Device(i), nil)
			if err != nil {
				return errors.Join(err, x.close())
			}
			*list = append(*list, e)
		}
	}
	for i := range g.members {
		g.members[i].ways.engines = x
	}
	return nil
}

func (x *engines) close() error {
	if x == nil {
		return nil
	}
	var errs []error
	for _, e := range append(x.begun, x.done...) {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}

// exchange carries out an all-gather or an all-to-all: each rank fetches its parts, from
// the rank after it first, so that no two fetch from the same one. Nobody begins before
// all have what they are to give, nor goes on before all have fetched it.
func (x *engines) exchange(ss []*stream.Stream, xs []nccl.Collective) error {
	if err := meet(ss, x.begun); err != nil {
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
				return err
			}
		}
	}
	return meet(ss, x.done)
}

// meet lets each stream wait for all others, each at an event of its own.
func meet(ss []*stream.Stream, at []*stream.Event) error {
	for i, s := range ss {
		if err := at[i].Record(s); err != nil {
			return err
		}
	}
	for i, s := range ss {
		for j, e := range at {
			if i == j {
				continue
			}
			if err := s.Wait(e); err != nil {
				return err
			}
		}
	}
	return nil
}
