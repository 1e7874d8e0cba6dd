// Package blas implements the interfaces of cuBLAS and cuBLASLt that Chorus uses, over the
// memory of virtual devices, with gonum's matrix products. cuBLASLt supports the products that a
// Hopper GPU supports, except some that the documentation leaves unclear:
//
//   - Inputs of one type, or a mix of float8_e4m3fn and float8_e5m2, with the outputs that
//     supported lists.
//   - 8-bit floats need a transposed A, a B that is not, and multiples of 16.
//   - Outputs must not share memory with inputs, workspaces need 256-byte alignment, and
//     pointers need the alignment that the algorithm was chosen with.
//
// Rounding: inputs are widened exactly, multiplied and added in float32 (float64 for
// float64, float16 after each addition for the compute type of 16 bits). Inputs of TF32
// products are rounded to TF32 first. An algorithm that splits k adds the parts in float32;
// with the reduction scheme of the output type each part is rounded to that type. Each step
// of the epilogue is rounded to float32. The result is rounded once to the output type, and
// saturates for 8-bit floats.
package blas
