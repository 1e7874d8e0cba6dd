package doctor

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// noLimit is the value of a limit that is not set.
const noLimit = math.MaxUint64

// limit returns the soft and the hard limit of this process by its name in /proc/self/limits.
func (h *Host) limit(name string) (soft, hard uint64, err error) {
	const file = "proc/self/limits"
	text, err := h.read(file)
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, name)
		f := strings.Fields(rest)
		if !ok || len(f) < 2 {
			continue
		}
		if soft, err = parseLimit(f[0]); err == nil {
			hard, err = parseLimit(f[1])
		}
		return soft, hard, err
	}
	return 0, 0, fmt.Errorf("/%s has no line %q", file, name)
}

// parseLimit parses a limit of /proc or of a cgroup.
func parseLimit(s string) (uint64, error) {
	if s == "unlimited" || s == "max" {
		return noLimit, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the limit %q: want a number", s)
	}
	return n, nil
}

// limitText writes a limit in bytes.
func limitText(n uint64) string {
	if n == noLimit {
		return "unlimited"
	}
	return bytesText(n)
}

// status returns a field of /proc/self/status.
func (h *Host) status(field string) (string, error) {
	const file = "proc/self/status"
	text, err := h.read(file)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(v), nil
		}
	}
	return "", fmt.Errorf("/%s has no field %s", file, field)
}

// hasCapability reports whether this process has a capability of Linux.
func (h *Host) hasCapability(number int) (bool, error) {
	v, err := h.status("CapEff")
	if err != nil {
		return false, err
	}
	set, err := strconv.ParseUint(v, 16, 64)
	return set>>number&1 != 0, err
}

// parseCPUs returns the numbers of a list such as 0-3,8.
func parseCPUs(list string) (map[int]bool, error) {
	cpus := map[int]bool{}
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		if part == "" {
			continue
		}
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, err := strconv.Atoi(from)
		b, err2 := strconv.Atoi(to)
		if err != nil || err2 != nil || a < 0 || b < a || b > 1<<16 {
			return nil, fmt.Errorf("the list of processors %q: want ranges such as 0-3,8", list)
		}
		for ; a <= b; a++ {
			cpus[a] = true
		}
	}
	return cpus, nil
}
