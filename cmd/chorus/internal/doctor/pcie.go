package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"math"
	"path"
	"regexp"
	"strconv"
	"strings"
)

var pcie = &Check{
	ID: "pcie", Scope: ScopeGPU, Source: "/sys/bus/pci/devices, nvmlDeviceGetPcieReplayCounter",
	Hazard: "A PCIe link of the GPU or of a bridge above it lost lanes, or repeats packets.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkPCIe),
}

const curePCIe = "reseat the card or the riser, and check the slot's settings in the BIOS"

func checkPCIe(ctx context.Context, h *Host, g *GPU) Result {
	id, err := g.PCIBusID()
	if err != nil {
		return unread(err)
	}
	chain, err := h.pciPath(id)
	if err != nil {
		return unread(err)
	}
	// The two ports of a switch are not connected by a link. So the 1st and the 2nd device share a
	// link, the 3rd and the 4th, and so on.
	for i := 0; i+1 < len(chain); i += 2 {
		current, most, err := h.linkWidth(chain[i], chain[i+1])
		switch {
		case err != nil:
			return unread(err)
		case current < most:
			return fail(fmt.Sprintf("%s has %d of %d lanes", path.Base(chain[i]), current, most), fmt.Sprintf("%d lanes", most), "copies between host and GPU are slower", curePCIe)
		}
	}
	lanes, _, err := h.linkWidth(chain[0], "")
	if err != nil {
		return unread(err)
	}
	speed, err := h.read(chain[0] + "/max_link_speed")
	if err != nil {
		return unread(err)
	}
	return checkReplays(ctx, h, g, lanes, speed)
}

// checkReplays compares the replays of one interval with the limit of a minute.
func checkReplays(ctx context.Context, h *Host, g *GPU, lanes int, speed string) Result {
	found := fmt.Sprintf("%d lanes, at most %s", lanes, speed)
	before, err := g.PCIeReplays()
	if err != nil {
		return unknown(found + "; " + err.Error())
	}
	if err := h.wait(ctx); err != nil {
		return unread(err)
	}
	after, err := g.PCIeReplays()
	if err != nil {
		return unknown(found + "; " + err.Error())
	}
	if limit := mostReplays(lanes, speed); after-before > limit {
		return warn(fmt.Sprintf("%d replays in %v", after-before, h.Interval), fmt.Sprintf("at most %d a minute", limit), "the link repeats packets, so copies are slower", curePCIe)
	}
	return pass(found+", no replays", "all lanes, few replays")
}

var gigatransfers = regexp.MustCompile(`^([0-9.]+) GT/s`)

// mostReplays returns the replays of a minute that a healthy link has at most, which grow with
// the lanes and the speed.
func mostReplays(lanes int, speed string) int {
	gt := 2.5
	if m := gigatransfers.FindStringSubmatch(speed); m != nil {
		if v, err := strconv.ParseFloat(m[1], 64); err == nil {
			gt = v
		}
	}
	const each = 0.06 // for each lane and GT/s
	return int(math.Ceil(float64(lanes) * gt * each))
}

// pciPath returns the sysfs folders of a device and of the bridges above it.
func (h *Host) pciPath(id string) ([]string, error) {
	link := "sys/bus/pci/devices/" + id
	to, err := fs.ReadLink(h.Root, link)
	if err != nil {
		return nil, rooted(err)
	}
	dir := path.Join(path.Dir(link), to)
	var chain []string
	for ; strings.Count(path.Base(dir), ":") == 2; dir = path.Dir(dir) { // 0000:06:00.0, not pci0000:00
		chain = append(chain, dir)
	}
	if len(chain) == 0 {
		return nil, fmt.Errorf("/%s leads to /%s, which is not a PCI device", link, dir)
	}
	return chain, nil
}

// linkWidth returns the lanes of the link between a device and the port above it, and the lanes
// that both could have. Without a port it uses the device's numbers.
func (h *Host) linkWidth(dev, port string) (current, most int, err error) {
	if current, err = h.readInt(dev + "/current_link_width"); err != nil {
		return 0, 0, err
	}
	if most, err = h.readInt(dev + "/max_link_width"); err != nil {
		return 0, 0, err
	}
	const notKnown = 255
	if port != "" {
		if n, err := h.readInt(port + "/max_link_width"); err == nil && n > 0 { // virtual bridges have none
			most = min(most, n)
		}
	}
	if current == 0 || current == notKnown || most == notKnown {
		return 0, 0, fmt.Errorf("/%s: the device does not report its lanes", dev)
	}
	return current, most, nil
}
