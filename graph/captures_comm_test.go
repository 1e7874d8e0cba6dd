package graph_test

import (
	"errors"
	"io"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

// communicator returns one of a single rank.
func (r *rig) communicator() *nccl.Communicator {
	cs, err := nccl.NewCommunicators(r.ctx, []*device.Device{r.dev}, nil)
	r.must(err)
	r.later(cs[0].Close)
	return cs[0]
}

// A ring has what is made once and used by many programs: NCCL takes its time.
type ring struct {
	comm  *nccl.Communicator
	group *comm.Group
}

// drop closes what a program has broken, or everything.
func (k *ring) drop(all bool) error {
	var errs []error
	if k.comm != nil && (all || k.comm.Err() != nil) {
		errs = append(errs, k.comm.Close())
		k.comm = nil
	}
	if k.group != nil && (all || k.group.Err() != nil) {
		errs = append(errs, k.group.Close())
		k.group = nil
	}
	return errors.Join(errs...)
}

// connected returns a communicator that has done what it does first, for this program
// alone or for all.
func (r *rig) connected(alone bool) (c *nccl.Communicator) {
	if alone {
		c = r.communicator()
	} else if c = r.ring.comm; c != nil {
		return c
	} else {
		cs, err := nccl.NewCommunicators(r.ctx, []*device.Device{r.dev}, nil)
		r.must(err)
		c, r.ring.comm = cs[0], cs[0]
	}
	r.must(nccl.AllReduce(c, r.home, r.y, r.y, nccl.Sum))
	r.must(r.exchange(c, false))
	r.must(c.Wait(r.ctx, r.home))
	return c
}

func (r *rig) exchange(c *nccl.Communicator, here bool) error {
	s := r.home
	if here {
		s = r.on
	}
	return nccl.Group(func(b *nccl.Batch) error {
		return errors.Join(nccl.Send(b.On(c), s, r.x, 0), nccl.Recv(b.On(c), s, r.y, 0))
	})
}

var ncclCalls = []call{
	{name: "nccl.AllReduce: first", prepare: func(r *rig) func() error {
		c := r.communicator()
		return func() error { return nccl.AllReduce(c, r.on, r.y, r.y, nccl.Sum) }
	}},
	{name: "nccl.AllReduce: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.AllReduce(c, r.on, r.y, r.y, nccl.Sum) }
	}},
	{name: "nccl.Broadcast: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.Broadcast(c, r.on, r.y, r.x, 0) }
	}},
	{name: "nccl.AllGather: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.AllGather(c, r.on, r.y, r.x) }
	}},
	{name: "nccl.ReduceScatter: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.ReduceScatter(c, r.on, r.y, r.x, nccl.Sum) }
	}},
	{name: "nccl.AllToAll: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.AllToAll(c, r.on, r.y, r.x) }
	}},
	{name: "nccl.AllGatherV: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.AllGatherV(c, r.on, r.y, r.x, []int{elems}) }
	}},
	{name: "nccl.AllToAllV: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.AllToAllV(c, r.on, r.y, []int{elems}, r.x, []int{elems}) }
	}},
	{name: "nccl.ReduceScatterV: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.ReduceScatterV(c, r.on, r.y, r.x, []int{elems}, nccl.Sum) }
	}},
	{name: "nccl.Reduce: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.Reduce(c, r.on, r.y, r.x, nccl.Sum, 0) }
	}},
	{name: "nccl.Gather: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.Gather(c, r.on, r.y, r.x, 0) }
	}},
	{name: "nccl.Scatter: later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return nccl.Scatter(c, r.on, r.y, r.x, 0) }
	}},
	{name: "nccl.Group: nccl.Send and nccl.Recv, first", prepare: func(r *rig) func() error {
		c := r.communicator()
		return func() error { return r.exchange(c, true) }
	}},
	{name: "nccl.Group: nccl.Send and nccl.Recv, later", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return r.exchange(c, true) }
	}},
	{name: "nccl.Communicator.Wait: without operations", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { return c.Wait(r.ctx, r.on) }
	}},
	{name: "nccl.Communicator.Wait", prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error {
			return errors.Join(nccl.AllReduce(c, r.on, r.y, r.y, nccl.Sum), c.Wait(r.ctx, r.on))
		}
	}},
	{name: "nccl.Communicator.Close", nowhere: true, prepare: func(r *rig) func() error { return r.connected(true).Close }},
	{name: "nccl.Communicator.Close: after an operation", prepare: func(r *rig) func() error {
		c := r.connected(true)
		return func() error { return errors.Join(nccl.AllReduce(c, r.on, r.y, r.y, nccl.Sum), c.Close()) }
	}},
	{name: "nccl.Communicator.Shutdown", nowhere: true, prepare: func(r *rig) func() error {
		c := r.connected(true)
		return func() error { return c.Shutdown(r.ctx) }
	}},
	{name: "nccl.Communicator.Abort", nowhere: true, prepare: func(r *rig) func() error { return r.connected(true).Abort }},
	{name: "nccl.Communicator.Abort: after an operation", prepare: func(r *rig) func() error {
		c := r.connected(true)
		return func() error { return errors.Join(nccl.AllReduce(c, r.on, r.y, r.y, nccl.Sum), c.Abort()) }
	}},
	{name: "nccl.Communicator.Err", nowhere: true, prepare: func(r *rig) func() error { return r.connected(false).Err }},
	{name: "nccl.Communicator.Trace, nccl.Communicator.Progress, nccl.Communicator.DumpTrace", nowhere: true, prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { c.Trace(); c.Progress(); return c.DumpTrace(io.Discard) }
	}},
	{name: "nccl.NewPreMulSum, nccl.PreMulSum.Close", nowhere: true, prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error {
			p, err := nccl.NewPreMulSum(c, float32(2))
			return errors.Join(err, p.Close())
		}
	}},
	{name: "nccl.Communicator.Register, nccl.Registration.Close", prepare: func(r *rig) func() error {
		c, b := r.connected(false), r.buffer(1<<20)
		return func() error {
			reg, err := c.Register(b)
			if err != nil {
				return err
			}
			r.later(reg.Close)
			return reg.Close()
		}
	}},
	{name: "nccl.Communicator.RegisterPool, nccl.Communicator.DeregisterPool", nowhere: true, prepare: func(r *rig) func() error {
		c := r.connected(false)
		p := memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
		r.later(p.Close)
		r.must(p.Use(r.third, func() error {
			b, err := memory.Alloc(r.third, 1<<20)
			r.later(b.Close)
			return err
		}))
		return func() error { return errors.Join(c.RegisterPool(p), c.DeregisterPool(p)) }
	}},
	{name: "nccl.Communicator.MemoryStats", nowhere: true, prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { _, err := c.MemoryStats(); return err }
	}},
	{name: "nccl.Communicator.Properties", nowhere: true, prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error { _, err := c.Properties(); return err }
	}},
	{name: "nccl.Version", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := nccl.Version(r.dev); return err })},
}

// group returns one of a single rank, whose stream is the one that the call acts on.
func (r *rig) group() *comm.Group {
	g, err := comm.Local(r.ctx, []*device.Device{r.dev}, nil)
	r.must(err)
	r.later(g.Close)
	r.own(g.Stream(0))
	return g
}

// used returns a group that has done what it does first, for all programs.
func (r *rig) used() *comm.Group {
	if r.ring.group == nil {
		g, err := comm.Local(r.ctx, []*device.Device{r.dev}, nil)
		r.must(err)
		r.ring.group = g
		r.must(comm.AllReduce(g, comm.Sum, r.y))
		r.must(g.Wait(r.ctx))
	}
	r.own(r.ring.group.Stream(0))
	return r.ring.group
}

var commCalls = []call{
	{name: "comm.AllReduce: first", prepare: func(r *rig) func() error {
		g := r.group()
		return func() error { return comm.AllReduce(g, comm.Sum, r.y) }
	}},
	{name: "comm.AllReduce: later", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { return comm.AllReduce(g, comm.Sum, r.y) }
	}},
	{name: "comm.AllGather", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { return comm.AllGather(g, comm.Shards[float32]{r.y}, comm.Shards[float32]{r.x}) }
	}},
	{name: "comm.ReduceScatter", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error {
			return comm.ReduceScatter(g, comm.Sum, comm.Shards[float32]{r.y}, comm.Shards[float32]{r.x})
		}
	}},
	{name: "comm.BroadcastFrom", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { return comm.BroadcastFrom(g, 0, r.y) }
	}},
	{name: "comm.Group.Wait", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { return g.Wait(r.ctx) }
	}},
	{name: "comm.Group.Wait: after an operation", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { return errors.Join(comm.AllReduce(g, comm.Sum, r.y), g.Wait(r.ctx)) }
	}},
	{name: "comm.Group.Barrier", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { return g.Barrier(r.ctx) }
	}},
	{name: "comm.Group.Err", prepare: func(r *rig) func() error { return r.used().Err }},
	{name: "comm.Group.Close: without captured operations", nowhere: true, prepare: func(r *rig) func() error { return r.group().Close }},
	{name: "comm.Group.Close: after an operation", prepare: func(r *rig) func() error {
		g := r.group()
		return func() error { return errors.Join(comm.AllReduce(g, comm.Sum, r.y), g.Close()) }
	}},
	{name: "comm.Start, comm.Work.WaitOn", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error {
			w, err := r.start(g)
			return errors.Join(err, w.WaitOn(r.on))
		}
	}},
	{name: "comm.Work.Done", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error {
			w, err := r.start(g)
			if err != nil {
				return err
			}
			_, err = w.Done()
			return err
		}
	}},
	{name: "comm.Work.Wait", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error {
			w, err := r.start(g)
			return errors.Join(err, w.Wait(r.ctx))
		}
	}},
	{name: "comm.Work.Wait: started before the capture", prepare: func(r *rig) func() error {
		w, err := r.start(r.used())
		r.must(err)
		return func() error { return w.Wait(r.ctx) }
	}},
	{name: "comm.Broadcast", prepare: func(r *rig) func() error {
		g, x := r.used(), r.matrix()
		return func() error {
			ts, err := comm.Broadcast(g, x, nil)
			for _, t := range ts {
				r.later(t.Close)
			}
			return err
		}
	}},
	{name: "comm.Scatter", prepare: func(r *rig) func() error {
		g, x := r.used(), r.matrix()
		return func() error {
			ts, err := comm.Scatter(g, x, nil)
			for _, t := range ts {
				r.later(t.Close)
			}
			return err
		}
	}},
	{name: "comm.Gather", prepare: func(r *rig) func() error {
		g, x := r.used(), r.matrix()
		return func() error {
			t, err := comm.Gather(g, []tensor.Tensor{x}, nil)
			if err == nil {
				r.later(t.Close)
			}
			return err
		}
	}},
	{name: "comm.ReduceAdd", prepare: func(r *rig) func() error {
		g, x := r.used(), r.matrix()
		return func() error {
			t, err := comm.ReduceAdd(g, []tensor.Tensor{x}, nil)
			if err == nil {
				r.later(t.Close)
			}
			return err
		}
	}},
	{name: "comm.BroadcastValue", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { v := 1; return comm.BroadcastValue(r.ctx, g, 0, &v, comm.Gob) }
	}},
	{name: "comm.GatherValues", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { _, err := comm.GatherValues(r.ctx, g, comm.Gob, 1); return err }
	}},
	{name: "ddp.NewReducer", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error {
			d, err := ddp.NewReducer(g, [][]memory.Slice[float32]{{r.x}}, nil)
			if err == nil {
				r.later(d.Close)
			}
			return err
		}
	}},
	{name: "ddp.Reducer.Ready, ddp.Reducer.Finish", prepare: func(r *rig) func() error {
		d, err := ddp.NewReducer(r.used(), [][]memory.Slice[float32]{{r.x}}, nil)
		r.must(err)
		r.later(d.Close)
		return func() error { return errors.Join(d.Ready(r.on, 0), d.Finish(r.on)) }
	}},
	{name: "ddp.Sharder.Ready, ddp.Sharder.Finish, ddp.Sharder.AllGather", prepare: func(r *rig) func() error {
		d, err := ddp.NewSharder[float32](r.used(), []int{elems}, nil)
		r.must(err)
		r.later(d.Close)
		return func() error { return errors.Join(d.Ready(r.on, 0), d.Finish(r.on), d.AllGather(r.on)) }
	}},
}

func (r *rig) start(g *comm.Group) (*comm.Work, error) {
	w, err := comm.Start(g, func() error { return comm.AllReduce(g, comm.Sum, r.y) })
	if err == nil {
		r.later(w.Close)
	}
	return w, err
}

// joinCalls make communicators. They come last: NCCL may wait for ever.
var joinCalls = []call{
	{name: "nccl.NewUniqueID", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := nccl.NewUniqueID(r.dev); return err })},
	{name: "nccl.NewCommunicators, nccl.Communicator.Close", nowhere: true, prepare: onDevice(func(r *rig) error {
		cs, err := nccl.NewCommunicators(r.ctx, []*device.Device{r.dev}, nil)
		if err != nil {
			return err
		}
		r.later(cs[0].Close)
		return cs[0].Close()
	})},
	{name: "nccl.NewCommunicator", nowhere: true, prepare: onDevice(func(r *rig) error {
		id, err := nccl.NewUniqueID(r.dev)
		if err != nil {
			return err
		}
		c, err := nccl.NewCommunicator(r.ctx, r.dev, id, 0, 1, nil)
		if err == nil {
			r.later(c.Close)
		}
		return err
	})},
	{name: "nccl.Communicator.Split", nowhere: true, prepare: func(r *rig) func() error {
		c := r.connected(false)
		return func() error {
			child, err := c.Split(r.ctx, 0, 0, nil)
			if err == nil {
				r.later(child.Close)
			}
			return err
		}
	}},
	{name: "comm.Local", nowhere: true, prepare: onDevice(func(r *rig) error {
		g, err := comm.Local(r.ctx, []*device.Device{r.dev}, nil)
		if err == nil {
			r.later(g.Close)
		}
		return err
	})},
	{name: "comm.Group.Split", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error {
			gs, err := g.Split(r.ctx, []int{0}, nil)
			if err == nil {
				r.later(gs[0].Close)
			}
			return err
		}
	}},
}
