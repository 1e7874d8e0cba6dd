package perf

import (
	"fmt"
	"strconv"
	"strings"
)

// ParseBytes parses a size in the syntax of nccl-tests: K, M and G are 2^10, 2^20 and 2^30.
func ParseBytes(s string) (int, error) {
	number, shift := strings.TrimSuffix(strings.ToUpper(s), "B"), 0
	number = strings.TrimSuffix(number, "I")
	for i, unit := range []string{"K", "M", "G", "T"} {
		if rest, ok := strings.CutSuffix(number, unit); ok {
			number, shift = rest, 10*(i+1)
		}
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || !(n >= 0) || n > float64(int64(1)<<50>>shift) {
		return 0, fmt.Errorf("%q is not a size: want bytes, such as 8, 64K, 1M or 1.5G", s)
	}
	return int(n * float64(int(1)<<shift)), nil
}

// Sizes are the sizes of a sweep in bytes, from Min to Max. Each size is Factor
// times the previous one, or Step larger if Factor is 0.
type Sizes struct{ Min, Max, Step, Factor int }

// Check validates the sizes.
func (s Sizes) Check() error {
	_, err := s.list()
	return err
}

// mostSizes limits the length of a table.
const mostSizes = 10000

// list returns the sizes in ascending order.
func (s Sizes) list() ([]int, error) {
	switch {
	case s.Min < 1 || s.Max < s.Min:
		return nil, fmt.Errorf("sizes from %d to %d bytes: want at least 1, and the smallest first", s.Min, s.Max)
	case s.Factor == 1 || s.Factor < 0 || s.Step < 0:
		return nil, fmt.Errorf("step %d, factor %d: want a step of 1 byte or more, or a factor of 2 or more", s.Step, s.Factor)
	case s.Factor == 0 && s.Step == 0 && s.Min != s.Max:
		return nil, fmt.Errorf("sizes from %d to %d bytes: want a step or a factor", s.Min, s.Max)
	}
	var list []int
	for n := s.Min; ; {
		if list = append(list, n); len(list) > mostSizes {
			return nil, fmt.Errorf("more than %d sizes from %d to %d bytes: want a larger step or factor", mostSizes, s.Min, s.Max)
		}
		switch {
		case s.Factor > 1 && n <= s.Max/s.Factor:
			n *= s.Factor
		case s.Factor == 0 && s.Step > 0 && s.Step <= s.Max-n:
			n += s.Step
		default:
			return list, nil
		}
	}
}
