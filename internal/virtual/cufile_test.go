package virtual

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/stretchr/testify/require"
)

// A fileRig is a rig with a driver of cuFile that is open and streams that can be
// used.
type fileRig struct {
	*rig
	api cufileapi.API
}

func newFileRig(t *testing.T, cfg Config) *fileRig {
	t.Helper()
	cfg.Devices = max(cfg.Devices, 1)
	r := &fileRig{rig: newRig(t, cfg)}
	r.api = r.m.CuFile()
	r.fine(r.api.SetParameterBool(cufileapi.ParallelIO, true))
	r.fine(r.api.SetParameterSizeT(cufileapi.MaxIOThreads, 1))
	r.fine(r.api.DriverOpen())
	return r
}

func (r *fileRig) fine(res cufileapi.Result) {
	r.t.Helper()
	require.Equal(r.t, cufileapi.Success, res, "%v: %s", res, res.Meaning())
}

// with calls f with the context of a device bound.
func (r *fileRig) with(dev int, f func() cufileapi.Result) (res cufileapi.Result) {
	r.t.Helper()
	r.on(dev, func() cudadrv.Result { res = f(); return cudadrv.Success })
	return res
}

func (r *fileRig) open(n int, flags int) *os.File {
	r.t.Helper()
	path := filepath.Join(r.t.TempDir(), "file")
	content := make([]byte, n)
	for i := range content {
		content[i] = byte(i * 7)
	}
	require.NoError(r.t, os.WriteFile(path, content, 0o600))
	f, err := os.OpenFile(path, flags, 0)
	require.NoError(r.t, err)
	r.t.Cleanup(func() { f.Close() })
	return f
}

func (r *fileRig) register(f *os.File) (h cufileapi.Handle) {
	r.t.Helper()
	r.fine(r.with(0, func() (res cufileapi.Result) {
		h, res = r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
		return res
	}))
	return h
}

func (r *fileRig) read(h cufileapi.Handle, p cudadrv.DevicePtr, bytes uintptr) (n int64, err error) {
	r.t.Helper()
	r.on(0, func() cudadrv.Result { n, err = r.api.Read(h, p, bytes, 0, 0); return cudadrv.Success })
	return n, err
}

func (r *fileRig) write(h cufileapi.Handle, p cudadrv.DevicePtr, bytes uintptr) (n int64, err error) {
	r.t.Helper()
	r.on(0, func() cudadrv.Result { n, err = r.api.Write(h, p, bytes, 0, 0); return cudadrv.Success })
	return n, err
}

// asyncWords lie in page-locked memory.
type asyncWords struct {
	size                  uintptr
	fileOffset, devOffset int64
	done                  int64
}

func (r *fileRig) words(size uintptr) *asyncWords {
	r.t.Helper()
	var p unsafe.Pointer
	r.do(0, func() (res cudadrv.Result) { p, res = r.drv.MemHostAlloc(unsafe.Sizeof(asyncWords{}), 0); return })
	w := (*asyncWords)(p)
	*w = asyncWords{size: size, done: -77}
	return w
}

func (r *fileRig) readAsync(h cufileapi.Handle, p cudadrv.DevicePtr, w *asyncWords, s cudadrv.Stream) cufileapi.Result {
	r.t.Helper()
	return r.with(0, func() cufileapi.Result {
		return r.api.ReadAsync(h, p, &w.size, &w.fileOffset, &w.devOffset, &w.done, s)
	})
}

// block holds the stream until the function that it returns is called.
func (r *fileRig) block(s cudadrv.Stream) func() {
	r.t.Helper()
	gate := make(chan struct{})
	r.do(0, func() cudadrv.Result { return r.drv.LaunchHostFunc(s, dl.OnceClosure(func() { <-gate })) })
	return func() { close(gate) }
}

func (r *fileRig) reported(part string) {
	r.t.Helper()
	reports := r.m.Reports()
	require.Len(r.t, reports, 1)
	require.Contains(r.t, reports[0], part)
	require.Contains(r.t, reports[0], "seed")
}

func TestCuFileWantsItsDriverAndAContext(t *testing.T) {
	r := &fileRig{rig: newRig(t, Config{Devices: 1})}
	r.api = r.m.CuFile()
	f := r.open(10, os.O_RDWR)
	register := func() cufileapi.Result {
		_, res := r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
		return res
	}
	for name, call := range map[string]func() cufileapi.Result{
		"register":   register,
		"buffer":     func() cufileapi.Result { return r.api.BufRegister(1, 1, 0) },
		"close":      r.api.DriverClose,
		"properties": func() cufileapi.Result { return r.api.DriverGetProperties(new(cufileapi.DrvProps)) },
		"limit":      func() cufileapi.Result { return r.api.DriverSetMaxDirectIOSize(1024) },
		"bar":        func() cufileapi.Result { _, res := r.api.GetBARSizeInKB(0); return res },
		"statistics": r.api.StatsStart,
		"cancel":     func() cufileapi.Result { return r.api.BatchIOCancel(1) },
	} {
		require.Equal(t, cufileapi.DriverNotInitialized, r.with(0, call), name)
	}
	_, err := r.read(1, 1, 1)
	require.ErrorIs(t, err, cufileapi.DriverNotInitialized)

	r.fine(r.api.DriverOpen())
	require.Equal(t, cufileapi.CUDAFailed(cudadrv.ErrorInvalidContext), register(), "no context is bound")
	require.Equal(t, cufileapi.Success, r.with(0, func() cufileapi.Result {
		r.fine(register())
		require.Equal(t, cufileapi.CUDAFailed(cudadrv.ErrorInvalidContext), r.api.BufRegister(1, 1, 0), "the context was consumed")
		return cufileapi.Success
	}))
	r.fine(r.api.DriverClose())
	require.Equal(t, cufileapi.DriverNotInitialized, r.api.DriverClose())
	require.Empty(t, r.m.Reports())
}

func TestCuFileParametersAreChecked(t *testing.T) {
	m, err := New(&Config{Devices: 1})
	require.NoError(t, err)
	api := m.CuFile()
	require.Equal(t, cufileapi.CUDAFailed(cudadrv.ErrorNotInitialized), api.DriverOpen())
	require.Equal(t, cudadrv.Success, m.Driver().Init())
	for p := range cufileapi.NumSizeTParams {
		least, greatest, res := api.GetParameterMinMaxValue(p)
		if p == cufileapi.ProfileStats {
			require.Equal(t, cufileapi.InvalidValue, res)
			continue
		}
		require.Equal(t, cufileapi.Success, res)
		v, res := api.GetParameterSizeT(p)
		require.Equal(t, cufileapi.Success, res)
		require.GreaterOrEqual(t, v, least, "parameter %d", p)
		if least > 0 {
			require.Equal(t, cufileapi.InvalidValue, api.SetParameterSizeT(p, least-1))
		}
		require.Equal(t, cufileapi.Success, api.SetParameterSizeT(p, least))
		if greatest > 0 {
			require.LessOrEqual(t, v, greatest, "parameter %d", p)
			require.Equal(t, cufileapi.InvalidValue, api.SetParameterSizeT(p, greatest+1))
			require.Equal(t, cufileapi.Success, api.SetParameterSizeT(p, greatest))
		}
	}
	require.Equal(t, cufileapi.InvalidValue, api.SetParameterBool(cufileapi.ProfileNVTX, true), "obsolete")
	for _, bad := range [][2][]uintptr{{nil, nil}, {{4, 8}, {1}}, {{0}, {1}}, {{4}, {0}}} {
		require.Equal(t, cufileapi.InvalidValue, api.SetParameterPosixPoolSlabArray(bad[0], bad[1]), bad)
	}
	require.Equal(t, cufileapi.Success, api.SetParameterPosixPoolSlabArray([]uintptr{8, 64}, []uintptr{2, 3}))
	for range 2 { // before and after the opening
		sizes, counts := make([]uintptr, 2), make([]uintptr, 2)
		require.Equal(t, cufileapi.Success, api.GetParameterPosixPoolSlabArray(sizes, counts))
		require.Equal(t, []uintptr{8, 64, 2, 3}, append(sizes, counts...))
		require.Equal(t, cufileapi.InvalidValue, api.GetParameterPosixPoolSlabArray(sizes[:1], counts[:1]))
		api.DriverOpen()
	}
	// What was set holds for one opening.
	api.DriverClose()
	require.Equal(t, cufileapi.Success, api.DriverClose())
	v, _ := api.GetParameterSizeT(cufileapi.IOBatchSize)
	require.EqualValues(t, 128, v)
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
		r := &fileRig{rig: newRig(t, Config{Devices: 1})}
		r.api = r.m.CuFile()
		r.fine(r.api.SetParameterBool(cufileapi.ParallelIO, c.parallel))
		r.fine(r.api.SetParameterSizeT(cufileapi.MaxIOThreads, c.threads))
		r.fine(r.api.DriverOpen())
		var p cufileapi.DrvProps
		r.fine(r.api.DriverGetProperties(&p))
		require.Equal(t, c.flags, p.FFlags)
		h, s := r.register(r.open(64, os.O_RDWR)), r.stream(0)
		w, mem := r.words(64), r.alloc(0, 64)
		require.Equal(t, c.want, r.readAsync(h, mem, w, s))
		r.sync(0, s)
		if c.want == cufileapi.Success {
			require.EqualValues(t, 64, w.done)
		}
	}
}

func TestCuFileWithoutCompatibilityMode(t *testing.T) {
	r := &fileRig{rig: newRig(t, Config{Devices: 1})}
	r.api = r.m.CuFile()
	r.fine(r.api.SetParameterBool(cufileapi.ParamAllowCompatMode, false))
	r.fine(r.api.DriverOpen())
	f := r.open(1, os.O_RDONLY)
	require.Equal(t, cufileapi.IONotSupported, r.with(0, func() cufileapi.Result {
		_, res := r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
		return res
	}))
}

// A read into memory that a stream still uses is a race: nothing orders the two.
func TestCuFileReadRacesWithAStream(t *testing.T) {
	t.Run("stream first", func(t *testing.T) {
		r := newFileRig(t, Config{})
		h, s, p := r.register(r.open(4096, os.O_RDWR)), r.stream(0), r.alloc(0, 4096)
		r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 4096, s) })
		for done := false; !done; { // the fill has ended, but nobody has waited for it
			r.m.mu.Lock()
			done = r.m.streams[s].idle()
			r.m.mu.Unlock()
		}
		_, err := r.read(h, p, 4096)
		require.ErrorIs(t, err, cufileapi.CUDADriverError)
		require.ErrorIs(t, err, cudadrv.ErrorLaunchFailed)
		r.reported("cuFileRead on the host writes bytes 0 to 4096 of the block")
		require.Contains(t, r.m.Explain(0), "cuMemsetD8Async on stream")
		require.Contains(t, r.m.Explain(0), "the host has waited")
	})
	t.Run("write", func(t *testing.T) {
		r := newFileRig(t, Config{})
		h, s, p := r.register(r.open(4096, os.O_RDWR)), r.stream(0), r.alloc(0, 4096)
		open := r.block(s)
		r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 4096, s) })
		_, err := r.write(h, p, 4096)
		require.NoError(t, err)
		open()
		r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) })
		r.reported("cuFileWrite on the host")
	})
	t.Run("ordered", func(t *testing.T) {
		r := newFileRig(t, Config{})
		h, s, p := r.register(r.open(4096, os.O_RDWR)), r.stream(0), r.alloc(0, 4096)
		for range 20 {
			r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 4096, s) })
			r.sync(0, s)
			_, err := r.read(h, p, 4096)
			require.NoError(t, err)
			_, err = r.write(h, p, 4096)
			require.NoError(t, err)
		}
		require.Empty(t, r.m.Reports())
	})
}

func TestCuFileMemoryIsChecked(t *testing.T) {
	illegal := func(t *testing.T, use func(r *fileRig, h cufileapi.Handle) error, part string) {
		r := newFileRig(t, Config{Devices: 2})
		err := use(r, r.register(r.open(4096, os.O_RDWR)))
		require.ErrorIs(t, err, cudadrv.ErrorIllegalAddress)
		require.Contains(t, r.m.Explain(0), part)
		require.Contains(t, r.m.Explain(0), "cuFileRead on the host")
		_, err = r.read(1, 1, 1)
		require.ErrorIs(t, err, cudadrv.ErrorIllegalAddress, "the device is lost")
	}
	t.Run("past the end", func(t *testing.T) {
		illegal(t, func(r *fileRig, h cufileapi.Handle) error {
			_, err := r.read(h, r.alloc(0, 4000), 4096)
			return err
		}, "runs 96 bytes past the end")
	})
	t.Run("freed", func(t *testing.T) {
		illegal(t, func(r *fileRig, h cufileapi.Handle) error {
			p := r.alloc(0, 4096)
			r.do(0, func() cudadrv.Result { return r.drv.MemFree(p) })
			_, err := r.read(h, p, 4096)
			return err
		}, "was freed by cuMemFree")
	})
	t.Run("not given out", func(t *testing.T) {
		illegal(t, func(r *fileRig, h cufileapi.Handle) error {
			p, s := r.alloc(0, 4096), r.stream(0)
			audit := r.drv.(cudadrv.Auditor)
			r.ok(audit.MemLend(p, 4096, s))
			r.ok(audit.MemReturn(p, 4096, s))
			r.sync(0, s)
			_, err := r.read(h, p, 4096)
			return err
		}, "were freed by MemReturn")
	})
	r := newFileRig(t, Config{Devices: 2})
	h := r.register(r.open(4096, os.O_RDWR))
	_, err := r.read(h, r.alloc(1, 4096), 4096)
	require.ErrorIs(t, err, cufileapi.CUDAContextMismatch)
	other := r.alloc(1, 64)
	require.Equal(t, cufileapi.CUDAContextMismatch, r.with(0, func() cufileapi.Result { return r.api.BufRegister(other, 64, 0) }))
	plain := make([]byte, 16)
	_, err = r.read(h, cudadrv.DevicePtr(uintptr(unsafe.Pointer(&plain[0]))), 16)
	require.ErrorIs(t, err, cufileapi.CUDAMemoryTypeInvalid)
	require.Equal(t, cufileapi.CUDAPointerInvalid, r.with(0, func() cufileapi.Result { return r.api.BufRegister(addressBase+5, 64, 0) }))
	var pinned unsafe.Pointer
	r.do(0, func() (res cudadrv.Result) { pinned, res = r.drv.MemHostAlloc(16, 0); return })
	n, err := r.read(h, cudadrv.DevicePtr(uintptr(pinned)), 16)
	require.NoError(t, err)
	require.EqualValues(t, 16, n)
	require.Equal(t, byte(7), unsafe.Slice((*byte)(pinned), 16)[1])
	require.Empty(t, r.m.Reports())
}

// A handle stands for a number, which the system gives to another file.
func TestCuFileDescriptorClosedTooEarly(t *testing.T) {
	r := newFileRig(t, Config{})
	f := r.open(4096, os.O_RDWR)
	h, p := r.register(f), r.alloc(0, 4096)
	f.Close()
	_, err := r.read(h, p, 4096)
	require.ErrorIs(t, err, cufileapi.HandleNotRegistered)
	r.reported("was closed before its handle was deregistered")

	r = newFileRig(t, Config{})
	f = r.open(16, os.O_RDWR)
	h = r.register(f)
	r.api.HandleDeregister(h)
	_, err = r.read(h, r.alloc(0, 16), 16)
	require.ErrorIs(t, err, cufileapi.HandleNotRegistered)
	require.Empty(t, r.m.Reports())
	r.api.HandleDeregister(h)
	r.reported("which is no handle")
}

func TestCuFileGivenUpInFlight(t *testing.T) {
	const n = 4096
	for name, c := range map[string]struct {
		giveUp func(r *fileRig, h cufileapi.Handle, p cudadrv.DevicePtr)
		report string
	}{
		"file": {func(r *fileRig, h cufileapi.Handle, p cudadrv.DevicePtr) { r.api.HandleDeregister(h) },
			"cuFileHandleDeregister gave up the handle of file descriptor"},
		"memory": {func(r *fileRig, h cufileapi.Handle, p cudadrv.DevicePtr) {
			r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p) }))
		}, "cuFileBufDeregister gave up memory"},
		"driver": {func(r *fileRig, h cufileapi.Handle, p cudadrv.DevicePtr) {
			r.api.HandleDeregister(r.register(r.open(1, os.O_RDONLY)))
			r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p + n) }))
			r.fine(r.api.DriverClose())
		}, "cuFileDriverClose_v2 gave up"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newFileRig(t, Config{})
			h, s, p, w := r.register(r.open(n, os.O_RDWR)), r.stream(0), r.alloc(0, 2*n), r.words(n)
			if name == "memory" {
				r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, n, 0) }))
			}
			r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p+n, n, 0) }))
			open := r.block(s)
			r.fine(r.readAsync(h, p, w, s))
			c.giveUp(r, h, p)
			r.reported(c.report)
			open()
			r.sync(0, s)
			require.EqualValues(t, n, w.done, "what was under way ends")
		})
	}
	t.Run("afterwards", func(t *testing.T) {
		r := newFileRig(t, Config{})
		h, s, p, w := r.register(r.open(n, os.O_RDWR)), r.stream(0), r.alloc(0, n), r.words(n)
		r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, n, 0) }))
		r.fine(r.readAsync(h, p, w, s))
		r.sync(0, s)
		r.api.HandleDeregister(h)
		r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p) }))
		r.do(0, func() cudadrv.Result { return r.drv.MemFree(p) })
		r.fine(r.api.DriverClose())
		require.Empty(t, r.m.Reports())
	})
	t.Run("freed memory", func(t *testing.T) {
		r := newFileRig(t, Config{})
		p := r.alloc(0, n)
		r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p+512, 512, 0) }))
		r.do(0, func() cudadrv.Result { return r.drv.MemFree(p) })
		r.reported("was freed before cuFileBufDeregister")
		r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p + 512) }))
	})
}

// The words are read and written when the stream comes there.
func TestCuFileAsyncLooksLate(t *testing.T) {
	r := newFileRig(t, Config{})
	h, s, p, w := r.register(r.open(4096, os.O_RDWR)), r.stream(0), r.alloc(0, 4096), r.words(4096)
	open := r.block(s)
	r.fine(r.readAsync(h, p, w, s))
	require.EqualValues(t, -77, w.done)
	w.size, w.fileOffset, w.devOffset = 10, 20, 30
	open()
	r.sync(0, s)
	require.EqualValues(t, 10, w.done)
	got := download[byte](r.rig, 0, s, p, 4096)
	for i := range 10 {
		require.Equal(t, byte((20+i)*7), got[30+i])
	}
	require.Equal(t, got[0], got[40], "nothing else was written")

	// Where the stream has fixed ones, what comes later is too late.
	r.fine(r.with(0, func() cufileapi.Result {
		return r.api.StreamRegister(s, cufileapi.FixedFileOffset|cufileapi.FixedFileSize)
	}))
	*w = asyncWords{size: 16, fileOffset: 100}
	open = r.block(s)
	r.fine(r.readAsync(h, p, w, s))
	w.size, w.fileOffset, w.devOffset = 1, 1, 200
	open()
	r.sync(0, s)
	require.EqualValues(t, 16, w.done)
	require.Equal(t, byte(100*7%256), download[byte](r.rig, 0, s, p, 4096)[200])
	require.Empty(t, r.m.Reports())
}

func TestCuFileAsyncRefuses(t *testing.T) {
	r := newFileRig(t, Config{Devices: 2})
	h, s, p, w := r.register(r.open(4096, os.O_RDWR)), r.stream(0), r.alloc(0, 8192), r.words(4096)
	heap := new(asyncWords)
	require.Equal(t, cufileapi.CUDAMemoryTypeInvalid, r.with(0, func() cufileapi.Result {
		return r.api.ReadAsync(h, p, &w.size, &w.fileOffset, &w.devOffset, &heap.done, s)
	}), "C would keep an address of Go's")
	other := r.stream(1)
	require.Equal(t, cufileapi.CUDAContextMismatch, r.readAsync(h, p, w, other))
	require.Equal(t, cufileapi.HandleNotRegistered, r.readAsync(h+1, p, w, s))
	require.Equal(t, cufileapi.CUDAFailed(cudadrv.ErrorInvalidHandle), r.readAsync(h, p, w, 0x77))
	require.Equal(t, cufileapi.InvalidValue, r.with(0, func() cufileapi.Result { return r.api.StreamRegister(s, 16) }))
	require.Equal(t, cufileapi.InvalidValue, r.with(0, func() cufileapi.Result { return r.api.StreamDeregister(s) }))

	// What is wrong with the words shows when they are looked up, or at once.
	w.fileOffset = -1
	r.fine(r.readAsync(h, p, w, s))
	r.sync(0, s)
	_, err := cufileapi.Transferred(w.done)
	require.ErrorIs(t, err, cufileapi.InvalidValue)
	aligned := cufileapi.FixedBufOffset | cufileapi.FixedFileOffset | cufileapi.FixedFileSize | cufileapi.PageAlignedInputs
	r.fine(r.with(0, func() cufileapi.Result { return r.api.StreamRegister(s, aligned) }))
	*w = asyncWords{size: 4095}
	require.Equal(t, cufileapi.InvalidValue, r.readAsync(h, p, w, s))
	w.size = 4096
	r.fine(r.readAsync(h, p, w, s))
	r.sync(0, s)
	require.EqualValues(t, 4096, w.done)

	var captured cufileapi.Result
	r.do(0, func() cudadrv.Result {
		r.ok(r.drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed))
		captured = r.readAsync(h, p, w, s)
		r.ok(r.drv.CtxSetCurrent(r.ctxs[0]))
		_, res := r.drv.StreamEndCapture(s)
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, res)
		return cudadrv.Success
	})
	require.ErrorIs(t, captured, cudadrv.ErrorStreamCaptureUnsupported)
	require.Empty(t, r.m.Reports())
}

// A transfer on a stream is ordered with it and no other.
func TestCuFileAsyncRaces(t *testing.T) {
	r := newFileRig(t, Config{})
	h, a, b, p, w := r.register(r.open(4096, os.O_RDWR)), r.stream(0), r.stream(0), r.alloc(0, 4096), r.words(4096)
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 4096, a) })
	r.fine(r.readAsync(h, p, w, a))
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 4096, b) })
	r.on(0, r.drv.CtxSynchronize)
	require.NotEmpty(t, r.m.Reports())
	require.Contains(t, r.m.Explain(0), "cuFileReadAsync on stream")
}

func TestCuFileCapturesForbidTransfers(t *testing.T) {
	r := newFileRig(t, Config{})
	h, s, p := r.register(r.open(4096, os.O_RDWR)), r.stream(0), r.alloc(0, 4096)
	r.do(0, func() cudadrv.Result {
		r.ok(r.drv.StreamBeginCapture(s, cudadrv.CaptureThreadLocal))
		_, err := r.read(h, p, 16)
		require.ErrorIs(t, err, cudadrv.ErrorStreamCaptureUnsupported)
		r.ok(r.drv.CtxSetCurrent(r.ctxs[0]))
		_, res := r.drv.StreamEndCapture(s)
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, res)
		return cudadrv.Success
	})
}

func TestCuFileFaults(t *testing.T) {
	r := newFileRig(t, Config{Faults: "cuFileHandleRegister#1=CU_FILE_HANDLE_NOT_REGISTERED, cuFileRead#1=EIO, short@cuFileRead#2, " +
		"cuFileRead#3=CU_FILE_INTERNAL_ERROR, cuFileWrite#1=ENOSPC, short@cuFileReadAsync#1, async@cuFileReadAsync#2=EIO, " +
		"async@cuFileReadAsync#3=CU_FILE_IO_ERROR, cuFileReadAsync#4=CU_FILE_ASYNC_NOT_SUPPORTED, cuFileBufRegister#1=CU_FILE_GPU_MEMORY_PINNING_FAILED"})
	f := r.open(4096, os.O_RDWR)
	require.Equal(t, cufileapi.HandleNotRegistered, r.with(0, func() cufileapi.Result {
		_, res := r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
		return res
	}))
	h, s, p, w := r.register(f), r.stream(0), r.alloc(0, 4096), r.words(4096)
	_, err := r.read(h, p, 4096)
	require.ErrorIs(t, err, syscall.EIO)
	n, err := r.read(h, p, 4096)
	require.NoError(t, err)
	require.EqualValues(t, 2048, n)
	got := download[byte](r.rig, 0, s, p, 4096)
	require.Equal(t, byte(2047*7%256), got[2047])
	require.NotEqual(t, byte(2048*7%256), got[2048])
	_, err = r.read(h, p, 4096)
	require.ErrorIs(t, err, cufileapi.InternalError)
	_, err = r.write(h, p, 4096)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.Equal(t, cufileapi.GPUMemoryPinningFailed, r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, 4096, 0) }))
	for _, want := range []int64{2048, -1, -int64(cufileapi.IOError)} {
		r.fine(r.readAsync(h, p, w, s))
		r.sync(0, s)
		require.Equal(t, want, w.done)
	}
	require.Equal(t, cufileapi.AsyncNotSupported, r.readAsync(h, p, w, s))
	require.Empty(t, r.m.Reports())
	for _, bad := range []string{"cuFileRead#1=EWHAT", "cuFileReadAsync#1=EIO", "short@cuFileBufRegister#1", "short@cuMemAlloc#1",
		"async@cuFileRead#1=EIO", "cuFileUseCount#1=CU_FILE_INTERNAL_ERROR", "cuFileHandleDeregister#1=CU_FILE_INTERNAL_ERROR",
		"cuFileBufRegister#1=EIO", "short@cuFileRead#1=EIO", "cuFileRead#1=CUDA_ERROR_UNKNOWN"} {
		_, err := New(&Config{Devices: 1, Faults: bad})
		require.ErrorContains(t, err, "want call#n=status", bad)
	}
}

func TestCuFileSystemCallsFail(t *testing.T) {
	r := newFileRig(t, Config{})
	read := r.register(r.open(64, os.O_RDONLY))
	p := r.alloc(0, 64)
	_, err := r.write(read, p, 64)
	require.ErrorIs(t, err, syscall.EIO)
	f := r.open(64, os.O_RDWR)
	h := r.register(f)
	require.NoError(t, f.Truncate(10)) // a file that shrinks
	n, err := r.read(h, p, 64)
	require.NoError(t, err)
	require.EqualValues(t, 10, n)
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit))
	_, err = r.api.Write(h, p, 1, 1<<62, 0)
	require.Error(t, err)
}

// entries are n reads of 64 bytes, whose cookies count them.
func (r *fileRig) entries(h cufileapi.Handle, p cudadrv.DevicePtr, n int) []cufileapi.IOParams {
	params := make([]cufileapi.IOParams, n)
	for i := range params {
		params[i] = cufileapi.IOParams{Mode: cufileapi.BatchMode, DevPtrBase: p, DevOffset: int64(64 * i), FileOffset: int64(64 * i),
			Size: 64, Handle: h, Opcode: cufileapi.OpRead, Cookie: uintptr(i)}
	}
	return params
}

func (r *fileRig) batch(n uint32) (b cufileapi.Batch) {
	r.t.Helper()
	r.fine(r.with(0, func() (res cufileapi.Result) { b, res = r.api.BatchIOSetUp(n); return res }))
	return b
}

func (r *fileRig) submit(b cufileapi.Batch, params []cufileapi.IOParams) cufileapi.Result {
	r.t.Helper()
	return r.with(0, func() cufileapi.Result { return r.api.BatchIOSubmit(b, params, 0) })
}

// wait collects n transfers by their cookies.
func (r *fileRig) wait(b cufileapi.Batch, n int) map[uintptr]cufileapi.IOEvents {
	r.t.Helper()
	seen := map[uintptr]cufileapi.IOEvents{}
	for len(seen) < n {
		events := make([]cufileapi.IOEvents, 1+len(seen)%2)
		got, res := r.api.BatchIOGetStatus(b, 1, events, nil)
		r.fine(res)
		for _, e := range events[:got] {
			seen[e.Cookie] = e
		}
	}
	return seen
}

func TestCuFileBatch(t *testing.T) {
	r := newFileRig(t, Config{Faults: "short@cuFileBatchIOSubmit#2, async@cuFileBatchIOSubmit#3=EIO, " +
		"async@cuFileBatchIOSubmit#4=CU_FILE_IO_ERROR, cuFileBatchIOSubmit#5=CU_FILE_BATCH_SUBMIT_FAILED"})
	h, p, s := r.register(r.open(1024, os.O_RDWR)), r.alloc(0, 1024), r.stream(0)
	b := r.batch(8)
	for _, want := range []struct {
		status cufileapi.Status
		ret    int64
	}{{cufileapi.Complete, 64}, {cufileapi.Complete, 32}, {cufileapi.Failed, -int64(syscall.EIO)}, {cufileapi.Failed, -int64(cufileapi.IOError)}} {
		r.fine(r.submit(b, r.entries(h, p, 5)))
		for _, e := range r.wait(b, 5) {
			require.Equal(t, want.status, e.Status)
			require.Equal(t, want.ret, int64(e.Ret))
		}
	}
	require.Equal(t, cufileapi.BatchSubmitFailed, r.submit(b, r.entries(h, p, 1)))
	require.Len(t, download[byte](r.rig, 0, s, p, 320), 320, "the host knows that the transfers have ended")

	good := func() []cufileapi.IOParams { return r.entries(h, p, 2) }
	for name, spoil := range map[string]func(p *cufileapi.IOParams){
		"mode":    func(p *cufileapi.IOParams) { p.Mode = 0 },
		"opcode":  func(p *cufileapi.IOParams) { p.Opcode = 2 },
		"handle":  func(p *cufileapi.IOParams) { p.Handle++ },
		"offset":  func(p *cufileapi.IOParams) { p.FileOffset = -1 },
		"address": func(p *cufileapi.IOParams) { p.DevPtrBase = 0 },
	} {
		params := good()
		spoil(&params[1])
		require.Equal(t, cufileapi.InternalBatchSubmitError, r.submit(b, params), name)
	}
	require.Equal(t, cufileapi.InvalidValue, r.with(0, func() cufileapi.Result { return r.api.BatchIOSubmit(b, good(), 1) }))
	_, res := r.api.BatchIOGetStatus(b, 1, make([]cufileapi.IOEvents, 1), nil)
	require.Equal(t, cufileapi.InvalidValue, res, "there is nothing to wait for")
	_, res = r.api.BatchIOGetStatus(b+1, 0, nil, nil)
	require.Equal(t, cufileapi.InternalBatchStatusError, res)
	require.Equal(t, cufileapi.InvalidValue, r.api.BatchIOCancel(b+1))
	r.api.BatchIODestroy(b)
	require.Empty(t, r.m.Reports())
	r.api.BatchIODestroy(b)
	r.reported("which is no batch")
}

// Transfers take up room until they have been told of.
func TestCuFileBatchCapacity(t *testing.T) {
	r := newFileRig(t, Config{})
	h, p, b := r.register(r.open(1024, os.O_RDWR)), r.alloc(0, 1024), r.batch(4)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	require.Equal(t, cufileapi.InternalBatchSubmitError, r.submit(b, r.entries(h, p+256, 2)))
	events := make([]cufileapi.IOEvents, 4)
	n, res := r.api.BatchIOGetStatus(b, 3, events, nil)
	r.fine(res)
	require.EqualValues(t, 3, n)
	r.fine(r.submit(b, r.entries(h, p, 4)))
	require.Equal(t, cufileapi.InternalBatchSubmitError, r.submit(b, r.entries(h, p+256, 1)))
	r.wait(b, 4)
}

func TestCuFileBatchCancel(t *testing.T) {
	r := newFileRig(t, Config{Faults: "hang@cuFileBatchIOSubmit#1"})
	h, p, b := r.register(r.open(1024, os.O_RDWR)), r.alloc(0, 1024), r.batch(8)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	second := r.entries(h, p+512, 2)
	for i := range second {
		second[i].Cookie += 10
	}
	r.fine(r.submit(b, second))
	require.Equal(t, cufileapi.Complete, r.wait(b, 2)[11].Status)

	events := make([]cufileapi.IOEvents, 8)
	begin := time.Now()
	n, res := r.api.BatchIOGetStatus(b, 1, events, &cufileapi.Timespec{Nsec: 20e6})
	r.fine(res)
	require.Zero(t, n, "nothing happened in the time given")
	require.GreaterOrEqual(t, time.Since(begin), 20*time.Millisecond)

	r.fine(r.api.BatchIOCancel(b))
	for _, e := range r.wait(b, 3) {
		require.Equal(t, cufileapi.Canceled, e.Status)
		require.Zero(t, e.Ret)
	}
	r.fine(r.submit(b, r.entries(h, p, 1)))
	require.Equal(t, cufileapi.Complete, r.wait(b, 1)[0].Status, "only what was there is canceled")
	r.api.BatchIODestroy(b)
	r.api.HandleDeregister(h)
	require.Empty(t, r.m.Reports())
}

func TestCuFileBatchGivenUpInFlight(t *testing.T) {
	r := newFileRig(t, Config{Faults: "hang@cuFileBatchIOSubmit#1"})
	h, p, b := r.register(r.open(1024, os.O_RDWR)), r.alloc(0, 1024), r.batch(8)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	r.api.BatchIODestroy(b)
	r.reported("cuFileBatchIODestroy gave up a batch while 3 of its transfers have not ended")
}

// A batch comes after what the host has waited for when it was submitted, and the
// host knows of its end once it was told.
func TestCuFileBatchRaces(t *testing.T) {
	r := newFileRig(t, Config{})
	h, p, b, s := r.register(r.open(1024, os.O_RDWR)), r.alloc(0, 1024), r.batch(8), r.stream(0)
	r.fine(r.submit(b, r.entries(h, p, 4)))
	r.wait(b, 4)
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 1024, s) })
	r.sync(0, s)
	require.Empty(t, r.m.Reports())
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 1024, s) })
	r.fine(r.submit(b, r.entries(h, p, 1)))
	r.wait(b, 1)
	r.on(0, r.drv.CtxSynchronize)
	r.reported("cuFileBatchIOSubmit on the host")
}

func TestCuFileStatistics(t *testing.T) {
	r := newFileRig(t, Config{Devices: 2, Faults: "cuFileRead#4=EIO"})
	h, p, w, s := r.register(r.open(1<<20, os.O_RDWR)), r.alloc(0, 1<<20), r.words(8192), r.stream(0)
	read := func(bytes uintptr) { _, _ = r.read(h, p, bytes) }
	l3 := func() (v cufileapi.StatsLevel3) { r.fine(r.api.GetStatsL3(&v)); return v }
	require.Equal(t, cufileapi.InvalidValue, r.api.StatsStart(), "there is no level")
	r.fine(r.api.SetStatsLevel(3))
	read(100)
	require.Zero(t, l3().Detailed, "collecting has not begun")
	r.fine(r.api.StatsStart())
	read(1 << 20)
	read(5000)
	_, err := r.read(h, p, 4096)
	require.Error(t, err) // by the plan, before the device is known
	_, err = r.read(h+1, p, 4096)
	require.Error(t, err)
	_, err = r.write(h, p, 8192)
	require.NoError(t, err)
	r.fine(r.readAsync(h, p, w, s))
	r.sync(0, s)
	r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, 4096, 0) }))
	require.NotEqual(t, cufileapi.Success, r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, 4096, 0) }))
	b := r.batch(4)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	r.wait(b, 3)
	r.api.BatchIODestroy(b)

	for range 2 {
		v := l3()
		one := v.Detailed.Basic
		require.Equal(t, cufileapi.OpCounter{OK: 6, Err: 1}, one.ReadOps)
		require.Equal(t, cufileapi.OpCounter{OK: 1}, one.WriteOps)
		require.EqualValues(t, 1<<20+5000+8192+3*64, one.ReadBytes)
		require.EqualValues(t, 8192, one.WriteBytes)
		require.Equal(t, cufileapi.OpCounter{OK: 1, Err: 1}, one.BufRegisterOps)
		require.Equal(t, cufileapi.OpCounter{OK: 1}, one.BatchSetUpOps)
		require.Equal(t, cufileapi.OpCounter{OK: 1}, one.BatchSubmitOps)
		require.Equal(t, cufileapi.OpCounter{OK: 3}, one.BatchCompleteOps)
		require.Equal(t, cufileapi.OpCounter{OK: 3}, one.BatchTotalSubmitOps)
		require.Equal(t, cufileapi.OpCounter{OK: 1}, one.BatchDestroyOps)
		require.EqualValues(t, 192, one.BatchReadBytes)
		require.EqualValues(t, 192, one.LastBatchReadBytes)
		require.Positive(t, one.ReadBytesPerSecond)
		require.GreaterOrEqual(t, one.ReadLatencySum, 6*one.ReadLatencyAverage)
		hist := v.Detailed.ReadSizeHist
		require.Equal(t, []uint64{3, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0}, []uint64{hist[0], hist[1], hist[2], hist[3], hist[4], hist[5], hist[6], hist[7], hist[8], hist[9], hist[10], hist[11]})
		require.EqualValues(t, 1, v.Detailed.WriteSizeHist[3])
		require.EqualValues(t, 2, v.NumGPUs)
		g := v.PerGPU[0]
		uuid, res := r.drv.DeviceGetUUID(0)
		r.ok(res)
		require.EqualValues(t, uuid, g.UUID)
		require.Equal(t, []uint64{one.ReadBytes, 6, 6, 1, 4, 8192, 1, 1}, []uint64{g.ReadBytes, g.Reads, g.PosixReads, g.ReadErrors, g.UnalignedReads, g.WriteBytes, g.Writes, g.PosixWrites})
		require.Equal(t, []uint64{2, 1, 1, 4096}, []uint64{g.BufRegisters, g.BufRegistersOK, g.BufRegistersFailed, g.RegisteredBytes})
		require.Zero(t, v.PerGPU[1].Reads)
		// What comes after the end of collecting is not counted.
		r.fine(r.api.StatsStop())
		read(4096)
	}
	r.fine(r.api.StatsReset())
	require.Zero(t, l3().Detailed)
	r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p) }))
	r.fine(r.api.SetStatsLevel(1))
	require.Equal(t, cufileapi.InvalidValue, r.api.GetStatsL2(new(cufileapi.StatsLevel2)))
	require.Empty(t, r.m.Reports())
}
