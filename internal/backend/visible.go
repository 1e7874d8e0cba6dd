package backend

import (
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/nvml"
)

// A visible is a parsed value of CUDA_VISIBLE_DEVICES: ordinals or UUIDs, in
// order.
type visible struct {
	ordinals []int
	uuids    []string // GPU-… or MIG-…, possibly only prefixes
}

// parseVisible parses a list like the driver. An invalid entry ends the list, and
// a duplicate makes it empty.
func parseVisible(list string) visible {
	for _, prefix := range []string{"GPU-", "MIG-"} {
		if strings.HasPrefix(list, prefix) {
			return visible{uuids: entries(list, func(e string) (string, bool) { return e, strings.HasPrefix(e, prefix) })}
		}
	}
	return visible{ordinals: entries(list, func(e string) (int, bool) { return strtoul(strings.TrimSpace(e)) })}
}

func entries[T comparable](list string, read func(string) (T, bool)) (out []T) {
	for e := range strings.SplitSeq(list, ",") {
		v, ok := read(e)
		if ok && slices.Contains(out, v) {
			return nil
		}
		if !ok {
			break
		}
		out = append(out, v)
	}
	return out
}

// strtoul parses a leading number like the C function: "2ampere" is 2, and "-0"
// is 0.
func strtoul(text string) (int, bool) {
	digits := strings.TrimPrefix(text, "+")
	if digits == text {
		digits = strings.TrimPrefix(text, "-")
	}
	sign := len(text) - len(digits)
	if end := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		text = text[:sign+end]
	}
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 0
}

// resolve returns the ordinals of the GPUs with the UUIDs. An entry that matches
// no UUID, or several, ends the list. Two entries for the same GPU make it empty.
func resolve(entries, uuids []string) (out []int) {
	for _, e := range entries {
		var match []int
		for i, u := range uuids {
			if strings.HasPrefix(u, e) {
				match = append(match, i)
			}
		}
		if len(match) != 1 {
			return out
		}
		if slices.Contains(out, match[0]) {
			return nil
		}
		out = append(out, match[0])
	}
	return out
}

// within truncates the list at the first ordinal without a GPU.
func within(ordinals []int, have int) []int {
	if i := slices.IndexFunc(ordinals, func(o int) bool { return o >= have }); i >= 0 {
		return ordinals[:i]
	}
	return ordinals
}

// Count returns the number of devices that Open would find with the present
// environment. It uses NVML, which does not start the driver, and the driver only
// if NVML cannot tell. It does not create a context.
func Count() (int, error) {
	b, err := env.Backend.OneOf(Auto, CUDA, Virtual)
	if err != nil {
		return 0, err
	}
	if b == Virtual {
		var c Config
		err := c.fillFromEnv()
		return c.Devices, err
	}
	if env.NVMLCheck.Value() != "0" {
		if api, err := nvml.Open(); err == nil {
			if n, ok := countNVML(api); ok {
				return n, nil
			}
		}
	}
	s, err := openCUDA()
	if err != nil {
		return 0, err
	}
	n, r := s.Driver.DeviceGetCount()
	if r != cudadrv.Success {
		return 0, r
	}
	return int(n), nil
}

// countNVML returns ok = false with MIG, because NVML and CUDA then count differently.
func countNVML(api nvml.API) (n int, ok bool) {
	uuids, err := api.UUIDs()
	if err != nil {
		return 0, false
	}
	if mig, err := api.MIG(); err != nil || mig {
		return 0, false
	}
	if !env.VisibleDevices.IsSet() {
		return len(uuids), true
	}
	v := parseVisible(env.VisibleDevices.Value())
	if len(v.uuids) > 0 {
		return len(resolve(v.uuids, uuids)), !strings.HasPrefix(v.uuids[0], "MIG-")
	}
	return len(within(v.ordinals, len(uuids))), true
}
