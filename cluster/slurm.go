package cluster

import (
	"fmt"
	"strconv"
	"strings"
)

// maxListed limits the expansion of a node list.
const maxListed = 1 << 16

// parseNodeList expands Slurm's syntax for a list of host names, such as
// "gpu[01-03,7],login,r[1-2]n[0-1]".
func parseNodeList(s string) ([]string, error) {
	var hosts []string
	for s != "" {
		item, rest, err := cutItem(s)
		if err != nil {
			return nil, err
		}
		names, err := expandItem(item)
		if err != nil {
			return nil, err
		}
		if len(hosts)+len(names) > maxListed {
			return nil, fmt.Errorf("node list names more than %d hosts", maxListed)
		}
		hosts = append(hosts, names...)
		if rest == "" && strings.HasSuffix(s, ",") {
			return nil, fmt.Errorf("node list ends with a comma")
		}
		s = rest
	}
	if len(hosts) == 0 {
		return nil, fmt.Errorf("node list is empty")
	}
	return hosts, nil
}

// cutItem cuts s at the first comma that is not in brackets.
func cutItem(s string) (item, rest string, err error) {
	open := false
	for i := range len(s) {
		switch c := s[i]; {
		case c == '[' && open, c == ']' && !open:
			return "", "", fmt.Errorf("node list has an unexpected %q at byte %d of %q", c, i, s)
		case c == '[':
			open = true
		case c == ']':
			open = false
		case c == ',' && !open:
			return s[:i], s[i+1:], nil
		}
	}
	if open {
		return "", "", fmt.Errorf("node list %q has an unclosed bracket", s)
	}
	return s, "", nil
}

// expandItem expands the brackets of one item; the first bracket varies slowest.
func expandItem(item string) ([]string, error) {
	if item == "" {
		return nil, fmt.Errorf("node list has an empty name")
	}
	names := []string{""}
	for item != "" {
		head, rest, found := strings.Cut(item, "[")
		parts := []string{head}
		if found {
			ranges, after, _ := strings.Cut(rest, "]")
			numbers, err := expandRanges(ranges)
			if err != nil {
				return nil, err
			}
			for i := range numbers {
				numbers[i] = head + numbers[i]
			}
			parts, rest = numbers, after
		}
		if len(names)*len(parts) > maxListed {
			return nil, fmt.Errorf("node list names more than %d hosts", maxListed)
		}
		names = product(names, parts)
		item = rest
	}
	return names, nil
}

func product(heads, tails []string) []string {
	out := make([]string, 0, len(heads)*len(tails))
	for _, h := range heads {
		for _, t := range tails {
			out = append(out, h+t)
		}
	}
	return out
}

// expandRanges expands "01-03,7". Leading zeros set the width, as in Slurm.
func expandRanges(s string) ([]string, error) {
	var out []string
	for part := range strings.SplitSeq(s, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		from, err1 := strconv.ParseUint(lo, 10, 32)
		to, err2 := strconv.ParseUint(hi, 10, 32)
		if err1 != nil || err2 != nil || from > to || to-from >= maxListed {
			return nil, fmt.Errorf("node list has the range %q: want numbers such as 01-16", part)
		}
		for n := from; n <= to; n++ {
			out = append(out, fmt.Sprintf("%0*d", len(lo), n))
		}
		if len(out) > maxListed {
			return nil, fmt.Errorf("node list names more than %d hosts", maxListed)
		}
	}
	return out, nil
}

// parseTasksPerNode expands Slurm's task counts, such as "4(x2),3".
func parseTasksPerNode(s string) ([]int, error) {
	var out []int
	for part := range strings.SplitSeq(s, ",") {
		count, times, repeated := strings.Cut(part, "(x")
		reps := uint64(1)
		var err error
		if repeated {
			var closed bool
			if times, closed = strings.CutSuffix(times, ")"); !closed {
				return nil, fmt.Errorf("task counts %q: want the form 4(x2),3", s)
			}
			if reps, err = strconv.ParseUint(times, 10, 32); err != nil || reps == 0 {
				return nil, fmt.Errorf("task counts %q: want the form 4(x2),3", s)
			}
		}
		n, err := strconv.ParseUint(count, 10, 31)
		if err != nil || uint64(len(out))+reps > maxListed {
			return nil, fmt.Errorf("task counts %q: want the form 4(x2),3", s)
		}
		for range reps {
			out = append(out, int(n))
		}
	}
	return out, nil
}
