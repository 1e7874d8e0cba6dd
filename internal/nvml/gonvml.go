//go:build cgo && !nonvml

package nvml

import (
	"fmt"
	"math"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gochorus/chorus/internal/dl"
)

// open searches for the library like for every other library, so that the error
// lists the attempts. go-nvml then opens the same file.
func open() (API, error) {
	so, err := dl.Open(spec)
	if err != nil {
		return nil, err
	}
	l := lib{nvml.New(nvml.WithLibraryPath(so.Path()))}
	if r := l.Init(); r != nvml.SUCCESS {
		return nil, fail("nvmlInit_v2", r)
	}
	return l, nil
}

// lib is NVML. It is never shut down.
type lib struct{ nvml.Interface }

func (l lib) UUIDs() ([]string, error) {
	var uuids []string
	err := l.each(func(d nvml.Device) error {
		u, r := d.GetUUID()
		uuids = append(uuids, u)
		return fail("nvmlDeviceGetUUID", r)
	})
	return uuids, err
}

func (l lib) MIG() (bool, error) {
	partitioned := false
	err := l.each(func(d nvml.Device) error {
		current, _, r := d.GetMigMode()
		if r == nvml.ERROR_NOT_SUPPORTED {
			return nil
		}
		partitioned = partitioned || current == nvml.DEVICE_MIG_ENABLE
		return fail("nvmlDeviceGetMigMode", r)
	})
	return partitioned, err
}

func (l lib) each(f func(nvml.Device) error) error {
	n, r := l.DeviceGetCount()
	if r != nvml.SUCCESS {
		return fail("nvmlDeviceGetCount_v2", r)
	}
	for i := range n {
		d, r := l.DeviceGetHandleByIndex(i)
		if r != nvml.SUCCESS {
			return fail("nvmlDeviceGetHandleByIndex_v2", r)
		}
		if err := f(d); err != nil {
			return err
		}
	}
	return nil
}

// Device accepts a UUID as CUDA returns it. CUDA also writes the prefix GPU- for
// an instance of MIG.
func (l lib) Device(uuid string) (Device, error) {
	d, r := l.DeviceGetHandleByUUID(uuid)
	if instance, gpu := strings.CutPrefix(uuid, "GPU-"); gpu && (r == nvml.ERROR_NOT_FOUND || r == nvml.ERROR_INVALID_ARGUMENT) {
		if m, r := l.DeviceGetHandleByUUID("MIG-" + instance); r == nvml.SUCCESS {
			return device{m}, nil
		}
	}
	if r != nvml.SUCCESS {
		return nil, fail("nvmlDeviceGetHandleByUUID", r)
	}
	return device{d}, nil
}

type device struct{ nvml.Device }

func (d device) Utilization() (gpu, memory int, err error) {
	u, r := d.GetUtilizationRates()
	return int(u.Gpu), int(u.Memory), fail("nvmlDeviceGetUtilizationRates", r)
}

func (d device) Temperature() (int, error) {
	v, r := d.GetTemperature(nvml.TEMPERATURE_GPU)
	return int(v), fail("nvmlDeviceGetTemperature", r)
}

func (d device) Power() (int, error) {
	v, r := d.GetPowerUsage()
	return int(v), fail("nvmlDeviceGetPowerUsage", r)
}

func (d device) SMClock() (int, error) {
	v, r := d.GetClockInfo(nvml.CLOCK_SM)
	return int(v), fail("nvmlDeviceGetClockInfo", r)
}

func (d device) MemoryUsed() (uint64, error) {
	m, r := d.GetMemoryInfo()
	return m.Used, fail("nvmlDeviceGetMemoryInfo", r)
}

func (d device) Processes() ([]Process, error) {
	infos, r := d.GetComputeRunningProcesses()
	if r != nvml.SUCCESS {
		return nil, fail("nvmlDeviceGetComputeRunningProcesses", r)
	}
	list := make([]Process, len(infos))
	for i, p := range infos {
		list[i] = Process{PID: int(p.Pid), Bytes: p.UsedGpuMemory}
		if p.UsedGpuMemory == math.MaxUint64 { // NVML_VALUE_NOT_AVAILABLE
			list[i].Bytes = 0
		}
	}
	return list, nil
}

// NVLinks queries links until NVML rejects an index, because NVML does not report
// the number of links.
func (d device) NVLinks() ([]bool, error) {
	var up []bool
	for i := range nvml.NVLINK_MAX_LINKS {
		state, r := d.GetNvLinkState(i)
		switch {
		case r == nvml.ERROR_INVALID_ARGUMENT, i > 0 && r == nvml.ERROR_NOT_SUPPORTED:
			return up, nil
		case r != nvml.SUCCESS:
			return nil, fail("nvmlDeviceGetNvLinkState", r)
		}
		up = append(up, state == nvml.FEATURE_ENABLED)
	}
	return up, nil
}

// fail converts a result to an error. A go-nvml Return is never nil, even on success.
func fail(op string, r nvml.Return) error {
	switch r {
	case nvml.SUCCESS:
		return nil
	case nvml.ERROR_NOT_SUPPORTED:
		return &UnsupportedError{Need: "a device with this sensor", Have: fmt.Sprintf("a device for which %s returns %q", op, r.Error())}
	case nvml.ERROR_FUNCTION_NOT_FOUND:
		return &UnsupportedError{Need: "a driver with " + op, Have: "an older one"}
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return &UnsupportedError{Need: "the NVIDIA kernel driver", Have: "no running driver (" + r.Error() + ")"}
	}
	return &Error{Op: op, Code: int(r), Text: r.Error()}
}
