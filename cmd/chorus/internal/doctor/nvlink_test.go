package doctor

import (
	"testing"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestNvlink(t *testing.T) {
	try(t, nvlink,
		lost, noGPU,
		change{"a link down", func(w *world) { w.gpus[0].links[4] = false }, Fail, "17 of 18 links up"},
		change{"slow", func(w *world) { w.gpus[0].speed = 13281 }, Fail, "link 0 runs at 13281 MB/s"},
		change{"replays", func(w *world) { w.gpus[0].linkErrors = countErrors(nvml.LinkReplays, 0) }, Warn, "1 replays or recoveries of link 0"},
		change{"CRC errors before", func(w *world) { w.gpus[0].linkErrors = countErrors(nvml.LinkCRC, 0) }, Pass, "no errors"},
		change{"CRC errors now", func(w *world) { w.gpus[0].linkErrors = countErrors(nvml.LinkCRC, 100) }, Fail, "CRC errors of link 0"},
		change{"CRC errors before a reset", func(w *world) {
			n := uint64(1000)
			w.gpus[0].linkErrors = func(_ int, c nvml.LinkCounter) uint64 {
				if c == nvml.LinkCRC && n > 0 {
					n--
					return n
				}
				return 0
			}
		}, Pass, "no errors"},
		change{"a card without a bridge", func(w *world) { w.gpus[0].name = "NVIDIA H100 PCIe"; w.gpus[0].links = make([]bool, 18) }, Pass, "0 of 18"},
		change{"one GPU of a host", func(w *world) { w.gpus = w.gpus[:1]; w.gpus[0].links = make([]bool, 18) }, Pass, "0 of 18"},
	)
}

// countErrors makes a counter of every link: 1 at first, and by step more at each reading.
func countErrors(which nvml.LinkCounter, step uint64) func(int, nvml.LinkCounter) uint64 {
	n := map[int]uint64{}
	return func(link int, c nvml.LinkCounter) uint64 {
		if c != which {
			return 0
		}
		n[link] += step
		return n[link] + 1
	}
}
