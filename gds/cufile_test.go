package gds

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

func virtualWith(t *testing.T, faults string) *device.Device {
	t.Helper()
	return testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: faults})[0]
}

// Where cuFile works it moves all bytes, whatever it moves at once.
func TestCuFileServes(t *testing.T) {
	for _, faults := range []string{"", "short@cuFileRead#2,short@cuFileWrite#3"} {
		r := newRig(t, virtualWith(t, faults))
		ctx := testgpu.Context(t)
		f, err := OpenFile(r.path, os.O_RDWR, &FileConfig{Engine: CuFile, Threads: 3})
		require.NoError(t, err)
		require.NoError(t, f.Load(ctx, r.s, r.x, 0))
		require.True(t, string(r.content) == string(hostBytes(t, r.s, r.x)))
		st := f.Status()
		require.NoError(t, st.CuFile.Reason)
		require.Equal(t, CuFile, st.Engine)
		require.EqualValues(t, len(r.content), st.CuFile.BytesRead)
		require.Zero(t, st.Cached.Reads+st.Direct.Reads)

		require.NoError(t, r.x.Zero(r.s))
		require.NoError(t, f.Save(ctx, r.s, r.x.Slice(3, 100_003), 77))
		got, err := os.ReadFile(r.path)
		require.NoError(t, err)
		clear(r.content[77 : 77+100_000])
		require.True(t, string(r.content) == string(got))
		st = f.Status()
		require.EqualValues(t, 100_000, st.CuFile.BytesWritten)
		require.Equal(t, faults != "", st.Continued > 0)
		require.NoError(t, f.Close())
		again, err := Open(r.path, &FileConfig{Engine: CuFile}) // the descriptors have the same numbers
		require.NoError(t, err)
		require.NoError(t, again.Register(r.dev))
		require.NoError(t, again.Close())
	}
}

// Whatever cuFile refuses, another engine does, and Status says why.
func TestCuFileIsRefused(t *testing.T) {
	for _, c := range []struct {
		faults string
		served bool // in part
		says   string
	}{
		{"cuFileDriverOpen#1=CU_FILE_PLATFORM_NOT_SUPPORTED", false, "cuFileDriverOpen: CU_FILE_PLATFORM_NOT_SUPPORTED"},
		{"cuFileHandleRegister#1=CU_FILE_HANDLE_NOT_REGISTERED", false, "cuFileHandleRegister: CU_FILE_HANDLE_NOT_REGISTERED"},
		{"cuFileRead#*=CU_FILE_IO_NOT_SUPPORTED", false, "cuFile moves 65536 bytes at byte"},
		{"cuFileRead#5=CU_FILE_INTERNAL_ERROR", true, "CU_FILE_INTERNAL_ERROR"},
	} {
		t.Run(c.faults, func(t *testing.T) {
			r := newRig(t, virtualWith(t, c.faults))
			f, err := Open(r.path, &FileConfig{Engine: CuFile, Threads: 3})
			require.NoError(t, err)
			tune(f, minSlot, 2)
			var moved atomic.Int64
			pieces := []piece{{Off: 0, Mem: r.x}}
			require.NoError(t, f.readPieces(testgpu.Context(t), r.s, pieces, hooks{Moved: func(n int) { moved.Add(int64(n)) }}))
			require.EqualValues(t, len(r.content), moved.Load())
			require.True(t, string(r.content) == string(hostBytes(t, r.s, r.x)))
			st := f.Status()
			require.ErrorContains(t, st.CuFile.Reason, c.says)
			require.Equal(t, c.served, st.CuFile.Reads > 0)
			require.Positive(t, st.Cached.BytesRead+st.Direct.BytesRead)
			require.NoError(t, f.Close())
		})
	}
}

// A cuFile that does not come back is given up.
func TestCuFileHangs(t *testing.T) {
	was := openTimeout
	openTimeout = 20 * time.Millisecond
	defer func() { openTimeout = was }()
	r := newRig(t, virtualWith(t, "hang@cuFileDriverOpen#1"))
	f, err := Open(r.path, &FileConfig{Engine: CuFile})
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Load(testgpu.Context(t), r.s, r.x, 0))
	require.True(t, string(r.content) == string(hostBytes(t, r.s, r.x)))
	require.ErrorContains(t, f.Status().CuFile.Reason, "has not returned for 20ms")
	require.ErrorContains(t, RegisterBuffer(r.x), "has not returned for 20ms")
}

// A file that becomes shorter while cuFile reads it is found.
func TestCuFileTruncated(t *testing.T) {
	r := newRig(t, virtualWith(t, ""))
	f, err := Open(r.path, &FileConfig{Engine: CuFile, Threads: 1})
	require.NoError(t, err)
	defer f.Close()
	tune(f, minSlot, 2)
	err = f.readPieces(testgpu.Context(t), r.s, []piece{{Off: 0, Mem: r.x}}, hooks{Moved: func(int) {
		if err := os.Truncate(r.path, 3*minSlot); err != nil {
			t.Error(err)
		}
	}})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.ErrorContains(t, f.Status().CuFile.Reason, "moves none")
}

// On hosts where cuFile does not work Register says why, and nothing else differs.
func TestRegister(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := newRig(t, devs[0])
		f, err := Open(r.path, &FileConfig{Engine: CuFile})
		require.NoError(t, err)
		defer f.Close()
		require.ErrorContains(t, f.Register(nil), "no device given")
		if err := f.Register(devs[0]); err != nil {
			require.Equal(t, "cuda", devs[0].System().Backend(), "%v", err)
			require.ErrorIs(t, err, f.Status().CuFile.Reason)
			t.Log(err)
		} else {
			require.NoError(t, f.Register(devs[0]))
			require.Len(t, f.known, 1)
			require.NoError(t, f.use("test"))
			require.ErrorContains(t, f.Deregister(), "wait for it")
			f.unuse()
			require.NoError(t, f.Deregister())
			require.NoError(t, f.Deregister())
			require.Empty(t, f.known)
		}
		require.NoError(t, f.Load(testgpu.Context(t), r.s, r.x, 0))
		require.True(t, string(r.content) == string(hostBytes(t, r.s, r.x)))
	})
}

// Registered memory is given to cuFile as such, by whatever part of it is used.
func TestBuffers(t *testing.T) {
	dev := virtualWith(t, "")
	r := newRig(t, dev)
	ctx := testgpu.Context(t)
	part := r.x.Slice(1000, 500_000)
	require.NoError(t, RegisterBuffer(part))
	require.NoError(t, RegisterBuffer(part))
	require.ErrorContains(t, DeregisterBuffer(r.x), "were not registered")
	require.Error(t, RegisterBuffer(r.x.Slice(1000, 2000)), "cuFile knows memory at this address")
	f, err := Open(r.path, &FileConfig{Engine: CuFile, Threads: 2})
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Load(ctx, r.s, r.x.Slice(1500, 300_001), 99))
	require.NoError(t, f.Status().CuFile.Reason)
	require.True(t, string(r.content[99:99+298_501]) == string(hostBytes(t, r.s, r.x)[1500:300_001]))
	require.NoError(t, DeregisterBuffer(part))
	c := cuFileOf(dev)
	require.Len(t, c.buffers, 1)
	require.Zero(t, c.buffers[0].busy)
	b, base, off := c.within(bytesAt(part, 100, 200))
	require.Equal(t, cudadrv.DevicePtr(part.Ptr()), base)
	require.EqualValues(t, 100, off)
	require.ErrorIs(t, DeregisterBuffer(part), errBusy)
	b.endUse()
	for _, x := range []memory.Slice[byte]{r.x.Slice(900, 1100), r.x.Slice(499_000, 500_001), r.x.Slice(0, 10)} {
		b, base, off := c.within(bytesAt(x, 0, x.Len()))
		require.Nil(t, b)
		require.Equal(t, cudadrv.DevicePtr(x.Ptr()), base)
		require.Zero(t, off)
	}
	require.NoError(t, DeregisterBuffer(part))
	require.Empty(t, c.buffers)
	require.ErrorContains(t, DeregisterBuffer(part), "were not registered")
	require.NoError(t, RegisterBuffer(r.x.Slice(0, 0)))
	require.NoError(t, DeregisterBuffer(memory.Slice[byte]{}))
}

func bytesAt(x memory.Slice[byte], i, j int) part {
	return part{ptr: cudadrv.DevicePtr(x.Slice(i, j).Ptr()), bytes: int64(j - i)}
}

func TestBuffersWithoutCuFile(t *testing.T) {
	dev := virtualWith(t, "cuFileDriverOpen#1=CU_FILE_PLATFORM_NOT_SUPPORTED")
	r := newRig(t, dev)
	err := RegisterBuffer(r.x)
	require.ErrorIs(t, err, cufileapi.PlatformNotSupported)
	require.ErrorContains(t, err, "on virtual:0")
	require.Error(t, DeregisterBuffer(r.x))
	r.usable(t)
}

// A file that cannot be written is refused, by cuFile too.
func TestCuFileReadOnly(t *testing.T) {
	r := newRig(t, virtualWith(t, ""))
	f := r.open(t, CuFile)
	defer f.Close()
	err := f.Save(testgpu.Context(t), r.s, r.x, 0)
	_, ok := errors.AsType[*Error](err)
	require.True(t, ok)
	require.ErrorContains(t, err, "read only")
	out := filepath.Join(t.TempDir(), "file")
	w, err := Create(out, &FileConfig{Engine: CuFile})
	require.NoError(t, err)
	require.NoError(t, w.Save(testgpu.Context(t), r.s, r.x, 0))
	require.Positive(t, w.Status().CuFile.BytesWritten)
	require.NoError(t, w.Commit(testgpu.Context(t)))
}

// TestUnknownDisk checks what is said of a file that cuFile did not register.
func TestUnknownDisk(t *testing.T) {
	defer func(folder string) { udevFolder = folder }(udevFolder)
	udevFolder = t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(udevFolder, "b254:1"), nil, 0o600))
	require.Empty(t, unknownDisk(unix.Mkdev(254, 1)))
	require.Contains(t, unknownDisk(unix.Mkdev(254, 16)), udevFolder+"/b254:16")
	require.Contains(t, unknownDisk(unix.Mkdev(0, 27)), "no disk")

	f, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, unregistered(cufileapi.Success, int(f.Fd())))
	err = unregistered(cufileapi.HandleNotRegistered, int(f.Fd()))
	require.ErrorIs(t, err, cufileapi.HandleNotRegistered)
	require.Contains(t, err.Error(), "disk")
	require.NotContains(t, unregistered(cufileapi.InvalidFileType, int(f.Fd())).Error(), "disk")
}
