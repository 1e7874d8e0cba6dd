package doctor

import "testing"

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
