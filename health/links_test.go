package health

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

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

// countErrors adds a counter to every link: 1 at first, and by step more at each reading.
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

func TestFabricManager(t *testing.T) {
	try(t, fabricManager,
		lost, noGPU,
		change{"cuInit 802", func(w *world) { w.cuda.Code = 802 }, Fail, "systemctl start nvidia-fabricmanager"},
		change{"not started", func(w *world) { w.put("dev/nvidia-nvswitch0", ""); w.gpus[0].fabric.State = nvml.FabricNotStarted }, Fail, "state 1 of 3"},
		change{"in progress in a virtual machine", func(w *world) { w.gpus[0].fabric.State = nvml.FabricInProgress }, Pass, "no NVSwitch"},
		change{"failed", func(w *world) { w.gpus[0].fabric.Status = 999 }, Fail, "error 999"},
		change{"degraded", func(w *world) { w.gpus[0].fabric.Health = 1 | 1<<8 }, Warn, "degraded bandwidth"},
		change{"wrong configuration", func(w *world) { w.gpus[0].fabric.Health = 2 | 5<<8 }, Warn, "0x502"},
		change{"an old driver with NVSwitches", func(w *world) {
			w.put("dev/nvidia-nvswitch0", "")
			w.gpus[0].noFabric = &nvml.UnsupportedError{Need: "a newer driver", Have: "an older driver"}
		}, Unknown, "an older driver"},
		change{"an old driver without", func(w *world) {
			w.gpus[0].noFabric = &nvml.UnsupportedError{Need: "a newer driver", Have: "an older driver"}
		}, Pass, "no fabric"},
	)
}

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

func TestIommu(t *testing.T) {
	try(t, iommu,
		lost, noGPU,
		change{"translation", func(w *world) { w.put(bridges+"/"+gpu0+"/iommu_group/type", "DMA-FQ") }, Warn, "iommu=pt"},
		change{"no IOMMU", func(w *world) { w.remove(bridges + "/" + gpu0 + "/iommu_group") }, Pass, "no IOMMU"},
		change{"redirection", func(w *world) { w.put(bridges+"/config", acsConfig(0x1d)) }, Warn, "0000:05:00.0 redirects"},
		change{"no redirection", func(w *world) { w.put(bridges+"/config", acsConfig(0x11)) }, Pass, "identity"},
		change{"a user", func(w *world) { w.put(bridges+"/config", strings.Repeat("\x00", 64)) }, Unknown, "only root"},
		change{"a virtual machine", func(w *world) {
			w.put("proc/cpuinfo", "flags : fpu hypervisor lahf\n")
			w.put(bridges+"/config", acsConfig(0x1d))
		}, Pass, "virtual machine"},
	)
}

// acsConfig returns the configuration of a bridge with two extended capabilities: the second is
// ACS with a control register.
func acsConfig(control byte) string {
	b := make([]byte, 4096)
	copy(b[0x100:], []byte{1, 0, 0x02, 0x15}) // next: 0x150
	copy(b[0x150:], []byte{0x0d, 0, 1, 0, 0xff, 0xff, control, 0})
	return string(b)
}

// The checks of benchmarks have the verdict of the benchmark, and are unknown without one.
func TestMeasured(t *testing.T) {
	all := func(s Speed) *Measured { return &Measured{nil, s, s, s, s} }
	for _, c := range []*Check{peerData, pairs, allReduce, pinned} {
		for _, x := range []struct {
			m    *Measured
			want Verdict
			text string
		}{
			{nil, Unknown, "not measured"},
			{all(Speed{Missing: "one GPU"}), Unknown, "one GPU"},
			{all(Speed{OK: true, Reason: "fast"}), Pass, "fast"},
			{all(Speed{Reason: "slow"}), Fail, "slow"},
		} {
			w := healthy()
			w.Measured = x.m
			r := w.runOne(t, c)[0]
			require.Equal(t, x.want, r.Verdict)
			require.Contains(t, r.Found+r.Cause, x.text)
		}
	}
	w := healthy()
	w.Measured = &Measured{Pairs: Speed{OK: true, Reason: "fast"}, AllReduce: Speed{Reason: "slow"}}
	require.Equal(t, Pass, w.runOne(t, pairs)[0].Verdict)
	require.Equal(t, Fail, w.runOne(t, allReduce)[0].Verdict)
}
