package doctor

import (
	"os"
	"testing"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestOtherProcesses(t *testing.T) {
	try(t, otherProcesses,
		lost, noGPU,
		change{"another process", func(w *world) { w.gpus[0].list = []nvml.Process{{PID: 4711, Bytes: 62 << 30}} }, Warn, "process 4711 uses 62 GiB"},
		change{"this process", func(w *world) { w.gpus[0].list = []nvml.Process{{PID: os.Getpid()}} }, Pass, "in use"},
		change{"another rank", func(w *world) {
			w.gpus[0].list = []nvml.Process{{PID: 4711}}
			w.put("proc/4711/cmdline", "chorus\x00doctor\x00")
		}, Pass, "in use"},
		change{"a hidden process", func(w *world) { w.gpus[0].used = 5 << 30 }, Warn, "not visible here"},
	)
}
