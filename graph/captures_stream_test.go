package graph_test

import (
	"context"
	"errors"
	"io"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

var streamCalls = []call{
	{name: "stream.Stream.Sync", prepare: func(r *rig) func() error { return func() error { return r.on.Sync(r.ctx) } }},
	{name: "stream.Stream.Sync: without a deadline", prepare: func(r *rig) func() error {
		return func() error { return r.on.Sync(context.Background()) }
	}},
	{name: "stream.Stream.Query", prepare: func(r *rig) func() error {
		return func() error { _, err := r.on.Query(); return err }
	}},
	{name: "stream.Stream.Capturing", prepare: func(r *rig) func() error {
		return func() error { _, err := r.on.Capturing(); return err }
	}},
	{name: "stream.Stream.Wait: event recorded before the capture", prepare: func(r *rig) func() error {
		e := r.event(nil)
		r.must(e.Record(r.home))
		return func() error { return r.on.Wait(e) }
	}},
	{name: "stream.Stream.Wait: event never recorded", prepare: func(r *rig) func() error {
		e := r.event(nil)
		return func() error { return r.on.Wait(e) }
	}},
	{name: "stream.Stream.Wait: event of the captured stream", prepare: func(r *rig) func() error {
		e := r.event(nil)
		return func() error { return errors.Join(e.Record(r.captured), r.on.Wait(e)) }
	}},
	{name: "stream.Stream.WaitStream: stream outside of the capture", prepare: func(r *rig) func() error {
		return func() error { return r.on.WaitStream(r.third) }
	}},
	{name: "stream.Stream.WaitStream: third stream, forked and joined", prepare: func(r *rig) func() error {
		return func() error { return errors.Join(r.third.WaitStream(r.on), r.on.WaitStream(r.third)) }
	}},
	{name: "stream.Stream.WaitStream: third stream, forked but not joined", prepare: func(r *rig) func() error {
		return func() error { return errors.Join(r.third.WaitStream(r.on), r.third.WaitStream(r.captured)) }
	}},
	{name: "stream.Stream.WaitStream: the captured stream waits", prepare: func(r *rig) func() error {
		return func() error { return r.captured.WaitStream(r.on) }
	}},
	{name: "stream.Fork, stream.Join", prepare: func(r *rig) func() error {
		others := []*stream.Stream{r.third, r.stream()}
		return func() error { return errors.Join(gpu.Fork(r.on, others), gpu.Join(r.on, others)) }
	}},
	{name: "stream.Stream.Callback", prepare: func(r *rig) func() error {
		return func() error { return r.on.Callback(func() {}) }
	}},
	{name: "stream.Stream.Close", prepare: func(r *rig) func() error { return func() error { return r.on.Close() } }},
	{name: "stream.Stream.Priority", prepare: func(r *rig) func() error {
		return func() error { _, err := r.on.Priority(); return err }
	}},
	{name: "stream.New, stream.Stream.Close", nowhere: true, prepare: func(r *rig) func() error {
		return func() error {
			s, err := stream.New(r.dev, nil)
			return errors.Join(err, s.Close())
		}
	}},
	{name: "stream.FromPool", nowhere: true, prepare: func(r *rig) func() error {
		return func() error { _, err := stream.FromPool(r.dev, 0); return err }
	}},
	{name: "stream.PriorityRange", nowhere: true, prepare: func(r *rig) func() error {
		return func() error { _, _, err := stream.PriorityRange(r.dev); return err }
	}},
	{name: "stream.External", prepare: func(r *rig) func() error {
		return func() error {
			s, err := stream.External(r.dev, r.on.Handle())
			if err == nil {
				r.later(s.Close)
			}
			return err
		}
	}},
	{name: "stream.Stream.Sync: external stream", prepare: func(r *rig) func() error {
		s, err := stream.External(r.dev, r.on.Handle())
		r.must(err)
		r.later(s.Close)
		return func() error { return s.Sync(r.ctx) }
	}},
}

// event returns an event of the device.
func (r *rig) event(cfg *stream.EventConfig) *stream.Event {
	e, err := stream.NewEvent(r.dev, cfg)
	r.must(err)
	r.later(e.Close)
	return e
}

var eventCalls = []call{
	{name: "stream.NewEvent, stream.Event.Close", nowhere: true, prepare: func(r *rig) func() error {
		return func() error {
			e, err := stream.NewEvent(r.dev, nil)
			return errors.Join(err, e.Close())
		}
	}},
	{name: "stream.Stream.Record", prepare: func(r *rig) func() error {
		return func() error {
			e, err := r.on.Record(nil)
			if err == nil {
				r.later(e.Close)
			}
			return err
		}
	}},
	{name: "stream.Event.Record", prepare: func(r *rig) func() error {
		e := r.event(nil)
		return func() error { return e.Record(r.on) }
	}},
	{name: "stream.Event.Record: with timing", prepare: func(r *rig) func() error {
		e := r.event(&stream.EventConfig{Timing: true})
		return func() error { return e.Record(r.on) }
	}},
	{name: "stream.Event.Record: interprocess", prepare: func(r *rig) func() error {
		e := r.event(&stream.EventConfig{Interprocess: true})
		return func() error { return e.Record(r.on) }
	}},
	{name: "stream.Event.Close: recorded", prepare: func(r *rig) func() error {
		e := r.event(nil)
		return func() error { return errors.Join(e.Record(r.on), e.Close()) }
	}},
	{name: "stream.Event.Query", prepare: eventCall(func(r *rig, e *stream.Event) error { _, err := e.Query(); return err })},
	{name: "stream.Event.Sync", prepare: eventCall(func(r *rig, e *stream.Event) error { return e.Sync(r.ctx) })},
	{name: "stream.Event.Sync: without a deadline", prepare: eventCall(func(_ *rig, e *stream.Event) error { return e.Sync(context.Background()) })},
	{name: "stream.Event.Elapsed", prepare: eventCall(elapsed)},
	{name: "stream.Event.Query: recorded before the capture", nowhere: true, prepare: oldEventCall(func(r *rig, e *stream.Event) error { _, err := e.Query(); return err })},
	{name: "stream.Event.Sync: recorded before the capture", nowhere: true, prepare: oldEventCall(func(r *rig, e *stream.Event) error { return e.Sync(r.ctx) })},
	{name: "stream.Event.Sync: recorded before the capture, without a deadline", nowhere: true, prepare: oldEventCall(func(_ *rig, e *stream.Event) error { return e.Sync(context.Background()) })},
	{name: "stream.Event.Elapsed: recorded before the capture", nowhere: true, prepare: oldEventCall(elapsed)},
	{name: "stream.Event.Close: recorded before the capture", nowhere: true, prepare: oldEventCall(func(_ *rig, e *stream.Event) error { return e.Close() })},
	{name: "stream.Event.Query: never recorded", nowhere: true, prepare: func(r *rig) func() error {
		e := r.event(nil)
		return func() error { _, err := e.Query(); return err }
	}},
	{name: "stream.Event.IPCHandle", nowhere: true, prepare: func(r *rig) func() error {
		e := r.event(&stream.EventConfig{Interprocess: true})
		return func() error { _, err := e.IPCHandle(); return err }
	}},
}

// eventCall is about an event that is recorded within the capture.
func eventCall(fn func(r *rig, e *stream.Event) error) func(r *rig) func() error {
	return func(r *rig) func() error {
		e := r.event(&stream.EventConfig{Timing: true})
		return func() error {
			if err := e.Record(r.on); err != nil {
				return err
			}
			return fn(r, e)
		}
	}
}

// elapsed takes the time of an event. Whether the device has come there is another matter.
func elapsed(_ *rig, e *stream.Event) error {
	_, err := e.Elapsed(e)
	if errors.Is(err, device.ErrorNotReady) {
		return nil
	}
	return err
}

// oldEventCall is about an event that was recorded and passed before the capture.
func oldEventCall(fn func(r *rig, e *stream.Event) error) func(r *rig) func() error {
	return func(r *rig) func() error {
		e := r.event(&stream.EventConfig{Timing: true})
		r.must(e.Record(r.home))
		return func() error { return fn(r, e) }
	}
}

// defaultCalls are about CUDA's stream 0.
var defaultCalls = []call{
	{name: "stream.Default: Sync", nowhere: true, prepare: func(r *rig) func() error {
		return func() error { return stream.Default(r.dev).Sync(r.ctx) }
	}},
	{name: "stream.Default: Query", nowhere: true, prepare: func(r *rig) func() error {
		return func() error { _, err := stream.Default(r.dev).Query(); return err }
	}},
	{name: "stream.Default: Record", nowhere: true, prepare: func(r *rig) func() error {
		e := r.event(nil)
		return func() error { return e.Record(stream.Default(r.dev)) }
	}},
	{name: "stream.Default: WaitStream", prepare: func(r *rig) func() error {
		return func() error { return stream.Default(r.dev).WaitStream(r.on) }
	}},
	{name: "stream.Default: another stream waits for it", prepare: func(r *rig) func() error {
		return func() error { return r.on.WaitStream(stream.Default(r.dev)) }
	}},
	{name: "stream.Default: kernel.Kernel.Launch", nowhere: true, prepare: func(r *rig) func() error {
		return func() error { return r.kit.launch(r.kit.add, stream.Default(r.dev), r.y, 1) }
	}},
	{name: "stream.Default: memory.Slice.Zero", nowhere: true, prepare: func(r *rig) func() error {
		return func() error { return r.y.Zero(stream.Default(r.dev)) }
	}},
	{name: "stream.Default: memory.Slice.CopyTo", nowhere: true, prepare: func(r *rig) func() error {
		host := make([]float32, elems)
		return func() error { return r.y.CopyTo(stream.Default(r.dev), host) }
	}},
	{name: "stream.Default: graph.Capture", nowhere: true, prepare: func(r *rig) func() error {
		return func() error {
			x, err := graph.Capture([]*stream.Stream{stream.Default(r.dev)}, func() error { return nil }, nil)
			return errors.Join(err, x.Close())
		}
	}},
}

var deviceCalls = []call{
	{name: "device.Device.Sync", nowhere: true, prepare: onDevice(func(r *rig) error { return r.dev.Sync(r.ctx) })},
	{name: "device.Device.Sync: without a deadline", nowhere: true, prepare: onDevice(func(r *rig) error { return r.dev.Sync(context.Background()) })},
	{name: "device.Device.MemoryInfo", nowhere: true, prepare: onDevice(func(r *rig) error { _, _, err := r.dev.MemoryInfo(); return err })},
	{name: "device.Device.Properties", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := r.dev.Properties(); return err })},
	{name: "device.Device.Capability", nowhere: true, prepare: onDevice(func(r *rig) error { _, _, err := r.dev.Capability(); return err })},
	{name: "device.Device.Name", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := r.dev.Name(); return err })},
	{name: "device.Device.Active", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := r.dev.Active(); return err })},
	{name: "device.Device.Arch", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := r.dev.Arch(); return err })},
	{name: "device.Device.Supports", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := r.dev.Supports(device.TensorCores); return err })},
	{name: "device.Device.CanAccessPeer: itself", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := r.dev.CanAccessPeer(r.dev); return err })},
	{name: "device.Device.StartProfiler, device.Device.StopProfiler", nowhere: true, prepare: onDevice(func(r *rig) error { return errors.Join(r.dev.StartProfiler(), r.dev.StopProfiler()) })},
	{name: "device.Device.Err", nowhere: true, prepare: onDevice(func(r *rig) error { return r.dev.Err() })},
	{name: "device.NewSystem, device.System.Close", nowhere: true, prepare: onDevice(func(r *rig) error {
		sys, err := device.NewSystem(&device.SystemConfig{Backend: r.dev.System().Backend(), VirtualDevices: 1})
		if err != nil {
			return err
		}
		_, _, err = sys.Devices()[0].MemoryInfo()
		return errors.Join(err, sys.Close())
	})},
}

func onDevice(fn func(r *rig) error) func(r *rig) func() error {
	return func(r *rig) func() error { return func() error { return fn(r) } }
}

// exec returns a graph of a kernel.
func (r *rig) exec() *graph.Exec {
	x, err := graph.Capture([]*stream.Stream{r.third}, func() error { return r.kit.launch(r.kit.add, r.third, r.y, 1) }, nil)
	r.must(err)
	r.later(x.Close)
	return x
}

var graphCalls = []call{
	{name: "graph.Capture: nested", prepare: func(r *rig) func() error {
		return func() error {
			x, err := graph.Capture([]*stream.Stream{r.on}, func() error { return r.kit.launch(r.kit.add, r.on, r.y, 1) }, nil)
			return errors.Join(err, x.Close())
		}
	}},
	{name: "graph.Capture: nested, relaxed", prepare: func(r *rig) func() error {
		return func() error {
			x, err := graph.Capture([]*stream.Stream{r.on}, func() error { return r.kit.launch(r.kit.add, r.on, r.y, 1) }, &graph.Config{Mode: graph.Relaxed})
			return errors.Join(err, x.Close())
		}
	}},
	{name: "graph.Begin, graph.Recording.Abort", prepare: func(r *rig) func() error {
		return func() error {
			rec, err := graph.Begin(r.on, nil)
			return errors.Join(err, rec.Abort())
		}
	}},
	{name: "graph.Exec.Launch", prepare: func(r *rig) func() error {
		x := r.exec()
		return func() error { return x.Launch(r.on) }
	}},
	{name: "graph.Exec.Launch: with random numbers", prepare: func(r *rig) func() error {
		g := rng.New(r.dev, 1)
		x, err := graph.Capture([]*stream.Stream{r.third}, func() error { return rng.Uniform(g, r.third, r.y, 0, 1) }, nil)
		r.must(err)
		r.later(x.Close)
		return func() error { return x.Launch(r.on) }
	}},
	{name: "graph.Exec.Upload", prepare: func(r *rig) func() error {
		x := r.exec()
		return func() error { return x.Upload(r.on) }
	}},
	{name: "graph.Exec.Update", nowhere: true, prepare: func(r *rig) func() error {
		x, y := r.exec(), r.exec()
		return func() error { return x.Update(y) }
	}},
	{name: "graph.Exec.Dot", nowhere: true, prepare: func(r *rig) func() error {
		x := r.exec()
		return func() error { return x.Dot(io.Discard) }
	}},
	{name: "graph.Exec.Close", nowhere: true, prepare: func(r *rig) func() error {
		x := r.exec()
		return func() error { return x.Close() }
	}},
	{name: "graph.Exec.Close: launched", nowhere: true, prepare: func(r *rig) func() error {
		x := r.exec()
		r.must(x.Launch(r.home))
		return func() error { return x.Close() }
	}},
	{name: "graph.NewCallable", prepare: func(r *rig) func() error {
		return func() error {
			c, err := graph.NewCallable(r.on, []memory.Slice[float32]{r.y}, func(s *stream.Stream) error { return r.kit.launch(r.kit.add, s, r.y, 1) }, nil)
			return errors.Join(err, c.Close())
		}
	}},
	{name: "graph.Callable.Call", prepare: func(r *rig) func() error {
		c, err := graph.NewCallable(r.third, []memory.Slice[float32]{r.y}, func(s *stream.Stream) error { return r.kit.launch(r.kit.add, s, r.y, 1) }, nil)
		r.must(err)
		r.later(c.Close)
		z := r.slice(r.home, elems)
		return func() error { return c.Call(r.on, z) }
	}},
}
