package main

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/backend"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
)

// findDevices counts this host's devices without opening a driver, because the
// launcher must not hold a device and must start its workers at once. procs is
// the number of processes requested; 0 means one for each device.
func findDevices(procs int) (launch.Devices, error) {
	c, err := backend.Choose()
	if _, wrong := errors.AsType[*env.ValueError](err); wrong {
		return launch.Devices{}, usage(err)
	}
	if err != nil {
		return launch.Devices{}, err
	}
	d := launch.Devices{Count: c.Devices, Backend: c.Backend}
	if c.Backend == backend.CUDA {
		return d, nil
	}
	// Virtual devices cost nothing: create one for each process, unless the
	// environment sets their number.
	if procs > d.Count && !env.VirtualDevices.IsSet() {
		if procs > backend.MaxVirtualDevices {
			return d, &launch.UsageError{Reason: fmt.Sprintf("%d virtual devices: want 1 to %d", procs, backend.MaxVirtualDevices)}
		}
		d.Count = procs
		d.Env = append(d.Env, fmt.Sprintf("%s=%d", env.VirtualDevices.Name, procs))
	}
	if c.NoGPU != "" {
		d.Env = append(d.Env, env.Backend.Name+"="+backend.Virtual)
		d.Note = c.Note(fmt.Sprintf("%d virtual devices", d.Count))
	}
	return d, nil
}
