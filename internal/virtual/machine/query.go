package machine

import (
	"fmt"
	"os"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/nvml"
)

// driverVersion is CUDA 13.0.
const driverVersion = 13000

func (d driver) Init() cudadrv.Result {
	if status, _ := d.m.faults.Hit("cuInit"); status != 0 {
		return cudadrv.Result(status)
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	d.m.initialized = true
	return cudadrv.Success
}

func (d driver) DriverGetVersion() (int32, cudadrv.Result) {
	if status, _ := d.m.faults.Hit("cuDriverGetVersion"); status != 0 {
		return 0, cudadrv.Result(status)
	}
	return driverVersion, cudadrv.Success
}

func (d driver) DeviceGetCount() (int32, cudadrv.Result) {
	c, r := d.beginFree("cuDeviceGetCount")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return int32(len(d.m.devices)), cudadrv.Success
}

func (d driver) DeviceGet(ordinal int32) (cudadrv.Device, cudadrv.Result) {
	ord := cudadrv.Device(ordinal)
	c, _, r := d.beginDevice("cuDeviceGet", ord)
	if r != cudadrv.Success {
		return 0, r
	}
	c.end()
	return ord, cudadrv.Success
}

// beginDevice is beginFree for calls on a device.
func (d driver) beginDevice(name string, ord cudadrv.Device) (call, *Device, cudadrv.Result) {
	c, r := d.beginFree(name)
	if r != cudadrv.Success {
		return c, nil, r
	}
	dev := d.m.Device(ord)
	if dev == nil {
		c.end()
		return c, nil, cudadrv.ErrorInvalidDevice
	}
	return c, dev, cudadrv.Success
}

func (d driver) DeviceGetName(ord cudadrv.Device) (string, cudadrv.Result) {
	c, _, r := d.beginDevice("cuDeviceGetName", ord)
	if r != cudadrv.Success {
		return "", r
	}
	c.end()
	return "Chorus Virtual Device", cudadrv.Success
}

func (d driver) DeviceGetUUID(ord cudadrv.Device) (cudadrv.UUID, cudadrv.Result) {
	c, dev, r := d.beginDevice("cuDeviceGetUuid", ord)
	if r != cudadrv.Success {
		return cudadrv.UUID{}, r
	}
	c.end()
	return dev.uuid, cudadrv.Success
}

func (d driver) DeviceTotalMem(ord cudadrv.Device) (uintptr, cudadrv.Result) {
	c, _, r := d.beginDevice("cuDeviceTotalMem", ord)
	if r != cudadrv.Success {
		return 0, r
	}
	c.end()
	return d.m.cfg.Memory, cudadrv.Success
}

func (d driver) DeviceGetPCIBusID(ord cudadrv.Device) (string, cudadrv.Result) {
	c, dev, r := d.beginDevice("cuDeviceGetPCIBusId", ord)
	if r != cudadrv.Success {
		return "", r
	}
	c.end()
	return dev.BusID(), cudadrv.Success
}

func (d driver) DeviceCanAccessPeer(ord, peer cudadrv.Device) (int32, cudadrv.Result) {
	c, dev, r := d.beginDevice("cuDeviceCanAccessPeer", ord)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	switch other := d.m.Device(peer); other {
	case nil:
		return 0, cudadrv.ErrorInvalidDevice
	case dev:
		return 0, cudadrv.Success
	}
	return 1, cudadrv.Success
}

func (d driver) DeviceGetP2PAttribute(a cudadrv.P2PAttribute, src, dst cudadrv.Device) (int32, cudadrv.Result) {
	c, dev, r := d.beginDevice("cuDeviceGetP2PAttribute", src)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if other := d.m.Device(dst); other == nil || other == dev {
		return 0, cudadrv.ErrorInvalidDevice
	}
	slow := int32(0)
	if d.m.cfg.pcie(int(src), int(dst)) {
		slow = 1
	}
	switch a {
	case cudadrv.P2PPerformanceRank:
		return slow, cudadrv.Success
	case cudadrv.P2PAccessSupported:
		return 1, cudadrv.Success
	case cudadrv.P2PNativeAtomics:
		return 1 - slow, cudadrv.Success
	}
	return 0, cudadrv.ErrorInvalidValue
}

// pcie reports whether two devices are connected by PCIe.
func (c *Config) pcie(a, b int) bool {
	return slices.Contains(c.PCIe, [2]int{a, b}) || slices.Contains(c.PCIe, [2]int{b, a})
}

// DeviceGetAttribute returns the values of an H200, except those set by Config.
func (d driver) DeviceGetAttribute(a cudadrv.Attribute, ord cudadrv.Device) (int32, cudadrv.Result) {
	c, dev, r := d.beginDevice("cuDeviceGetAttribute", ord)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	switch a {
	case cudadrv.AttrMultiprocessorCount:
		return int32(d.m.cfg.SMs), cudadrv.Success
	case cudadrv.AttrPCIBusID:
		return 0x10 + dev.ordinal, cudadrv.Success
	}
	v, ok := attributes[a]
	if !ok {
		return 0, cudadrv.ErrorInvalidValue
	}
	return v, cudadrv.Success
}

var attributes = map[cudadrv.Attribute]int32{
	cudadrv.AttrMaxThreadsPerBlock:          maxThreadsPerBlock,
	cudadrv.AttrMaxSharedMemoryPerBlock:     maxSharedPerBlock,
	cudadrv.AttrWarpSize:                    warpSize,
	cudadrv.AttrClockRate:                   1980000,
	cudadrv.AttrPCIDeviceID:                 0,
	cudadrv.AttrMemoryClockRate:             3201000,
	cudadrv.AttrGlobalMemoryBusWidth:        6144,
	cudadrv.AttrL2CacheSize:                 62914560,
	cudadrv.AttrMaxThreadsPerMultiprocessor: maxThreadsPerSM,
	cudadrv.AttrPCIDomainID:                 0,
	cudadrv.AttrComputeCapabilityMajor:      9,
	cudadrv.AttrComputeCapabilityMinor:      0,
	cudadrv.AttrMaxSharedMemoryPerSM:        maxSharedPerSM,
	cudadrv.AttrCooperativeLaunch:           1,
	cudadrv.AttrMaxSharedMemoryOptin:        maxSharedOptin,
	cudadrv.AttrHostRegisterSupported:       1,
	cudadrv.AttrVMMSupported:                1,
	cudadrv.AttrPosixFDHandleSupported:      1,
	cudadrv.AttrGPUDirectRDMAWithVMM:        1,
	cudadrv.AttrMemoryPoolsSupported:        1,
}

// NVML reports the memory of the machine's devices and the process that uses
// them, but no temperature or clock, which virtual devices lack.
func (m *Machine) NVML() nvml.API { return telemetry{m} }

type telemetry struct{ m *Machine }

func (t telemetry) UUIDs() ([]string, error) {
	var uuids []string
	for _, d := range t.m.devices {
		uuids = append(uuids, uuidText(d.uuid))
	}
	return uuids, nil
}

func (t telemetry) MIG() (bool, error) { return false, nil }

func (t telemetry) Device(uuid string) (nvml.Device, error) {
	for _, d := range t.m.devices {
		if uuidText(d.uuid) == uuid {
			return deviceTelemetry{d}, nil
		}
	}
	return nil, fmt.Errorf("virtual: no device %s", uuid)
}

func uuidText(u cudadrv.UUID) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

type deviceTelemetry struct{ dev *Device }

func (deviceTelemetry) Utilization() (gpu, memory int, err error) { return 0, 0, noSensor() }
func (deviceTelemetry) Temperature() (int, error)                 { return 0, noSensor() }
func (deviceTelemetry) Power() (int, error)                       { return 0, noSensor() }
func (deviceTelemetry) SMClock() (int, error)                     { return 0, noSensor() }
func (deviceTelemetry) NVLinks() ([]bool, error)                  { return nil, noSensor() }

func noSensor() error { return &nvml.UnsupportedError{Need: "a GPU", Have: "virtual devices"} }

func (t deviceTelemetry) MemoryUsed() (uint64, error) {
	t.dev.m.mu.Lock()
	defer t.dev.m.mu.Unlock()
	return uint64(t.dev.arena.used), nil
}

// Processes lists this process while it has a context on the device, which no
// other process can use.
func (t deviceTelemetry) Processes() ([]nvml.Process, error) {
	t.dev.m.mu.Lock()
	defer t.dev.m.mu.Unlock()
	if t.dev.retained == 0 {
		return nil, nil
	}
	return []nvml.Process{{PID: os.Getpid(), Bytes: uint64(t.dev.arena.used)}}, nil
}

func (d driver) ProfilerStart() cudadrv.Result { return d.profile("cuProfilerStart", true) }

func (d driver) ProfilerStop() cudadrv.Result { return d.profile("cuProfilerStop", false) }

// profile records whether a profiler would collect data, and has no effect when
// repeated, as in CUDA.
func (d driver) profile(name string, on bool) cudadrv.Result {
	c, r := d.begin(name)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	c.dev.profiling = on
	return cudadrv.Success
}

// Profiling reports whether a profiler would collect data for a device.
func (m *Machine) Profiling(d cudadrv.Device) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	dev := m.Device(d)
	return dev != nil && dev.profiling
}
