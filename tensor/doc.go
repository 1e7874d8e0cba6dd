// Package tensor gives memory a shape: views, copies between any two layouts,
// types and devices, and matrix products.
//
//	x, err := tensor.Make(s, memory.Float32, 64, 128) // 64 rows of 128
//	defer x.Close()
//	half, err := x.Narrow(1, 0, 64)                   // the first 64 columns, no copy
//	y, err := tensor.Make(s, memory.BFloat16T, 64, 64)
//	err = tensor.Copy(s, y, half)                     // packed and rounded, on s
//	err = tensor.MatMul(s, c, a, b.T(), nil)          // c = a·bᵀ
//
// A Tensor is a small immutable value. Its element type is known at run time, as
// in torch. Its memory is a device's, or the host's: a Go slice (OfHost) or pinned
// memory (OfPinned). Names and rules of views are torch's: a negative dimension
// counts from the end, a tensor without dimensions has one element, and dimensions
// may be 0.
//
// Ownership: memory that Make and its like allocated belongs to the tensors that
// Make and Retain returned, and goes back when the last of them is closed. All
// others borrow: views, copies of the value, and what Of made of a slice, whose
// memory stays the slice's. Close of one that borrows does nothing; using one
// after the memory went back is an error that matches device.ErrClosed.
//
// Concurrency: tensors may be used by several goroutines.
package tensor
