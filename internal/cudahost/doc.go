// Package cudahost compiles CUDA kernels as C++ for the host and runs them, with a fiber for
// each GPU thread. It needs g++. Kernels may use barriers, shuffles, atomic operations and
// shared memory; blocks run one after the other, so they cannot wait for each other. CUDA's
// headers and PTX are not available.
package cudahost
