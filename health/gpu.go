package health

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/nvml"
)

var computeMode = &Check{
	ID: "compute-mode", Scope: ScopeGPU, Source: "nvmlDeviceGetComputeMode",
	Hazard: "The GPU admits no process, or one process.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkComputeMode),
}

func checkComputeMode(_ context.Context, _ *Host, g *gpu) Result {
	const want = "default: any number of processes"
	cure := fmt.Sprintf("nvidia-smi -i %d -c 0", g.Index)
	mode, err := g.ComputeMode()
	if err != nil {
		return unread(err)
	}
	switch mode {
	case nvml.ModeDefault:
		return pass("default", want)
	case nvml.ModeProhibited:
		return fail("prohibited", want, "the GPU admits no process", cure)
	}
	list, err := g.Processes()
	switch {
	case err == nil && len(list) > 0:
		return fail(fmt.Sprintf("exclusive, and process %d is there", list[0].PID), want, "the GPU admits one process and has one", cure)
	default:
		return warn("exclusive", want, "two ranks, or a rank and a profiler, cannot share the GPU", cure)
	}
}

var deviceNodes = &Check{
	ID: "device-nodes", Scope: ScopeHost, Source: "/dev/nvidia*, /proc/driver/nvidia/gpus, /sys/bus/pci",
	Hazard: "A device file is missing or does not open, so cuInit fails.",
	Run:    one(checkDeviceNodes),
}

var gpuNode = regexp.MustCompile(`^nvidia[0-9]+$`)

func checkDeviceNodes(h *Host) Result {
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	if !h.hasDriver() {
		return fail(fmt.Sprintf("%d GPUs on the PCI bus, and no kernel driver", len(h.pciGPUs())), "the NVIDIA kernel driver",
			"no program can use a GPU", "install the NVIDIA driver, or run modprobe nvidia on the host")
	}
	entries, err := fs.ReadDir(h.Root, "dev")
	if err != nil {
		return unread(rooted(err))
	}
	gpus, uvm := 0, false
	for _, e := range entries {
		name := e.Name()
		switch {
		case name == "nvidia-uvm":
			uvm = true
		case gpuNode.MatchString(name):
			gpus++
		case name != "nvidiactl":
			continue
		}
		if err := h.openDevice("/dev/" + name); err != nil {
			return fail(err.Error(), "all device files open", "the driver does not start in this process",
				"run the program with access to /dev/nvidia*: as a member of the video group, or in a container with all GPUs")
		}
	}
	return h.judgeNodes(gpus, uvm)
}

// judgeNodes compares the device files that open with the GPUs of the driver.
func (h *Host) judgeNodes(gpus int, uvm bool) Result {
	const cure = "run nvidia-modprobe -u -c0 on the host, and start the container with all GPUs"
	listed, err := fs.ReadDir(h.Root, "proc/driver/nvidia/gpus")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return unread(rooted(err))
	}
	found := fmt.Sprintf("%d of %d GPUs have a device file that opens", gpus, len(listed))
	want := fmt.Sprintf("%d device files, and /dev/nvidia-uvm", len(listed))
	switch {
	case gpus == 0:
		return fail(found, want, "the driver finds no GPU", cure)
	case !uvm:
		return fail("no /dev/nvidia-uvm", want, "cuInit fails", cure)
	case gpus < len(listed) && !h.assigned():
		return warn(found, want, "the other GPUs are not usable here", cure)
	}
	return pass(found, want)
}

// assigned reports whether a container runtime gave this container chosen GPUs.
func (h *Host) assigned() bool {
	v := h.getenv("NVIDIA_VISIBLE_DEVICES")
	return v != "" && v != "all" && !strings.EqualFold(v, "none")
}

var driverMismatch = &Check{
	ID: "driver-mismatch", Scope: ScopeHost, Source: "/proc/driver/nvidia/version, libcuda, cuInit",
	Hazard: "The kernel driver and libcuda have different versions, or CUDA does not start.",
	Needs:  []string{"device-nodes"},
	Run:    one(checkDriver),
}

var driverVersion = regexp.MustCompile(`\b\d{3,}\.\d+(\.\d+)?\b`)

// Results of cuInit and of NVML that name a cause.
const (
	nvmlMismatch        = 18  // NVML_ERROR_LIB_RM_VERSION_MISMATCH
	cudaNotReady        = 802 // CUDA_ERROR_SYSTEM_NOT_READY
	cudaDriverMismatch  = 803 // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
	cudaCompatMode      = 804 // CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
	cureDriver          = "reload the kernel modules or restart the host; remove libcuda from the container's image"
	causeDriverMismatch = "cuInit fails: the kernel driver and libcuda must have the same version"
)

func checkDriver(h *Host) Result {
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	kernel, err := h.driverVersion()
	if err != nil {
		return unread(err)
	}
	c := h.cuda()
	if c.Err != nil {
		return fail(c.Err.Error(), "libcuda of driver "+kernel, "no program can use CUDA", "install the driver's libraries; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility")
	}
	user := driverVersion.FindString(c.Path[strings.LastIndexByte(c.Path, '/')+1:])
	found := fmt.Sprintf("kernel driver %s, libcuda %s", kernel, user)
	want := "equal versions, and cuInit succeeds"
	switch {
	case c.Code == cudaDriverMismatch || c.Code == cudaCompatMode || c.Code == 0 && user != "" && user != kernel && !strings.Contains(c.Path, "compat"):
		return fail(found, want, causeDriverMismatch, cureDriver)
	case c.Code == cudaNotReady:
		return unknown("cuInit returns 802, which the check fabric-manager explains")
	case c.Code != 0:
		return fail(fmt.Sprintf("cuInit returns %d: %s", c.Code, c.Meaning), want, "no program can use CUDA", cureDriver)
	}
	_, err = h.gpus()
	if e, ok := errors.AsType[*nvml.Error](err); ok && e.Code == nvmlMismatch {
		return fail(err.Error(), want, "the state of the GPUs is not readable: NVML and the kernel driver must have the same version", cureDriver)
	}
	if err != nil {
		return unread(err)
	}
	return pass(found, want)
}

// driverVersion returns the version of the kernel driver.
func (h *Host) driverVersion() (string, error) {
	text, err := h.read("proc/driver/nvidia/version")
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(text, "\n")
	v := driverVersion.FindString(line)
	if v == "" {
		return "", fmt.Errorf("/proc/driver/nvidia/version has no version: %q", line)
	}
	return v, nil
}

var ecc = &Check{
	ID: "ecc", Scope: ScopeGPU, Source: "nvmlDeviceGetEccMode, nvmlDeviceGetTotalEccErrors, nvmlDeviceGetMemoryErrorCounter",
	Hazard: "The GPU's memory has errors, or does not detect them.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkECC),
}

// Limits of corrected errors since the driver was loaded.
const (
	mostSRAM = 10_000
	mostDRAM = 20_000_000
)

func checkECC(_ context.Context, _ *Host, g *gpu) Result {
	const want = "on, no uncorrected errors"
	on, later, err := g.ECCMode()
	switch {
	case err != nil:
		return unread(err)
	case !on || !later:
		return warn("off now or after the next reset", want, "the GPU computes with wrong bits and does not report them",
			fmt.Sprintf("nvidia-smi -i %d -e 1, and nvidia-smi -r -i %d", g.Index, g.Index))
	}
	bad, err := g.ECCErrors(true, false)
	if err != nil {
		return unread(err)
	}
	if bad > 0 {
		return fail(fmt.Sprintf("%d uncorrected errors since the driver was loaded", bad), want, "programs were ended or computed with wrong data",
			fmt.Sprintf("nvidia-smi -r -i %d; replace the board if it comes again", g.Index))
	}
	for _, m := range []struct {
		memory nvml.Memory
		name   string
		most   uint64
	}{{nvml.SRAM, "SRAM", mostSRAM}, {nvml.DRAM, "DRAM", mostDRAM}} {
		n, err := g.CorrectedErrors(m.memory)
		if err == nil && n > m.most {
			return fail(fmt.Sprintf("%d corrected errors of %s", n, m.name), fmt.Sprintf("at most %d", m.most), "the memory wears out", "replace the board")
		}
	}
	before, err := g.ECCErrors(true, true)
	if err != nil {
		return pass("on, no uncorrected errors since the driver was loaded", want)
	}
	return pass(fmt.Sprintf("on, no uncorrected errors since the driver was loaded, %d before", before), want)
}

var mig = &Check{
	ID: "mig", Scope: ScopeGPU, Source: "nvmlDeviceGetMigMode",
	Hazard: "The GPU is divided into instances, which have no peer access.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkMIG),
}

func checkMIG(_ context.Context, _ *Host, g *gpu) Result {
	const want = "off"
	now, later, err := g.MIGMode()
	switch {
	case err != nil:
		return unread(err)
	case now:
		return warn("on", want, "instances of MIG have no access to the memory of peers, and NCCL uses one instance of a GPU",
			fmt.Sprintf("nvidia-smi -i %d -mig 0, and nvidia-smi -r -i %d", g.Index, g.Index))
	case later:
		return warn("off, and on after the next reset", want, "the next reset divides the GPU", fmt.Sprintf("nvidia-smi -i %d -mig 0", g.Index))
	}
	return pass("off", want)
}

var rowRemap = &Check{
	ID: "row-remap", Scope: ScopeGPU, Source: "nvmlDeviceGetRemappedRows",
	Hazard: "A bad row of memory waits for its replacement, or no spare row is left.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkRows),
}

// mostRows is the number of uncorrectable rows that fail a board.
const mostRows = 512

func checkRows(_ context.Context, _ *Host, g *gpu) Result {
	const want = "no pending and no failed remapping"
	r, err := g.RemappedRows()
	if err != nil {
		return unread(err)
	}
	found := fmt.Sprintf("%d rows remapped, %d because of uncorrectable errors", r.Correctable+r.Uncorrectable, r.Uncorrectable)
	switch {
	case r.Failed:
		return fail(found+", and a remapping failed", want, "no spare row replaces a bad row of memory", "replace the board")
	case r.Pending:
		return fail(found+", and a remapping is pending", want, "programs use a bad row of memory until the next reset",
			fmt.Sprintf("end all programs on the GPU, and run nvidia-smi -r -i %d", g.Index))
	case r.Uncorrectable >= mostRows:
		return fail(found, fmt.Sprintf("fewer than %d", mostRows), "the memory wears out", "replace the board")
	}
	return pass(found, want)
}

var recoveryAction = &Check{
	ID: "recovery-action", Scope: ScopeGPU, Source: "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
	Hazard: "The driver asks for a reset of the GPU or a restart of the host.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkRecovery),
}

func checkRecovery(_ context.Context, _ *Host, g *gpu) Result {
	const want = "no action"
	a, err := g.RecoveryAction()
	if err != nil {
		return unread(err)
	}
	reset := fmt.Sprintf("nvidia-smi -r -i %d", g.Index)
	actions := map[nvml.RecoveryAction][2]string{
		nvml.RecoverReset:    {"reset", "run " + reset},
		nvml.RecoverReboot:   {"restart of the host", "restart the host"},
		nvml.RecoverDrainP2P: {"drain of peer traffic", "end all programs that use peer copies, and run nvidia-smi again"},
		nvml.RecoverDrain:    {"drain and reset", "end all programs on the GPU, and run " + reset},
		nvml.RecoverIMEX:     {"recovery of the IMEX domain", "restart nvidia-imex on all hosts of the domain"},
	}
	if a == nvml.RecoverNone {
		return pass(want, want)
	}
	x, ok := actions[a]
	if !ok {
		x = [2]string{fmt.Sprintf("action %d", a), "read nvidia-smi -q of a newer driver"}
	}
	return fail(x[0], want, "the driver does not trust the GPU after an error", x[1])
}

var persistence = &Check{
	ID: "persistence", Scope: ScopeGPU, Source: "nvmlDeviceGetPersistenceMode",
	Hazard: "The driver initializes the GPU again for each program.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run: perGPU(func(_ context.Context, _ *Host, g *gpu) Result {
		on, err := g.Persistence()
		switch {
		case err != nil:
			return unread(err)
		case !on:
			return warn("off", "on", "programs start slowly, and the GPU forgets its settings when no program runs", "start nvidia-persistenced, or run nvidia-smi -pm 1")
		}
		return pass("on", "on")
	}),
}

var powerLimit = &Check{
	ID: "power-limit", Scope: ScopeGPU, Source: "nvmlDeviceGetPowerManagementLimit, nvmlDeviceGetPowerManagementDefaultLimit",
	Hazard: "The power of the GPU is limited below its default.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run: perGPU(func(_ context.Context, _ *Host, g *gpu) Result {
		limit, err := g.PowerLimit()
		if err != nil {
			return unread(err)
		}
		usual, err := g.DefaultPowerLimit()
		if err != nil {
			return unread(err)
		}
		found, want := fmt.Sprintf("%d W", limit/1000), fmt.Sprintf("%d W", usual/1000)
		if limit < usual {
			return warn(found, want, "the GPU is slower than others, and all ranks wait for it", fmt.Sprintf("nvidia-smi -i %d -pl %d", g.Index, usual/1000))
		}
		return pass(found, want)
	}),
}

var clocks = &Check{
	ID: "clocks", Scope: ScopeGPU, Source: "nvmlDeviceGetCurrentClocksEventReasons",
	Hazard: "The GPU runs at lower clocks because of heat, power or a setting.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkClocks),
}

// clockRules are sorted by weight.
var clockRules = []struct {
	bit                nvml.ClockEvents
	verdict            Verdict
	found, cause, cure string
}{
	{nvml.HWThermal, Fail, "thermal slowdown by hardware", "the GPU is too hot and runs at half its clock or less", "check the fans, the air inlet and the cooling of the rack"},
	{nvml.PowerBrake, Fail, "power brake", "the power supply asks for half the clock or less", "check the power supplies and cables"},
	{nvml.HWSlowdown, Fail, "slowdown by hardware", "heat or power forces half the clock or less", "check the cooling, the power supplies and cables"},
	{nvml.SWThermal, Warn, "thermal slowdown by the driver", "the GPU or its memory is near its highest temperature", "check the fans, the air inlet and the cooling of the rack"},
	{nvml.ApplicationClocks, Warn, "application clocks", "a setting limits the clocks", "nvidia-smi -rac"},
	{nvml.SyncBoost, Warn, "sync boost", "the slowest GPU of the group limits the clocks", "remove the sync boost group by DCGM"},
}

func checkClocks(_ context.Context, _ *Host, g *gpu) Result {
	const want = "no slowdown"
	events, err := g.ClockEvents()
	if err != nil {
		return unread(err)
	}
	for _, r := range clockRules {
		if events&r.bit != 0 {
			return Result{Verdict: r.verdict, Found: r.found, Want: want, Cause: r.cause, Cure: r.cure}
		}
	}
	return pass(want, want)
}

var otherProcesses = &Check{
	ID: "other-processes", Scope: ScopeGPU, Source: "nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetMemoryInfo",
	Hazard: "Another process uses the GPU.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkProcesses),
}

// mostUsed is the memory that an idle GPU has in use at most.
const mostUsed = 1 << 30

func checkProcesses(_ context.Context, h *Host, g *gpu) Result {
	const want = "no other process"
	list, err := g.Processes()
	if err != nil {
		return unread(err)
	}
	hidden := false
	for _, p := range list {
		if _, err := fs.Stat(h.Root, fmt.Sprintf("proc/%d", p.PID)); err != nil && h.inContainer() {
			hidden = true // NVML has the PIDs of the host
			continue
		}
		if p.PID != os.Getpid() && !h.isDoctor(p.PID) {
			return warn(fmt.Sprintf("process %d uses %s", p.PID, bytesText(p.Bytes)), want, "the job shares memory and time with it",
				"end the process, or choose other GPUs by CUDA_VISIBLE_DEVICES")
		}
	}
	used, err := g.MemoryUsed()
	switch {
	case err != nil:
		return unread(err)
	case hidden:
		return unknown(fmt.Sprintf("a process uses the GPU, with %s in use, and this container does not see whether it is of this job: run chorus doctor on the host, or in its PID namespace (docker run --pid=host)", bytesText(used)))
	case used > mostUsed && len(list) == 0:
		return warn(bytesText(used)+" in use by a process that is not visible here", want, "the job has less memory than the GPU",
			"search the host for processes with /dev/nvidia* open: fuser -v /dev/nvidia*")
	}
	return pass(bytesText(used)+" in use", want)
}

// inContainer reports whether this process is in a PID namespace other than the first one.
func (h *Host) inContainer() bool {
	const first = "pid:[4026531836]" // PROC_PID_INIT_INO of the kernel
	own, err := fs.ReadLink(h.Root, "proc/self/ns/pid")
	return err == nil && own != first
}

// isDoctor reports whether a process runs the same program as this one: the other ranks of a
// job of doctors.
func (h *Host) isDoctor(pid int) bool {
	other, err := h.read(fmt.Sprintf("proc/%d/cmdline", pid))
	if err != nil || other == "" {
		return false
	}
	own, err := h.read("proc/self/cmdline")
	return err == nil && own == other
}

var xid = &Check{
	ID: "xid", Scope: ScopeHost, Source: "/dev/kmsg",
	Hazard: "The driver reported an error of a GPU or an NVLink since the host started.",
	Run:    one(checkXid),
}

// xidLine matches errors of GPUs, and sxidLine those of NVSwitches.
var (
	xidLine  = regexp.MustCompile(`NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)`)
	sxidLine = regexp.MustCompile(`SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)`)
	noAction = regexp.MustCompile(`to 0x0 \(None\)`)
	nonfatal = regexp.MustCompile(`(?i)non-?fatal`)
)

// recentXid is the age up to which an error fails the host.
const recentXid = 2 * time.Hour

// harmlessXids are faults of applications, and messages without a consequence for the host.
var harmlessXids = []int{8, 13, 31, 32, 43, 45, 63, 69, 92, 94, 121}

// xidCures has the remedies by number.
var xidCures = map[int]string{54: "check the power cables of the GPU", 79: "restart the host; if it comes again, replace the GPU",
	74: "reset all GPUs and restart the fabric manager", 154: "run chorus doctor --only recovery-action"}

// Severities of an error: the driver went on, the GPU may have to be reset, the GPU is gone.
const (
	xidNonfatal = iota
	xidFatal
	xidGone
)

// A xidEvent is an error that the driver reported.
type xidEvent struct {
	name     string // "Xid" or "SXid"
	pci      string
	number   int
	severity int
	age      time.Duration
}

// xidEventOf returns the error of a line of the kernel's log, unless the line has none or a harmless one.
func xidEventOf(l logLine) (e xidEvent, found bool) {
	e.name = "SXid"
	m := sxidLine.FindStringSubmatch(l.Text)
	if m == nil {
		e.name = "Xid"
		if m = xidLine.FindStringSubmatch(l.Text); m == nil {
			return e, false
		}
	}
	n, err := strconv.Atoi(m[2])
	if err != nil || e.name == "Xid" && (slices.Contains(harmlessXids, n) || n == 154 && noAction.MatchString(m[3])) {
		return e, false
	}
	e.pci, e.number, e.age, e.severity = m[1], n, l.Age, xidFatal
	switch {
	case nonfatal.MatchString(m[3]):
		e.severity = xidNonfatal
	case e.name == "Xid" && n == 79:
		e.severity = xidGone
	}
	return e, true
}

// checkXid reports the worst error of each GPU and NVSwitch, and of equal ones the latest.
func checkXid(h *Host) Result {
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	lines, err := h.kernelLog()
	if err != nil {
		return unknown(err.Error() + ": needs CAP_SYSLOG, or kernel.dmesg_restrict=0 on the host")
	}
	var list []xidEvent
	for _, l := range lines { // by time
		e, found := xidEventOf(l)
		if !found {
			continue
		}
		i := slices.IndexFunc(list, func(x xidEvent) bool { return x.pci == e.pci })
		switch {
		case i < 0:
			list = append(list, e)
		case e.severity >= list[i].severity:
			list[i] = e
		}
	}
	const want = "no error of a GPU since the start"
	if len(list) == 0 {
		return pass("no error", want)
	}
	slices.SortStableFunc(list, func(a, b xidEvent) int { return b.severity - a.severity })
	var texts []string
	worst, recent := list[0], false
	for _, e := range list {
		of := "GPU"
		if e.name == "SXid" {
			of = "NVSwitch"
		}
		texts = append(texts, fmt.Sprintf("%s %d of %s %s, %v ago", e.name, e.number, of, e.pci, e.age.Round(time.Minute)))
		if e.age <= recentXid && e.severity > xidNonfatal && !recent {
			worst, recent = e, true
		}
	}
	found := strings.Join(texts, "; ")
	if worst.name == "SXid" {
		result := warn
		if recent {
			result = fail
		}
		return result(found, want, "an NVSwitch reported an error", "restart the fabric manager; if it comes again, reset all GPUs and NVSwitches or restart the host")
	}
	if !recent {
		return warn(found, want, xidCause(worst.number), xidCure(worst.number))
	}
	return fail(found, want, xidCause(worst.number), xidCure(worst.number))
}

func xidCause(n int) string {
	switch {
	case n == 79:
		return "the GPU fell off the bus"
	case n == 74 || n >= 144 && n <= 150:
		return "an NVLink had an error"
	case n == 54:
		return "a power cable is missing"
	}
	return "the GPU or its memory had an error (see NVIDIA's catalogue of Xids)"
}

func xidCure(n int) string {
	if c, ok := xidCures[n]; ok {
		return c
	}
	return "reset the GPU: nvidia-smi -r -i INDEX; if it comes again, restart the host"
}
