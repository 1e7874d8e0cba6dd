package doctor

import (
	"errors"
	"testing"
)

func TestLibraryCopies(t *testing.T) {
	try(t, libraryCopies,
		noGPU,
		change{"no NCCL", func(w *world) {
			w.NCCL = func() (*Library, error) { return nil, errors.New("no usable library for NCCL") }
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
