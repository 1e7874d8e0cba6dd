package doctor

import (
	"context"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/internal/nvml"
)

var nvlink = &Check{
	ID: "nvlink", Scope: ScopeGPU, Source: "nvmlDeviceGetNvLinkState, NVML_FI_DEV_NVLINK_GET_SPEED, nvmlDeviceGetNvLinkErrorCounter",
	Hazard: "An NVLink is down, slow, or has errors.",
	Needs:  []string{"device-nodes", "driver-mismatch", "fabric-manager"},
	Run:    perGPU(checkNVLink),
}

// A linkModel has the links of a product whose links are all connected.
type linkModel struct {
	name  string // part of the product's name
	links int
	speed int // MB/s of a link in one direction
}

var linkModels = []linkModel{
	{"GB300", 18, 53125}, {"GB200", 18, 53125}, {"B300", 18, 53125}, {"B200", 18, 53125},
	{"H200", 18, 26562}, {"H100 80GB HBM3", 18, 26562}, {"A100-SXM4", 12, 25000},
}

// modelOf returns the model of a product, or nil for cards, whose links may have no bridge.
func modelOf(name string) *linkModel {
	for i, m := range linkModels {
		if strings.Contains(name, m.name) && !strings.Contains(name, "NVL") && !strings.Contains(name, "PCIe") {
			return &linkModels[i]
		}
	}
	return nil
}

const cureNVLink = "reset all GPUs, restart the fabric manager, and replace the board if it comes again"

func checkNVLink(ctx context.Context, h *Host, g *GPU) Result {
	up, err := g.NVLinks()
	if err != nil {
		return unread(err)
	}
	name, err := g.Name()
	if err != nil {
		return unread(err)
	}
	active := 0
	for _, u := range up {
		if u {
			active++
		}
	}
	gpus, _ := h.gpus()
	found, m := fmt.Sprintf("%d of %d links up", active, len(up)), modelOf(name)
	switch {
	case m == nil || len(gpus) == 1 && active == 0:
		return pass(found, "all links up if the GPUs have NVLink")
	case active < m.links:
		return fail(found, fmt.Sprintf("%d of %d", m.links, m.links), "peer copies are slower, or go through host memory", cureNVLink)
	}
	for i, u := range up {
		if speed, err := g.NVLinkSpeed(i); u && err == nil && speed < m.speed*95/100 {
			return fail(fmt.Sprintf("link %d runs at %d MB/s", i, speed), fmt.Sprintf("%d MB/s", m.speed), "peer copies are slower", cureNVLink)
		}
	}
	return checkLinkErrors(ctx, h, g, up, found)
}

// mostCRC is the number of CRC errors in one second that fail a link.
const mostCRC = 100

// checkLinkErrors reads the counters of all links twice.
func checkLinkErrors(ctx context.Context, h *Host, g *GPU, up []bool, found string) Result {
	before, err := crcErrors(g, up)
	if err != nil {
		return unknown(found + "; " + err.Error())
	}
	if err := h.wait(ctx); err != nil {
		return unread(err)
	}
	after, err := crcErrors(g, up)
	if err != nil {
		return unknown(found + "; " + err.Error())
	}
	for i := range up {
		if n := after[i] - before[i]; after[i] > before[i] && n >= mostCRC { // a reset sets the counter to 0
			return fail(fmt.Sprintf("%d CRC errors of link %d in %v", n, i, h.Interval), fmt.Sprintf("fewer than %d", mostCRC), "the link repeats transfers", cureNVLink)
		}
		for _, c := range []nvml.LinkCounter{nvml.LinkReplays, nvml.LinkRecoveries} {
			if n, err := g.NVLinkErrors(i, c); up[i] && err == nil && n > 0 {
				return warn(fmt.Sprintf("%d replays or recoveries of link %d since the driver was loaded", n, i), "none", "the link had errors", cureNVLink)
			}
		}
	}
	return pass(found+", no errors", "all links up, no errors")
}

func crcErrors(g *GPU, up []bool) ([]uint64, error) {
	list := make([]uint64, len(up))
	for i, u := range up {
		if !u {
			continue
		}
		n, err := g.NVLinkErrors(i, nvml.LinkCRC)
		if err != nil {
			return nil, err
		}
		list[i] = n
	}
	return list, nil
}
