package health

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestComputeMode(t *testing.T) {
	try(t, computeMode,
		lost, noGPU,
		change{"prohibited", func(w *world) { w.gpus[0].mode = nvml.ModeProhibited }, Fail, "nvidia-smi -i 0 -c 0"},
		change{"exclusive", func(w *world) { w.gpus[0].mode = nvml.ModeExclusive }, Warn, "cannot share"},
		change{"taken", func(w *world) { w.gpus[0].mode = nvml.ModeExclusive; w.gpus[0].list = []nvml.Process{{PID: 4711}} }, Fail, "process 4711"},
	)
}

func TestDeviceNodes(t *testing.T) {
	try(t, deviceNodes,
		noGPU,
		change{"no driver", func(w *world) { w.remove("proc/driver") }, Fail, "2 GPUs on the PCI bus"},
		change{"no uvm", func(w *world) { w.remove("dev/nvidia-uvm") }, Fail, "nvidia-modprobe -u"},
		change{"no node", func(w *world) { w.remove("dev/nvidia0"); w.remove("dev/nvidia1") }, Fail, "0 of 2 GPUs"},
		change{"one node", func(w *world) { w.remove("dev/nvidia1") }, Warn, "1 of 2 GPUs"},
		change{"an assigned node", func(w *world) { w.remove("dev/nvidia1"); w.Env["NVIDIA_VISIBLE_DEVICES"] = "0" }, Pass, "1 of 2 GPUs"},
		change{"no permission", func(w *world) { w.openDevice = func(string) error { return fs.ErrPermission } }, Fail, "permission denied"},
	)
}

func TestDriverMismatch(t *testing.T) {
	try(t, driverMismatch,
		noGPU,
		change{"other versions", func(w *world) { w.cuda.Path = "/usr/lib/libcuda.so.570.86.10" }, Fail, "libcuda 570.86.10"},
		change{"a forward-compatible libcuda", func(w *world) { w.cuda.Path = "/usr/local/cuda/compat/libcuda.so.590.10" }, Pass, "590.10"},
		change{"cuInit 803", func(w *world) { w.cuda.Code = 803 }, Fail, "same version"},
		change{"cuInit 999", func(w *world) { w.cuda.Code, w.cuda.Meaning = 999, "unknown error" }, Fail, "cuInit returns 999: unknown error"},
		change{"cuInit 802", func(w *world) { w.cuda.Code = 802 }, Unknown, "fabric-manager"},
		change{"no libcuda", func(w *world) { w.cuda = cudaStatus{Err: errors.New("no usable library")} }, Fail, "no usable library"},
		change{"NVML fails", func(w *world) {
			w.listGPUs = func() ([]*gpu, error) { return nil, &nvml.Error{Op: "nvmlInit_v2", Code: 18, Text: "mismatch"} }
		}, Fail, "(18)"},
		change{"no NVML", func(w *world) {
			w.listGPUs = func() ([]*gpu, error) { return nil, errors.New("no usable library for NVML") }
		}, Unknown, "no usable library for NVML"},
		change{"another text", func(w *world) { w.put("proc/driver/nvidia/version", "?") }, Unknown, "has no version"},
	)
}

func TestEcc(t *testing.T) {
	try(t, ecc,
		lost, noGPU,
		change{"off", func(w *world) { w.gpus[0].ecc = false }, Warn, "nvidia-smi -i 0 -e 1"},
		change{"off after the reset", func(w *world) { w.gpus[0].eccLater = false }, Warn, "after the next reset"},
		change{"uncorrected", func(w *world) { w.gpus[0].uncorrected = 3 }, Fail, "3 uncorrected errors"},
		change{"SRAM", func(w *world) { w.gpus[0].corrected = map[nvml.Memory]uint64{nvml.SRAM: 10_001} }, Fail, "10001 corrected errors of SRAM"},
		change{"DRAM", func(w *world) { w.gpus[0].corrected = map[nvml.Memory]uint64{nvml.DRAM: 20_000_001} }, Fail, "of DRAM"},
		change{"some corrected", func(w *world) { w.gpus[0].corrected = map[nvml.Memory]uint64{nvml.DRAM: 10_001} }, Pass, "on"},
	)
}

func TestMig(t *testing.T) {
	try(t, mig,
		lost, noGPU,
		change{"on", func(w *world) { w.gpus[0].mig = true }, Warn, "nvidia-smi -i 0 -mig 0"},
		change{"pending", func(w *world) { w.gpus[0].migLater = true }, Warn, "after the next reset"},
	)
}

func TestRowRemap(t *testing.T) {
	try(t, rowRemap,
		lost, noGPU,
		change{"pending", func(w *world) { w.gpus[0].rows.Pending = true }, Fail, "nvidia-smi -r -i 0"},
		change{"failed", func(w *world) { w.gpus[0].rows.Failed = true }, Fail, "replace the board"},
		change{"worn", func(w *world) { w.gpus[0].rows.Uncorrectable = 512 }, Fail, "fewer than 512"},
		change{"some", func(w *world) { w.gpus[0].rows.Uncorrectable = 2 }, Pass, "2 rows"},
	)
}

func TestRecoveryAction(t *testing.T) {
	try(t, recoveryAction,
		lost, noGPU,
		change{"reset", func(w *world) { w.gpus[0].action = nvml.RecoverReset }, Fail, "nvidia-smi -r -i 0"},
		change{"restart", func(w *world) { w.gpus[0].action = nvml.RecoverReboot }, Fail, "restart the host"},
		change{"a new action", func(w *world) { w.gpus[0].action = 17 }, Fail, "action 17"},
	)
}

func TestPersistence(t *testing.T) {
	try(t, persistence,
		lost, noGPU,
		change{"off", func(w *world) { w.gpus[0].persistent = false }, Warn, "nvidia-persistenced"},
	)
}

func TestPowerLimit(t *testing.T) {
	try(t, powerLimit,
		lost, noGPU,
		change{"capped", func(w *world) { w.gpus[0].limit = 500000 }, Warn, "500 W"},
	)
}

func TestClocks(t *testing.T) {
	try(t, clocks,
		lost, noGPU,
		change{"too hot", func(w *world) { w.gpus[0].events = nvml.HWThermal | nvml.HWSlowdown }, Fail, "too hot"},
		change{"warm", func(w *world) { w.gpus[0].events = nvml.SWThermal }, Warn, "highest temperature"},
		change{"a setting", func(w *world) { w.gpus[0].events = nvml.ApplicationClocks }, Warn, "nvidia-smi -rac"},
		change{"idle", func(w *world) { w.gpus[0].events = 1 | 4 }, Pass, "no slowdown"},
	)
}

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

func TestXid(t *testing.T) {
	try(t, xid,
		noGPU,
		change{"no permission", func(w *world) { w.kernelLog = func() ([]logLine, error) { return nil, fs.ErrPermission } }, Unknown, "CAP_SYSLOG"},
		change{"fell off the bus", logged(79, 12*time.Minute), Fail, "Xid 79 of GPU 0000:06:00, 12m0s ago"},
		change{"NVLink", logged(145, time.Minute), Fail, "an NVLink had an error"},
		change{"old", logged(48, 3*time.Hour), Warn, "3h0m0s ago"},
		change{"a fault of a program", logged(13, time.Minute), Pass, "no error"},
		change{"another message", func(w *world) { w.log = []logLine{{0, "NVRM: loading"}} }, Pass, "no error"},
	)
}

// logged returns a host whose driver reported an error.
func logged(number int, age time.Duration) func(w *world) {
	return func(w *world) {
		w.log = []logLine{{age + time.Hour, "usb 1-1: new device"}, {age, fmt.Sprintf("NVRM: Xid (PCI:0000:06:00): %d, pid=1, text", number)}}
	}
}

func TestKernelLine(t *testing.T) {
	l, ok := kernelLine("4,1234,5000000,-;NVRM: Xid\n SUBSYSTEM=pci\n", 7*time.Second)
	require.True(t, ok)
	require.Equal(t, logLine{2 * time.Second, "NVRM: Xid"}, l)
	for _, text := range []string{"", ";", "4,5;x", "4,5,x;y", "no semicolon"} {
		_, ok := kernelLine(text, 0)
		require.False(t, ok, text)
	}
}

// The worst error of each GPU counts, not the last line, and the log says which errors are harmless.
func TestXidSeverity(t *testing.T) {
	const a, b = "NVRM: Xid (PCI:0000:06:00): ", "NVRM: Xid (PCI:0000:07:00): "
	for name, c := range map[string]struct {
		lines []string
		want  Verdict
		text  string
	}{
		"fatal SXid":              {[]string{"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"}, Fail, "SXid 20034 of NVSwitch 0000:c1:00.0"},
		"recovered":               {[]string{a + "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"}, Pass, "no error"},
		"reset required":          {[]string{a + "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"}, Fail, "Xid 154"},
		"nonfatal of NVLink":      {[]string{a + "145, RLW_REMAP Nonfatal", a + "149, NETIR_LINK_EVT Nonfatal"}, Warn, "Xid 149"},
		"off the bus, then 154":   {[]string{a + "79, GPU has fallen off the bus.", a + "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"}, Fail, "Xid 79"},
		"two GPUs":                {[]string{a + "79, GPU has fallen off the bus.", b + "48, pid=1, DBE"}, Fail, "Xid 79 of GPU 0000:06:00, 1m0s ago; Xid 48 of GPU 0000:07:00"},
		"nonfatal after fatal":    {[]string{a + "48, pid=1, DBE", a + "145, Nonfatal"}, Fail, "Xid 48"},
		"nonfatal of another GPU": {[]string{b + "145, Nonfatal", a + "48, pid=1, DBE"}, Fail, "Xid 48 of GPU 0000:06:00, 1m0s ago; Xid 145 of GPU 0000:07:00"},
	} {
		try(t, xid, change{name, func(w *world) {
			for _, l := range c.lines {
				w.log = append(w.log, logLine{time.Minute, l})
			}
		}, c.want, c.text})
	}
}
