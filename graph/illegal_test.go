package graph_test

import (
	"bytes"
	"context"
	"errors"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// What Chorus knows to be illegal fails at once, with its name, and the capture
// goes on.
func TestIllegalCalls(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		host := make([]float32, elems)
		e, err := stream.NewEvent(devs[0], &stream.EventConfig{Timing: true})
		require.NoError(t, err)
		defer e.Close()
		other := capture(t, func() error { return b.launch(b.add, b.s, v, 1) }, b.s)
		used := newStream(t, devs[0])
		w, err := memory.Make[float32](used, 1)
		require.NoError(t, err)
		require.NoError(t, w.RecordStream(b.s))
		for _, c := range []struct {
			op   string
			call func() error
		}{
			{"stream: sync", func() error { return b.s.Sync(context.Background()) }},
			{"stream: sync", func() error { return b.s.Sync(testgpu.Context(t)) }},
			{"stream: query", func() error { _, err := b.s.Query(); return err }},
			{"stream: close", b.s.Close},
			{"device: synchronize " + devs[0].String(), func() error { return devs[0].Sync(context.Background()) }},
			{"stream: sync event", func() error { return errors.Join(e.Record(b.s), e.Sync(context.Background())) }},
			{"stream: query event", func() error { _, err := e.Query(); return err }},
			{"stream: elapsed time", func() error { _, err := e.Elapsed(e); return err }},
			{"memory: copy from host", func() error { _, err := memory.MakeFrom(b.s, host); return err }},
			{"memory: free", v.Close},
			{"memory: free", w.Close},
			{"memory: copy from host", func() error { return v.CopyFrom(b.s, host) }},
			{"memory: copy to host", func() error { return v.CopyTo(b.s, host) }},
			{"graph: launch", func() error { return other.Launch(b.s) }},
			{"graph: upload", func() error { return other.Upload(b.s) }},
			{"graph: capture", func() error {
				_, err := graph.Capture([]*stream.Stream{b.s}, func() error { return nil }, nil)
				return err
			}},
		} {
			t.Run(c.op, func(t *testing.T) {
				x, err := graph.Capture([]*stream.Stream{b.s}, func() error {
					err := c.call()
					var ce *device.CaptureError
					require.ErrorAs(t, err, &ce)
					require.Equal(t, c.op, ce.Op)
					require.ErrorIs(t, err, graph.ErrorUnsupported)
					require.ErrorContains(t, err, c.op+": ")
					require.ErrorContains(t, err, "is captured into a graph: ")
					return b.launch(b.add, b.s, v, 1)
				}, nil)
				require.NoError(t, err)
				require.NoError(t, x.Close())
				// The error itself ends a capture that returns it.
				_, err = graph.Capture([]*stream.Stream{b.s}, c.call, nil)
				require.ErrorIs(t, err, graph.ErrorUnsupported)
			})
		}
		require.NoError(t, w.Close())
		require.NoError(t, e.Record(b.s), "outside of a capture it is an event again")
		require.NoError(t, e.Sync(testgpu.Context(t)))
		b.want(1, v)
	})
}

// What only the driver finds spoils the capture, and its end says so.
func TestSpoiledCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		e, err := stream.NewEvent(devs[0], nil)
		require.NoError(t, err)
		defer e.Close()
		require.NoError(t, e.Record(b.s))
		for name, c := range map[string]struct {
			call func() error
			want error
		}{
			"device sync": {func() error {
				return gpu.DeviceOf(devs[0]).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
			}, graph.ErrorUnsupported},
			"cuMemAlloc": {func() error { return allocate(t, devs[0]) }, graph.ErrorUnsupported},
			"isolation":  {func() error { return b.s.Wait(e) }, graph.ErrorIsolation},
		} {
			t.Run(name, func(t *testing.T) {
				_, err := graph.Capture([]*stream.Stream{b.s}, func() error {
					require.ErrorIs(t, c.call(), c.want)
					_ = b.launch(b.add, b.s, v, 1)
					return nil
				}, nil)
				require.ErrorIs(t, err, graph.ErrorInvalidated)
				require.ErrorContains(t, err, "graph: end the capture of graph ")
				usable(b, v)
			})
		}
	})
}

// allocate calls what a capture may forbid. The memory is freed after the test.
func allocate(t *testing.T, dev *device.Device) error {
	var p cudadrv.DevicePtr
	err := gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) { p, r = drv.MemAlloc(1 << 20); return r })
	if err == nil {
		t.Cleanup(func() {
			require.NoError(t, gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFree(p) }))
		})
	}
	return err
}

// usable checks that no capture is left on the stream.
func usable(b *bench, v memory.Slice[float32]) {
	b.t.Helper()
	yes, err := b.s.Capturing()
	require.NoError(b.t, err)
	require.False(b.t, yes)
	b.fill(v, 1)
	require.NoError(b.t, b.launch(b.add, b.s, v, 1))
	b.want(2, v)
	x, err := graph.Capture([]*stream.Stream{b.s}, func() error { return b.launch(b.scale, b.s, v, 3) }, nil)
	require.NoError(b.t, err)
	require.NoError(b.t, x.Launch(b.s))
	b.want(6, v)
	require.NoError(b.t, x.Close())
}

// In the global mode another goroutine's cuMemAlloc is forbidden too.
func TestModesAndOtherGoroutines(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		for m, want := range map[graph.Mode]error{graph.ThreadLocal: nil, graph.Global: graph.ErrorUnsupported, graph.Relaxed: nil} {
			t.Run(m.String(), func(t *testing.T) {
				x, err := graph.Capture([]*stream.Stream{b.s}, func() error {
					done := make(chan error)
					go func() { done <- allocate(t, devs[0]) }() // this goroutine's thread is locked
					require.ErrorIs(t, <-done, want)
					return b.launch(b.add, b.s, v, 1)
				}, &graph.Config{Mode: m})
				if want == nil {
					require.NoError(t, err)
					require.NoError(t, x.Close())
				} else {
					require.ErrorIs(t, err, graph.ErrorInvalidated)
				}
				usable(b, v)
			})
		}
		x, err := graph.Capture([]*stream.Stream{b.s}, func() error { return allocate(t, devs[0]) }, &graph.Config{Mode: graph.Relaxed})
		require.NoError(t, err)
		require.NoError(t, x.Close())
	})
}

// Nothing is left of a capture whose function fails, whatever it has forked.
func TestFunctionFails(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		side, inner := newStream(t, devs[0]), newStream(t, devs[0])
		v := b.make(1)
		streams := []*stream.Stream{b.s, side}
		begun := func() error {
			return errors.Join(b.launch(b.add, b.s, v, 1), inner.WaitStream(side), b.launch(b.add, inner, v, 1))
		}
		boom := errors.New("boom")
		for range 3 {
			_, err := graph.Capture(streams, func() error { return errors.Join(begun(), boom) }, nil)
			require.ErrorIs(t, err, boom)
			require.EqualError(t, err, "boom")
			usable(b, v)
			require.PanicsWithValue(t, "boom", func() {
				_, _ = graph.Capture(streams, func() error { _ = begun(); panic("boom") }, nil)
			})
			usable(b, v)
			_, err = graph.Capture(streams, begun, nil)
			require.ErrorIs(t, err, graph.ErrorUnjoined)
			usable(b, v)
		}
		for _, s := range []*stream.Stream{side, inner} {
			require.NoError(t, s.Sync(testgpu.Context(t)))
		}
	})
}

func TestAbort(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		for range 3 {
			r, err := graph.Begin(b.s, nil)
			require.NoError(t, err)
			require.NoError(t, b.launch(b.add, b.s, v, 1))
			require.NoError(t, r.Abort())
			require.NoError(t, r.Abort())
			_, err = r.End()
			require.ErrorIs(t, err, device.ErrClosed)
			usable(b, v)
		}
		require.NoError(t, (*graph.Recording)(nil).Abort())
	})
}

func TestEndOnAnotherGoroutine(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		r, err := graph.Begin(b.s, nil)
		require.NoError(t, err)
		require.NoError(t, b.launch(b.add, b.s, v, 1))
		ended := make(chan error)
		go func() { _, err := r.End(); ended <- err }()
		err = <-ended
		require.ErrorIs(t, err, graph.ErrorWrongThread)
		require.ErrorContains(t, err, "call it on the goroutine that began the capture")
		require.NoError(t, r.Abort())
		usable(b, v)
		r, err = graph.Begin(b.s, &graph.Config{Mode: graph.Relaxed})
		require.NoError(t, err)
		go func() { x, err := r.End(); ended <- errors.Join(err, x.Close()) }()
		require.NoError(t, <-ended)
		usable(b, v)
	})
}

// Two captures cannot become one.
func TestMerge(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		other := newStream(t, devs[0])
		relaxed := &graph.Config{Mode: graph.Relaxed}
		first, err := graph.Begin(b.s, relaxed)
		require.NoError(t, err)
		second, err := graph.Begin(other, relaxed)
		require.NoError(t, err)
		require.NoError(t, b.launch(b.add, b.s, v, 1))
		require.ErrorIs(t, other.WaitStream(b.s), graph.ErrorMerge)
		require.NoError(t, first.Abort())
		require.NoError(t, second.Abort())
		usable(b, v)
		require.NoError(t, other.Sync(testgpu.Context(t)))
	})
}

func TestArguments(t *testing.T) {
	a := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	z := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s, far := newStream(t, a[0]), newStream(t, z[0])
	nothing := func() error { return nil }
	closed, err := stream.New(a[0], nil)
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	for want, streams := range map[string][]*stream.Stream{
		"want at least one stream":  nil,
		"no stream given":           {nil},
		"belong to two systems":     {s, far},
		"is given twice":            {s, s},
		device.ErrClosed.Error():    {closed},
		"graph: capture: stream 0x": {s, closed},
	} {
		_, err := graph.Capture(streams, nothing, nil)
		require.ErrorContains(t, err, want)
	}
	_, err = graph.Capture([]*stream.Stream{s}, nil, nil)
	require.ErrorContains(t, err, "a function")
	x := capture(t, nothing, s)
	require.ErrorContains(t, x.Launch(far), "another system")
}

// In the relaxed mode any goroutine may end a capture, and one does.
func TestEndOnSeveralGoroutines(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		for range 20 {
			r, err := graph.Begin(s, &graph.Config{Mode: graph.Relaxed})
			require.NoError(t, err)
			var wg sync.WaitGroup
			var ended atomic.Int32
			for i := range 6 {
				wg.Go(func() {
					if i%3 == 2 {
						if r.Abort() != nil {
							ended.Add(100)
						}
					} else if x, err := r.End(); err == nil {
						ended.Add(1)
						_ = x.Close()
					}
				})
			}
			wg.Wait()
			require.LessOrEqual(t, ended.Load(), int32(1))
		}
		_, err := (*graph.Recording)(nil).End()
		require.ErrorContains(t, err, "no recording given")
		require.NoError(t, (*graph.Recording)(nil).Abort())
	})
}

// A driver that fails at the end of a capture leaves nothing behind either.
func TestFaults(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuGraphInstantiateWithFlags#1=CUDA_ERROR_OUT_OF_MEMORY, " +
		"cuStreamBeginCapture#2=CUDA_ERROR_OUT_OF_MEMORY, cuStreamGetCaptureInfo#3=CUDA_ERROR_UNKNOWN"})
	b := newBench(t, sys.Devices()[0])
	v := b.make(1)
	pool := memory.NewPool(nil)
	defer pool.Close()
	for _, want := range []error{device.ErrorOutOfMemory, device.ErrorOutOfMemory, device.Status(cudadrv.ErrorUnknown)} {
		_, err := b.captureIn(pool, func() error { return b.launch(b.add, b.s, v, 1) })
		require.ErrorIs(t, err, want)
		require.False(t, locked(), "the goroutine is free of its thread")
		yes, err := b.s.Capturing()
		require.NoError(t, err)
		require.False(t, yes)
	}
	x, err := b.captureIn(pool, func() error {
		require.True(t, locked())
		return b.launch(b.add, b.s, v, 1)
	})
	require.NoError(t, err, "the pool is not in use")
	require.NoError(t, x.Close())
	require.False(t, locked())
	usable(b, v)
}

// locked reports whether the goroutine is locked to its thread.
func locked() bool {
	head, _, _ := bytes.Cut(debug.Stack(), []byte("\n"))
	return bytes.Contains(head, []byte("locked to thread"))
}

// A function that uses other streams captures nothing, and the error names them.
func TestNothingCaptured(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		other, joins := newStream(t, devs[0]), newStream(t, devs[0])
		cs, err := nccl.NewCommunicators(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, cs[0].Close()) }()
		uses := map[string]func() error{
			"kernel": func() error { return b.launch(b.add, other, v, 1) },
			"copy":   func() error { return v.Zero(other) },
			"nccl":   func() error { return nccl.AllReduce(cs[0], other, v, v, nccl.Sum) },
			"event":  func() error { e, err := other.Record(nil); return errors.Join(err, e.Close()) },
		}
		for _, mode := range []graph.Mode{graph.ThreadLocal, graph.Global, graph.Relaxed} {
			for name, use := range uses {
				_, err := graph.Capture([]*stream.Stream{b.s}, use, &graph.Config{Mode: mode, Name: "step"})
				var nothing *graph.NothingCapturedError
				require.ErrorAs(t, err, &nothing, "%s, %s", name, mode)
				require.Equal(t, []string{other.String()}, nothing.Used)
				require.Equal(t, b.s.String(), nothing.Stream)
				require.ErrorContains(t, err, "graph step of")
				require.NoError(t, other.Sync(testgpu.Context(t)))
				usable(b, v)
			}
		}
		for name, fn := range map[string]func() error{
			"nothing":     func() error { return nil },
			"only a fork": func() error { return errors.Join(joins.WaitStream(b.s), b.s.WaitStream(joins)) },
			"only events": func() error {
				e, err := b.s.Record(nil)
				return errors.Join(err, joins.Wait(e), b.s.WaitStream(joins), e.Close())
			},
			"no work of its own": func() error { _, err := other.Priority(); return err },
		} {
			x, err := graph.Capture([]*stream.Stream{b.s}, fn, nil)
			require.NoError(t, err, name)
			require.Zero(t, x.Nodes(), name)
			require.NoError(t, errors.Join(x.Launch(b.s), x.Close()), name)
		}
		x, err := graph.Capture([]*stream.Stream{b.s}, func() error {
			return errors.Join(b.launch(b.add, other, v, 1), b.launch(b.add, b.s, v, 1))
		}, nil)
		require.NoError(t, err, "something was captured")
		require.NoError(t, errors.Join(x.Close(), other.Sync(testgpu.Context(t))))
	})
}

// A wait that the mode forbids is refused before the driver sees it: the error says which
// call on what, which stream is captured and what to do, and the capture goes on.
func TestWaitsThatTheModeForbids(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		other := newStream(t, devs[0])
		e, err := other.Record(nil)
		require.NoError(t, err)
		defer e.Close()
		calls := map[string]func() error{
			"stream: sync":         func() error { return other.Sync(context.Background()) },
			"stream: query":        func() error { _, err := other.Query(); return err },
			"stream: sync event":   func() error { return e.Sync(context.Background()) },
			"stream: query event":  func() error { _, err := e.Query(); return err },
			"memory: copy to host": func() error { return v.CopyTo(other, make([]float32, elems)) },
		}
		for op, call := range calls {
			for mode, refused := range map[graph.Mode][2]string{
				graph.ThreadLocal: {"capture in the mode relaxed", ""},
				graph.Global:      {"capture in the mode relaxed", "capture in the mode thread_local"},
				graph.Relaxed:     {"", ""},
			} {
				x, err := graph.Capture([]*stream.Stream{b.s}, func() error {
					there := make(chan error)
					go func() { there <- call() }()
					for i, err := range []error{call(), <-there} {
						if refused[i] == "" {
							require.NoError(t, err, "%s, %s, %d", op, mode, i)
							continue
						}
						var ce *device.CaptureError
						require.ErrorAs(t, err, &ce, "%s, %s, %d", op, mode, i)
						require.Equal(t, op, ce.Op)
						require.Equal(t, b.s.String(), ce.Object)
						require.ErrorContains(t, err, "in the mode "+mode.String())
						require.ErrorContains(t, err, refused[i])
					}
					return b.launch(b.add, b.s, v, 1)
				}, &graph.Config{Mode: mode})
				require.NoError(t, err, "%s, %s", op, mode)
				require.NoError(t, errors.Join(x.Close(), other.Sync(testgpu.Context(t))))
			}
		}
	})
}

// A call that the driver refuses changes nothing: the event keeps what it recorded last.
func TestRefusedRecord(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		other := newStream(t, devs[0])
		e, err := other.Record(nil)
		require.NoError(t, err)
		defer e.Close()
		before, err := other.Record(nil)
		require.NoError(t, err)
		defer before.Close()
		_, err = graph.Capture([]*stream.Stream{b.s}, func() error {
			require.ErrorIs(t, b.s.Wait(before), graph.ErrorIsolation) // which spoils the capture
			require.ErrorIs(t, e.Record(b.s), graph.ErrorInvalidated)
			return e.Sync(testgpu.Context(t))
		}, &graph.Config{Mode: graph.Relaxed})
		require.ErrorIs(t, err, graph.ErrorInvalidated)
		require.NoError(t, e.Sync(testgpu.Context(t)))
	})
}

// A buffer without bytes can be closed at any time.
func TestCloseOfNothingInCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		outside, err := memory.Alloc(b.s, 0)
		require.NoError(t, err)
		capture(t, func() error {
			inside, err := memory.Alloc(b.s, 0)
			return errors.Join(err, inside.Close(), outside.Close())
		}, b.s)
	})
}

// An event of a capture that has ended cannot be waited for, with the same words for streams as for the host.
func TestWaitForAnEventOfAGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v, other := b.make(1), newStream(t, devs[0])
		e, err := stream.NewEvent(devs[0], nil)
		require.NoError(t, err)
		defer e.Close()
		x := capture(t, func() error { return errors.Join(b.launch(b.add, b.s, v, 1), e.Record(b.s)) }, b.s)
		require.NoError(t, x.Launch(b.s))
		_, asked := e.Query()
		waited := other.Wait(e)
		for _, err := range []error{asked, waited} {
			require.ErrorContains(t, err, "what the event recorded on "+devs[0].String()+" is captured into a graph: captured operations have not run")
		}
		require.ErrorIs(t, waited, device.ErrorInvalidValue)
		require.NoError(t, e.Record(b.s))
		require.NoError(t, other.Wait(e))
		require.NoError(t, other.Sync(testgpu.Context(t)))
	})
}
