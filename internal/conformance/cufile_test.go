package conformance

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/stretchr/testify/require"
)

// testCuFile tests an implementation of cuFile on the first device. The driver must
// not be open. If cuFile does not accept files, tests that need one are skipped
// with the reason.
func testCuFile(t *testing.T, drv cudadrv.Driver, api cufileapi.API) {
	r := &fileRig{rig: newRig(t, drv), api: api}
	r.testVersion(t)
	r.testParameters(t)
	r.test(t, cufileapi.Success, api.DriverOpen)
	t.Cleanup(func() {
		r.test(t, cufileapi.Success, api.DriverClose)
	})
	t.Run("open driver", r.testOpen)
	h, _ := r.file(t, 0)
	api.HandleDeregister(h)
	t.Run("files", r.testFiles)
	t.Run("memory", r.testMemory)
	t.Run("transfers", r.testTransfers)
}

// A fileRig is a rig with cuFile.
type fileRig struct {
	*rig
	api cufileapi.API
}

// test calls f with the first device's context bound and checks the result.
func (r *fileRig) test(t *testing.T, want cufileapi.Result, f func() cufileapi.Result) {
	t.Helper()
	r.on(t, 0, func() cudadrv.Result {
		got := f()
		require.Equal(t, want, got, "%v: %s", got, got.Meaning())
		return cudadrv.Success
	})
}

func (r *fileRig) testVersion(t *testing.T) {
	v, res := r.api.GetVersion()
	require.Equal(t, cufileapi.Success, res)
	require.GreaterOrEqual(t, v, int32(1000))
	require.Zero(t, v%10)
}

// testParameters checks that parameters are set only while the driver is closed.
func (r *fileRig) testParameters(t *testing.T) {
	v, _ := r.api.GetVersion()
	if v < cufileapi.FuncSetParameterString.Since() {
		t.Log("this cuFile has no parameters")
		return
	}
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.SetParameterString(cufileapi.LoggingLevel, "WARN") })
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.SetParameterString(cufileapi.LogDir, t.TempDir()) })
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { return r.api.SetParameterString(cufileapi.NumStringParams, "") })
}

func (r *fileRig) testOpen(t *testing.T) {
	r.test(t, cufileapi.Success, r.api.DriverOpen)
	r.test(t, cufileapi.Success, r.api.DriverClose)
	if v, _ := r.api.GetVersion(); v < cufileapi.FuncSetParameterString.Since() {
		return
	}
	r.test(t, cufileapi.DriverAlreadyOpen, func() cufileapi.Result { return r.api.SetParameterString(cufileapi.LoggingLevel, "INFO") })
}

// file creates and registers a file of n bytes. It skips the test if cuFile does
// not accept files.
func (r *fileRig) file(t *testing.T, n int) (cufileapi.Handle, *os.File) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.WriteFile(path, data(n, uint64(n)), 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	h, res := r.register(t, f)
	if res != cufileapi.Success {
		t.Skipf("cuFileHandleRegister: %v (%s)", res, res.Meaning())
	}
	require.NotZero(t, h)
	return h, f
}

func (r *fileRig) register(t *testing.T, f *os.File) (h cufileapi.Handle, res cufileapi.Result) {
	t.Helper()
	r.on(t, 0, func() cudadrv.Result {
		h, res = r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
		return cudadrv.Success
	})
	return h, res
}

func (r *fileRig) testFiles(t *testing.T) {
	h, f := r.file(t, 100)
	_, res := r.register(t, f)
	require.Equal(t, cufileapi.HandleAlreadyRegistered, res)
	r.api.HandleDeregister(h)
	h, res = r.register(t, f)
	require.Equal(t, cufileapi.Success, res)
	r.api.HandleDeregister(h)

	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	_, res = r.register(t, dir)
	require.Equal(t, cufileapi.InvalidFileType, res)
	appending, err := os.OpenFile(f.Name(), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer appending.Close()
	_, res = r.register(t, appending)
	require.Equal(t, cufileapi.InvalidFileOpenFlag, res)
	for _, d := range []cufileapi.Descr{{Type: cufileapi.OpaqueFD, FD: -1}, {Type: cufileapi.OpaqueFD, FD: 1 << 20}} {
		r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { _, res := r.api.HandleRegister(&d); return res })
	}
	r.test(t, cufileapi.IONotSupported, func() cufileapi.Result {
		_, res := r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueWin32, FD: int32(f.Fd())})
		return res
	})
}

func (r *fileRig) testMemory(t *testing.T) {
	const n = 1 << 20
	p := r.alloc(t, 0, n)
	register := func(want cufileapi.Result, p cudadrv.DevicePtr, bytes uintptr) {
		t.Helper()
		r.test(t, want, func() cufileapi.Result { return r.api.BufRegister(p, bytes, 0) })
	}
	deregister := func(want cufileapi.Result, p cudadrv.DevicePtr) {
		t.Helper()
		r.test(t, want, func() cufileapi.Result { return r.api.BufDeregister(p) })
	}
	register(cufileapi.Success, p, n)
	register(cufileapi.MemoryAlreadyRegistered, p, n)
	register(cufileapi.Success, p+4096, 4096) // within a registration
	deregister(cufileapi.Success, p+4096)
	deregister(cufileapi.Success, p)
	deregister(cufileapi.MemoryNotRegistered, p)
	register(cufileapi.CUDAPointerRangeError, p, 2*n)
	register(cufileapi.CUDAPointerRangeError, p+n/2, n)
	register(cufileapi.InvalidValue, 0, n)
	register(cufileapi.InvalidValue, p, 0)
	deregister(cufileapi.InvalidValue, 0)
}
