// Package kernels has the kernels of the small GPT that examples/gpt trains: embedding, layer
// norm, causal attention, GELU, cross-entropy, and their gradients. kernels.cu is their CUDA
// source, and standin.go the Go functions that virtual devices run in its place.
package kernels
