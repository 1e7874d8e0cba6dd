// Package nvml reads what NVIDIA's management library tells about GPUs:
// telemetry, and which GPUs there are, without starting CUDA.
//
// It goes by go-nvml, which needs cgo: a program that is built without it, or
// with the tag nonvml, gets an UnsupportedError from Open. The library itself is
// opened on first use.
package nvml
