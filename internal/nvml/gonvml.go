//go:build cgo && !nonvml

package nvml

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gochorus/chorus/internal/dl"
)

// bind makes calls by go-nvml, which opens the file again.
func bind(find dl.Resolver, path string) (raw, error) {
	return goNVML{nvml.New(nvml.WithLibraryPath(path)), find}, nil
}

// goNVML calls NVML by go-nvml.
type goNVML struct {
	api  nvml.Interface
	find dl.Resolver
}

func (l goNVML) init() Return         { return Return(l.api.Init()) }
func (l goNVML) text(r Return) string { return l.api.ErrorString(nvml.Return(r)) }

func (l goNVML) count() (int, Return) {
	n, r := l.api.DeviceGetCount()
	return n, Return(r)
}

func (l goNVML) byIndex(i int) (rawDevice, Return) {
	d, r := l.api.DeviceGetHandleByIndex(i)
	return goDevice{d, l.find}, Return(r)
}

func (l goNVML) byUUID(uuid string) (rawDevice, Return) {
	d, r := l.api.DeviceGetHandleByUUID(uuid)
	return goDevice{d, l.find}, Return(r)
}

type goDevice struct {
	d    nvml.Device
	find dl.Resolver
}

func (g goDevice) uuid() (string, Return) {
	u, r := g.d.GetUUID()
	return u, Return(r)
}

func (g goDevice) migMode() (current, pending uint32, _ Return) {
	c, p, r := g.d.GetMigMode()
	return uint32(c), uint32(p), Return(r)
}

func (g goDevice) utilization() (gpu, memory uint32, _ Return) {
	u, r := g.d.GetUtilizationRates()
	return u.Gpu, u.Memory, Return(r)
}

func (g goDevice) temperature() (uint32, Return) {
	v, r := g.d.GetTemperature(nvml.TEMPERATURE_GPU)
	return v, Return(r)
}

func (g goDevice) powerUsage() (uint32, Return) {
	v, r := g.d.GetPowerUsage()
	return v, Return(r)
}

func (g goDevice) smClock() (uint32, Return) {
	v, r := g.d.GetClockInfo(nvml.CLOCK_SM)
	return v, Return(r)
}

func (g goDevice) memoryUsed() (uint64, Return) {
	m, r := g.d.GetMemoryInfo()
	return m.Used, Return(r)
}

func (g goDevice) computeProcesses() ([]Process, Return) {
	infos, r := g.d.GetComputeRunningProcesses()
	list := make([]Process, len(infos))
	for i, p := range infos {
		list[i] = Process{PID: int(p.Pid), Bytes: p.UsedGpuMemory}
	}
	return list, Return(r)
}

func (g goDevice) nvLinkState(link int) (bool, Return) {
	state, r := g.d.GetNvLinkState(link)
	return state == nvml.FEATURE_ENABLED, Return(r)
}
