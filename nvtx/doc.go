// Package nvtx names what a program does for the profilers: ranges and marks
// that Nsight Systems draws beside the work of the GPU (torch.cuda.nvtx).
//
//	r := nvtx.Start("backward")
//	defer r.End()
//
// A profiler attaches itself by the variable NVTX_INJECTION64_PATH, which nsys
// sets; no library of NVIDIA's is needed besides. Without a profiler every
// function returns at once: it costs one atomic load and no allocation.
//
// Concurrency: all functions may be called by any goroutine, except for RangePush
// and RangePop, which belong to an OS thread.
package nvtx
