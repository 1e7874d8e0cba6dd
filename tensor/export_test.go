package tensor

// Shares reports whether two operands of a product share memory.
func Shares(x, y Tensor) bool { return shares(&x, &y) }

// SharesWithin reports whether elements of a tensor may share memory.
func SharesWithin(x Tensor) bool { return sharesWithin(&x) }
