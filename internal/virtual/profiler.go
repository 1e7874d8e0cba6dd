package virtual

import "github.com/gochorus/chorus/internal/cudadrv"

func (d driver) ProfilerStart() cudadrv.Result { return d.profile("cuProfilerStart", true) }

func (d driver) ProfilerStop() cudadrv.Result { return d.profile("cuProfilerStop", false) }

// profile remembers whether a profiler would collect. As in CUDA, saying it
// twice has no effect.
func (d driver) profile(name string, on bool) cudadrv.Result {
	c, r := d.begin(name)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	c.dev.profiling = on
	return cudadrv.Success
}

// Profiling reports whether a profiler would collect what a device does.
func (m *Machine) Profiling(d cudadrv.Device) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	dev := m.device(d)
	return dev != nil && dev.profiling
}
