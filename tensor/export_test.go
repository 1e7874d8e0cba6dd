package tensor

// Shares reports whether two operands of a product share memory.
func Shares(x, y Tensor) bool { return shares(&x, &y) }

// SharesWithin reports whether elements of a tensor may share memory.
func SharesWithin(x Tensor) bool { return sharesWithin(&x) }

// Owned reports whether the memory is freed by Close of the last reference, and does not
// belong to a slice.
func (t Tensor) Owned() bool { return t.at().Owned() }
