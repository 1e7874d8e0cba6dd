package backend

import (
	"fmt"
	"path/filepath"

	"github.com/gochorus/chorus/internal/env"
)

// A Choice is what a program that may fall back to virtual devices should use,
// as `chorus` and the examples do.
type Choice struct {
	Backend string
	Devices int    // how many devices a process here will see
	NoGPU   string // why virtual devices stand in for GPUs; "" where they do not
}

// Note is the line that tells the user of a fallback to devices, such as "4
// virtual devices", or "".
func (c *Choice) Note(devices string) string {
	if c.NoGPU == "" {
		return ""
	}
	return fmt.Sprintf("no GPU on this machine (%s): running on %s in host memory instead; set %s=cuda to insist",
		c.NoGPU, devices, env.Backend.Name)
}

// Choose decides without starting the driver, so that a launcher that never
// touches a GPU can ask: it counts the device files of the kernel driver.
func Choose() (*Choice, error) {
	b, err := env.Backend.OneOf(Auto, CUDA, Virtual)
	if err != nil {
		return nil, err
	}
	files := deviceFiles()
	gpus := countVisible(len(files))
	switch {
	case b != Virtual && gpus > 0:
		return &Choice{Backend: CUDA, Devices: gpus}, nil
	case b == CUDA:
		return nil, &NoGPUError{Reason: whyNoGPU(files)}
	}
	var c Config
	if err := c.fillFromEnv(); err != nil {
		return nil, err
	}
	choice := &Choice{Backend: Virtual, Devices: c.Devices}
	if b == Auto {
		choice.NoGPU = whyNoGPU(files)
	}
	return choice, nil
}

// A NoGPUError says that CUDA was asked for where there is no GPU.
type NoGPUError struct{ Reason string }

func (e *NoGPUError) Error() string {
	return fmt.Sprintf("no GPU on this machine (%s), and %s=cuda insists on one: install the NVIDIA driver, or use %[2]s=virtual",
		e.Reason, env.Backend.Name)
}

// deviceFiles are the GPUs' files of the kernel driver.
func deviceFiles() []string {
	files, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is well formed
	return files
}

func whyNoGPU(files []string) string {
	if len(files) == 0 {
		return "no /dev/nvidia*"
	}
	return fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", env.VisibleDevices.Value())
}

// countVisible counts which of have GPUs CUDA_VISIBLE_DEVICES leaves. UUIDs are
// taken to name GPUs: only NVML or the driver could look them up.
func countVisible(have int) int {
	if !env.VisibleDevices.IsSet() {
		return have
	}
	v := parseVisible(env.VisibleDevices.Value())
	return min(len(v.uuids)+len(within(v.ordinals, have)), have)
}
