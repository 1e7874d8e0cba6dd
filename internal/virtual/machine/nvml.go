package machine

import (
	"fmt"
	"os"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/nvml"
)

// NVML reports the memory of the machine's devices and the process that uses
// them. Virtual devices have no temperature and no clock.
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

// Processes lists this process while it has a context on the device. No other
// process can use the device.
func (t deviceTelemetry) Processes() ([]nvml.Process, error) {
	t.dev.m.mu.Lock()
	defer t.dev.m.mu.Unlock()
	if t.dev.retained == 0 {
		return nil, nil
	}
	return []nvml.Process{{PID: os.Getpid(), Bytes: uint64(t.dev.arena.used)}}, nil
}
