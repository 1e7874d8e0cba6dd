package machine

import "github.com/gochorus/chorus/internal/cudadrv"

func (d driver) ProfilerStart() cudadrv.Result { return d.profile("cuProfilerStart", true) }

func (d driver) ProfilerStop() cudadrv.Result { return d.profile("cuProfilerStop", false) }

// profile records whether a profiler would collect data. As in CUDA, repeated
// calls have no effect.
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
