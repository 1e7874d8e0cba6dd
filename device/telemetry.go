package device

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/nvml"
)

// What NVIDIA's management library tells about a device. The methods create no
// context and wait for no work, may be called at any time, and go on working
// after a sticky error. Where the program is built without cgo, the machine has
// no libnvidia-ml, or the device no such sensor, their error matches
// errors.ErrUnsupported and says which. A virtual device tells of its memory and
// of its process, and has no sensors.

// Utilization returns in how many percent of the last sample period, between a
// sixth of a second and a second, a kernel ran; torch.cuda.utilization.
func (d *Device) Utilization() (percent int, err error) {
	err = d.sense("utilization", func(n nvml.Device) (err error) { percent, _, err = n.Utilization(); return err })
	return percent, err
}

// MemoryActivity returns in how many percent of the last sample period memory
// of the device was read or written; torch.cuda.memory_usage.
func (d *Device) MemoryActivity() (percent int, err error) {
	err = d.sense("memory activity", func(n nvml.Device) (err error) { _, percent, err = n.Utilization(); return err })
	return percent, err
}

// Temperature returns that of the chip in degrees Celsius;
// torch.cuda.temperature.
func (d *Device) Temperature() (celsius int, err error) {
	err = d.sense("temperature", func(n nvml.Device) (err error) { celsius, err = n.Temperature(); return err })
	return celsius, err
}

// PowerDraw returns the power that the board takes in milliwatts;
// torch.cuda.power_draw.
func (d *Device) PowerDraw() (milliwatts int, err error) {
	err = d.sense("power draw", func(n nvml.Device) (err error) { milliwatts, err = n.Power(); return err })
	return milliwatts, err
}

// ClockRate returns the present clock of the multiprocessors in MHz;
// torch.cuda.clock_rate.
func (d *Device) ClockRate() (mhz int, err error) {
	err = d.sense("clock rate", func(n nvml.Device) (err error) { mhz, err = n.SMClock(); return err })
	return mhz, err
}

// MemoryUsed returns how many bytes of the device's memory are taken, by all
// processes and the driver itself; torch.cuda.device_memory_used.
func (d *Device) MemoryUsed() (bytes uint64, err error) {
	err = d.sense("memory used", func(n nvml.Device) (err error) { bytes, err = n.MemoryUsed(); return err })
	return bytes, err
}

// A Process computes on a device.
type Process struct {
	PID         int    `json:"pid"`          // as the kernel driver knows it: not that of a container's own namespace
	MemoryBytes uint64 `json:"memory_bytes"` // of the device; 0 where the driver does not tell
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

// NVLinks returns for each NVLink of the device whether it is up.
func (d *Device) NVLinks() (up []bool, err error) {
	err = d.sense("NVLink state", func(n nvml.Device) (err error) { up, err = n.NVLinks(); return err })
	return up, err
}

// sense finds the device by its UUID, which unlike its ordinal means the same
// device to CUDA and to NVML, and reads something of it.
func (d *Device) sense(what string, read func(nvml.Device) error) error {
	api, err := d.sys.sys.NVML()
	if err == nil {
		var uuid string
		if uuid, err = d.UUID(); err != nil {
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
