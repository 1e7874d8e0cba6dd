// Package conformance tests implementations of the raw interfaces against the
// documented behaviour of CUDA, NCCL, cuBLAS and cuFile. Real libraries and virtual
// devices must pass it. The additional checks of the virtual devices are tested in their
// packages.
//
// Each test poisons its outputs, checks every element, and compares with a reference
// computed in float64 or in integers. NCCL runs all ranks in one process, and on virtual
// devices also each rank in its own process.
//
// The backends also agree on whole programs (program*_test.go): programs that are wrong on GPUs, and programs that
// look wrong and are right. Each runs in a process of its own over the public API, on virtual devices
// and, if there are GPUs, on CUDA. The tests compare how they end: virtual devices must not forgive what
// GPUs do not. A program is a row of a table, one table for each area. A process that does not
// end within the limit hangs. Virtual devices may report a hang as an error.
package conformance
