package doctor

import "testing"

func TestOpenFiles(t *testing.T) {
	try(t, openFiles,
		change{"few", limits("Max open files 1024 4096 files"), Warn, "hard limit 4096"},
		change{"unlimited", limits("Max open files 1024 unlimited files"), Pass, "unlimited"},
		change{"no file", func(w *world) { w.remove("proc/self/limits") }, Unknown, "/proc/self/limits"},
	)
}
