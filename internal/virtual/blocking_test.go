package virtual

import (
	"testing"

	"github.com/gochorus/chorus/internal/conformance"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// Under CUDA_LAUNCH_BLOCKING the stream is idle after each call, and the call
// that goes wrong is the one that says so.
func TestBlocking(t *testing.T) {
	r := newRig(t, Config{Devices: 2, Blocking: true})
	s, p := r.stream(0), r.alloc(0, 1<<20)
	for i := range 200 {
		r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, uint8(i), 1<<20, s) })
		r.do(0, func() cudadrv.Result { return r.drv.StreamQuery(s) })
	}
	res := r.on(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 2<<20, s) })
	require.Equal(t, cudadrv.ErrorIllegalAddress, res)

	r = newRig(t, Config{Devices: 1})
	s, p = r.stream(0), r.alloc(0, 1<<20)
	res = r.on(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 2<<20, s) })
	require.Equal(t, cudadrv.Success, res, "without it a later call does")
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) }))
}

func TestConformanceBlocking(t *testing.T) {
	m, err := New(&Config{Devices: 2, Blocking: true})
	require.NoError(t, err)
	conformance.Driver(t, m.Driver())
	require.Empty(t, m.Reports())
}
