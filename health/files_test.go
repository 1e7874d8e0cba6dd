package health

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDisk(t *testing.T) {
	writes := func(speed float64, err error) func(w *world) {
		return func(w *world) {
			w.writeSpeed = func(context.Context, string) (float64, error) { return speed, err }
		}
	}
	try(t, disk,
		change{"slow", writes(0.2e9, nil), Warn, "0.2 GB/s"},
		change{"full", func(w *world) { w.space.Free = 1 << 30 }, Warn, "1 GiB free"},
		change{"read-only", writes(0, errors.New("read-only file system")), Unknown, "read-only"},
		change{"no folder", func(w *world) { w.spaceOf = func(string) (*space, error) { return nil, os.ErrNotExist } }, Unknown, "not exist"},
	)
}

// TestWriteSpeed writes to a real directory, and leaves no file.
func TestWriteSpeed(t *testing.T) {
	dir := t.TempDir()
	speed, err := writeSpeed(t.Context(), dir)
	require.NoError(t, err)
	require.Positive(t, speed)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	_, err = writeSpeed(t.Context(), dir+"/missing")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestGds(t *testing.T) {
	try(t, gds,
		change{"no udev", func(w *world) { w.put("proc/driver/nvidia-fs/version", "2.22") }, Warn, "/run/udev/data"},
		change{"complete", func(w *world) {
			w.put("proc/driver/nvidia-fs/version", "2.22")
			w.put("run/udev/data/b8:0", "")
			w.Env["PWD"] = "/scratch/me"
		}, Pass, "on lustre"},
		change{"another file system", func(w *world) {
			w.put("proc/driver/nvidia-fs/version", "2.22")
			w.put("run/udev/data/b8:0", "")
			w.put("proc/self/mountinfo", "1 0 0:5 / / rw - overlay o rw\n")
		}, Pass, "does not support"},
		change{"no mounts", func(w *world) { w.remove("proc/self/mountinfo") }, Unknown, "mountinfo"},
	)
}

func TestLibraryCopies(t *testing.T) {
	try(t, libraryCopies,
		noGPU,
		change{"no NCCL", func(w *world) {
			w.nccl = func() (*library, error) { return nil, errors.New("no usable library for NCCL") }
		}, Unknown, "no usable library"},
		change{"another copy", func(w *world) {
			w.Env["LD_LIBRARY_PATH"] = "/opt/nccl"
			w.put("opt/nccl/libnccl.so.2", "->libnccl.so.2.28.9")
			w.put("opt/nccl/libnccl.so.2.28.9", "")
		}, Warn, "/opt/nccl/libnccl.so.2.28.9"},
		change{"a preloaded copy", func(w *world) { w.Env["LD_PRELOAD"] = "/x/libnccl.so" }, Warn, "/x/libnccl.so"},
		change{"a mapped copy", func(w *world) { w.put("proc/self/maps", "7f0-7f1 r-xp 0 08:01 9 /y/libnccl.so.2.27.1\n") }, Warn, "/y/libnccl.so.2.27.1"},
		change{"the same copy and a plugin", func(w *world) {
			w.Env["LD_LIBRARY_PATH"] = "/usr/lib"
			w.put("usr/lib/libnccl.so.2.28.3", "")
			w.put("usr/lib/libnccl-net.so", "")
		}, Pass, "the plugins /usr/lib/libnccl-net.so"},
	)
}

func TestNCCLDefects(t *testing.T) {
	version := func(v string) func(w *world) {
		return func(w *world) {
			w.nccl = func() (*library, error) { return &library{Path: "/usr/lib/libnccl.so.2", Version: v}, nil }
		}
	}
	w := healthy()
	version("2.32.6")(w)
	require.Equal(t, Pass, w.runOne(t, ncclDefects)[0].Verdict)
	for _, x := range []change{
		noGPU,
		{"stale data in graphs", version("2.28.3"), Warn, "symmetric-in-graphs: symmetric kernels may read data"},
		{"the cure of all", version("2.28.3"), Warn, "install NCCL 2.31.2 or newer"},
		{"without the first", version("2.30.7"), Warn, "windows-in-one-allocation: "},
		{"no NCCL", func(w *world) { w.nccl = func() (*library, error) { return nil, errors.New("no usable library") } }, Unknown, "no usable library"},
		{"no version", version("x"), Unknown, `NCCL's version is "x"`},
	} {
		w := healthy()
		x.make(w)
		r := w.runOne(t, ncclDefects)[0]
		require.Equal(t, x.want, r.Verdict, "%s: %+v", x.name, r)
		require.Contains(t, r.Found+" "+r.Want+" "+r.Cause+" "+r.Cure, x.text, x.name)
	}
}
