package doctor

import (
	"fmt"
	"strconv"
	"strings"
)

var hugePages = &Check{
	ID: "huge-pages", Scope: ScopeHost, Source: "/proc/meminfo",
	Hazard: "Reserved huge pages leave too little memory for programs.",
	Run:    one(checkHugePages),
}

func checkHugePages(h *Host) Result {
	text, err := h.read("proc/meminfo")
	if err != nil {
		return unread(err)
	}
	var v [3]uint64
	for i, name := range []string{"MemTotal:", "HugePages_Total:", "Hugepagesize:"} {
		if v[i], err = meminfo(text, name); err != nil {
			return unread(err)
		}
	}
	const kib = 1 << 10
	total, huge := v[0]*kib, v[1]*v[2]*kib
	found := fmt.Sprintf("%s of %s reserved", bytesText(huge), bytesText(total))
	if huge > total/2 {
		return warn(found, "less than half", "memory cannot be pinned, because CUDA does not pin huge pages of the reserve", "sysctl vm.nr_hugepages=0")
	}
	return pass(found, "less than half")
}

// meminfo returns the number of a line of /proc/meminfo.
func meminfo(text, name string) (uint64, error) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				return strconv.ParseUint(f[0], 10, 64)
			}
		}
	}
	return 0, fmt.Errorf("/proc/meminfo has no line %s", name)
}
