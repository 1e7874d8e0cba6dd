package timeline_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nvtx"
	"github.com/gochorus/chorus/stream"
	record "github.com/gochorus/chorus/timeline"
)

// TestOverlapShows reduces the gradients of four ranks twice: while a kernel of the backward pass runs
// on another stream, and alone. The summary has the reduction as overlap, and as exposed.
func TestOverlapShows(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	g := groups.Local(t, devs)
	step := newStep(t, g)
	dir := t.TempDir()
	rec, err := record.Start(dir)
	require.NoError(t, err)
	nvtx.Range("step with a backward pass", func() { step.overlapped() })
	nvtx.Range("step alone", func() { step.reduce() })
	require.NoError(t, rec.Close())
	j, err := analyze.LoadTimeline(dir)
	require.NoError(t, err)
	s := j.Summarize()
	require.Len(t, s.Ranks, 4)
	require.Zero(t, s.Dropped)
	for i, r := range s.Ranks {
		require.Equal(t, i, r.Rank)
		require.Len(t, r.Steps, 2)
		with, alone := r.Steps[0], r.Steps[1]
		require.Positive(t, with.Communication)
		require.Equal(t, with.Communication, with.Overlap, "rank %d: %+v", i, with)
		require.Zero(t, with.Exposed)
		require.Positive(t, alone.Communication)
		require.Equal(t, alone.Communication, alone.Exposed, "rank %d: %+v", i, alone)
	}
}

// A step reduces gradients, with a backward pass that lasts until the host ends it.
type step struct {
	t        *testing.T
	g        *comm.Group
	reducer  *ddp.Reducer
	backward []*kernel.Kernel
	side     []*stream.Stream
	running  sync.WaitGroup
	gate     chan struct{}
}

func newStep(t *testing.T, g *comm.Group) *step {
	s := &step{t: t, g: g, gate: make(chan struct{})}
	source := &kernel.Source{Name: "backward.cu", CUDA: `extern "C" __global__ void backward() {}`,
		Kernels: []kernel.Def{{Name: "backward", Go: func(*kernel.Call) { s.running.Done(); <-s.gate }}}}
	var grads [][]memory.Slice[float32]
	for i := range g.Locals() {
		flat, parts, err := memory.MakeFlat[float32](g.Stream(i), 64, 32)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, flat.Close()) })
		grads = append(grads, parts)
		m, err := kernel.Compile(g.Stream(i).Device(), source)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, m.Close()) })
		k, err := m.Kernel("backward")
		require.NoError(t, err)
		side, err := stream.New(g.Stream(i).Device(), nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, side.Close()) })
		s.backward, s.side = append(s.backward, k), append(s.side, side)
	}
	var err error
	s.reducer, err = ddp.NewReducer(g, grads, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.reducer.Close()) })
	s.reduce() // the first collective connects the ranks
	return s
}

// overlapped reduces while all ranks run the kernel.
func (s *step) overlapped() {
	open := sync.OnceFunc(func() { close(s.gate) })
	defer open()
	s.running.Add(len(s.side))
	for i, k := range s.backward {
		require.NoError(s.t, k.Launch(s.side[i], kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}))
	}
	s.running.Wait()
	s.reduce()
	open()
	for _, side := range s.side {
		require.NoError(s.t, side.Sync(testgpu.Context(s.t)))
	}
}

func (s *step) reduce() {
	for _, on := range s.g.Streams() {
		require.NoError(s.t, errors.Join(s.reducer.Ready(on, 1), s.reducer.Ready(on, 0)))
	}
	require.NoError(s.t, errors.Join(s.reducer.Finish(s.g.Streams()...), s.g.Wait(testgpu.Context(s.t))))
}
