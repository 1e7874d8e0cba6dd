package tensor

// ChannelsLast reports whether the strides are torch's memory format channels_last, for
// four dimensions, or channels_last_3d, for five.
func (t Tensor) ChannelsLast() bool {
	a := t.at()
	n := len(a.Shape)
	if n != 4 && n != 5 || a.Strides[1] == 0 {
		return false
	}
	least := 0
	for _, d := range channelsLastOrder(n) {
		switch {
		case a.Shape[d] == 0 || a.Strides[d] < least:
			return false
		case d == 0 && least == a.Strides[1]:
			return false // ambiguous: all dimensions but the first are 1
		}
		least = a.Strides[d] * max(1, a.Shape[d])
	}
	return true
}

// channelsLastOrder returns the dimensions from the innermost to the outermost.
func channelsLastOrder(n int) []int {
	order := []int{1}
	for d := n - 1; d >= 2; d-- {
		order = append(order, d)
	}
	return append(order, 0)
}
