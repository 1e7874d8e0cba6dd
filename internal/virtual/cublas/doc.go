// Package cublas implements the interface of cuBLAS that Chorus uses, over the memory of
// virtual devices, with gonum's matrix products.
package cublas
