package perf

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
)

// quick is the check of the tests.
func quick() *CheckConfig {
	return &CheckConfig{MaxBytes: 4 << 10, MemoryBytes: 8 << 10, Iterations: 2}
}

// A healthy group has no findings, and each step has run.
func TestCheckOfHealthyDevices(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		r, err := CheckDevices(testgpu.Context(t), devs[:3], &CheckConfig{MaxBytes: 4 << 10, MemoryBytes: 8 << 10, Iterations: 2, Limits: Limits{Part: 1e-9}})
		require.NoError(t, err)
		require.Empty(t, r.Findings)
		require.True(t, r.OK())
		require.Len(t, r.GPUs, 3)
		require.Len(t, r.Pairs, 3)
		require.Len(t, r.Devices, 3)
		for i, d := range r.Devices {
			require.Positive(t, d.ToGPU)
			require.Positive(t, d.FromGPU)
			if d.Skipped == "" {
				require.Positive(t, d.Product)
			}
			require.Equal(t, i, r.GPUs[i].Rank)
			require.NotEmpty(t, r.GPUs[i].UUID)
			require.NotEmpty(t, r.GPUs[i].PCI)
		}
		for _, p := range r.Pairs {
			require.Positive(t, p.Bandwidth)
			require.Positive(t, p.Latency)
			require.Equal(t, UnknownPath, p.Path, "NCCL's connections were not recorded")
		}
		require.Len(t, r.AllReduce.Rows[0].OutOfPlace.Ranks, 3)
	})
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	r, err := CheckDevices(testgpu.Context(t), devs, quick())
	require.NoError(t, err)
	require.Empty(t, r.Findings)
	require.Equal(t, []string{"pairs and all-reduce: one GPU has no peer"}, r.Skipped)
}

// Each fault of virtual devices is found, with the GPUs behind it.
func TestCheckFindsFaults(t *testing.T) {
	const slow = 2 * time.Second // in virtual time a healthy step takes some microseconds, however busy the machine is
	slowly := func(calls ...string) string {
		for i, c := range calls {
			calls[i] = fmt.Sprintf("slow@%s=%v", c, slow)
		}
		return strings.Join(calls, ",")
	}
	// The limits are between the speed with the delay and the speed without it.
	below := func(bytes int) float64 { return float64(bytes) / 1e9 / (slow / 2).Seconds() }
	for name, x := range map[string]struct {
		faults string
		limits Limits
		kind   Kind
		step   string
		gpus   []int
		text   string
		either bool // virtual NCCL gives all ranks the same error, so the rank that notices it first is named
	}{
		"wrong memory":                   {faults: "wrong@cuMemcpyDtoDAsync:2#*", kind: Wrong, step: "devices", gpus: []int{2}, text: "bytes of its memory"},
		"wrong copies to the GPU":        {faults: "wrong@cuMemcpyHtoDAsync:1#6", kind: Wrong, step: "devices", gpus: []int{1}, text: "copied from the host"},
		"wrong copies to the host":       {faults: "wrong@cuMemcpyDtoHAsync:3#7", kind: Wrong, step: "devices", gpus: []int{3}},
		"wrong products":                 {faults: "wrong@cublasLtMatmul:0#*", kind: Wrong, step: "devices", gpus: []int{0}, text: "rows of a matrix product"},
		"a lost device":                  {faults: "cuLaunchKernel:1#3=CUDA_ERROR_ECC_UNCORRECTABLE", kind: Broken, step: "devices", gpus: []int{1}, text: "ECC"},
		"no memory":                      {faults: "cuMemAlloc:2#*=CUDA_ERROR_OUT_OF_MEMORY", kind: Broken, step: "devices", gpus: []int{2}, text: "out of memory"},
		"a failed product":               {faults: "cublasLtMatmul:2#1=CUBLAS_STATUS_EXECUTION_FAILED", kind: Broken, step: "devices", gpus: []int{2}, text: "a matrix product failed"},
		"a kernel that hangs":            {faults: "hang@cuLaunchKernel:3#1", kind: Hang, step: "devices", gpus: []int{3}, text: "the test of its memory did not finish"},
		"a copy that hangs":              {faults: "hang@cuMemcpyHtoDAsync:1#4", kind: Hang, step: "devices", gpus: []int{1}, text: "did not finish"},
		"a slow product":                 {faults: slowly("cublasLtMatmul:2#*"), limits: Limits{Product: 2 * 32 * 32 * 32 / (slow / 2).Seconds() / 1e12}, kind: Slow, step: "devices", gpus: []int{2}, text: "a matrix product"},
		"slow copies":                    {faults: slowly("cuMemcpyDtoHAsync:0#6", "cuMemcpyDtoHAsync:0#7"), limits: Limits{HostCopy: below(8 << 10)}, kind: Slow, step: "devices", gpus: []int{0}, text: "copies to the host"},
		"a GPU that receives wrong data": {faults: "wrong@ncclRecv:2#*", kind: Wrong, step: "pairs", gpus: []int{2}, text: "3 of its 3 pairs"},
		"a link with wrong data":         {faults: "wrong@ncclRecv:1#1", kind: Wrong, step: "pairs", gpus: []int{1, 2}, text: "the link between"},
		"a slow GPU":                     {faults: slowly("ncclSend:1#*"), limits: Limits{Pair: below(4 << 10)}, kind: Slow, step: "pairs", gpus: []int{1}, text: "3 of its 3 pairs"},
		"a slow link":                    {faults: slowly("ncclSend:0#1", "ncclSend:0#2", "ncclSend:0#3"), limits: Limits{Pair: below(4 << 10)}, kind: Slow, step: "pairs", gpus: []int{0, 3}, text: "the link between"},
		"a transfer that hangs":          {faults: "hang@ncclSend:1#1", kind: Hang, step: "pairs", gpus: []int{1, 2}, text: "the exchange did not finish"},
		"a refused transfer":             {faults: "ncclRecv:2#1=ncclUnhandledCudaError", kind: Broken, step: "pairs", gpus: []int{2}, text: "fault plan"},
		"a failed connection":            {faults: "async@ncclSend:1#1=ncclSystemError", kind: Broken, step: "pairs", gpus: []int{0, 1, 2, 3}, text: "failed ncclSend of rank 1", either: true},
		"a GPU with wrong sums":          {faults: "wrong@ncclAllReduce:3#*", kind: Wrong, step: "all-reduce", gpus: []int{3}, text: "3 ranks have right ones"},
		"a slow all-reduce":              {faults: "slow@ncclAllReduce:1#*=200ms", limits: Limits{AllReduce: 256 / 0.1e9}, kind: Slow, step: "all-reduce", text: "over all 4 ranks"},
		"an all-reduce that hangs":       {faults: "hang@ncclAllReduce:2#1", kind: Hang, step: "all-reduce", text: "although every pair did"},
		"no group":                       {faults: "ncclCommInitRankScalable#1=ncclSystemError", kind: Broken, step: "group", text: "cannot be created"},
	} {
		t.Run(name, func(t *testing.T) {
			streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 4, Faults: x.faults}, func(t *testing.T, devs []*device.Device) {
				cfg := &CheckConfig{MaxBytes: 4 << 10, MemoryBytes: 8 << 10, Iterations: 2, Limits: x.limits}
				if x.kind == Hang {
					cfg.StepTimeout = 20 * time.Second
				}
				r, err := CheckDevices(testgpu.Context(t), devs, cfg)
				require.NoError(t, err)
				require.Len(t, r.Findings, 1, "%+v", r.Findings)
				f := r.Findings[0]
				require.Equal(t, x.kind, f.Kind, "%+v", f)
				require.Equal(t, x.step, f.Step)
				var ranks []int
				for _, g := range f.GPUs {
					ranks = append(ranks, g.Rank)
					require.Contains(t, f.Reason, g.UUID)
					require.Contains(t, f.Reason, g.PCI)
					require.Contains(t, f.Reason, "host "+g.Host)
					require.Len(t, r.Of(g.Rank), 1)
				}
				if x.either {
					require.Len(t, ranks, 1)
					require.Subset(t, x.gpus, ranks, f.Reason)
				} else {
					require.Equal(t, x.gpus, ranks, f.Reason)
				}
				require.Contains(t, f.Reason, x.text)
			})
		})
	}
}

// An error that follows from the end of the check names nobody, whatever rank has it.
func TestClosedGroupIsNoCulprit(t *testing.T) {
	gpus := []GPU{{Rank: 0, UUID: "GPU-a"}, {Rank: 1, UUID: "GPU-b"}}
	states := []*pairState{{}, {}}
	states[0].fail(fmt.Errorf("memory: allocate: %w", device.ErrClosed), 0)
	states[1].fail(errors.New("a transfer failed"), 1)
	list := judgeStates(gpus, states, time.Second)
	require.Len(t, list, 1)
	require.Equal(t, gpus[1:], list[0].GPUs)
	require.Contains(t, list[0].Reason, "a transfer failed")
}
