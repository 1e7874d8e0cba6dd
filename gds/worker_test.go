package gds

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// newRings returns a ring with room for two slots, and one of them.
func newRings(t *testing.T) (*device.Device, *ring, *slot) {
	t.Helper()
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	r := smallRing(t, dev, 2*minSlot)
	x, err := r.acquire(context.Background(), nil, dev, minSlot)
	require.NoError(t, err)
	return dev, r, x
}

// Who waits comes in turn, also where what a later one wants would fit.
func TestRingIsFair(t *testing.T) {
	dev, r, x := newRings(t)
	got := make(chan *slot, 1)
	go func() {
		y, err := r.acquire(testgpu.Context(t), nil, dev, 2*minSlot)
		if err != nil {
			t.Error(err)
		}
		got <- y
	}()
	require.NoError(t, poll.Until(testgpu.Context(t), func() (bool, error) { return r.pressed(), nil }))
	z, err := r.tryAcquire(dev, minSlot)
	require.NoError(t, err)
	require.Nil(t, z)
	over := make(chan struct{})
	close(over)
	_, err = r.acquire(context.Background(), over, dev, minSlot)
	require.ErrorIs(t, err, errNoMore)
	require.NoError(t, r.release(x))
	require.NoError(t, r.release(<-got))
	require.Zero(t, r.used)
	require.False(t, r.pressed())
}

// Who gives up waiting gives back what it has got meanwhile, and those behind go on.
func TestRingGivenUp(t *testing.T) {
	dev, r, x := newRings(t)
	boom := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(boom)
	_, err := r.acquire(ctx, nil, dev, 2*minSlot)
	require.ErrorIs(t, err, boom)
	first := r.queue(2 * minSlot)
	second := r.queue(minSlot)
	require.NotNil(t, first)
	require.NotNil(t, second, "it is not its turn")
	r.withdraw(first)
	<-second.come
	require.EqualValues(t, 2*minSlot, r.used)
	r.withdraw(second)
	require.EqualValues(t, minSlot, r.used)
	require.NoError(t, r.release(x))
	require.Zero(t, r.used)
}

// Where only one slot can be pinned everybody gets it in the end, and where none can
// everybody is told, also of those who ask at the same time.
func TestRingAsksAgain(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	for n := range 1000 {
		r := newRing()
		var room atomic.Bool
		room.Store(n%2 == 1)
		r.make = func(dev *device.Device, bytes int) (*memory.Pinned[byte], error) {
			if !room.CompareAndSwap(true, false) {
				return nil, device.ErrorOutOfMemory
			}
			return memory.MakePinned[byte](dev, bytes)
		}
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				x, err := r.acquire(testgpu.Context(t), nil, dev, minSlot)
				if err == nil {
					room.Store(n%2 == 1)
					err = r.release(x)
				}
				if n%2 == 1 && err != nil || n%2 == 0 && !errors.Is(err, device.ErrorOutOfMemory) {
					t.Error(n, err)
				}
			})
		}
		all.Wait()
		require.Zero(t, r.used)
		require.Zero(t, r.slots)
	}
}

// Workers that wait for slots leave when there is nothing left to do.
func TestLastWindowIsTold(t *testing.T) {
	x := &transfer{windows: make([]window, 2), over: make(chan struct{})}
	_, ok := x.claim()
	require.True(t, ok)
	select {
	case <-x.over:
		t.Error("there is one more")
	default:
	}
	_, ok = x.claim()
	require.True(t, ok)
	<-x.over
	_, ok = x.claim()
	require.False(t, ok)
}

// A short call comes in between the windows of a long one that has all the slots.
func TestShortCallsInBetween(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	r := smallRing(t, dev, 2*minSlot)
	ctx := testgpu.Context(t)
	const windows = 1000
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, os.Truncate(path, windows*minSlot))
	long, short := openFile(t, path, &FileConfig{Engine: Cached, Threads: 1}), openFile(t, path, &FileConfig{Engine: Cached, Threads: 1})
	tune(long, minSlot, 2)
	tune(short, minSlot, 1)
	var calls atomic.Int64
	var over atomic.Bool // the short call has returned
	started := make(chan struct{})
	long.sys.Pread = func(fd int, p []byte, off int64) (int, error) {
		n := calls.Add(1)
		if n > 3 && !over.Load() {
			time.Sleep(5 * time.Millisecond) // so that the windows last longer than a stall of the short call
		}
		if n == 3 { // it has both slots
			close(started)
			if err := poll.Until(ctx, func() (bool, error) { return r.pressed(), nil }); err != nil {
				t.Error(err)
			}
		}
		return unix.Pread(fd, p, off)
	}
	s, other := newStream(t, dev), newStream(t, dev)
	x, y := makeBytes(t, s, windows*minSlot), makeBytes(t, other, 3*minSlot)
	done := make(chan error, 1)
	go func() { done <- long.Load(ctx, s, x, 0) }()
	<-started
	err := short.Load(ctx, other, y, 0)
	over.Store(true)
	require.NoError(t, err)
	require.Less(t, calls.Load(), int64(windows))
	require.NoError(t, <-done)
}

// Streams and events are kept for later calls.
func TestCopyStreamsAreKept(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := newRig(t, devs[0])
		before := len(copyStreamsOf(gpu.DeviceOf(devs[0])).free)
		require.Positive(t, before)
		for range 3 {
			r.usable(t)
		}
		f := r.open(t, Cached)
		defer f.Close()
		f.sys.Pread = func(int, []byte, int64) (int, error) { return 0, unix.EIO }
		for range 5 {
			require.ErrorIs(t, f.Load(testgpu.Context(t), r.s, r.x, 0), unix.EIO)
		}
		require.LessOrEqual(t, len(copyStreamsOf(gpu.DeviceOf(devs[0])).free), max(before, 3))
		require.GreaterOrEqual(t, len(copyStreamsOf(gpu.DeviceOf(devs[0])).free), before)
	})
}

// A worker sleeps until its copies are done only when asking for them takes too long.
func TestPollTime(t *testing.T) {
	for wait, is := range map[time.Duration]error{time.Hour: nil, 0: device.ErrorInvalidValue} {
		setPollTime(t, wait)
		dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuEventSynchronize#*=CUDA_ERROR_INVALID_VALUE"})[0]
		s, content := newStream(t, dev), randomBytes(40*minSlot)
		f := openFile(t, writeFile(t, content), &FileConfig{Threads: 2})
		tune(f, minSlot, 2)
		x := makeBytes(t, s, len(content))
		require.ErrorIs(t, f.Load(testgpu.Context(t), s, x, 0), is)
		if is == nil {
			require.True(t, string(content) == string(hostBytes(t, s, x)))
		}
	}
}

// The slots of all devices stay within the caches, as far as their size allows.
func TestSlotSizes(t *testing.T) {
	for _, x := range []struct {
		threads, devices, depth int
		want                    int64
	}{
		{16, 1, 2, 4 << 20}, {16, 0, 2, 4 << 20}, {4, 1, 2, 4 << 20}, {16, 2, 2, 2 << 20}, {16, 2, 4, 1 << 20},
		{12, 2, 2, 2 << 20}, {16, 8, 2, 512 << 10}, {64, 8, 2, 512 << 10},
	} {
		require.Equal(t, x.want, (&File{depth: x.depth}).slotFor(x.threads, x.devices), "%+v", x)
	}
	require.EqualValues(t, minSlot, (&File{depth: 2, chunk: minSlot}).slotFor(16, 8))
}
