// Package tensor gives memory a shape: views, copies between any two layouts,
// types and devices, and matrix products.
//
//	x, err := tensor.Make(s, memory.Float32, 64, 128) // 64 rows of 128
//	defer x.Close()
//	half, err := x.Narrow(1, 0, 64)                   // the first 64 columns, no copy
//	y, err := tensor.Make(s, memory.BFloat16, 64, 64)
//	err = tensor.Copy(s, y, half)                     // packed and rounded, on s
//	err = tensor.MatMul(s, c, a, b.T(), nil)          // c = a·bᵀ
//
// A Tensor is a small immutable value. Its element type is known at run time, as
// in torch. Its memory is a device's, or the host's: a Go slice (OfHost) or pinned
// memory (OfPinned). Names and rules of views are torch's: a negative dimension
// counts from the end, a tensor without dimensions has one element, and dimensions
// may be 0.
//
// Ownership: memory that Make and similar functions allocated belongs to the tensors that
// Make and Retain returned, and is freed when the last of these tensors is closed. All other
// tensors borrow their memory: views, copies of the value, and tensors of Of, whose memory
// belongs to the slice. Close of a borrowing tensor does nothing; using it after the
// memory was freed is an error that matches device.ErrClosed.
//
// Concurrency: tensors may be used by several goroutines.
package tensor
