package stream_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var addSource = kernel.Source{
	Name: "add.cu",
	CUDA: `extern "C" __global__ void add(int* x, int by, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) x[i] += by;
}`,
	Kernels: []kernel.Def{{
		Name:   "add",
		Params: []kernel.Param{kernel.Pointer, kernel.I32, kernel.I32},
		Go: func(c *kernel.Call) {
			x := kernel.Update[int32](c, 0, int(kernel.Get[int32](c, 2)))
			for i := range x {
				x[i] += kernel.Get[int32](c, 1)
			}
		},
	}},
}

// 200 goroutines allocate, copy, launch, record, wait and synchronise on streams
// of their own and of the pool, and each element is right.
func TestManyGoroutines(t *testing.T) {
	t.Run("virtual", func(t *testing.T) {
		manyGoroutines(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4}))
	})
	t.Run("cuda", func(t *testing.T) {
		all := testgpu.CUDA(t, 1)[0].System().Devices()
		manyGoroutines(t, all[:min(4, len(all))])
	})
}

func manyGoroutines(t *testing.T, devs []*device.Device) {
	adds := make([]*kernel.Kernel, len(devs))
	for i, dev := range devs {
		m, err := kernel.Compile(dev, &addSource)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, m.Close()) })
		adds[i] = must(m.Kernel("add"))
	}
	var wg sync.WaitGroup
	for g := range 200 {
		wg.Go(func() {
			for round := range testgpu.Rounds(2, 4) {
				if err := oneRound(t, devs[g%len(devs)], adds[g%len(devs)], g, round); err != nil {
					t.Errorf("goroutine %d, round %d: %v", g, round, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// oneRound adds on one stream and copies on another, to and fro.
func oneRound(t *testing.T, dev *device.Device, add *kernel.Kernel, g, round int) (err error) {
	ok := func(e error) {
		if e != nil && err == nil {
			err = e
		}
	}
	s, e := stream.FromPool(dev, -(g % 2))
	if round%2 == 0 {
		s, e = stream.New(dev, nil)
	}
	if e != nil {
		return e
	}
	defer func() { ok(s.Close()) }()
	side, e := stream.FromPool(dev, 0)
	if e != nil {
		return e
	}
	n := 100 + 7*g
	in, out := make([]int32, n), make([]int32, n)
	for i := range in {
		in[i] = int32(g*100000 + round*1000 + i)
	}
	x, e := memory.MakeFrom(s, in)
	if e != nil {
		return e
	}
	defer func() { ok(x.Close()) }()
	y, e := memory.Make[int32](side, n)
	if e != nil {
		return e
	}
	defer func() { ok(y.Close()) }()
	ok(x.RecordStream(side))
	ok(y.RecordStream(s))
	ok(add.Launch(s, kernel.Cover(n), kernel.Ptr(x), kernel.Scalar(int32(g)), kernel.Scalar(int32(n))))
	ready, e := s.Record(nil)
	if e != nil {
		return e
	}
	defer func() { ok(ready.Close()) }()
	ok(side.Wait(ready))
	ok(memory.Copy(side, y, x))
	ok(s.WaitStream(side))
	ok(add.Launch(s, kernel.Cover(n), kernel.Ptr(y), kernel.Scalar[int32](1), kernel.Scalar(int32(n))))
	called := 0
	ok(s.Callback(func() { called++ }))
	ok(ready.Record(s))
	ok(ready.Sync(testgpu.Context(t)))
	ok(y.CopyTo(s, out))
	ok(s.Sync(testgpu.Context(t)))
	if err != nil {
		return err
	}
	if called != 1 {
		return fmt.Errorf("the callback ran %d times", called)
	}
	for i := range out {
		if want := in[i] + int32(g) + 1; out[i] != want {
			return fmt.Errorf("element %d of %d is %d: want %d", i, n, out[i], want)
		}
	}
	return nil
}
