package backend

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/gochorus/chorus/internal/env"
)

// A Choice is what a program that may fall back to virtual devices should use,
// as `chorus` and the examples do.
type Choice struct {
	Backend string
	Devices int    // how many devices a process here will see
	Note    string // the line that tells the user of a fallback, or ""
}

// Choose decides without starting the driver, so that a launcher that never
// touches a GPU can ask: it looks for the device files of the kernel driver.
func Choose() (Choice, error) {
	b, err := env.Backend.OneOf(Auto, CUDA, Virtual)
	if err != nil {
		return Choice{}, err
	}
	if b == Virtual {
		c := Config{}
		err := c.fillFromEnv()
		return Choice{Backend: Virtual, Devices: c.Devices}, err
	}
	if n := gpuFiles(); n > 0 {
		return Choice{Backend: CUDA, Devices: n}, nil
	}
	if b == CUDA {
		return Choice{}, &NoGPUError{}
	}
	c := Config{}
	if err := c.fillFromEnv(); err != nil {
		return Choice{}, err
	}
	return Choice{Backend: Virtual, Devices: c.Devices,
		Note: "no GPU is visible here (no /dev/nvidia0, or CUDA_VISIBLE_DEVICES hides it): using virtual devices in host memory instead; set CHORUS_BACKEND=cuda to insist on a GPU"}, nil
}

// A NoGPUError says that CUDA was asked for where there is no GPU.
type NoGPUError struct{}

func (*NoGPUError) Error() string {
	return "backend: CHORUS_BACKEND=cuda, but no GPU is visible here: there is no /dev/nvidia0, or CUDA_VISIBLE_DEVICES hides it; install the NVIDIA driver, or use CHORUS_BACKEND=virtual"
}

// gpuFiles counts the GPUs that CUDA_VISIBLE_DEVICES leaves of /dev/nvidia0,
// /dev/nvidia1 and so on.
func gpuFiles() int {
	files, err := filepath.Glob("/dev/nvidia[0-9]*")
	if err != nil || len(files) == 0 {
		return 0
	}
	visible, set := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	if !set {
		return len(files)
	}
	return visibleCount(visible, len(files))
}

// visibleCount follows the driver's reading of CUDA_VISIBLE_DEVICES: the list
// ends at the first entry that names no device.
func visibleCount(list string, have int) int {
	n := 0
	for _, f := range strings.Split(list, ",") {
		f = strings.TrimSpace(f)
		if !strings.HasPrefix(f, "GPU-") && !strings.HasPrefix(f, "MIG-") && !ordinalBelow(f, have) {
			break
		}
		n++
	}
	return n
}

func ordinalBelow(s string, have int) bool {
	if s == "" {
		return false
	}
	v := 0
	for _, c := range s {
		if c < '0' || c > '9' {
			return false
		}
		if v = v*10 + int(c-'0'); v >= have {
			return false
		}
	}
	return true
}
