package cufile

import (
	"os"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// asyncWords lie in page-locked memory.
type asyncWords struct {
	size                  uintptr
	fileOffset, devOffset int64
	done                  int64
}

func (r *fileRig) words(size uintptr) *asyncWords {
	r.T.Helper()
	var p unsafe.Pointer
	r.Do(0, func() (res cudadrv.Result) { p, res = r.Drv.MemHostAlloc(unsafe.Sizeof(asyncWords{}), 0); return })
	w := (*asyncWords)(p)
	*w = asyncWords{size: size, done: -77}
	return w
}

func (r *fileRig) readAsync(h cufileapi.Handle, p cudadrv.DevicePtr, w *asyncWords, s cudadrv.Stream) cufileapi.Result {
	r.T.Helper()
	return r.with(0, func() cufileapi.Result {
		return r.api.ReadAsync(h, p, &w.size, &w.fileOffset, &w.devOffset, &w.done, s)
	})
}

// block holds the stream until the function that it returns is called.
func (r *fileRig) block(s cudadrv.Stream) func() {
	r.T.Helper()
	gate := make(chan struct{})
	r.Do(0, func() cudadrv.Result { return r.Drv.LaunchHostFunc(s, dl.OnceClosure(func() { <-gate })) })
	return func() { close(gate) }
}

func TestCuFileStreamsWantThreads(t *testing.T) {
	for _, c := range []struct {
		parallel bool
		threads  uintptr
		want     cufileapi.Result
		flags    uint32
	}{
		{false, 0, cufileapi.AsyncNotSupported, 1 << cufileapi.BatchIOSupported},
		{true, 0, cufileapi.AsyncNotSupported, 1<<cufileapi.BatchIOSupported | 1<<cufileapi.ParallelIOSupported},
		{false, 2, cufileapi.AsyncNotSupported, 1 << cufileapi.BatchIOSupported},
		{true, 2, cufileapi.Success, 1<<cufileapi.BatchIOSupported | 1<<cufileapi.ParallelIOSupported | 1<<cufileapi.StreamsSupported},
	} {
		r := &fileRig{rig: newRig(t, machine.Config{Devices: 1})}
		r.api = New(r.m)
		r.fine(r.api.SetParameterBool(cufileapi.ParallelIO, c.parallel))
		r.fine(r.api.SetParameterSizeT(cufileapi.MaxIOThreads, c.threads))
		r.fine(r.api.DriverOpen())
		var p cufileapi.DrvProps
		r.fine(r.api.DriverGetProperties(&p))
		require.Equal(t, c.flags, p.FFlags)
		h, s := r.register(r.open(64, os.O_RDWR)), r.Stream(0)
		w, mem := r.words(64), r.Alloc(0, 64)
		require.Equal(t, c.want, r.readAsync(h, mem, w, s))
		r.Sync(0, s)
		if c.want == cufileapi.Success {
			require.EqualValues(t, 64, w.done)
		}
	}
}

// The words are read and written when the stream comes there.
func TestCuFileAsyncLooksLate(t *testing.T) {
	r := newFileRig(t, machine.Config{})
	h, s, p, w := r.register(r.open(4096, os.O_RDWR)), r.Stream(0), r.Alloc(0, 4096), r.words(4096)
	open := r.block(s)
	r.fine(r.readAsync(h, p, w, s))
	require.EqualValues(t, -77, w.done)
	w.size, w.fileOffset, w.devOffset = 10, 20, 30
	open()
	r.Sync(0, s)
	require.EqualValues(t, 10, w.done)
	got := virtualtest.Download[byte](r.Rig, 0, s, p, 4096)
	for i := range 10 {
		require.Equal(t, byte((20+i)*7), got[30+i])
	}
	require.Equal(t, got[0], got[40], "nothing else was written")

	// Memory that is not registered has as many bytes as the size said at the call.
	*w = asyncWords{size: 16, devOffset: 200}
	r.fine(r.readAsync(h, p, w, s))
	r.Sync(0, s)
	_, err := cufileapi.Transferred(w.done)
	require.ErrorIs(t, err, syscall.EIO)
	r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, 4096, 0) }))

	// Where the stream has fixed ones, what comes later is too late.
	r.fine(r.with(0, func() cufileapi.Result {
		return r.api.StreamRegister(s, cufileapi.FixedFileOffset|cufileapi.FixedFileSize)
	}))
	*w = asyncWords{size: 16, fileOffset: 100}
	open = r.block(s)
	r.fine(r.readAsync(h, p, w, s))
	w.size, w.fileOffset, w.devOffset = 1, 1, 200
	open()
	r.Sync(0, s)
	require.EqualValues(t, 16, w.done)
	require.Equal(t, byte(100*7%256), virtualtest.Download[byte](r.Rig, 0, s, p, 4096)[200])
	require.Empty(t, r.m.Reports())
}

func TestCuFileAsyncRefuses(t *testing.T) {
	r := newFileRig(t, machine.Config{Devices: 2})
	h, s, p, w := r.register(r.open(4096, os.O_RDWR)), r.Stream(0), r.Alloc(0, 8192), r.words(4096)
	heap := new(asyncWords)
	require.Equal(t, cufileapi.CUDAMemoryTypeInvalid, r.with(0, func() cufileapi.Result {
		return r.api.ReadAsync(h, p, &w.size, &w.fileOffset, &w.devOffset, &heap.done, s)
	}), "C would keep an address of Go's")
	other := r.Stream(1)
	require.Equal(t, cufileapi.CUDAContextMismatch, r.readAsync(h, p, w, other))
	require.Equal(t, cufileapi.HandleNotRegistered, r.readAsync(h+1, p, w, s))
	require.Equal(t, cufileapi.CUDAFailed(cudadrv.ErrorInvalidHandle), r.readAsync(h, p, w, 0x77))
	require.Equal(t, cufileapi.InvalidValue, r.with(0, func() cufileapi.Result { return r.api.StreamRegister(s, 16) }))
	require.Equal(t, cufileapi.InvalidValue, r.with(0, func() cufileapi.Result { return r.api.StreamDeregister(s) }))

	// What is wrong with the words shows when they are looked up, or at once.
	for _, bad := range []asyncWords{{size: 1, fileOffset: -1}, {size: 1, devOffset: -1}, {size: ^uintptr(0)}} {
		*w = bad
		r.fine(r.readAsync(h, p, w, s))
		r.Sync(0, s)
		_, err := cufileapi.Transferred(w.done)
		require.ErrorIs(t, err, cufileapi.InvalidValue)
	}
	aligned := cufileapi.FixedBufOffset | cufileapi.FixedFileOffset | cufileapi.FixedFileSize | cufileapi.PageAlignedInputs
	r.fine(r.with(0, func() cufileapi.Result { return r.api.StreamRegister(s, aligned) }))
	*w = asyncWords{size: 4095}
	require.Equal(t, cufileapi.InvalidValue, r.readAsync(h, p, w, s))
	w.size = 4096
	r.fine(r.readAsync(h, p, w, s))
	r.Sync(0, s)
	require.EqualValues(t, 4096, w.done)

	var captured cufileapi.Result
	r.Do(0, func() cudadrv.Result {
		r.OK(r.Drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed))
		captured = r.readAsync(h, p, w, s)
		r.OK(r.Drv.CtxSetCurrent(r.Contexts[0]))
		_, res := r.Drv.StreamEndCapture(s)
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, res)
		return cudadrv.Success
	})
	require.ErrorIs(t, captured, cudadrv.ErrorStreamCaptureUnsupported)
	require.Empty(t, r.m.Reports())
}

// Registering a stream waits for it, and holds until the driver is closed.
func TestCuFileStreamRegister(t *testing.T) {
	r := newFileRig(t, machine.Config{})
	s := r.Stream(0)
	for i, call := range []func() cufileapi.Result{
		func() cufileapi.Result { return r.api.StreamRegister(s, 0) },
		func() cufileapi.Result { return r.api.StreamDeregister(s) },
	} {
		open := r.block(s)
		done := make(chan cufileapi.Result, 1)
		go func() { done <- r.with(0, call) }()
		select {
		case res := <-done:
			t.Fatalf("call %d returned %v while the stream was at work", i, res)
		case <-time.After(20 * time.Millisecond):
		}
		open()
		r.fine(<-done)
	}
	r.fine(r.with(0, func() cufileapi.Result { return r.api.StreamRegister(s, 0) }))
	r.fine(r.api.DriverClose())
	r.fine(r.api.DriverOpen())
	r.fine(r.with(0, func() cufileapi.Result { return r.api.StreamRegister(s, 0) }))
}

// What a device that was lost does not carry out is over nevertheless.
func TestCuFileOnLostDevice(t *testing.T) {
	r := newFileRig(t, machine.Config{})
	h, a, b, p, w := r.register(r.open(64, os.O_RDWR)), r.Stream(0), r.Stream(0), r.Alloc(0, 64), r.words(64)
	open := r.block(a)
	r.fine(r.readAsync(h, p, w, a))
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p+60, 0, 8, b) })
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(b) }))
	open()
	r.drained(a)
	require.EqualValues(t, -77, w.done)
	r.api.HandleDeregister(h)
	require.Len(t, r.m.Reports(), 1)
	require.Contains(t, r.m.Reports()[0], "cuMemsetD8Async")
	require.Equal(t, cufileapi.CUDAFailed(cudadrv.ErrorIllegalAddress), r.readAsync(h, p, w, a))
}

// A transfer on a stream is ordered with it and no other.
func TestCuFileAsyncRaces(t *testing.T) {
	r := newFileRig(t, machine.Config{})
	h, a, b, p, w := r.register(r.open(4096, os.O_RDWR)), r.Stream(0), r.Stream(0), r.Alloc(0, 4096), r.words(4096)
	r.fine(r.readAsync(h, p, w, a))
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 4096, b) })
	r.On(0, r.Drv.CtxSynchronize)
	require.NotEmpty(t, r.m.Reports())
	require.Contains(t, r.m.Explain(0), "cuFileReadAsync on stream")
}
