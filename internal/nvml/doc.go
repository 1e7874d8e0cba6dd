// Package nvml reads telemetry, the health and the list of GPUs from NVIDIA's management library
// (NVML), without starting CUDA.
//
// Two bindings make the same calls: go-nvml in programs built with cgo, and internal/dl in
// the others and in those with the tag nonvml. The library is opened at its first use.
package nvml
