// Package tensor gives device memory a shape: views, and matrix products.
//
//	a, err := tensor.Of(x, 64, 128) // 64 rows of 128, row-major
//	b, err := tensor.Of(y, 32, 128)
//	c, err := tensor.Of(z, 64, 32)
//	err = tensor.MatMul(s, c, a, b.T(), nil) // c = a·bᵀ, enqueued on s
//
// A Tensor is a view: it owns no memory and is not closed. Its element type is
// known at run time, as in torch.
//
// Concurrency: tensors are immutable values.
package tensor
