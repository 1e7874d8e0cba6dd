package tsan

// Rounds returns n if the race detector watches this test binary, or all.
func Rounds(n, all int) int {
	if On {
		return n
	}
	return all
}
