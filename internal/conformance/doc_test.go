// Package conformance tests implementations of the raw interfaces against the
// documented behaviour of CUDA, NCCL, cuBLAS and cuFile. Real libraries and virtual
// devices must pass it. The additional checks of the virtual devices are tested in their
// packages.
//
// Each test poisons its outputs, checks every element, and compares with a reference
// computed in float64 or in integers. NCCL runs all ranks in one process, and on virtual
// devices also each rank in its own process.
package conformance
