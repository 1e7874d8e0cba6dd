package device

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/nvml"
)

// The methods below query NVIDIA's management library. They create no context, do not wait
// for work, may be called at any time, and work after a sticky error. If the machine has no
// libnvidia-ml, or the device lacks the sensor, their error matches errors.ErrUnsupported and
// says which. A virtual device reports its
// memory and its process, and has no sensors.

// Utilization returns the percentage of time that kernels ran during the last sample period
// (torch.cuda.utilization). The period is between a sixth of a second and a second.
func (d *Device) Utilization() (percent int, err error) {
	err = d.sense("utilization", func(n nvml.Device) (err error) { percent, _, err = n.Utilization(); return err })
	return percent, err
}

// MemoryActivity returns the percentage of time that device memory was read or written during
// the last sample period (torch.cuda.memory_usage).
func (d *Device) MemoryActivity() (percent int, err error) {
	err = d.sense("memory activity", func(n nvml.Device) (err error) { _, percent, err = n.Utilization(); return err })
	return percent, err
}

// Temperature returns the temperature of the chip in degrees Celsius;
// torch.cuda.temperature.
func (d *Device) Temperature() (celsius int, err error) {
	err = d.sense("temperature", func(n nvml.Device) (err error) { celsius, err = n.Temperature(); return err })
	return celsius, err
}

// PowerDraw returns the power consumption of the board in milliwatts;
// torch.cuda.power_draw.
func (d *Device) PowerDraw() (milliwatts int, err error) {
	err = d.sense("power draw", func(n nvml.Device) (err error) { milliwatts, err = n.Power(); return err })
	return milliwatts, err
}

// ClockRate returns the current clock of the multiprocessors in MHz;
// torch.cuda.clock_rate.
func (d *Device) ClockRate() (mhz int, err error) {
	err = d.sense("clock rate", func(n nvml.Device) (err error) { mhz, err = n.SMClock(); return err })
	return mhz, err
}

// MemoryUsed returns how many bytes of the device's memory are in use, by all processes
// and the driver itself; torch.cuda.device_memory_used.
func (d *Device) MemoryUsed() (bytes uint64, err error) {
	err = d.sense("memory used", func(n nvml.Device) (err error) { bytes, err = n.MemoryUsed(); return err })
	return bytes, err
}

// A Process is a process with a context on a device.
type Process struct {
	PID         int    `json:"pid"`          // in the kernel driver's namespace, not in a container's
	MemoryBytes uint64 `json:"memory_bytes"` // of the device; 0 if the driver does not report it
}

// Processes returns the processes that have a context on the device, by PID;
// torch.cuda.list_gpu_processes.
func (d *Device) Processes() ([]Process, error) {
	var list []Process
	err := d.sense("processes", func(n nvml.Device) error {
		found, err := n.Processes()
		for _, p := range found {
			list = append(list, Process{PID: p.PID, MemoryBytes: p.Bytes})
		}
		return err
	})
	slices.SortFunc(list, func(a, b Process) int { return cmp.Compare(a.PID, b.PID) })
	return list, err
}

// NVLinks reports for each NVLink of the device whether it is up.
func (d *Device) NVLinks() (up []bool, err error) {
	err = d.sense("NVLink state", func(n nvml.Device) (err error) { up, err = n.NVLinks(); return err })
	return up, err
}

// sense finds the device by its UUID, because CUDA and NVML may use different ordinals,
// and reads a value.
func (d *Device) sense(what string, read func(nvml.Device) error) error {
	api, err := gpu.SystemOf(d.sys).NVML()
	if err == nil {
		var uuid string
		if uuid, err = gpu.DeviceOf(d).UUID(); err != nil {
			return err
		}
		var n nvml.Device
		if n, err = api.Device(uuid); err == nil {
			err = read(n)
		}
	}
	if err == nil {
		return nil
	}
	if u, ok := errors.AsType[*nvml.UnsupportedError](err); ok {
		return &UnsupportedError{Feature: fmt.Sprintf("the %s of %s", what, d), Need: u.Need, Have: u.Have}
	}
	return fmt.Errorf("device: %s of %s: %w", what, d, err)
}
