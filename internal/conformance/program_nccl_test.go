package conformance

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

var ncclPrograms = slices.Concat([]program{
	barrier("allreduce", succeeds, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.AllReduce(p.on(b, i), p.s[i], p.y[i], p.z[i], nccl.Sum)
	}),
	barrier("allreduce-of-nothing", wrongData, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.AllReduce(p.on(b, i), p.s[i], p.y[i].Slice(0, 0), p.z[i].Slice(0, 0), nccl.Sum)
	}),
	barrier("allgather", succeeds, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.AllGather(p.on(b, i), p.s[i], p.y[i], p.z[i].Slice(0, elements/2))
	}),
	barrier("broadcast", wrongData, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.Broadcast(p.on(b, i), p.s[i], p.y[i], p.z[i], 0)
	}),
	barrier("broadcast-of-the-other", succeeds, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.Broadcast(p.on(b, i), p.s[i], p.y[i], p.z[i], 1)
	}),
	barrier("reduce", wrongData, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.Reduce(p.on(b, i), p.s[i], p.y[i], p.z[i], nccl.Sum, 1)
	}),
	barrier("reduce-to-this", succeeds, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.Reduce(p.on(b, i), p.s[i], p.y[i], p.z[i], nccl.Sum, 0)
	}),
	barrier("gather", wrongData, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.Gather(p.on(b, i), p.s[i], p.y[i], p.z[i].Slice(0, elements/2), 1)
	}),
	barrier("scatter", wrongData, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.Scatter(p.on(b, i), p.s[i], p.y[i].Slice(0, elements/2), p.z[i], 0)
	}),
	barrier("alltoall", succeeds, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.AllToAll(p.on(b, i), p.s[i], p.y[i], p.z[i])
	}),
	barrier("allgatherv", wrongData, func(b *nccl.Batch, p *pair, i int) error {
		return nccl.AllGatherV(p.on(b, i), p.s[i], p.y[i], p.z[i].Slice(0, []int{elements, 0}[i]), []int{elements, 0})
	}),
	barrier("send", wrongData, func(b *nccl.Batch, p *pair, i int) error {
		if i == 0 {
			return nccl.Send(p.on(b, i), p.s[i], p.z[i], 1)
		}
		return nccl.Recv(p.on(b, i), p.s[i], p.y[i], 0)
	}),
	barrier("recv", succeeds, func(b *nccl.Batch, p *pair, i int) error {
		if i == 1 {
			return nccl.Send(p.on(b, i), p.s[i], p.z[i], 0)
		}
		return nccl.Recv(p.on(b, i), p.s[i], p.y[i], 1)
	}),

	{name: "first-collective-one-goroutine", area: "nccl", devices: 2, gpu: hangs, run: twoRanks(func(p *pair) error {
		return errors.Join(p.reduce(0), p.reduce(1))
	})},
	{name: "first-collective-in-a-batch", area: "nccl", devices: 2, gpu: succeeds, run: twoRanks(func(p *pair) error { return p.connect() })},
	{name: "first-collective-two-goroutines", area: "nccl", devices: 2, gpu: succeeds, run: twoRanks(func(p *pair) error { return p.both(p.reduce) })},
	{name: "second-collective-one-goroutine", area: "nccl", devices: 2, gpu: succeeds, run: twoRanks(func(p *pair) error {
		return errors.Join(p.connect(), p.reduce(0), p.reduce(1))
	})},
	{name: "p2p-unbatched-first", area: "nccl", devices: 2, gpu: hangs, run: twoRanks(func(p *pair) error {
		return p.both(func(i int) error {
			return errors.Join(nccl.Send(p.c[i], p.s[i], p.z[i], 1-i), nccl.Recv(p.c[i], p.s[i], p.y[i], 1-i))
		})
	})},
	{name: "p2p-batched-first", area: "nccl", devices: 2, gpu: succeeds, run: twoRanks(func(p *pair) error {
		return p.both(func(i int) error {
			return nccl.Group(func(b *nccl.Batch) error {
				return errors.Join(nccl.Send(b.On(p.c[i]), p.s[i], p.z[i], 1-i), nccl.Recv(b.On(p.c[i]), p.s[i], p.y[i], 1-i))
			})
		})
	})},

	// NCCL's documentation forbids this one, and two H200 complete it, because they have room for both kernels.
	twoGroups("different-orders", succeeds, "two communicators are used in different orders", 1, func(p, q *pair) error {
		for range 20 { // a stream may be so late that both have one order
			if err := errors.Join(p.reduce(0), q.reduce(0), q.reduce(1), p.reduce(1), p.wait(), q.wait()); err != nil {
				return err
			}
		}
		return nil
	}),
	twoGroups("different-orders-on-one-stream", hangs, "two communicators are used in different orders", 0, func(p, q *pair) error {
		return errors.Join(p.reduce(0), q.reduce(0), q.reduce(1), p.reduce(1))
	}),
	twoGroups("one-order", succeeds, "", 1, func(p, q *pair) error {
		return errors.Join(p.reduce(0), q.reduce(0), p.reduce(1), q.reduce(1))
	}),
	twoGroups("turns", succeeds, "", 1, func(p, q *pair) error {
		for i := range 10 {
			x := []*pair{p, q}[i%2]
			if err := errors.Join(x.reduce(i/2%2), x.reduce(1-i/2%2), x.wait()); err != nil {
				return err
			}
		}
		return nil
	}),

	together("two-allreduces-in-place", func(b *nccl.Batch, p *pair, i int) error {
		return errors.Join(nccl.AllReduce(b.On(p.c[i]), p.s[i], p.y[i], p.y[i], nccl.Sum), nccl.AllReduce(b.On(p.c[i]), p.s[i], p.y[i], p.y[i], nccl.Sum))
	}),
	together("chained-collectives", func(b *nccl.Batch, p *pair, i int) error {
		return errors.Join(nccl.AllReduce(b.On(p.c[i]), p.s[i], p.y[i], p.z[i], nccl.Sum), nccl.Broadcast(b.On(p.c[i]), p.s[i], p.x[i], p.y[i], 0))
	}),
	together("collectives-share-output", func(b *nccl.Batch, p *pair, i int) error {
		return errors.Join(nccl.AllReduce(b.On(p.c[i]), p.s[i], p.y[i], p.z[i], nccl.Sum), nccl.AllReduce(b.On(p.c[i]), p.s[i], p.y[i], p.x[i], nccl.Sum))
	}),
	{name: "group-collectives-share-input", area: "nccl", devices: 2, gpu: succeeds, run: twoRanks(func(p *pair) error {
		return p.batch(func(b *nccl.Batch, i int) error {
			return errors.Join(nccl.AllReduce(b.On(p.c[i]), p.s[i], p.y[i], p.z[i], nccl.Sum), nccl.AllReduce(b.On(p.c[i]), p.s[i], p.x[i], p.z[i], nccl.Max))
		})
	})},

	window("unaligned", fails, "suitably aligned", nccl.Allocator, 512),
	window("of-ordinary-memory-not-symmetric", fails, "ncclUnhandledCudaError", nil, 0),
	window("of-ncclMemAlloc", succeeds, "", nccl.Allocator, 4096),

	{name: "one-rank-premulsum-e4m3", area: "nccl", devices: 1, gpu: fails, text: "ncclInvalidArgument", run: func(r *run) error {
		p, err := ranks(r, nil)
		if err != nil {
			return err
		}
		x, err := memory.Make[memory.Float8E4M3Bits](p.s[0], 16)
		if err != nil {
			return err
		}
		sum, err := nccl.NewPreMulSum(p.c[0], memory.Float8E4M3Bits(0x40))
		if err != nil {
			return err
		}
		return nccl.AllReduce(p.c[0], p.s[0], x, x, sum.Op())
	}},
	{name: "premulsum-of-another-communicator", area: "nccl", devices: 1, gpu: fails, text: "is not a reduction of this communicator", run: func(r *run) error {
		p, err := ranks(r, nil)
		if err != nil {
			return err
		}
		q, err := ranks(r, nil)
		if err != nil {
			return err
		}
		two, err := nccl.NewPreMulSum(p.c[0], float32(2))
		if err != nil {
			return err
		}
		if _, err := nccl.NewPreMulSum(q.c[0], float32(3)); err != nil {
			return err
		}
		return nccl.AllReduce(q.c[0], q.s[0], q.y[0], q.x[0], two.Op())
	}},
}, configs())

// elements is the number of elements of each slice, little enough for NCCL to buffer them.
const elements = 1024

// A pair is two ranks, or fewer, with their streams and memory.
type pair struct {
	r       *run
	c       []*nccl.Communicator
	s       []*stream.Stream
	x, y, z []memory.Slice[float32]
}

func ranks(r *run, cfg *nccl.Config) (p *pair, err error) {
	p = &pair{r: r}
	if p.c, err = nccl.NewCommunicators(r.ctx, r.devs, cfg); err != nil {
		return nil, err
	}
	for i := range r.devs {
		s, err := r.stream(i)
		if err != nil {
			return nil, err
		}
		p.s = append(p.s, s)
		for _, to := range []*[]memory.Slice[float32]{&p.x, &p.y, &p.z} {
			x, err := floats(s, elements)
			if err != nil {
				return nil, err
			}
			*to = append(*to, x)
		}
	}
	return p, nil
}

// twoRanks is a program of ranks without a timeout.
func twoRanks(f func(p *pair) error) func(r *run) error {
	return func(r *run) error {
		p, err := ranks(r, &nccl.Config{Timeout: -1})
		if err != nil {
			return err
		}
		if err := f(p); err != nil {
			return err
		}
		return p.wait()
	}
}

func (p *pair) on(b *nccl.Batch, i int) nccl.Issuer { return b.On(p.c[i]) }

// batch runs f for each rank in one batch.
func (p *pair) batch(f func(b *nccl.Batch, i int) error) error {
	return nccl.Group(func(b *nccl.Batch) error {
		for i := range p.c {
			if err := f(b, i); err != nil {
				return err
			}
		}
		return nil
	})
}

// both runs f for each rank on a goroutine of its own.
func (p *pair) both(f func(i int) error) error {
	errs := make([]error, len(p.c))
	var all sync.WaitGroup
	for i := range p.c {
		all.Go(func() { errs[i] = f(i) })
	}
	all.Wait()
	return errors.Join(errs...)
}

func (p *pair) reduce(i int) error { return nccl.AllReduce(p.c[i], p.s[i], p.y[i], p.z[i], nccl.Sum) }

// connect is the first collective, in a batch.
func (p *pair) connect() error {
	err := p.batch(func(b *nccl.Batch, i int) error {
		return nccl.AllReduce(b.On(p.c[i]), p.s[i], p.y[i], p.z[i], nccl.Sum)
	})
	return errors.Join(err, p.wait())
}

// wait waits for the streams.
func (p *pair) wait() error {
	for i, c := range p.c {
		if err := c.Wait(p.r.ctx, p.s[i]); err != nil {
			return err
		}
	}
	return nil
}

// twoGroups is a program of two connected communicators, with one stream or two on each device.
func twoGroups(name string, gpu outcome, text string, second int, f func(p, q *pair) error) program {
	return program{name: "two-groups-in-" + name, area: "nccl", devices: 2, gpu: gpu, text: text, run: twoRanks(func(p *pair) error {
		q, err := ranks(p.r, &nccl.Config{Timeout: -1})
		if err != nil {
			return err
		}
		if err := errors.Join(p.connect(), q.connect()); err != nil {
			return err
		}
		if second == 0 {
			q.s = p.s
		}
		return errors.Join(f(p, q), q.wait())
	})}
}

// barrier is a program in which rank 1 writes its memory late and then takes part in an operation, and
// rank 0 reads this memory after the operation.
func barrier(name string, gpu outcome, op func(b *nccl.Batch, p *pair, i int) error) program {
	p := program{name: "barrier-by-" + name, area: "nccl", devices: 2, gpu: gpu}
	if gpu != succeeds {
		p.text = "race"
	}
	p.run = twoRanks(func(p *pair) error {
		if err := p.batch(func(b *nccl.Batch, i int) error { return op(b, p, i) }); err != nil { // connects
			return err
		}
		if err := errors.Join(p.wait(), memory.Copy(p.s[0], p.z[0], p.x[1]), p.s[0].Sync(p.r.ctx)); err != nil { // tests the path
			return err
		}
		late := p.s[1].Callback(func() { time.Sleep(300 * time.Millisecond) })
		if err := errors.Join(late, p.x[1].Zero(p.s[1]), p.batch(func(b *nccl.Batch, i int) error { return op(b, p, i) })); err != nil {
			return err
		}
		if err := errors.Join(memory.Copy(p.s[0], p.x[0], p.x[1]), p.wait()); err != nil {
			return err
		}
		return check(p.s[0], p.x[0], func(int) float32 { return 0 })
	})
	return p
}

// together is a program with operations in one batch that depend on their order.
func together(name string, ops func(b *nccl.Batch, p *pair, i int) error) program {
	return program{name: "group-" + name, area: "nccl", devices: 2, gpu: fails, text: "their buffers overlap",
		run: twoRanks(func(p *pair) error {
			return p.batch(func(b *nccl.Batch, i int) error { return ops(b, p, i) })
		})}
}

// window is a program that registers memory of an allocator, from a byte on, as a window.
func window(name string, gpu outcome, text string, a memory.Allocator, from int) program {
	return program{name: "window-" + name, area: "nccl", devices: 2, gpu: gpu, text: text, run: twoRanks(func(p *pair) error {
		pool := memory.NewPool(&memory.PoolConfig{Allocator: a})
		xs := make([]memory.Slice[byte], len(p.s))
		for i, s := range p.s {
			err := pool.Use(s, func() error {
				pad, err := memory.Make[byte](s, max(from, 1))
				if from == 0 {
					err = errors.Join(err, pad.Close())
				}
				if err != nil {
					return err
				}
				xs[i], err = memory.Make[byte](s, 1<<16)
				return err
			})
			if err != nil {
				return err
			}
		}
		return p.both(func(i int) error {
			_, err := p.c[i].RegisterWindow(p.r.ctx, xs[i].Buffer(), xs[i].Bytes(), false)
			return err
		})
	})}
}

// configs are programs with a configuration of a communicator.
func configs() (list []program) {
	for name, x := range map[string]struct {
		gpu  outcome
		text string
		cfg  nccl.Config
	}{
		"unknown-network":         {fails, "ncclInvalidUsage", nccl.Config{NetName: "carrier pigeon"}},
		"socket":                  {succeeds, "", nccl.Config{NetName: "Socket"}},
		"min-above-max":           {fails, "ncclInvalidArgument", nccl.Config{MinCTAs: new(8), MaxCTAs: new(4)}},
		"only-min-ctas":           {fails, "ncclInvalidArgument", nccl.Config{MinCTAs: new(2)}},
		"only-max-ctas":           {succeeds, "", nccl.Config{MaxCTAs: new(2)}},
		"max-ctas-0":              {fails, "ncclInvalidArgument", nccl.Config{MinCTAs: new(1), MaxCTAs: new(0)}},
		"cluster-negative":        {fails, "ncclInvalidArgument", nccl.Config{CGAClusterSize: new(-1)}},
		"cta-policy-7":            {fails, "ncclInvalidArgument", nccl.Config{CTAPolicy: new(7)}},
		"nvls-ctas-0":             {fails, "ncclInvalidArgument", nccl.Config{NVLSCTAs: new(0)}},
		"channels-per-net-peer-0": {fails, "ncclInvalidArgument", nccl.Config{NChannelsPerNetPeer: new(0)}},
		"channels-per-net-peer-2": {succeeds, "", nccl.Config{NChannelsPerNetPeer: new(2)}},
	} {
		list = append(list, program{name: "config-" + name, area: "nccl", devices: 2, gpu: x.gpu, text: x.text, run: func(r *run) error {
			p, err := ranks(r, &x.cfg)
			if err != nil {
				return err
			}
			return p.connect()
		}})
	}
	slices.SortFunc(list, func(a, b program) int { return strings.Compare(a.name, b.name) })
	return list
}
