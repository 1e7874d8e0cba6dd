// Package cudacc turns CUDA C++ into programs.
//
// NVRTC, the run-time compiler, makes programs for GPUs. The part that package kernel needs is bound here.
//
// The Chorus kernels are stored as PTX, the driver's portable assembly, so that
// no compiler is needed at run time. An archive maps digests of sources to PTX texts,
// and each text has the lowest PTX version that its content permits.
//
// CompileHost compiles kernels as C++ for the host, with g++, and a HostProgram runs them, with a fiber for
// each GPU thread. Kernels may use barriers, shuffles, atomic operations and
// shared memory; blocks run one after the other, so they cannot wait for each other. CUDA's
// headers and PTX are not available, but src/cores.h has functions for tensor cores.
package cudacc
