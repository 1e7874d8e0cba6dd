// Package dims has rules about the dimensions of tensors.
package dims

import "fmt"

// Wrap returns the dimension that dim means of n dimensions: a negative dim counts from
// the end (torch's maybe_wrap_dim). A tensor without dimensions counts as one with one.
func Wrap(dim, n int) (int, error) {
	n = max(1, n)
	if dim < -n || dim >= n {
		return 0, fmt.Errorf("dimension out of range (expected to be in range of [%d, %d], but got %d)", -n, n-1, dim)
	}
	if dim < 0 {
		dim += n
	}
	return dim, nil
}
