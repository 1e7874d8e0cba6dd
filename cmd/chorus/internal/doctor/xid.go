package doctor

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

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
func xidEventOf(l KernelLine) (e xidEvent, found bool) {
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
	lines, err := h.KernelLog()
	if err != nil {
		return unknown(err.Error() + ": needs CAP_SYSLOG, or kernel.dmesg_restrict=0 on the host")
	}
	var list []xidEvent
	for _, l := range lines { // in the order of time
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
