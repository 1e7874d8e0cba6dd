package memory_test

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A block of some MiB needs a segment of 20 MiB: without its size, the error would name less memory than there is.
func TestOutOfMemoryNamesTheSegment(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		limit(t, d, 8*mib)
		_, err := memory.Make[byte](newStream(t, d), 4*mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.ErrorContains(t, err, ": tried to allocate 4.00 MiB, for which the driver is asked for 20.00 MiB; ")
	})
}

// limit lets the process have so many bytes of the device.
func limit(t testing.TB, d *device.Device, bytes int) {
	t.Helper()
	_, total, err := d.MemoryInfo()
	require.NoError(t, err)
	require.NoError(t, memory.SetFraction(d, float64(bytes)/float64(total)))
}

// The error has torch's facts and is right about them; the allocator is as good as
// before (test_out_of_memory, test_set_per_process_memory_fraction).
func TestOutOfMemorySaysWhatThereIs(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		p := newPool(t, nil)
		limit(t, d, 100*mib)
		x, err := memory.Make[byte](s, 30*mib)
		require.NoError(t, err)
		y := makeIn(t, p, s, 20*mib)
		small, err := memory.Make[byte](s, 1000)
		require.NoError(t, err)
		_, err = memory.Make[byte](s, 60*mib)
		oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
		require.True(t, ok, "%v", err)
		free, total, err2 := d.MemoryInfo()
		require.NoError(t, err2)
		require.Equal(t, memory.OutOfMemoryError{
			Device: d.String(), Requested: 60 * mib, Wanted: 60 * mib, Free: oom.Free, Total: total,
			Allocated: 50*mib + 1024, Private: 20 * mib, Reserved: 52 * mib, Largest: 0, Fraction: oom.Fraction, Uses: oom.Uses, Err: device.ErrorOutOfMemory,
		}, *oom)
		require.InDelta(t, free, oom.Free, 1<<30)
		require.Regexp(t, regexp.MustCompile(`^memory: out of memory on .*: tried to allocate 60\.00 MiB; .* of .* are free; `+
			`the process may use 100\.00 MiB \(0\.\d+ of all\); 50\.00 MiB are allocated, 20\.00 MiB of them in pools \(graphs have some\); `+
			`2\.00 MiB are reserved but not allocated, the largest block 0 bytes(; memory outside of the allocator: .*)?$`), err.Error())
		require.NotContains(t, err.Error(), "the driver is asked")
		st := statsOf(t, d)
		require.EqualValues(t, 1, st.OOMs)
		require.EqualValues(t, 1, st.AllocRetries)
		require.NoError(t, y.Close())
		_, err = memory.Make[byte](s, 60*mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory, "an open pool keeps what it does not use")
		require.NoError(t, p.Close())
		z, err := memory.Make[byte](s, 60*mib)
		require.NoError(t, err)
		require.EqualValues(t, 2, statsOf(t, d).AllocRetries)
		require.NoError(t, errors.Join(x.Close(), z.Close(), small.Close()))
		for _, f := range []float64{0, 0.5, 1} {
			require.NoError(t, memory.SetFraction(d, f))
			got, err := memory.Fraction(d)
			require.NoError(t, err)
			require.Equal(t, f, got)
		}
		for _, f := range []float64{math.NaN(), -0.1, 1.1, math.Inf(1)} {
			require.ErrorContains(t, memory.SetFraction(d, f), fmt.Sprintf("limit the memory of %s to %g of all: want a number from 0 to 1", d, f))
		}
	})
}

// Free memory in pieces is told of, and expandable segments find it
// (test_raises_oom).
func TestFragmentsAreTold(t *testing.T) {
	for conf, fits := range map[string]bool{"": false, "expandable_segments:True": true} {
		eachFresh(t, conf, func(t *testing.T, d *device.Device) {
			s := newStream(t, d)
			limit(t, d, 100*mib)
			var list []memory.Slice[byte]
			for range 8 {
				x, err := memory.Make[byte](s, 12*mib)
				require.NoError(t, err)
				list = append(list, x)
			}
			// Every second is free, but in one segment with a block that is not.
			var keep []memory.Slice[byte]
			for i, x := range list {
				if i%2 == 0 {
					require.NoError(t, x.Close())
					y, err := memory.Make[byte](s, 7*mib)
					require.NoError(t, err)
					keep = append(keep, y)
				} else {
					keep = append(keep, x)
				}
			}
			x, err := memory.Make[byte](s, 15*mib)
			if fits {
				require.NoError(t, err)
				require.NoError(t, x.Zero(s))
				require.NoError(t, s.Sync(testgpu.Context(t)))
			} else {
				require.ErrorIs(t, err, device.ErrorOutOfMemory)
				require.ErrorContains(t, err, "the free memory is in fragments: set CHORUS_ALLOC_CONF=expandable_segments:True")
			}
			require.NoError(t, x.Close())
			for _, x := range keep {
				require.NoError(t, x.Close())
			}
		})
	}
}

// What other streams use is waited for before there is no memory
// (test_caching_allocator_record_stream_oom).
func TestOutOfMemoryAwaitsOtherStreams(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		a, b := newStream(t, d), newStream(t, d)
		limit(t, d, 70*mib)
		for range 20 {
			x, err := memory.Make[byte](a, 30*mib)
			require.NoError(t, err)
			require.NoError(t, b.WaitStream(a))
			require.NoError(t, x.RecordStream(b))
			require.NoError(t, x.Zero(b))
			require.NoError(t, x.Close())
		}
		require.Zero(t, statsOf(t, d).OOMs)
	})
}

// Faults of the driver at each call leave the books as they were.
func TestAllocationWithFaults(t *testing.T) {
	for fault, conf := range map[string]string{
		"cuMemAlloc#2=CUDA_ERROR_OUT_OF_MEMORY":     "",
		"cuMemAlloc#2=CUDA_ERROR_UNKNOWN":           "",
		"cuMemCreate#2=CUDA_ERROR_OUT_OF_MEMORY":    "expandable_segments:True",
		"cuMemMap#2=CUDA_ERROR_UNKNOWN":             "expandable_segments:True",
		"cuMemSetAccess#2=CUDA_ERROR_OUT_OF_MEMORY": "expandable_segments:True",
		"cuMemAllocAsync#2=CUDA_ERROR_UNKNOWN":      "backend:cudaMallocAsync",
	} {
		t.Run(fault, func(t *testing.T) {
			configure(t, conf)
			d := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: fault})[0]
			s := newStream(t, d)
			x, err := memory.MakeFrom(s, random(1000))
			require.NoError(t, err)
			failed := 0
			large := make([]float32, 1<<20)
			for range 4 {
				y, err := memory.MakeFrom(s, large)
				if err != nil {
					failed++
					require.ErrorContains(t, err, "memory: ")
					require.ErrorContains(t, err, d.String())
				}
				require.NoError(t, y.Close())
			}
			require.LessOrEqual(t, failed, 1)
			out := make([]float32, 1000)
			require.NoError(t, x.CopyTo(s, out))
			require.Equal(t, random(1000), out)
			require.NoError(t, x.Close())
			require.NoError(t, memory.EmptyCache(d))
			require.Zero(t, statsOf(t, d).ReservedBytes.All.Current)
		})
	}
}

// The memory of a lost device is given up without a wait.
func TestLostDevice(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True", "backend:cudaMallocAsync"} {
		t.Run(conf, func(t *testing.T) {
			configure(t, conf)
			sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuMemsetD8Async#1=CUDA_ERROR_ILLEGAL_ADDRESS"})
			t.Cleanup(func() {
				if err := sys.Close(); err != nil {
					require.NotContains(t, err.Error(), "memory: ", "nobody asks a lost device for its memory back")
				}
			})
			d := sys.Devices()[0]
			a, b := newStream(t, d), newStream(t, d)
			p := memory.NewPool(nil)
			x := makeIn(t, p, a, 1000)
			y, err := memory.Make[byte](a, 1000)
			require.NoError(t, err)
			require.NoError(t, x.RecordStream(b))
			require.NoError(t, y.RecordStream(b))
			_ = set(a, cudadrv.DevicePtr(y.Ptr()), 10)
			require.Error(t, a.Sync(testgpu.Context(t)))
			_, err = memory.Make[byte](a, 1000)
			require.ErrorContains(t, err, "the device was lost before")
			_ = errors.Join(y.Close(), x.Close(), p.Close()) // what they say is what the device said
			_ = memory.EmptyCache(d)
			_, err = memory.StatsOf(d)
			if conf != "backend:cudaMallocAsync" {
				require.NoError(t, err)
			}
			_, err = memory.TakeSnapshot(d)
			require.NoError(t, err)
		})
	}
}

// Free memory of an open pool is not in fragments.
func TestFreeMemoryOfAPoolIsTold(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		limit(t, d, 100*mib)
		p := newPool(t, nil)
		require.NoError(t, makeIn(t, p, s, 60*mib).Close())
		keep := makeIn(t, p, s, 12*mib) // a part of the same segment, which therefore stays
		_, err := memory.Make[byte](s, 45*mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.ErrorContains(t, err, "48.00 MiB of the free memory are in pools: close a pool, or allocate from it")
		require.NotContains(t, err.Error(), "expandable_segments")
		require.NoError(t, keep.Close())
	})
}

// An error names the reason for which free memory does not help.
func TestOutOfMemoryNamesNoWrongCause(t *testing.T) {
	eachFresh(t, "expandable_segments:True", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		limit(t, d, 60*mib)
		x, err := memory.Make[byte](s, 40*mib)
		require.NoError(t, err)
		require.NoError(t, x.Close())
		allocate := func() error {
			y, err := memory.Make[byte](s, 40*mib)
			return errors.Join(err, y.Close())
		}
		_, err = graph.Capture([]*stream.Stream{s}, allocate, nil)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.ErrorContains(t, err, "during a capture, free memory of expandable segments stays reserved: call EmptyCache before it")
		require.NotContains(t, err.Error(), "fragments")
		require.NoError(t, memory.EmptyCache(d))
		g, err := graph.Capture([]*stream.Stream{s}, allocate, nil)
		require.NoError(t, err, "the cure")
		require.NoError(t, g.Close())
	})
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		x, err := memory.Make[byte](s, 1)
		require.NoError(t, err)
		p := newPool(t, &memory.PoolConfig{Allocator: noAllocator{}})
		require.NoError(t, p.Use(s, func() error {
			_, err := memory.Make[byte](s, 1)
			require.ErrorIs(t, err, device.ErrorOutOfMemory)
			require.ErrorContains(t, err, "the Allocator of the pool has no memory left")
			require.NotContains(t, err.Error(), "fragments")
			return nil
		}))
		require.NoError(t, x.Close())
	})
}

// A noAllocator has no memory.
type noAllocator struct{ memory.Allocator }

func (noAllocator) Alloc(*stream.Stream, int) (uint64, error) { return 0, device.ErrorOutOfMemory }
