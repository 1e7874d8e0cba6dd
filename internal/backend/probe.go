package backend

import (
	"fmt"
	"path/filepath"

	"github.com/gochorus/chorus/internal/env"
)

// A Choice is the backend for a program that may fall back to virtual devices,
// such as `chorus` and the examples.
type Choice struct {
	Backend string
	Devices int    // number of devices that a process will see
	NoGPU   string // the reason for a fallback to virtual devices, or ""
}

// Note returns the line that tells the user of a fallback, or "". devices
// describes them, such as "4 virtual devices".
func (c *Choice) Note(devices string) string {
	if c.NoGPU == "" {
		return ""
	}
	return fmt.Sprintf("no GPU on this machine (%s): running on %s in host memory instead; set %s=cuda to require a GPU",
		c.NoGPU, devices, env.Backend.Name)
}

// Choose counts the device files of the kernel driver. It does not start the CUDA
// driver, so a launcher that must not use a GPU can call it.
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

// A NoGPUError reports that CUDA was requested on a machine without a GPU.
type NoGPUError struct{ Reason string }

func (e *NoGPUError) Error() string {
	return fmt.Sprintf("no GPU on this machine (%s), and %s=cuda requires one: install the NVIDIA driver, or use %[2]s=virtual",
		e.Reason, env.Backend.Name)
}

// deviceFiles returns the device files of the GPUs.
func deviceFiles() []string {
	files, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is valid
	return files
}

func whyNoGPU(files []string) string {
	if len(files) == 0 {
		return "no /dev/nvidia*"
	}
	return fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", env.VisibleDevices.Value())
}

// countVisible returns how many of have GPUs CUDA_VISIBLE_DEVICES selects. It
// assumes that UUIDs are valid, because only NVML or the driver could check them.
func countVisible(have int) int {
	if !env.VisibleDevices.IsSet() {
		return have
	}
	v := parseVisible(env.VisibleDevices.Value())
	return min(len(v.uuids)+len(within(v.ordinals, have)), have)
}
