// Package conformance tests an implementation of the raw interfaces against
// what CUDA, NCCL, cuBLAS and cuFile promise. Real libraries pass it and the virtual
// devices do; what the virtual devices refuse beyond that is tested with them.
//
// Each test poisons its outputs, looks at each element, and compares with a
// reference computed here in float64 or in integers. NCCL has its ranks in one
// process; with Rank each has its own.
package conformance
