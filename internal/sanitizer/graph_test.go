package sanitizer_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// filling returns a graph that fills memory.
func (b *bench) filling(i int, p cudadrv.DevicePtr) cudadrv.GraphExec {
	var g cudadrv.Graph
	var x cudadrv.GraphExec
	s := b.streams[i]
	for _, f := range []func() cudadrv.Result{
		func() cudadrv.Result { return b.drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) },
		func() cudadrv.Result { return b.drv.MemsetD8Async(p, 1, 64, s) },
		func() (r cudadrv.Result) { g, r = b.drv.StreamEndCapture(s); return r },
		func() (r cudadrv.Result) { x, r = b.drv.GraphInstantiateWithFlags(g, 0); return r },
	} {
		b.call(b.of[i], f)
	}
	return x
}

// Both engines report a graph whose memory an allocator has freed and allocated again since the capture, and no graph whose
// memory has stayed.
func TestGraphUsesMemoryAllocatedAgain(t *testing.T) {
	b := newBench(t, 1)
	a := b.drv.(cudadrv.Auditor)
	p := b.blocks[0]
	audit := func(call func(cudadrv.DevicePtr, uintptr, cudadrv.Stream) cudadrv.Result, at cudadrv.DevicePtr) {
		b.on(0, func(s cudadrv.Stream) cudadrv.Result { return call(at, 512, s) })
	}
	audit(a.MemAllocated, p)
	audit(a.MemAllocated, p+512)
	stays, gone := b.filling(0, p), b.filling(0, p+512)
	audit(a.MemFreed, p+512)
	audit(a.MemAllocated, p+512)
	b.on(0, func(s cudadrv.Stream) cudadrv.Result { return b.drv.GraphLaunch(stays, s) })
	require.Empty(t, b.m.Reports())
	require.Empty(t, b.san.Reports())
	b.on(0, func(s cudadrv.Stream) cudadrv.Result { return b.drv.GraphLaunch(gone, s) })
	for _, reports := range [][]string{b.m.Reports(), b.san.Reports()} {
		require.Len(t, reports, 1)
		require.Contains(t, reports[0], "cuMemsetD8Async on stream 0x")
		require.Contains(t, reports[0], "that were allocated after the graph captured the operation")
	}
}

// A block that the driver allocates at the addresses of a freed one is another one for a graph.
func TestGraphUsesAddressesOfAnotherBlock(t *testing.T) {
	b := newBench(t, 2)
	x := b.filling(0, b.blocks[0])
	b.san.Replace(b.blocks[0])
	b.on(0, func(s cudadrv.Stream) cudadrv.Result { return b.drv.GraphLaunch(x, s) })
	require.Empty(t, b.m.Reports())
	require.Len(t, b.san.Reports(), 1)
	require.Contains(t, b.san.Reports()[0], "that were allocated after the graph captured the operation")
}
