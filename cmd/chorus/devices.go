package main

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"os"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
)

// maxVirtualDevices is what CHORUS_VIRTUAL_DEVICES may say.
const maxVirtualDevices = 64

// findDevices counts this host's devices without opening a driver: the launcher
// must hold no device, and has to start its workers at once. procs is how many
// were asked for, 0 for one on each device.
func findDevices(procs int) (launch.Devices, error) {
	backend, err := env.Backend.OneOf("auto", "cuda", "virtual")
	if err != nil {
		return launch.Devices{}, usage(err)
	}
	if backend == "virtual" {
		return virtualDevices(procs)
	}
	gpus := visibleGPUs()
	switch {
	case gpus > 0:
		return launch.Devices{Count: gpus, Backend: "cuda"}, nil
	case backend == "cuda":
		return launch.Devices{}, fmt.Errorf("no GPU on this machine (%s), and %s=cuda insists on one", whyNoGPU(), env.Backend.Name)
	}
	d, err := virtualDevices(procs)
	d.Env = append(d.Env, env.Backend.Name+"=virtual")
	d.Note = fmt.Sprintf("no GPU on this machine (%s): running on %d virtual devices in host memory instead; set %s=cuda to insist",
		whyNoGPU(), d.Count, env.Backend.Name)
	return d, err
}

// virtualDevices has as many devices as the environment says, or as are asked
// for where it says nothing.
func virtualDevices(procs int) (launch.Devices, error) {
	n, err := env.VirtualDevices.Int()
	if err != nil {
		return launch.Devices{}, usage(err)
	}
	d := launch.Devices{Count: n, Backend: "virtual"}
	if procs > n && !env.VirtualDevices.IsSet() {
		d.Count = procs
		d.Env = append(d.Env, fmt.Sprintf("%s=%d", env.VirtualDevices.Name, procs))
	}
	if d.Count < 1 || d.Count > maxVirtualDevices {
		return d, &launch.UsageError{Reason: fmt.Sprintf("%d virtual devices: want 1 to %d", d.Count, maxVirtualDevices)}
	}
	return d, nil
}

// deviceFiles are the GPUs' files of the driver.
func deviceFiles() []string {
	files, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is well formed
	return files
}

// visibleGPUs counts the GPUs that CUDA would show: up to the first name in
// CUDA_VISIBLE_DEVICES that is none.
func visibleGPUs() int {
	have := len(deviceFiles())
	visible, set := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	if !set {
		return have
	}
	n := 0
	for name := range strings.SplitSeq(visible, ",") {
		name = strings.TrimSpace(name)
		if i, err := strconv.Atoi(name); name == "" || err == nil && (i < 0 || i >= have) {
			break
		}
		n++
	}
	return min(n, have)
}

func whyNoGPU() string {
	if len(deviceFiles()) == 0 {
		return "no /dev/nvidia*"
	}
	return fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", os.Getenv("CUDA_VISIBLE_DEVICES"))
}
