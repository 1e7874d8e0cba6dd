package doctor

import "testing"

func TestHugePages(t *testing.T) {
	try(t, hugePages,
		change{"reserved", func(w *world) {
			w.put("proc/meminfo", "MemTotal: 8388608 kB\nHugePages_Total: 3072\nHugepagesize: 2048 kB\n")
		}, Warn, "6 GiB of 8 GiB"},
		change{"no line", func(w *world) { w.put("proc/meminfo", "MemTotal: 1 kB\n") }, Unknown, "HugePages_Total"},
	)
}
