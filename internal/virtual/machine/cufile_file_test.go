package machine

import (
	"os"
	"syscall"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// A read into memory that a stream still uses is a race: nothing orders the two.
func TestCuFileReadRacesWithAStream(t *testing.T) {
	t.Run("stream first", func(t *testing.T) {
		r := newFileRig(t, Config{})
		h, s, p := r.register(r.open(4096, os.O_RDWR)), r.Stream(0), r.Alloc(0, 4096)
		r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 4096, s) })
		r.drained(s) // the fill has ended, but nobody has waited for it
		_, err := r.read(h, p, 4096)
		require.ErrorIs(t, err, cufileapi.CUDADriverError)
		require.ErrorIs(t, err, cudadrv.ErrorLaunchFailed)
		r.reported("cuFileRead on the host writes bytes 0 to 4096 of the block")
		require.Contains(t, r.m.Explain(0), "cuMemsetD8Async on stream")
		require.Contains(t, r.m.Explain(0), "let the host wait for the stream first")
	})
	t.Run("write", func(t *testing.T) {
		r := newFileRig(t, Config{})
		h, s, p := r.register(r.open(4096, os.O_RDWR)), r.Stream(0), r.Alloc(0, 4096)
		open := r.block(s)
		r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 4096, s) })
		_, err := r.write(h, p, 4096)
		require.NoError(t, err)
		open()
		r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
		r.reported("cuFileWrite on the host")
	})
	t.Run("ordered", func(t *testing.T) {
		r := newFileRig(t, Config{})
		h, s, p := r.register(r.open(4096, os.O_RDWR)), r.Stream(0), r.Alloc(0, 4096)
		for range 20 {
			r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 4096, s) })
			r.Sync(0, s)
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
			_, err := r.read(h, r.Alloc(0, 4000), 4096)
			return err
		}, "runs 96 bytes past the end")
	})
	t.Run("freed", func(t *testing.T) {
		illegal(t, func(r *fileRig, h cufileapi.Handle) error {
			p := r.Alloc(0, 4096)
			r.Do(0, func() cudadrv.Result { return r.Drv.MemFree(p) })
			_, err := r.read(h, p, 4096)
			return err
		}, "was freed by cuMemFree")
	})
	t.Run("not given out", func(t *testing.T) {
		illegal(t, func(r *fileRig, h cufileapi.Handle) error {
			p, s := r.Alloc(0, 4096), r.Stream(0)
			audit := r.Drv.(cudadrv.Auditor)
			r.OK(audit.MemAllocated(p, 4096, s))
			r.OK(audit.MemFreed(p, 4096, s))
			r.Sync(0, s)
			_, err := r.read(h, p, 4096)
			return err
		}, "were freed by MemFreed")
	})
	r := newFileRig(t, Config{Devices: 2})
	h := r.register(r.open(4096, os.O_RDWR))
	_, err := r.read(h, r.Alloc(1, 4096), 4096)
	require.ErrorIs(t, err, cufileapi.CUDAContextMismatch)
	other := r.Alloc(1, 64)
	require.Equal(t, cufileapi.CUDAContextMismatch, r.with(0, func() cufileapi.Result { return r.api.BufRegister(other, 64, 0) }))
	plain := make([]byte, 16)
	_, err = r.read(h, cudadrv.DevicePtr(uintptr(unsafe.Pointer(&plain[0]))), 16)
	require.ErrorIs(t, err, cufileapi.CUDAMemoryTypeInvalid)
	require.Equal(t, cufileapi.CUDAPointerInvalid, r.with(0, func() cufileapi.Result { return r.api.BufRegister(1<<48+5, 64, 0) }))
	var pinned unsafe.Pointer
	r.Do(0, func() (res cudadrv.Result) { pinned, res = r.Drv.MemHostAlloc(16, 0); return })
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
	h, p := r.register(f), r.Alloc(0, 4096)
	f.Close()
	_, err := r.read(h, p, 4096)
	require.ErrorIs(t, err, cufileapi.HandleNotRegistered)
	r.reported("was closed before its handle was deregistered")

	r = newFileRig(t, Config{})
	f, other := r.open(16, os.O_RDWR), r.open(16, os.O_RDWR)
	h = r.register(f)
	require.NoError(t, syscall.Dup3(int(other.Fd()), int(f.Fd()), 0))
	_, err = r.read(h, r.Alloc(0, 16), 16)
	require.ErrorIs(t, err, cufileapi.HandleNotRegistered, "the number stands for another file now")
	r.reported("was closed before its handle was deregistered")

	r = newFileRig(t, Config{})
	f = r.open(16, os.O_RDWR)
	h = r.register(f)
	require.Equal(t, 2, openings(t, f.Name()))
	r.api.HandleDeregister(h)
	_, err = r.read(h, r.Alloc(0, 16), 16)
	require.ErrorIs(t, err, cufileapi.HandleNotRegistered)
	require.Equal(t, 1, openings(t, f.Name()))
	require.Empty(t, r.m.Reports())
	r.api.HandleDeregister(h)
	r.reported("which is not a handle")
}

// openings counts the process's descriptors of a file.
func openings(t *testing.T, path string) (n int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, fd := range list {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && to == path {
			n++
		}
	}
	return n
}

func TestCuFileRegistersWhatIsThere(t *testing.T) {
	r := newFileRig(t, Config{})
	register := func(p cudadrv.DevicePtr, bytes uintptr) cufileapi.Result {
		return r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, bytes, 0) })
	}
	p := r.Reserve(0, 3)
	r.Map(0, p, 1, 0)
	r.Map(0, p+2*virtualtest.Unit, 1, 0)
	require.Equal(t, cufileapi.CUDAPointerRangeError, register(p, 3*virtualtest.Unit), "a hole")
	r.fine(register(p, virtualtest.Unit))
	r.fine(register(p+2*virtualtest.Unit+512, virtualtest.Unit-512))

	s := r.Stream(0)
	open := r.block(s)
	var q cudadrv.DevicePtr
	r.Do(0, func() (res cudadrv.Result) { q, res = r.Drv.MemAllocAsync(64, s); return })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFreeAsync(q, s) })
	require.Equal(t, cufileapi.CUDAPointerInvalid, register(q, 64), "its free was called")
	open()
	r.Sync(0, s)
	plain := r.Alloc(0, 64)
	require.Equal(t, cufileapi.InvalidValue, r.with(0, func() cufileapi.Result { return r.api.BufRegister(plain, 64, 4) }), "flags")
	require.Empty(t, r.m.Reports())
}

func TestCuFileSystemMemory(t *testing.T) {
	r := newFileRig(t, Config{})
	var p unsafe.Pointer
	r.Do(0, func() (res cudadrv.Result) { p, res = r.Drv.MemHostAlloc(64, 0); return })
	r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(cudadrv.DevicePtr(uintptr(p)), 64, 0) }))
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFreeHost(p) })
	r.reported("was freed before cuFileBufDeregister")
}

func TestCuFileGivenUpInFlight(t *testing.T) {
	const n = 4096
	for name, c := range map[string]struct {
		giveUp func(r *fileRig, h cufileapi.Handle, p cudadrv.DevicePtr)
		report string
	}{
		"file": {func(r *fileRig, h cufileapi.Handle, p cudadrv.DevicePtr) { r.api.HandleDeregister(h) },
			"cuFileHandleDeregister deregistered file descriptor"},
		"memory": {func(r *fileRig, h cufileapi.Handle, p cudadrv.DevicePtr) {
			r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p) }))
		}, "cuFileBufDeregister deregistered memory"},
		"driver": {func(r *fileRig, h cufileapi.Handle, p cudadrv.DevicePtr) {
			r.api.HandleDeregister(r.register(r.open(1, os.O_RDONLY)))
			r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p + n) }))
			r.fine(r.api.DriverClose())
		}, "cuFileDriverClose_v2 deregistered"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newFileRig(t, Config{})
			h, p := r.register(r.open(n, os.O_RDWR)), r.Alloc(0, 2*n)
			if name == "memory" {
				r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, n, 0) }))
			}
			r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p+n, n, 0) }))
			l := r.api.(*cufileLib)
			x := &transfer{file: l.files[h], buffer: l.buffers[p]}
			x.use(1)
			c.giveUp(r, h, p)
			r.reported(c.report)
			_, err := x.file.file.Stat()
			require.NoError(t, err, "the file stays open for what is in flight")
			x.use(-1)
			_, err = x.file.file.Stat()
			require.Equal(t, name == "memory", err == nil, "the file is closed after the last transfer")
		})
	}
	t.Run("afterwards", func(t *testing.T) {
		r := newFileRig(t, Config{})
		h, p := r.register(r.open(n, os.O_RDWR)), r.Alloc(0, n)
		r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, n, 0) }))
		_, err := r.read(h, p, n)
		require.NoError(t, err)
		r.api.HandleDeregister(h)
		r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p) }))
		r.Do(0, func() cudadrv.Result { return r.Drv.MemFree(p) })
		r.fine(r.api.DriverClose())
		require.Empty(t, r.m.Reports())
	})
	t.Run("freed memory", func(t *testing.T) {
		r := newFileRig(t, Config{})
		p := r.Alloc(0, n)
		r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p+512, 512, 0) }))
		r.Do(0, func() cudadrv.Result { return r.Drv.MemFree(p) })
		r.reported("was freed before cuFileBufDeregister")
		r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p + 512) }))
	})
}

func TestCuFileCapturesForbidTransfers(t *testing.T) {
	r := newFileRig(t, Config{})
	h, s, p := r.register(r.open(4096, os.O_RDWR)), r.Stream(0), r.Alloc(0, 4096)
	r.Do(0, func() cudadrv.Result {
		r.OK(r.Drv.StreamBeginCapture(s, cudadrv.CaptureThreadLocal))
		_, err := r.read(h, p, 16)
		require.ErrorIs(t, err, cudadrv.ErrorStreamCaptureUnsupported)
		r.OK(r.Drv.CtxSetCurrent(r.Contexts[0]))
		_, res := r.Drv.StreamEndCapture(s)
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, res)
		return cudadrv.Success
	})
}

func TestCuFileFaults(t *testing.T) {
	r := newFileRig(t, Config{Faults: "cuFileHandleRegister#1=CU_FILE_HANDLE_NOT_REGISTERED, cuFileRead#1=EIO, short@cuFileRead#2, " +
		"cuFileRead#3=CU_FILE_INTERNAL_ERROR, cuFileWrite#1=ENOSPC, cuFileBufRegister#1=CU_FILE_GPU_MEMORY_PINNING_FAILED"})
	f := r.open(4096, os.O_RDWR)
	require.Equal(t, cufileapi.HandleNotRegistered, r.with(0, func() cufileapi.Result {
		_, res := r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
		return res
	}))
	h, s, p := r.register(f), r.Stream(0), r.Alloc(0, 4096)
	_, err := r.read(h, p, 4096)
	require.ErrorIs(t, err, syscall.EIO)
	n, err := r.read(h, p, 4096)
	require.NoError(t, err)
	require.EqualValues(t, 2048, n)
	got := virtualtest.Download[byte](r.Rig, 0, s, p, 4096)
	require.Equal(t, byte(2047*7%256), got[2047])
	require.NotEqual(t, byte(2048*7%256), got[2048])
	_, err = r.read(h, p, 4096)
	require.ErrorIs(t, err, cufileapi.InternalError)
	_, err = r.write(h, p, 4096)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.Equal(t, cufileapi.GPUMemoryPinningFailed, r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, 4096, 0) }))
	require.Empty(t, r.m.Reports())
	for _, bad := range []string{"cuFileRead#1=EWHAT", "cuFileDriverOpen#1=EIO", "short@cuFileBufRegister#1", "short@cuMemAlloc#1",
		"async@cuFileRead#1=EIO", "cuFileHandleDeregister#1=CU_FILE_INTERNAL_ERROR",
		"cuFileBufRegister#1=EIO", "short@cuFileRead#1=EIO", "cuFileRead#1=CUDA_ERROR_UNKNOWN"} {
		_, err := New(&Config{Devices: 1, Faults: bad})
		require.ErrorContains(t, err, "want call#n=status", bad)
	}
}

func TestCuFileSystemCallsFail(t *testing.T) {
	r := newFileRig(t, Config{})
	read := r.register(r.open(64, os.O_RDONLY))
	p := r.Alloc(0, 64)
	_, err := r.write(read, p, 64)
	require.ErrorIs(t, err, syscall.EIO)
	f := r.open(64, os.O_RDWR)
	h := r.register(f)
	require.NoError(t, f.Truncate(10)) // a file that shrinks
	n, err := r.read(h, p, 64)
	require.NoError(t, err)
	require.EqualValues(t, 10, n)
	r.On(0, func() cudadrv.Result {
		_, err = r.api.Write(h, p, 1, 1<<62, 0)
		return cudadrv.Success
	})
	require.ErrorIs(t, err, syscall.EFBIG)
}
