package conformance

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// These programs make a call while a device has work that waits for something that the program does
// only after the call: a host function, or the other rank of a collective.
var waitPrograms = slicesOf(
	pending("pinned-free", succeeds, "", func(r *run, _ *stream.Stream) (func() error, error) {
		h, err := memory.MakePinned[float32](r.devs[0], 1000)
		return func() error { return errors.Join(h.Close(), memory.EmptyHostCache(r.devs[0])) }, err
	}),
	pending("unpin-slice", hangs, "", func(r *run, _ *stream.Stream) (func() error, error) {
		h, err := memory.PinSlice(r.devs[0], make([]float32, 1<<20))
		return h.Close, err
	}),
	pending("module-load", hangs, "cuModuleLoadData waits for all work", func(r *run, _ *stream.Stream) (func() error, error) {
		return func() error { _, err := kernel.Compile(r.devs[0], nothing()); return err }, nil
	}),
	pending("module-unload", hangs, "cuModuleUnload waits for all work", func(r *run, _ *stream.Stream) (func() error, error) {
		m, err := kernel.Compile(r.devs[0], nothing())
		return m.Close, err
	}),
	pending("first-rng", hangs, "cuModuleLoadData waits for all work", func(r *run, s *stream.Stream) (func() error, error) {
		x, err := floats(s, 1000)
		return func() error { return rng.Uniform(nil, s, x, 0, 1) }, err
	}),
	pending("second-rng", succeeds, "", func(r *run, s *stream.Stream) (func() error, error) {
		x, err := floats(s, 1000)
		return func() error { return rng.Uniform(nil, s, x, 0, 1) }, errors.Join(err, rng.Uniform(nil, s, x, 0, 1), s.Sync(r.ctx))
	}),
	pending("first-product", hangs, "the first product of its kind waits for all work", func(r *run, s *stream.Stream) (func() error, error) {
		return square(s)
	}),
	pending("second-product", succeeds, "", func(r *run, s *stream.Stream) (func() error, error) {
		product, err := square(s)
		if err != nil {
			return nil, err
		}
		return product, errors.Join(product(), s.Sync(r.ctx))
	}),
	pending("first-strided-copy", hangs, "cuModuleLoadData waits for all work", func(r *run, s *stream.Stream) (func() error, error) {
		return transposed(s)
	}),
	pending("second-strided-copy", succeeds, "", func(r *run, s *stream.Stream) (func() error, error) {
		copied, err := transposed(s)
		if err != nil {
			return nil, err
		}
		return copied, errors.Join(copied(), s.Sync(r.ctx))
	}),
	pending("new-optimizer", hangs, "cuModuleLoadData waits for all work", func(r *run, s *stream.Stream) (func() error, error) {
		p, err := parameter(s)
		return func() error { _, err := optim.NewAdamW(s, []optim.Group{{Params: []optim.Param{p}}}, nil); return err }, err
	}),
	pending("first-step", succeeds, "", func(r *run, s *stream.Stream) (func() error, error) { // NewAdamW has loaded the kernels
		p, err := parameter(s)
		if err != nil {
			return nil, err
		}
		opt, err := optim.NewAdamW(s, []optim.Group{{Params: []optim.Param{p}}}, nil)
		return func() error { return opt.Step(s, nil) }, err
	}),
	pending("first-set-scale", succeeds, "", func(r *run, s *stream.Stream) (func() error, error) {
		sc, err := amp.NewScaler(s, nil)
		return func() error { return sc.SetScale(s, 2) }, err
	}),
	// The first communicator of a device loads NCCL's kernels. Beside a collective it is not the first.
	withDevices(2, pending("new-communicators", hangs, "the first communicator, which loads NCCL's kernels, waits for all work", newCommunicators)[:1]),
	pending("new-communicators", succeeds, "", newCommunicators)[1:],
	[]program{
		{name: "callback-waits-for-callback", area: "waits", devices: 1, gpu: hangs, text: "waits for a host function of another stream", run: func(r *run) error {
			a, err := r.stream(0)
			if err != nil {
				return err
			}
			b, err := r.stream(0)
			if err != nil {
				return err
			}
			begun, gate := make(chan struct{}), make(chan struct{})
			if err := a.Callback(func() { close(begun); <-gate }); err != nil {
				return err
			}
			<-begun
			if err := b.Callback(func() { close(gate) }); err != nil {
				return err
			}
			return b.Sync(r.ctx)
		}},
		{name: "callback-sleeps", area: "waits", devices: 1, gpu: wrongData, text: "the callback of the other stream took", run: func(r *run) error {
			a, err := r.stream(0)
			if err != nil {
				return err
			}
			b, err := r.stream(0)
			if err != nil {
				return err
			}
			entered, ran := make(chan struct{}), make(chan time.Duration, 1)
			if err := a.Callback(func() { close(entered); time.Sleep(3 * time.Second) }); err != nil { // a busy machine may stop this process for most of it
				return err
			}
			<-entered
			start := time.Now()
			if err := b.Callback(func() { ran <- time.Since(start) }); err != nil {
				return err
			}
			if d := <-ran; d > 400*time.Millisecond {
				return wrong("the callback of the other stream took %v", d)
			}
			return nil
		}},
		{name: "stream-queues-alias", area: "waits", devices: 1, gpu: hangs, text: "share a hardware queue", run: func(r *run) error { return aliasing(r, 32) }},
		{name: "few-streams", area: "waits", devices: 1, gpu: succeeds, run: func(r *run) error { return aliasing(r, 4) }},
		{name: "pending-collective-full-cooperative-kernel", area: "waits", devices: 2, gpu: hangs, text: "cooperative grid that fills the device", run: func(r *run) error {
			return cooperative(r, 0)
		}},
		{name: "pending-collective-half-cooperative-kernel", area: "waits", devices: 2, gpu: succeeds, run: func(r *run) error {
			return cooperative(r, 2)
		}},
	},
)

func newCommunicators(r *run, _ *stream.Stream) (func() error, error) {
	return func() error { _, err := nccl.NewCommunicators(r.ctx, r.devs, nil); return err }, nil
}

func withDevices(n int, list []program) []program {
	for i := range list {
		list[i].devices = n
	}
	return list
}

// transposed returns a copy that a kernel does.
func transposed(s *stream.Stream) (func() error, error) {
	var ts [2]tensor.Tensor
	for i := range ts {
		x, err := floats(s, 64)
		if err != nil {
			return nil, err
		}
		if ts[i], err = tensor.Of(x, 8, 8); err != nil {
			return nil, err
		}
	}
	return func() error { return tensor.Copy(s, ts[0], ts[1].T()) }, nil
}

// parameter returns a parameter of an optimizer.
func parameter(s *stream.Stream) (optim.Param, error) {
	value, err := floats(s, 64)
	if err != nil {
		return optim.Param{}, err
	}
	grad, err := floats(s, 64)
	return optim.Of(value, grad), err
}

func slicesOf(lists ...[]program) (all []program) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// pending returns two programs that call what prepare returns: while a callback waits, and while a
// collective does.
func pending(name string, gpu outcome, text string, prepare func(r *run, s *stream.Stream) (func() error, error)) []program {
	return []program{
		{name: "pending-callback-" + name, area: "waits", devices: 1, gpu: gpu, text: text, run: func(r *run) error {
			busy, err := r.stream(0)
			if err != nil {
				return err
			}
			s, err := r.stream(0)
			if err != nil {
				return err
			}
			call, err := prepare(r, s)
			if err != nil {
				return err
			}
			gate := make(chan struct{})
			if err := busy.Callback(func() { <-gate }); err != nil {
				return err
			}
			err = call()
			close(gate)
			return errors.Join(err, busy.Sync(r.ctx))
		}},
		{name: "pending-collective-" + name, area: "waits", devices: 2, gpu: gpu, text: text, run: func(r *run) error {
			s, err := r.stream(0)
			if err != nil {
				return err
			}
			call, err := prepare(r, s)
			if err != nil {
				return err
			}
			return besideCollective(r, call)
		}},
	}
}

// besideCollective calls fn while rank 0 of an all-reduce waits for rank 1.
func besideCollective(r *run, fn func() error) error {
	comms, err := nccl.NewCommunicators(r.ctx, r.devs[:2], nil)
	if err != nil {
		return err
	}
	var streams [2]*stream.Stream
	var xs [2]memory.Slice[float32]
	for i := range 2 {
		if streams[i], err = r.stream(i); err != nil {
			return err
		}
		if xs[i], err = floats(streams[i], 1<<20); err != nil {
			return err
		}
	}
	both := func() error { // connects the ranks
		errs := make(chan error, 2)
		for i := range 2 {
			go func() { errs <- nccl.AllReduce(comms[i], streams[i], xs[i], xs[i], nccl.Sum) }()
		}
		return errors.Join(<-errs, <-errs, streams[0].Sync(r.ctx), streams[1].Sync(r.ctx))
	}
	if err := both(); err != nil {
		return err
	}
	if err := nccl.AllReduce(comms[0], streams[0], xs[0], xs[0], nccl.Sum); err != nil {
		return err
	}
	if err := fn(); err != nil {
		return err
	}
	return errors.Join(nccl.AllReduce(comms[1], streams[1], xs[1], xs[1], nccl.Sum), streams[0].Sync(r.ctx), streams[1].Sync(r.ctx))
}

func nothing() *kernel.Source {
	return &kernel.Source{Name: "nothing.cu", CUDA: `extern "C" __global__ void nothing() {}`,
		Kernels: []kernel.Def{{Name: "nothing", Go: func(*kernel.Call) {}}}}
}

// square returns a product of matrices.
func square(s *stream.Stream) (func() error, error) {
	var ts [3]tensor.Tensor
	for i := range ts {
		x, err := floats(s, 64)
		if err != nil {
			return nil, err
		}
		if ts[i], err = tensor.Of(x, 8, 8); err != nil {
			return nil, err
		}
	}
	return func() error { return tensor.MatMul(s, ts[0], ts[1], ts[2], nil) }, nil
}

// aliasing launches two kernels on each stream that wait for the kernel of the last stream.
func aliasing(r *run, streams int) error {
	src := &kernel.Source{Name: "spin.cu", CUDA: `
extern "C" __global__ void spin(volatile unsigned* flag) { while (*flag == 0) ; }
extern "C" __global__ void release(volatile unsigned* flag) { *flag = 1; }`,
		Kernels: []kernel.Def{
			{Name: "spin", Params: []kernel.Param{kernel.Pointer}, Go: func(c *kernel.Call) {
				flag := &inside.Shared[uint32](c, 0, 0, 1)[0]
				inside.Await(c, func() bool { return atomic.LoadUint32(flag) != 0 })
			}},
			{Name: "release", Params: []kernel.Param{kernel.Pointer}, Go: func(c *kernel.Call) {
				atomic.StoreUint32(&inside.Shared[uint32](c, 0, 0, 1)[0], 1)
			}},
		}}
	m, err := kernel.Compile(r.devs[0], src)
	if err != nil {
		return err
	}
	spin, _ := m.Kernel("spin")
	release, _ := m.Kernel("release")
	last, err := r.stream(0)
	if err != nil {
		return err
	}
	flag, err := memory.MakeFrom(last, []uint32{0})
	if err != nil {
		return err
	}
	if err := last.Sync(r.ctx); err != nil {
		return err
	}
	one := kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}
	for range streams {
		s, err := r.stream(0)
		if err != nil {
			return err
		}
		if err := errors.Join(spin.Launch(s, one, kernel.Ptr(flag)), spin.Launch(s, one, kernel.Ptr(flag))); err != nil {
			return err
		}
	}
	if last, err = r.stream(0); err != nil {
		return err
	}
	if err := release.Launch(last, one, kernel.Ptr(flag)); err != nil {
		return err
	}
	return last.Sync(r.ctx)
}

// cooperative launches a cooperative grid of as many blocks as the device holds, or a part of them,
// and waits for it while a collective is pending.
func cooperative(r *run, part int) error {
	m, err := kernel.Compile(r.devs[0], nothing())
	if err != nil {
		return err
	}
	k, _ := m.Kernel("nothing")
	each, err := k.Occupancy(1024, 0)
	if err != nil {
		return err
	}
	p, err := r.devs[0].Properties()
	if err != nil {
		return err
	}
	blocks := each * p.Multiprocessors
	if part > 0 {
		blocks /= part
	}
	s, err := r.stream(0)
	if err != nil {
		return err
	}
	grid := kernel.Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{1024, 1, 1}}
	if err := errors.Join(k.LaunchCooperative(s, grid), s.Sync(r.ctx)); err != nil { // alone it fits
		return err
	}
	return besideCollective(r, func() error { return errors.Join(k.LaunchCooperative(s, grid), s.Sync(r.ctx)) })
}
