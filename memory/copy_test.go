package memory

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

// broken is a machine on which whatever goes directly from one device to
// another arrives as zeros.
const broken = "zero@cuMemcpyDtoDAsync#*,zero@cuMemcpyPeerAsync#*"

// crossCopy copies n elements back and forth between two devices, on a stream of
// either, and checks them.
func crossCopy(t *testing.T, devs []*device.Device, n int) {
	t.Helper()
	for _, on := range []int{0, 1} {
		for _, w := range [][2]int{{0, 1}, {1, 0}} {
			var s [2]*stream.Stream
			for i, d := range devs[:2] {
				var err error
				s[i], err = stream.New(d, nil)
				require.NoError(t, err)
				defer s[i].Close()
			}
			in, out := make([]int32, n), make([]int32, n)
			for i := range in {
				in[i] = int32(i*7 + on + 1)
			}
			x, err := MakeFrom(s[w[0]], in)
			require.NoError(t, err)
			defer x.Close()
			y, err := MakeFrom(s[w[1]], out)
			require.NoError(t, err)
			defer y.Close()
			require.NoError(t, s[on].WaitStream(s[1-on]))
			require.NoError(t, Copy(s[on], y, x))
			require.NoError(t, s[1-on].WaitStream(s[on]))
			require.NoError(t, x.Zero(s[w[0]]), "after the copy, as the streams are ordered")
			require.NoError(t, y.CopyTo(s[w[1]], out))
			require.True(t, slices.Equal(in, out), "from %d to %d on a stream of %d", w[0], w[1], on)
		}
	}
}

// Copies are right where the direct way is broken, and the user is told once.
func TestCopyStagedWherePeersAreBroken(t *testing.T) {
	log := catchLog(t)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: broken})
	for _, n := range []int{1, 1000, stageBytes/4 + 1, 5*stageBytes/4 + 3} {
		crossCopy(t, devs, n)
	}
	require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("staged through host memory")), log.String())
	require.Contains(t, log.String(), "virtual:0")
	for _, way := range [][2]int{{0, 1}, {1, 0}} {
		works, tested := gpu.DeviceOf(devs[way[0]]).PeerTested(gpu.DeviceOf(devs[way[1]]))
		require.True(t, tested)
		require.False(t, works)
	}
	_, tested := gpu.DeviceOf(devs[0]).PeerTested(gpu.DeviceOf(devs[2]))
	require.False(t, tested, "no copy went there")
}

func TestCopyStagedEverywhere(t *testing.T) {
	t.Setenv("CHORUS_P2P", "off")
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		if gpu.DeviceOf(devs[0]).System().Machine == nil { // other tests have tested the way between these
			sys, err := device.NewSystem(&device.SystemConfig{Backend: "cuda"})
			require.NoError(t, err)
			defer func() { require.NoError(t, sys.Close()) }()
			devs = sys.Devices()[:2]
		}
		crossCopy(t, devs, 3*stageBytes/4+1)
	})
}

func TestCopyDirectByForce(t *testing.T) {
	t.Setenv("CHORUS_P2P", "force")
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: broken})
	works, err := devs[0].PeerWorks(devs[1])
	require.NoError(t, err)
	require.True(t, works, "as the user wants it")
	s, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	defer s.Close()
	s1, err := stream.New(devs[1], nil)
	require.NoError(t, err)
	defer s1.Close()
	x, err := MakeFrom(s, []int32{5})
	require.NoError(t, err)
	defer x.Close()
	y, err := MakeFrom(s1, []int32{6})
	require.NoError(t, err)
	defer y.Close()
	require.NoError(t, s.WaitStream(s1))
	require.NoError(t, Copy(s, y, x))
	require.NoError(t, s1.WaitStream(s))
	out := []int32{-1}
	require.NoError(t, y.CopyTo(s1, out))
	require.Zero(t, out[0], "the fault is there")
	t.Setenv("CHORUS_P2P", "maybe")
	other := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	_, err = other[0].PeerWorks(other[1])
	require.ErrorContains(t, err, "one of auto, off, force")
}

// Where one of the two directions is broken, neither is used.
func TestPeerWorksOneWay(t *testing.T) {
	for _, fault := range []string{"zero@cuMemcpyDtoDAsync#1", "zero@cuMemcpyDtoDAsync#2"} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: fault})
		works, err := devs[0].PeerWorks(devs[1])
		require.NoError(t, err)
		require.False(t, works, fault)
	}
}

// Where a call in the middle fails, what was enqueued before is done when Copy returns:
// the memory may go, and copies from then on are right.
func TestCopyStagedThatFails(t *testing.T) {
	t.Setenv("CHORUS_P2P", "off")
	for _, call := range []string{"cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"} {
		for nth := 1; nth <= 9; nth++ {
			// The calls before the copy are the same in each round.
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: fmt.Sprintf("%s#%d=CUDA_ERROR_OUT_OF_MEMORY", call, nth)})
			s, err := stream.New(devs[0], nil)
			require.NoError(t, err)
			defer s.Close()
			x, errX := Make[int32](s, stageBytes)
			s1, err := stream.New(devs[1], nil)
			require.NoError(t, err)
			defer s1.Close()
			z, errZ := Make[int32](s1, stageBytes)
			require.NoError(t, errors.Join(errX, errZ))
			require.NoError(t, x.Zero(s))
			if s.WaitStream(s1) == nil {
				_ = Copy(s, z, x) // fails in most rounds
			}
			require.NoError(t, x.Zero(s))
			require.NoError(t, s.Sync(testgpu.Context(t)))
			require.NoError(t, z.Zero(s1))
			require.NoError(t, s1.Sync(testgpu.Context(t)))
			require.NoError(t, errors.Join(x.Close(), z.Close()))
			require.Empty(t, devs[0].System().Reports(), "%s#%d", call, nth)
			require.NoError(t, devs[0].Err(), "%s#%d", call, nth)
		}
	}
}

// Staged copies from one device to several, by many goroutines and after an
// error, keep apart.
func TestCopyStagedFromMany(t *testing.T) {
	t.Setenv("CHORUS_P2P", "off")
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: "cuMemHostAlloc#2=CUDA_ERROR_OUT_OF_MEMORY"})
	const n = stageBytes/4 + 1
	send := func(to *device.Device, first int32) (in, out []int32, err error) {
		from, err := stream.New(devs[0], nil)
		if err != nil {
			return nil, nil, err
		}
		defer from.Close()
		s, err := stream.New(to, nil)
		if err != nil {
			return nil, nil, err
		}
		defer s.Close()
		in, out = make([]int32, n), make([]int32, n)
		for i := range in {
			in[i] = first + int32(i)
		}
		x, err := MakeFrom(from, in)
		if err != nil {
			return nil, nil, err
		}
		defer x.Close()
		y, err := Make[int32](s, n)
		if err != nil {
			return nil, nil, err
		}
		defer y.Close()
		err = errors.Join(s.WaitStream(from), x.RecordStream(s))
		if err == nil {
			err = Copy(s, y, x)
		}
		if err == nil {
			err = y.CopyTo(s, out)
		}
		return in, out, err
	}
	_, _, err := send(devs[1], 0)
	require.ErrorIs(t, err, device.ErrorOutOfMemory)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			in, out, err := send(devs[1+i%2], int32(i)<<24)
			if err != nil || !slices.Equal(in, out) {
				t.Errorf("copy %d: equal is %v: %v", i, slices.Equal(in, out), err)
			}
		})
	}
	all.Wait()
}

// A good way is tested once, without a word.
func TestPeerWorks(t *testing.T) {
	log := catchLog(t)
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for range 2 {
			works, err := devs[1].PeerWorks(devs[0])
			require.NoError(t, err)
			can, err := devs[0].CanAccessPeer(devs[1])
			require.NoError(t, err)
			if gpu.DeviceOf(devs[0]).System().Machine != nil {
				require.True(t, works)
			}
			require.True(t, can || !works)
		}
		works, err := devs[0].PeerWorks(devs[0])
		require.NoError(t, err)
		require.True(t, works)
		crossCopy(t, devs, 1000)
		_, err = devs[0].PeerWorks(nil)
		require.ErrorContains(t, err, "no device given")
	})
	require.NotContains(t, log.String(), "virtual")
}

// A test that could not be made is made again.
func TestPeerWorksAfterAnError(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "cuMemAllocAsync#1=CUDA_ERROR_OUT_OF_MEMORY"})
	_, err := devs[0].PeerWorks(devs[1])
	require.ErrorIs(t, err, device.ErrorOutOfMemory)
	require.ErrorContains(t, err, "test copies between virtual:0 and virtual:1")
	works, err := devs[0].PeerWorks(devs[1])
	require.NoError(t, err)
	require.True(t, works)
}

func catchLog(t *testing.T) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&b, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	return &b
}
