// Package strided copies and adds memory that has a shape and strides: layouts, copies
// between any two layouts, types and devices, many copies in one launch, and sums of many
// arrays.
//
// Package tensor is its face for users. A tensor.Tensor embeds a Ref, so that [Of] finds
// its Array, and users see neither the field nor its method. Errors begin with "tensor:",
// the package that users call.
package strided
