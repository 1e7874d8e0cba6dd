package doctor

import (
	"strings"
	"testing"
)

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
