// Package nvtx annotates a program for profilers with ranges and marks, which
// Nsight Systems shows next to the work of the GPU (torch.cuda.nvtx).
//
//	r := nvtx.Start("backward")
//	defer r.End()
//
// A profiler attaches through the variable NVTX_INJECTION64_PATH, which nsys
// sets; no library of NVIDIA is needed. The timeline of package timeline shows the
// ranges and marks, too. Without a profiler and a timeline, a call costs two
// atomic loads and does not allocate memory.
//
// Concurrency: all functions are safe for concurrent use. RangePush and RangePop
// apply to the calling OS thread.
package nvtx
