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
		require.Zero(t, api.UseCount())
	})
	t.Run("open driver", r.testOpen)
	t.Run("statistics", r.testStatistics)
	h, _ := r.file(t, 0)
	api.HandleDeregister(h)
	t.Run("files", r.testFiles)
	t.Run("memory", r.testMemory)
	t.Run("transfers", r.testTransfers)
	t.Run("batches", r.testBatches)
	t.Run("streams", r.testStreams)
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
	for f := range cufileapi.NumFuncs {
		if f.Since() <= v {
			require.True(t, r.api.Has(f), "%s, since %s", f.Name(), cufileapi.VersionText(f.Since()))
		}
	}
	require.Zero(t, r.api.UseCount())
}

const batchSize = 64 // set by testParameters

// testParameters checks that parameters set before the driver is opened can be read.
func (r *fileRig) testParameters(t *testing.T) {
	if !r.api.Has(cufileapi.FuncGetParameterMinMaxValue) {
		t.Log("this cuFile has no parameters")
		return
	}
	least, greatest, res := r.api.GetParameterMinMaxValue(cufileapi.IOBatchSize)
	require.Equal(t, cufileapi.Success, res)
	require.LessOrEqual(t, least, uintptr(batchSize))
	require.GreaterOrEqual(t, greatest, uintptr(batchSize))
	_, _, res = r.api.GetParameterMinMaxValue(cufileapi.NumSizeTParams)
	require.Equal(t, cufileapi.InvalidValue, res)

	for _, call := range []func() cufileapi.Result{
		func() cufileapi.Result { return r.api.SetParameterSizeT(cufileapi.IOBatchSize, batchSize) },
		func() cufileapi.Result { return r.api.SetParameterSizeT(cufileapi.MaxIOThreads, 4) },
		func() cufileapi.Result { return r.api.SetParameterBool(cufileapi.ParallelIO, true) },
		func() cufileapi.Result { return r.api.SetParameterString(cufileapi.LoggingLevel, "WARN") },
		func() cufileapi.Result { return r.api.SetParameterString(cufileapi.LogDir, t.TempDir()) },
	} {
		r.test(t, cufileapi.Success, call)
	}
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { return r.api.SetParameterSizeT(cufileapi.NumSizeTParams, 1) })
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { return r.api.SetParameterBool(cufileapi.NumBoolParams, true) })
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { return r.api.SetParameterString(cufileapi.NumStringParams, "") })

	n, res := r.api.GetParameterSizeT(cufileapi.IOBatchSize)
	require.Equal(t, cufileapi.Success, res)
	require.EqualValues(t, batchSize, n)
	on, res := r.api.GetParameterBool(cufileapi.ParallelIO)
	require.Equal(t, cufileapi.Success, res)
	require.True(t, on)
	text, res := r.api.GetParameterString(cufileapi.LoggingLevel)
	require.Equal(t, cufileapi.Success, res)
	require.Equal(t, "WARN", text)
}

func (r *fileRig) testOpen(t *testing.T) {
	require.EqualValues(t, 1, r.api.UseCount())
	r.test(t, cufileapi.Success, r.api.DriverOpen)
	require.EqualValues(t, 2, r.api.UseCount())
	r.test(t, cufileapi.Success, r.api.DriverClose)
	require.EqualValues(t, 1, r.api.UseCount())

	var p cufileapi.DrvProps
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.DriverGetProperties(&p) })
	t.Logf("%+v", p)
	require.Positive(t, p.MaxBatchIOSize)
	require.Positive(t, p.MaxDirectIOSize)
	if !r.api.Has(cufileapi.FuncGetParameterMinMaxValue) {
		return
	}
	// The machine's configuration file takes precedence over the parameters set here.
	batch, res := r.api.GetParameterSizeT(cufileapi.IOBatchSize)
	require.Equal(t, cufileapi.Success, res)
	t.Logf("the size of batches, set to %d, is %d", batchSize, batch)
	r.test(t, cufileapi.DriverAlreadyOpen, func() cufileapi.Result { return r.api.SetParameterSizeT(cufileapi.IOBatchSize, batch+1) })
	r.test(t, cufileapi.DriverAlreadyOpen, func() cufileapi.Result { return r.api.SetParameterBool(cufileapi.ParallelIO, false) })
	r.test(t, cufileapi.DriverAlreadyOpen, func() cufileapi.Result { return r.api.SetParameterString(cufileapi.LoggingLevel, "INFO") })
	r.test(t, cufileapi.DriverAlreadyOpen, func() cufileapi.Result {
		return r.api.SetParameterPosixPoolSlabArray([]uintptr{4}, []uintptr{4})
	})
	now, res := r.api.GetParameterSizeT(cufileapi.IOBatchSize)
	require.Equal(t, cufileapi.Success, res)
	require.Equal(t, batch, now)
	_, res = r.api.GetBARSizeInKB(0)
	require.Equal(t, cufileapi.Success, res)
	_, res = r.api.GetBARSizeInKB(99)
	require.Equal(t, cufileapi.InvalidValue, res)
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.DriverSetMaxDirectIOSize(1024) })
	r.test(t, cufileapi.DriverUnsupportedLimit, func() cufileapi.Result { return r.api.DriverSetMaxDirectIOSize(1 << 40) })
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.DriverSetPollMode(true, 8) })
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.DriverSetPollMode(false, 8) })
}

func (r *fileRig) testStatistics(t *testing.T) {
	if !r.api.Has(cufileapi.FuncSetStatsLevel) {
		t.Skip("this cuFile has no statistics")
	}
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { return r.api.SetStatsLevel(4) })
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { return r.api.SetStatsLevel(-1) })
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.SetStatsLevel(2) })
	level, res := r.api.GetStatsLevel()
	require.Equal(t, cufileapi.Success, res)
	require.EqualValues(t, 2, level)
	r.test(t, cufileapi.Success, r.api.StatsStart)
	r.test(t, cufileapi.Success, r.api.StatsReset)
	var l1 cufileapi.StatsLevel1
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.GetStatsL1(&l1) })
	require.Zero(t, l1.ReadOps)
	require.Zero(t, l1.ReadBytes)
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.GetStatsL2(new(cufileapi.StatsLevel2)) })
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { return r.api.GetStatsL3(new(cufileapi.StatsLevel3)) })
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
