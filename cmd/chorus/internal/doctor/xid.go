package doctor

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"
)

var xid = &Check{
	ID: "xid", Scope: ScopeHost, Source: "/dev/kmsg",
	Hazard: "The driver reported an error of a GPU or an NVLink since the host started.",
	Run:    one(checkXid),
}

var xidLine = regexp.MustCompile(`NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)`)

// recentXid is the age up to which an error fails the host.
const recentXid = 2 * time.Hour

// harmlessXids are faults of applications, and messages without a consequence for the host.
var harmlessXids = []int{8, 13, 31, 32, 43, 45, 63, 69, 92, 94, 121}

// xidCures has the remedies by number.
var xidCures = map[int]string{54: "check the power cables of the GPU", 79: "restart the host; if it comes again, replace the GPU",
	74: "reset all GPUs and restart the fabric manager", 154: "run chorus doctor --only recovery-action"}

// A xidEvent is an error that the driver reported.
type xidEvent struct {
	pci    string
	number int
	age    time.Duration
}

func checkXid(h *Host) Result {
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	lines, err := h.KernelLog()
	if err != nil {
		return unknown(err.Error() + ": needs CAP_SYSLOG, or kernel.dmesg_restrict=0 on the host")
	}
	var last *xidEvent
	for _, l := range lines {
		m := xidLine.FindStringSubmatch(l.Text)
		if m == nil {
			continue
		}
		n, err := strconv.Atoi(m[2])
		if err != nil || slices.Contains(harmlessXids, n) {
			continue
		}
		last = &xidEvent{m[1], n, l.Age} // the lines are in the order of time
	}
	const want = "no error of a GPU since the start"
	if last == nil {
		return pass("no error", want)
	}
	found := fmt.Sprintf("Xid %d of GPU %s, %v ago", last.number, last.pci, last.age.Round(time.Minute))
	if last.age > recentXid {
		return warn(found, want, xidCause(last.number), xidCure(last.number))
	}
	return fail(found, want, xidCause(last.number), xidCure(last.number))
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
