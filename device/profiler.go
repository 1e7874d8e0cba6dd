package device

import "github.com/gochorus/chorus/internal/cudadrv"

// StartProfiler lets the profiler that the process runs under, such as Nsight
// Systems with --capture-range=cudaProfilerApi, collect from now on; it mirrors
// torch.cuda.profiler.start. Without a profiler, and where it collects already,
// it does nothing. It creates the device's context, enqueues nothing, and
// returns at once: Sync first where what is enqueued by now should stay out.
func (d *Device) StartProfiler() error {
	return d.DoRelaxed("cuProfilerStart", func(drv cudadrv.Driver) cudadrv.Result { return drv.ProfilerStart() })
}

// StopProfiler ends what StartProfiler began; it mirrors
// torch.cuda.profiler.stop. Sync first, or work that is still on its way is
// not collected.
func (d *Device) StopProfiler() error {
	return d.DoRelaxed("cuProfilerStop", func(drv cudadrv.Driver) cudadrv.Result { return drv.ProfilerStop() })
}
