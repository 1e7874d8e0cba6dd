package route

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/osthread"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
)

// enginesFirst is a tuning with copy engines first for all-gathers, then Chorus kernels.
func enginesFirst() *Index {
	list := []Strategy{CopyEngines, OwnKernels}
	m := []Measured{{Bytes: 128, Captured: list, Eager: list}}
	x := &Index{}
	x[collective.AllGather][0][0] = &Measurements{m, m}
	return x
}

// TestBatchesOfAllShapes enqueues all-gathers in batches of different shapes, and checks their
// results and the services that executed them.
func TestBatchesOfAllShapes(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g, other := newRig(t, devs, Tuned), newRig(t, devs, Tuned)
		g.routers.UseTuning(enginesFirst())
		other.routers.UseTuning(enginesFirst())
		same := func(b *nccl.Batch) error { return errors.Join(g.send(b), g.recv(b)) }
		const N, K, E = collective.NCCL, collective.Kernels, collective.CopyEngines
		for name, c := range map[string]struct {
			batches []([]add) // enqueued at the same time
			want    []collective.Service
			others  []collective.Service
		}{
			"all ranks":                {[][]add{{g.gather(0), g.gather(1)}}, []collective.Service{E}, nil},
			"another order":            {[][]add{{g.gather(1), g.gather(0)}}, []collective.Service{E}, nil},
			"a batch each":             {[][]add{{g.gather(0)}, {g.gather(1)}}, []collective.Service{K}, nil},
			"each twice":               {[][]add{{g.gather(0), g.gather(1), g.gatherAside(0), g.gatherAside(1)}}, []collective.Service{N, N}, nil},
			"a batch of two each":      {[][]add{{g.gather(0), g.gatherAside(0)}, {g.gather(1), g.gatherAside(1)}}, []collective.Service{N, N}, nil},
			"with transfers":           {[][]add{{same, g.gather(0), g.gather(1)}}, []collective.Service{K}, nil},
			"with another's operation": {[][]add{{g.gather(0), other.gather(1)}, {other.gather(0), g.gather(1)}}, []collective.Service{K}, []collective.Service{N}},
			"two communicators":        {[][]add{{g.gather(0), other.gather(0), g.gather(1), other.gather(1)}}, []collective.Service{K}, []collective.Service{N}},
		} {
			g.clear(t)
			other.clear(t)
			errs := make([]error, len(c.batches))
			var all sync.WaitGroup
			for i, calls := range c.batches {
				all.Go(func() { errs[i] = g.enqueue(calls...) })
			}
			all.Wait()
			require.NoError(t, errors.Join(errs...), name)
			require.Equal(t, [][]collective.Service{c.want, c.want}, g.last(len(c.want)), name)
			g.requireGathered(t, name)
			if c.others != nil {
				require.Equal(t, [][]collective.Service{c.others, c.others}, other.last(1), name)
				other.requireGathered(t, name)
			}
		}
		require.ErrorIs(t, g.enqueue(g.gather(0), g.reduce(1)), nccl.ErrorInvalidUsage, "two kinds")

		// NCCL executes the operations that package nccl enqueues.
		g.clear(t)
		require.NoError(t, nccl.Group(func(b *nccl.Batch) error { return errors.Join(g.gather(0)(b), g.gather(1)(b)) }))
		require.Equal(t, [][]collective.Service{{N}, {N}}, g.last(1))
		g.requireGathered(t, "package nccl")
	})
}

// TestBatchThatNCCLRefusesInPart lets NCCL refuse the transfers of a batch that has
// all-reduces of Chorus kernels too. If a kernel was launched before, the communicators fail.
// Otherwise nothing was enqueued.
func TestBatchThatNCCLRefusesInPart(t *testing.T) {
	for name, c := range map[string]struct {
		fault    string
		launched bool
	}{
		"the end of the group":   {"ncclGroupEnd#2=ncclInvalidUsage", true},
		"an operation":           {"ncclSend#2=ncclInvalidUsage", false},
		"the start of the group": {"ncclGroupStart#2=ncclInvalidUsage", false},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: c.fault}), OwnKernels)
			batch := func() error { return g.enqueue(g.reduce(0), g.reduce(1), g.send, g.recv) }
			require.NoError(t, batch())
			require.Equal(t, [][]collective.Service{{collective.Kernels}, {collective.Kernels}}, g.last(1))
			stop := gpu.DeviceOf(g.comms[0].Device()).System().Machine.CountCalls()
			require.ErrorIs(t, batch(), nccl.ErrorInvalidUsage)
			require.Equal(t, c.launched, stop()["cuLaunchKernel"] > 0)
			if !c.launched {
				for _, k := range g.comms {
					require.NoError(t, k.Err())
					require.EqualValues(t, 1, k.Progress().Issued.Collective)
				}
				require.NoError(t, batch())
				g.wait(t)
				return
			}
			for _, k := range g.comms {
				require.NoError(t, poll.Until(testgpu.Context(t), func() (bool, error) { return k.Err() != nil, nil }))
				require.ErrorIs(t, k.Err(), nccl.ErrorInvalidUsage)
				require.EqualValues(t, 2, k.Progress().Issued.Collective, "the collective counts")
			}
		})
	}
}

// TestOrderedReductionFailsInPart lets a kernel of a reduction fail after the first pieces are
// enqueued, or after NCCL's copies are. The other ranks may wait for the rest, so the communicators fail,
// although each operation of the batch has an error.
func TestOrderedReductionFailsInPart(t *testing.T) {
	defer SetOrderedBytes(128)()
	defer SetKernelBytes(8, 8)()
	for s, failing := range map[Strategy][]int{OwnKernels: {3, 4}, NCCLOnly: {1}} { // threads may enqueue for both ranks at once
		open := func(faults []string) (*rig, func() map[string]int) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: strings.Join(faults, ",")})
			stop := gpu.DeviceOf(devs[0]).System().Machine.CountCalls()
			return newRigInOrder(t, devs, s, &Order{}), stop
		}
		_, stop := open(nil)
		opened := stop()["cuLaunchKernel"]
		var faults []string
		for _, n := range failing {
			faults = append(faults, fmt.Sprintf("cuLaunchKernel#%d=CUDA_ERROR_OUT_OF_MEMORY", opened+n))
		}
		g, _ := open(faults)
		require.ErrorIs(t, g.enqueue(g.reduce(0), g.reduce(1)), device.ErrorOutOfMemory, s.String())
		for _, k := range g.comms {
			require.NoError(t, poll.Until(testgpu.Context(t), func() (bool, error) { return k.Err() != nil, nil }), s.String())
		}
	}
}

// TestServicesOfTheLastCollectives reads the services of the last collectives from the flight recorder.
// The list leaves out transfers, and operations that NCCL refuses on both ranks.
func TestServicesOfTheLastCollectives(t *testing.T) {
	g := newRig(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclAllGather#3=ncclInvalidUsage,ncclAllGather#4=ncclInvalidUsage"}), OwnKernels)
	defer SetKernelBytes(1<<20, 8)() // all-reduces by Chorus kernels, all-gathers by NCCL
	gather := func() error { return g.enqueue(g.gather(0), g.gather(1)) }
	reduce := func() error { return g.enqueue(g.reduce(0), g.reduce(1)) }
	transfer := func() error { return g.enqueue(g.send, g.recv) }
	first, list := collective.Of(g.comms[0]).Services(5)
	require.Zero(t, first)
	require.Empty(t, list)
	for _, call := range []func() error{reduce, transfer, gather, reduce, transfer} {
		require.NoError(t, call())
	}
	require.ErrorIs(t, gather(), nccl.ErrorInvalidUsage)
	require.NoError(t, reduce())
	require.NoError(t, transfer())
	all := []collective.Service{collective.Kernels, collective.NCCL, collective.Kernels, collective.Kernels}
	for n := 1; n < 6; n++ {
		first, list := collective.Of(g.comms[1]).Services(n)
		require.Equal(t, all[max(4-n, 0):], list)
		require.EqualValues(t, max(5-n, 1), first)
	}
}

// TestWindowsAreReturned uses windows alone and in a batch, also when NCCL refuses the
// operation: the next operation can use them. A panic leaves the communicator unlocked.
func TestWindowsAreReturned(t *testing.T) {
	for fault, alone := range map[string]bool{"": false, "ncclAllGather#2=ncclInvalidUsage": false, "ncclAllGather#1=ncclInvalidUsage": true} {
		g := newRig(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: fault}), Windows)
		gather := func() error { return g.enqueue(g.gather(0), g.gather(1)) }
		if alone {
			require.ErrorIs(t, g.enqueue(g.gather(0)), nccl.ErrorInvalidUsage)
		} else if err := gather(); fault != "" {
			require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
		} else {
			require.NoError(t, err)
		}
		rule := g.routers[0].rule.Swap(nil)
		require.Panics(t, func() { _ = gather() })
		g.routers[0].rule.Store(rule)
		g.wait(t)
		g.clear(t)
		require.NoError(t, gather())
		require.Equal(t, [][]collective.Service{{collective.Windows}, {collective.Windows}}, g.last(1))
		g.requireGathered(t, fault)
	}
}

// TestBatchesAreReused checks that a batch that was refused, and an empty one, can be used
// again, and that a batch without routers is NCCL's.
func TestBatchesAreReused(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	for _, s := range []Strategy{OwnKernels, NCCLOnly} {
		g := newRig(t, devs, s)
		b := g.routers.NewBatch()
		require.NoError(t, b.Enqueue())
		require.Error(t, nccl.AllGather(b.On(g.comms[0]), g.streams[0], g.src[0], g.src[0]))
		require.Error(t, b.Enqueue())
		require.NoError(t, errors.Join(g.gather(0)(b.Batch), g.gather(1)(b.Batch), b.Enqueue()))
		g.requireGathered(t, s.String())
		require.NoError(t, g.reduce(0)(b.Batch))
		require.Error(t, nccl.AllGather(b.On(g.comms[0]), g.streams[0], g.src[0], g.src[0]))
		require.Error(t, b.Enqueue())
		require.EqualValues(t, 1, g.comms[0].Progress().Issued.Collective)
	}
}

// TestLaunchersExecuteBatches enqueues one operation of each rank concurrently, without a
// group of NCCL: the fault plan fails every group.
func TestLaunchersExecuteBatches(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(8))
	old := osthread.Launchers
	osthread.Launchers = &osthread.Pool{PollTime: time.Hour}
	defer func() { osthread.Launchers.Close(); osthread.Launchers = old }()
	for !osthread.Launchers.Try(2, nothing{}) {
		runtime.Gosched()
	}
	for _, s := range []Strategy{Tuned, OwnKernels, Windows} { // Tuned without measured times is NCCL
		g := newRig(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclGroupStart#*=ncclInternalError"}), s)
		for range 20 {
			g.clear(t)
			require.NoError(t, g.enqueue(g.gather(1), g.gather(0)), s)
			g.requireGathered(t, s.String())
		}
		if s == Tuned {
			require.ErrorIs(t, g.enqueue(g.gather(0), g.gather(1), g.gatherAside(0), g.gatherAside(1)), nccl.ErrorInternal, "two of each rank")
		}
	}
}

type nothing struct{}

func (nothing) Do(int) {}
