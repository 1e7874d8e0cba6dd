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
		change{"in the first namespace", func(w *world) {
			w.gpus[0].list = []nvml.Process{{PID: 4711, Bytes: 62 << 30}}
			w.put("proc/self/ns/pid", "->pid:[4026531836]")
		}, Warn, "process 4711 uses 62 GiB"},
		change{"a PID of the host in a container", func(w *world) {
			w.gpus[0].list = []nvml.Process{{PID: 4711, Bytes: 62 << 30}}
			w.put("proc/self/ns/pid", "->pid:[4026532001]")
		}, Unknown, "does not see whether it is of this job"},
		change{"another process of the container", func(w *world) {
			w.gpus[0].list = []nvml.Process{{PID: 47, Bytes: 62 << 30}}
			w.put("proc/self/ns/pid", "->pid:[4026532001]")
			w.put("proc/47/cmdline", "python\x00")
		}, Warn, "process 47 uses 62 GiB"},
		change{"a hidden process", func(w *world) { w.gpus[0].used = 5 << 30 }, Warn, "not visible here"},
	)
}
