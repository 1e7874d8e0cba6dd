package device

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// StartProfiler makes the profiler that the process runs under, such as Nsight Systems
// with --capture-range=cudaProfilerApi, collect from now on; it mirrors
// torch.cuda.profiler.start. Without a profiler, or if the profiler collects already, it
// does nothing. It creates the device's context, enqueues nothing, and returns at once. To
// exclude operations that are already enqueued, call Sync first.
func (d *Device) StartProfiler() error {
	return gpu.DeviceOf(d).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.ProfilerStart() })
}

// StopProfiler ends the collection that StartProfiler began; it mirrors
// torch.cuda.profiler.stop. Call Sync first, or operations that are still running are not
// collected.
func (d *Device) StopProfiler() error {
	return gpu.DeviceOf(d).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.ProfilerStop() })
}
