package doctor

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPcie(t *testing.T) {
	try(t, pcie,
		lost, noGPU,
		change{"the GPU lost lanes", func(w *world) { w.put(bridges+"/"+gpu0+"/current_link_width", "8") }, Fail, gpu0 + " has 8 of 16 lanes"},
		change{"the switch lost lanes", func(w *world) { w.put("sys/devices/pci0000:00/0000:00:01.0/0000:04:00.0/current_link_width", "4") }, Fail, "0000:04:00.0 has 4 of 16 lanes"},
		change{"a narrow slot", func(w *world) {
			w.put(bridges+"/max_link_width", "8")
			w.put(bridges+"/"+gpu0+"/current_link_width", "8")
		}, Pass, "8 lanes"},
		change{"a narrow card", func(w *world) {
			w.put(bridges+"/current_link_width", "8")
			w.put(bridges+"/"+gpu0+"/current_link_width", "8")
			w.put(bridges+"/"+gpu0+"/max_link_width", "8")
		}, Pass, "8 lanes"},
		change{"no lanes reported", func(w *world) { w.put(bridges+"/"+gpu0+"/current_link_width", "255") }, Unknown, "does not report its lanes"},
		change{"no device", func(w *world) { w.remove("sys/bus/pci/devices/" + gpu0) }, Unknown, "not exist"},
		change{"replays", func(w *world) { n := 0; w.gpus[0].replays = func() int { n += 32; return n } }, Warn, "32 replays"},
	)
}

func TestMostReplays(t *testing.T) {
	for speed, want := range map[string]int{"2.5 GT/s PCIe": 3, "8.0 GT/s PCIe": 8, "32.0 GT/s PCIe": 31, "Unknown": 3} {
		require.Equal(t, want, mostReplays(16, speed), speed)
	}
}
