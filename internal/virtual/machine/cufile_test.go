package machine

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/dl"
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
	r.api = NewCufile(r.m)
	r.fine(r.api.DriverOpen())
	return r
}

// block holds the stream until the function that it returns is called.
func (r *fileRig) block(s cudadrv.Stream) func() {
	r.T.Helper()
	gate := make(chan struct{})
	r.Do(0, func() cudadrv.Result { return r.Drv.LaunchHostFunc(s, dl.OnceClosure(func() { <-gate })) })
	return func() { close(gate) }
}

func (r *fileRig) fine(res cufileapi.Result) {
	r.T.Helper()
	require.Equal(r.T, cufileapi.Success, res, "%v: %s", res, res.Meaning())
}

// with calls f with the context of a device bound.
func (r *fileRig) with(dev int, f func() cufileapi.Result) (res cufileapi.Result) {
	r.T.Helper()
	r.On(dev, func() cudadrv.Result { res = f(); return cudadrv.Success })
	return res
}

// drained returns when the stream has no operations, without a wait by the host.
func (r *fileRig) drained(s cudadrv.Stream) {
	r.T.Helper()
	for done := false; !done; {
		r.m.Lock()
		x, res := r.m.Stream(nil, s)
		r.OK(res)
		done = x.Idle()
		r.m.Unlock()
	}
}

func (r *fileRig) open(n int, flags int) *os.File {
	r.T.Helper()
	path := filepath.Join(r.T.TempDir(), "file")
	content := make([]byte, n)
	for i := range content {
		content[i] = byte(i * 7)
	}
	require.NoError(r.T, os.WriteFile(path, content, 0o600))
	f, err := os.OpenFile(path, flags, 0)
	require.NoError(r.T, err)
	r.T.Cleanup(func() { f.Close() })
	return f
}

func (r *fileRig) register(f *os.File) (h cufileapi.Handle) {
	r.T.Helper()
	r.fine(r.with(0, func() (res cufileapi.Result) {
		h, res = r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
		return res
	}))
	return h
}

func (r *fileRig) read(h cufileapi.Handle, p cudadrv.DevicePtr, bytes uintptr) (n int64, err error) {
	r.T.Helper()
	r.On(0, func() cudadrv.Result { n, err = r.api.Read(h, p, bytes, 0, 0); return cudadrv.Success })
	return n, err
}

func (r *fileRig) write(h cufileapi.Handle, p cudadrv.DevicePtr, bytes uintptr) (n int64, err error) {
	r.T.Helper()
	r.On(0, func() cudadrv.Result { n, err = r.api.Write(h, p, bytes, 0, 0); return cudadrv.Success })
	return n, err
}

func (r *fileRig) reported(part string) {
	r.T.Helper()
	reports := r.m.Reports()
	require.Len(r.T, reports, 1)
	require.Contains(r.T, reports[0], part)
	require.Contains(r.T, reports[0], "seed")
}

func TestCuFileWantsItsDriverAndAContext(t *testing.T) {
	r := &fileRig{rig: newRig(t, Config{Devices: 1})}
	r.api = NewCufile(r.m)
	f := r.open(10, os.O_RDWR)
	register := func() cufileapi.Result {
		_, res := r.api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
		return res
	}
	for name, call := range map[string]func() cufileapi.Result{
		"register": register,
		"buffer":   func() cufileapi.Result { return r.api.BufRegister(1, 1, 0) },
		"close":    r.api.DriverClose,
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
	api := NewCufile(m)
	require.Equal(t, cufileapi.CUDAFailed(cudadrv.ErrorNotInitialized), api.DriverOpen())
	require.Equal(t, cudadrv.Success, m.Driver().Init())
	for _, p := range []cufileapi.StringParam{-1, cufileapi.NumStringParams} {
		require.Equal(t, cufileapi.InvalidValue, api.SetParameterString(p, ""), p)
	}
	require.Equal(t, cufileapi.Success, api.SetParameterString(cufileapi.LogDir, t.TempDir()))
	require.Equal(t, cufileapi.Success, api.DriverOpen())
	require.Equal(t, cufileapi.DriverAlreadyOpen, api.SetParameterString(cufileapi.LoggingLevel, "INFO"))
	require.Equal(t, cufileapi.Success, api.DriverClose())
	require.Equal(t, cufileapi.Success, api.SetParameterString(cufileapi.LoggingLevel, "INFO"))
}

// A host function of a stream may call cuFile no more than the driver.
func TestCuFileWithinHostFunctions(t *testing.T) {
	r := newFileRig(t, Config{})
	s := r.Stream(0)
	var res cufileapi.Result
	r.Do(0, func() cudadrv.Result {
		return r.Drv.LaunchHostFunc(s, dl.OnceClosure(func() { res = r.api.DriverOpen() }))
	})
	r.Sync(0, s)
	require.Equal(t, cufileapi.CUDAFailed(cudadrv.ErrorNotPermitted), res)
}
