package machine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Under CUDA_LAUNCH_BLOCKING the stream is idle after each call, and the call
// that goes wrong is the one that says so.
func TestBlocking(t *testing.T) {
	r := newRig(t, Config{Devices: 2, Blocking: true})
	s, p := r.Stream(0), r.Alloc(0, 1<<20)
	for i := range 200 {
		r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, uint8(i), 1<<20, s) })
		r.Do(0, func() cudadrv.Result { return r.Drv.StreamQuery(s) })
	}
	res := r.On(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 2<<20, s) })
	require.Equal(t, cudadrv.ErrorIllegalAddress, res)

	r = newRig(t, Config{Devices: 1})
	s, p = r.Stream(0), r.Alloc(0, 1<<20)
	res = r.On(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 2<<20, s) })
	require.Equal(t, cudadrv.Success, res, "without it a later call does")
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
}
