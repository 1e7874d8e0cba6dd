// Package nvml reads telemetry and the list of GPUs from NVIDIA's management library
// (NVML), without starting CUDA.
//
// It uses go-nvml, which needs cgo. In a program built without cgo, or with the tag
// nonvml, Open returns an UnsupportedError. The library is opened at its first use.
package nvml
