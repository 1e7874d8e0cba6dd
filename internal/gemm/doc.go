// Package gemm enqueues matrix products on streams with cuBLASLt and cuBLAS.
//
// Each stream keeps descriptors and algorithms of its latest products, a workspace from the
// caching allocator, and a handle of cuBLAS if one was needed. A product that the stream has
// had before, with other addresses of the same alignment, costs a look-up and the library's
// call, and allocates nothing. The algorithms that were chosen or tuned belong to the device.
//
// cuBLASLt computes every product. If it is missing, or has no algorithm for a product, cuBLAS
// computes those without epilogues, scales and separate inputs for beta.
package gemm
