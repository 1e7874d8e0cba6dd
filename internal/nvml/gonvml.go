//go:build cgo && !nonvml

package nvml

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gochorus/chorus/internal/dl"
)

// bind binds the calls by go-nvml, which opens the file again.
func bind(find dl.Resolver, path string) (raw, error) {
	return goNVML{nvml.New(nvml.WithLibraryPath(path)), find}, nil
}

// Of returns the API of an implementation of go-nvml's interface: a mock, in tests of hosts that are not at hand.
// The implementation has all functions except the fabric's state, which go-nvml reads past its interface.
func Of(api nvml.Interface) (API, error) {
	return start(goNVML{api, func(name string) (uintptr, bool) { return 0, name != "nvmlDeviceGetGpuFabricInfoV" }}, nil)
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

// lacks reports whether the library lacks a function. A call of such a function by go-nvml
// would end the process.
func (g goDevice) lacks(name string) bool {
	_, ok := g.find(name)
	return !ok
}

// value returns the result of get, which calls a function of the library, unless the library lacks
// the function.
func value[T any](g goDevice, name string, get func() (T, nvml.Return)) (v T, _ Return) {
	if g.lacks(name) {
		return v, functionNotFound
	}
	v, r := get()
	return v, Return(r)
}

func (g goDevice) name() (string, Return) {
	return value(g, "nvmlDeviceGetName", g.d.GetName)
}

func (g goDevice) pciBusID() (string, Return) {
	if g.lacks("nvmlDeviceGetPciInfo_v3") {
		return "", functionNotFound
	}
	p, r := g.d.GetPciInfo()
	var id []byte
	for _, c := range p.BusId {
		if c == 0 {
			break
		}
		id = append(id, byte(c))
	}
	return string(id), Return(r)
}

func (g goDevice) persistence() (uint32, Return) {
	v, r := value(g, "nvmlDeviceGetPersistenceMode", g.d.GetPersistenceMode)
	return uint32(v), r
}

func (g goDevice) computeMode() (uint32, Return) {
	v, r := value(g, "nvmlDeviceGetComputeMode", g.d.GetComputeMode)
	return uint32(v), r
}

func (g goDevice) eccMode() (current, pending uint32, _ Return) {
	if g.lacks("nvmlDeviceGetEccMode") {
		return 0, 0, functionNotFound
	}
	c, p, r := g.d.GetEccMode()
	return uint32(c), uint32(p), Return(r)
}

func (g goDevice) totalECC(kind, counter uint32) (uint64, Return) {
	return value(g, "nvmlDeviceGetTotalEccErrors", func() (uint64, nvml.Return) {
		return g.d.GetTotalEccErrors(nvml.MemoryErrorType(kind), nvml.EccCounterType(counter))
	})
}

func (g goDevice) memoryErrors(kind, counter, location uint32) (uint64, Return) {
	return value(g, "nvmlDeviceGetMemoryErrorCounter", func() (uint64, nvml.Return) {
		return g.d.GetMemoryErrorCounter(nvml.MemoryErrorType(kind), nvml.EccCounterType(counter), nvml.MemoryLocation(location))
	})
}

func (g goDevice) remappedRows() (RemappedRows, Return) {
	if g.lacks("nvmlDeviceGetRemappedRows") {
		return RemappedRows{}, functionNotFound
	}
	c, u, pending, failed, r := g.d.GetRemappedRows()
	return RemappedRows{c, u, pending, failed}, Return(r)
}

func (g goDevice) clockEvents() (uint64, Return) {
	return value(g, "nvmlDeviceGetCurrentClocksEventReasons", g.d.GetCurrentClocksEventReasons)
}

func (g goDevice) powerLimit() (uint32, Return) {
	return value(g, "nvmlDeviceGetPowerManagementLimit", g.d.GetPowerManagementLimit)
}

func (g goDevice) defaultPowerLimit() (uint32, Return) {
	return value(g, "nvmlDeviceGetPowerManagementDefaultLimit", g.d.GetPowerManagementDefaultLimit)
}

func (g goDevice) pcieReplays() (uint32, Return) {
	v, r := value(g, "nvmlDeviceGetPcieReplayCounter", g.d.GetPcieReplayCounter)
	return uint32(v), r
}

func (g goDevice) nvLinkErrors(link int, counter uint32) (uint64, Return) {
	return value(g, "nvmlDeviceGetNvLinkErrorCounter", func() (uint64, nvml.Return) {
		return g.d.GetNvLinkErrorCounter(link, nvml.NvLinkErrorCounter(counter))
	})
}

func (g goDevice) field(id, scope uint32) (fieldValue, Return) {
	if g.lacks("nvmlDeviceGetFieldValues") {
		return fieldValue{}, functionNotFound
	}
	v := []nvml.FieldValue{{FieldId: id, ScopeId: scope}}
	r := g.d.GetFieldValues(v)
	return fieldValue{v[0].ValueType, Return(v[0].NvmlReturn), v[0].Value}, Return(r)
}

func (g goDevice) fabric() (Fabric, Return) {
	if g.lacks("nvmlDeviceGetGpuFabricInfoV") {
		return Fabric{}, functionNotFound
	}
	v, r := g.d.GetGpuFabricInfoV().V2()
	return Fabric{FabricState(v.State), int(v.Status), v.HealthMask}, Return(r)
}
