package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

var hostCopies = &Check{
	ID: "host-copies", Scope: ScopeGPU, Source: "copies of 256 MiB of pinned memory, one GPU at a time",
	Hazard:   "Copies between the host and a GPU are slow.",
	Measures: true,
	Run:      checkHostCopies,
}

// A Copy has the bandwidth between the host and one GPU.
type Copy struct {
	Rank       int     `json:"rank"`
	Product    string  `json:"product"`
	ToGPU      float64 `json:"to_gpu"` // 10^9 bytes a second
	FromGPU    float64 `json:"from_gpu"`
	Missing    string  `json:"missing,omitempty"` // the reason for no bandwidth
	OnlyMemory bool    `json:"virtual,omitempty"` // a virtual device, whose memory is host memory
}

// leastCopies has the bandwidth that a copy of a product reaches at least.
var leastCopies = []struct {
	product string
	least   float64
}{{"H200", 48}, {"H100", 48}, {"A100", 21}}

// leastOfMedian is the part of the median of all GPUs that a copy reaches at least.
const leastOfMedian = 0.8

func checkHostCopies(_ context.Context, h *Host) []Result {
	if h.Measured == nil || len(h.Measured.Copies) == 0 {
		return []Result{judge(h, func(m *Measured) Speed { return m.Pairs }, "", "", "")}
	}
	median := medianCopy(h.Measured.Copies)
	list := make([]Result, len(h.Measured.Copies))
	for i, c := range h.Measured.Copies {
		list[i] = c.judge(median)
	}
	return list
}

func (c Copy) judge(median float64) Result {
	switch {
	case c.Missing != "":
		return unknown(c.Missing)
	case c.OnlyMemory:
		return unknown("virtual devices: timings are not meaningful")
	}
	least, slower := leastOfMedian*median, min(c.ToGPU, c.FromGPU)
	known := false
	for _, p := range leastCopies {
		if strings.Contains(c.Product, p.product) {
			least, known = max(least, p.least), true
			break
		}
	}
	found := fmt.Sprintf("rank %d: %.1f GB/s to the GPU, %.1f GB/s from it", c.Rank, c.ToGPU, c.FromGPU)
	want := fmt.Sprintf("%.0f GB/s", least)
	switch {
	case slower < least:
		return fail(found, want, "loading data and checkpoints is slower", "check the PCIe link and the NUMA node: chorus doctor --only pcie,numa")
	case !known && median == slower: // the only GPU
		return unknown(found + "; no known bandwidth of " + c.Product)
	}
	return pass(found, want)
}

// medianCopy returns the median of the slower directions of all GPUs.
func medianCopy(list []Copy) float64 {
	var all []float64
	for _, c := range list {
		if c.Missing == "" {
			all = append(all, min(c.ToGPU, c.FromGPU))
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)/2]
}
