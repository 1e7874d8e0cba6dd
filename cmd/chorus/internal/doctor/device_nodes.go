package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
)

var deviceNodes = &Check{
	ID: "device-nodes", Scope: ScopeHost, Source: "/dev/nvidia*, /proc/driver/nvidia/gpus, /sys/bus/pci",
	Hazard: "A device file is missing or does not open, so cuInit fails.",
	Run:    one(checkDeviceNodes),
}

var gpuNode = regexp.MustCompile(`^nvidia[0-9]+$`)

func checkDeviceNodes(h *Host) Result {
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	if !h.hasDriver() {
		return fail(fmt.Sprintf("%d GPUs on the PCI bus, and no kernel driver", len(h.pciGPUs())), "the NVIDIA kernel driver",
			"no program can use a GPU", "install the NVIDIA driver, or run modprobe nvidia on the host")
	}
	entries, err := fs.ReadDir(h.Root, "dev")
	if err != nil {
		return unread(rooted(err))
	}
	gpus, uvm := 0, false
	for _, e := range entries {
		name := e.Name()
		switch {
		case name == "nvidia-uvm":
			uvm = true
		case gpuNode.MatchString(name):
			gpus++
		case name != "nvidiactl":
			continue
		}
		if err := h.OpenDevice("/dev/" + name); err != nil {
			return fail(err.Error(), "all device files open", "the driver does not start in this process",
				"run the program with access to /dev/nvidia*: as a member of the video group, or in a container with all GPUs")
		}
	}
	return h.judgeNodes(gpus, uvm)
}

// judgeNodes compares the device files that open with the GPUs of the driver.
func (h *Host) judgeNodes(gpus int, uvm bool) Result {
	const cure = "run nvidia-modprobe -u -c0 on the host, and start the container with all GPUs"
	listed, err := fs.ReadDir(h.Root, "proc/driver/nvidia/gpus")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return unread(rooted(err))
	}
	found := fmt.Sprintf("%d of %d GPUs have a device file that opens", gpus, len(listed))
	want := fmt.Sprintf("%d device files, and /dev/nvidia-uvm", len(listed))
	switch {
	case gpus == 0:
		return fail(found, want, "the driver finds no GPU", cure)
	case !uvm:
		return fail("no /dev/nvidia-uvm", want, "cuInit fails", cure)
	case gpus < len(listed) && !h.assigned():
		return warn(found, want, "the other GPUs are not usable here", cure)
	}
	return pass(found, want)
}

// assigned reports whether a container runtime gave this container chosen GPUs.
func (h *Host) assigned() bool {
	v := h.getenv("NVIDIA_VISIBLE_DEVICES")
	return v != "" && v != "all" && !strings.EqualFold(v, "none")
}
