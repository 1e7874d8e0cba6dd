package kernel_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// touching is a kernel that declares accesses and makes none, so that only the sanitizer
// judges them and virtual devices stay usable after a report.
var touching = &kernel.Source{Name: "touch.cu", CUDA: `
extern "C" __global__ void touch(const float* r0, const float* r1, const float* r2, float* w0, float* w1, float* const w2) {}`,
	Kernels: []kernel.Def{{Name: "touch", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.Pointer},
		Go: func(*kernel.Call) {}}}}

// A yard is a sanitized device with tensors, which the host has waited for.
type yard struct {
	t   *testing.T
	sys *device.System
	dev *device.Device
	k   *kernel.Kernel
	s   []*stream.Stream
	x   []memory.Slice[float32]
}

// eachSanitized runs fn on sanitized virtual devices, and on CUDA.
func eachSanitized(t *testing.T, fn func(t *testing.T, y *yard)) {
	for _, backend := range []string{"virtual", "cuda"} {
		t.Run(backend, func(t *testing.T) {
			if backend == "cuda" {
				testgpu.CUDA(t, 1)
			}
			before := slog.Default()
			slog.SetDefault(slog.New(slog.DiscardHandler)) // of the expected reports
			t.Cleanup(func() { slog.SetDefault(before) })
			t.Setenv("CHORUS_SANITIZER", "1")
			sys, err := device.NewSystem(&device.SystemConfig{Backend: backend, VirtualDevices: 1})
			require.NoError(t, err)
			y := &yard{t: t, sys: sys, dev: sys.Devices()[0]}
			t.Cleanup(func() { require.NoError(t, sys.Close()) })
			m, err := kernel.Compile(y.dev, touching)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, m.Close()) })
			y.k, err = m.Kernel("touch")
			require.NoError(t, err)
			for range 11 {
				y.newStream()
			}
			for range 10 {
				x, err := memory.Make[float32](y.s[0], 64)
				require.NoError(t, err)
				y.x = append(y.x, x)
				t.Cleanup(func() { require.NoError(t, x.Close()) })
			}
			y.syncDevice()
			fn(t, y)
			y.syncDevice()
		})
	}
}

func (y *yard) newStream() *stream.Stream {
	s, err := stream.New(y.dev, nil)
	require.NoError(y.t, err)
	y.s = append(y.s, s)
	y.t.Cleanup(func() { require.NoError(y.t, s.Close()) })
	return s
}

func (y *yard) syncDevice() { require.NoError(y.t, y.dev.Sync(testgpu.Context(y.t))) }

func (y *yard) event() *stream.Event {
	e, err := stream.NewEvent(y.dev, nil)
	require.NoError(y.t, err)
	y.t.Cleanup(func() { require.NoError(y.t, e.Close()) })
	return e
}

// launch enqueues the kernel on stream i with arguments, three read and three written ones.
func (y *yard) launch(i int, args ...kernel.Arg) {
	require.NoError(y.t, y.k.Launch(y.s[i], kernel.Cover(1), args...))
}

// read and write enqueue an access of tensor x, and report whether it is an error.
func (y *yard) read(i, x int) bool {
	return y.judged(func() { y.launch(i, kernel.Ptr(y.x[x]), none, none, none, none, none) })
}

func (y *yard) write(i, x int) bool {
	return y.judged(func() { y.launch(i, none, none, none, kernel.Ptr(y.x[x]), none, none) })
}

// judged reports whether enqueue leads to a report.
func (y *yard) judged(enqueue func()) bool {
	before := len(y.sys.Reports())
	enqueue()
	return len(y.sys.Reports()) > before
}

var none = kernel.Address(0)

func (y *yard) record(e *stream.Event, i int) { require.NoError(y.t, e.Record(y.s[i])) }

func (y *yard) wait(i int, e *stream.Event) { require.NoError(y.t, y.s[i].Wait(e)) }

// torch's TestEventHandler: sequences of accesses, records and waits. Stream and tensor numbers
// begin at 1 as there.
func TestSanitizerEventHandler(t *testing.T) {
	ok, bad := func(t *testing.T, b bool) { t.Helper(); require.False(t, b, "false report") }, func(t *testing.T, b bool) { t.Helper(); require.True(t, b, "no report") }
	for name, do := range map[string]func(t *testing.T, y *yard){
		"empty_kernel_launch": func(t *testing.T, y *yard) {
			ok(t, y.judged(func() { y.launch(1, none, none, none, none, none, none) }))
		},
		"simple_passing": func(t *testing.T, y *yard) { ok(t, y.read(1, 1)); ok(t, y.read(2, 1)) },
		"simple_error":   func(t *testing.T, y *yard) { ok(t, y.read(1, 1)); bad(t, y.write(2, 1)) },
		"simple_sync": func(t *testing.T, y *yard) {
			e := y.event()
			ok(t, y.read(1, 1))
			y.record(e, 1)
			y.wait(2, e)
			ok(t, y.write(2, 1))
		},
		"reads_check_last_write": func(t *testing.T, y *yard) {
			e := y.event()
			ok(t, y.write(1, 1))
			y.record(e, 1)
			y.wait(2, e)
			ok(t, y.read(2, 1))
			bad(t, y.read(3, 1))
		},
		"branch_sync": func(t *testing.T, y *yard) {
			e := y.event()
			ok(t, y.write(1, 1))
			y.record(e, 1)
			y.wait(2, e)
			y.wait(3, e)
			ok(t, y.read(2, 1))
			ok(t, y.read(3, 1))
			bad(t, y.write(2, 1))
		},
		"chain_sync": func(t *testing.T, y *yard) {
			ok(t, y.write(1, 1))
			for i := 1; i < 10; i++ {
				e := y.event()
				y.record(e, i)
				y.wait(i+1, e)
			}
			ok(t, y.write(10, 1))
		},
		"expired_record": func(t *testing.T, y *yard) {
			e := y.event()
			ok(t, y.read(1, 1))
			y.record(e, 1)
			ok(t, y.read(1, 1))
			y.wait(2, e)
			bad(t, y.write(2, 1))
		},
		"deleted_record": func(t *testing.T, y *yard) {
			e, err := stream.NewEvent(y.dev, nil)
			require.NoError(t, err)
			ok(t, y.read(1, 1))
			y.record(e, 1)
			require.NoError(t, e.Close())
			again := y.event() // CUDA may reuse the handle
			y.wait(2, again)
			bad(t, y.write(2, 1))
		},
		"all_reads_checked_failing": func(t *testing.T, y *yard) { bad(t, y.readers(9)) },
		"all_reads_checked_passing": func(t *testing.T, y *yard) { ok(t, y.readers(10)) },
		"multiple_errors": func(t *testing.T, y *yard) {
			for x := range 10 {
				ok(t, y.write(1, x))
			}
			before := len(y.sys.Reports())
			for x := range 10 {
				bad(t, y.write(2, x))
			}
			require.Len(t, y.sys.Reports()[before:], 10)
		},
		"correct_state_merging": func(t *testing.T, y *yard) {
			e1, e2 := y.event(), y.event()
			ok(t, y.write(1, 1))
			ok(t, y.write(2, 2))
			y.record(e1, 1)
			y.record(e2, 2)
			ok(t, y.write(1, 1))
			ok(t, y.write(2, 2))
			y.wait(1, e2)
			y.wait(2, e1)
			y.record(e2, 2)
			y.wait(1, e2)
			ok(t, y.write(1, 2))
			y.record(e1, 1)
			y.wait(2, e1)
			ok(t, y.write(2, 1))
		},
		"record_override": func(t *testing.T, y *yard) {
			e := y.event()
			ok(t, y.read(1, 1))
			y.record(e, 1)
			y.record(e, 2)
			y.wait(3, e)
			bad(t, y.write(3, 1))
		},
		"multiple_wait": func(t *testing.T, y *yard) {
			e := y.event()
			ok(t, y.write(1, 1))
			y.record(e, 1)
			y.wait(2, e)
			y.wait(3, e)
			ok(t, y.read(2, 1))
			ok(t, y.read(3, 1))
		},
		"device_synchronize": func(t *testing.T, y *yard) {
			for i := 1; i < 10; i++ {
				ok(t, y.write(i, i))
			}
			y.syncDevice()
			for i := 1; i < 10; i++ {
				ok(t, y.write(i%9+1, i))
			}
		},
		"device_synchronization_expired": func(t *testing.T, y *yard) {
			ok(t, y.write(1, 1))
			y.syncDevice()
			ok(t, y.write(1, 1))
			bad(t, y.write(2, 1))
		},
		"new_stream_is_synchronized": func(t *testing.T, y *yard) {
			ok(t, y.write(1, 1))
			y.syncDevice()
			y.newStream()
			ok(t, y.write(len(y.s)-1, 1))
		},
		"stream_synchronize": func(t *testing.T, y *yard) {
			ok(t, y.write(1, 1))
			ok(t, y.write(2, 2))
			require.NoError(t, y.s[1].Sync(testgpu.Context(t)))
			ok(t, y.write(3, 1))
			bad(t, y.write(3, 2))
		},
		"event_synchronize": func(t *testing.T, y *yard) {
			e := y.event()
			ok(t, y.write(1, 1))
			y.record(e, 1)
			ok(t, y.write(1, 2))
			require.NoError(t, e.Sync(testgpu.Context(t)))
			ok(t, y.write(2, 1))
			bad(t, y.write(2, 2))
		},
	} {
		t.Run(name, func(t *testing.T) { eachSanitized(t, do) })
	}
}

// readers lets ten streams read a tensor, and stream 0 wait for some of them before it writes.
func (y *yard) readers(waits int) (bad bool) {
	for i := 1; i <= 10; i++ {
		require.False(y.t, y.read(i, 1))
	}
	for i := 1; i <= waits; i++ {
		e := y.event()
		y.record(e, i)
		y.wait(0, e)
	}
	return y.write(0, 1)
}

// torch's TestArgumentHandler: which arguments a kernel reads and writes.
func TestSanitizerArgumentHandler(t *testing.T) {
	eachSanitized(t, func(t *testing.T, y *yard) {
		x, z := y.x[1], y.x[2]
		y.launch(1, kernel.Ptr(x), kernel.Ptr(z), none, kernel.Ptr(y.x[3]), none, kernel.Ptr(y.x[4]))
		require.False(t, y.read(2, 1), "const float* is read")
		require.False(t, y.read(2, 2))
		require.True(t, y.read(2, 3), "float* is written")
		require.True(t, y.read(2, 4), "float* const is written")
		y.syncDevice()
		y.launch(1, kernel.Ptr(x), none, none, kernel.Ptr(x), none, none)
		require.True(t, y.read(3, 1), "a tensor that is both read and written")
		y.syncDevice()
		y.launch(1, none, none, none, kernel.Ptr(x.Slice(0, 32)), none, none)
		require.False(t, y.judged(func() { y.launch(2, none, none, none, kernel.Ptr(x.Slice(32, 64)), none, none) }), "other elements")
		require.True(t, y.judged(func() { y.launch(4, none, none, none, kernel.Ptr(x.Slice(31, 33)), none, none) }))
		y.syncDevice()
		y.launch(1, none, none, none, kernel.Address(x.Ptr()), none, none)
		require.False(t, y.write(2, 1), "the length behind an address is unknown")
	})
}

// torch's TestMessages: the report names both calls, their streams and places, and the cure.
func TestSanitizerMessages(t *testing.T) {
	eachSanitized(t, func(t *testing.T, y *yard) {
		require.NoError(t, y.x[1].Zero(y.s[1]))
		y.launch(2, none, none, none, none, kernel.Ptr(y.x[1]), none)
		reports := y.sys.Reports()
		r := reports[len(reports)-1]
		for _, part := range []string{"race: kernel touch", "writes", "cuMemsetD8Async", fmt.Sprintf("stream %#x", y.s[1].Handle()), fmt.Sprintf("stream %#x", y.s[2].Handle()),
			"record an event after the first use"} {
			require.Contains(t, r, part)
		}
		require.Equal(t, 2, strings.Count(r, "sanitizer_test.go:"), r)
	})
}

// Uses of freed memory, the allocator's reuse of memory, copies, graphs.
func TestSanitizerMemory(t *testing.T) {
	for name, do := range map[string]func(t *testing.T, y *yard){
		"use after free": func(t *testing.T, y *yard) {
			x, err := memory.Make[float32](y.s[1], 64)
			require.NoError(t, err)
			arg := kernel.Ptr(x)
			require.NoError(t, x.Close())
			require.True(t, y.judged(func() { y.launch(1, arg, none, none, none, none, none) }))
			require.Contains(t, strings.Join(y.sys.Reports(), "\n"), "freed by MemFreed")
		},
		"reuse without RecordStream": func(t *testing.T, y *yard) { require.True(t, y.reused(false)) },
		"reuse with RecordStream":    func(t *testing.T, y *yard) { require.False(t, y.reused(true)) },
		"RecordStream is no access": func(t *testing.T, y *yard) {
			require.NoError(t, y.x[1].RecordStream(y.s[2]))
			require.False(t, y.write(1, 1))
		},
		"graph": func(t *testing.T, y *yard) {
			g, err := graph.Capture([]*stream.Stream{y.s[1]}, func() error {
				require.False(t, y.write(1, 1), "a capture enqueues nothing")
				return nil
			}, nil)
			require.NoError(t, err)
			defer func() { require.NoError(t, g.Close()) }()
			require.False(t, y.write(2, 1))
			require.True(t, y.judged(func() { require.NoError(t, g.Launch(y.s[3])) }))
			y.syncDevice()
			require.False(t, y.judged(func() { require.NoError(t, g.Launch(y.s[3])) }))
			require.True(t, y.read(4, 1))
			require.False(t, y.read(3, 1), "the stream of the launch")
		},
		"launches of one graph run in order": func(t *testing.T, y *yard) {
			g, err := graph.Capture([]*stream.Stream{y.s[1]}, func() error { y.write(1, 1); return nil }, nil)
			require.NoError(t, err)
			require.False(t, y.judged(func() { require.NoError(t, g.Launch(y.s[3])); require.NoError(t, g.Launch(y.s[4])) }))
			y.syncDevice()
			require.NoError(t, g.Close())
		},
		"launches of one graph run in order on other streams too": func(t *testing.T, y *yard) {
			g, err := graph.Capture([]*stream.Stream{y.s[1]}, func() error {
				require.NoError(t, y.s[2].WaitStream(y.s[1]))
				y.read(2, 1)
				require.NoError(t, y.s[1].WaitStream(y.s[2]))
				y.write(1, 1)
				return nil
			}, nil)
			require.NoError(t, err)
			for i := range 4 {
				require.False(t, y.judged(func() { require.NoError(t, g.Launch(y.s[3+i])) }))
			}
			y.syncDevice()
			require.NoError(t, g.Close())
		},
		"branches of a graph": func(t *testing.T, y *yard) {
			g, err := graph.Capture([]*stream.Stream{y.s[1]}, func() error {
				require.NoError(t, y.s[2].WaitStream(y.s[1]))
				y.read(2, 1)
				y.write(1, 1)
				require.NoError(t, y.s[1].WaitStream(y.s[2]))
				return nil
			}, nil)
			require.NoError(t, err)
			require.True(t, y.judged(func() { require.NoError(t, g.Launch(y.s[1])) }))
			y.syncDevice()
			require.NoError(t, g.Close())
		},
	} {
		t.Run(name, func(t *testing.T) { eachSanitized(t, do) })
	}
}

// reused lets another stream use a tensor that its stream frees, and reports whether that is an
// error.
func (y *yard) reused(record bool) bool {
	x, err := memory.Make[float32](y.s[1], 64)
	require.NoError(y.t, err)
	require.NoError(y.t, y.s[2].WaitStream(y.s[1]))
	y.launch(2, none, none, none, kernel.Ptr(x), none, none)
	if record {
		require.NoError(y.t, x.RecordStream(y.s[2]))
	}
	before := len(y.sys.Reports())
	require.NoError(y.t, x.Close())
	again, err := memory.Make[float32](y.s[1], 64)
	require.NoError(y.t, err)
	y.launch(1, none, none, none, kernel.Ptr(again), none, none)
	require.NoError(y.t, again.Close())
	return len(y.sys.Reports()) > before
}

// Without the variable, the driver is not decorated.
func TestSanitizerIsOff(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		require.Nil(t, gpu.DeviceOf(devs[0]).Watcher())
		_, decorated := gpu.DeviceOf(devs[0]).Driver().(cudadrv.Watcher)
		require.False(t, decorated)
	})
}
