package strided

import "testing"

// HostBytes returns the memory of a host tensor from its first element on.
func HostBytes[T Tensor](t T) []byte {
	a := t.array()
	return a.all()
}

// The source of the kernels and its PTX.
var (
	Source = source
	Packed = packed
)

// SetTurnBytes lets pieces take turns in parts of another length, for a test.
func SetTurnBytes(t testing.TB, n int) {
	old := turnBytes
	turnBytes = n
	t.Cleanup(func() { turnBytes = old })
}

// SetEngineBytes lets copy engines take rows of other lengths, for a test.
func SetEngineBytes(t testing.TB, row, all int) {
	old := [2]int{engineRow, engineBytes}
	engineRow, engineBytes = row, all
	t.Cleanup(func() { engineRow, engineBytes = old[0], old[1] })
}

// Turns returns of which of some runs, of so many bytes, the parts are that one launch
// copies, in their order.
func Turns(runs ...int) (order []int) {
	b := &pieces{width: 4}
	for i, n := range runs {
		b.list = append(b.list, piece{to: uint64(i) << 40, rows: 1, row: n})
		b.bytes += n
	}
	t := new(pieceTable)
	t.fill(b)
	for _, to := range t.to[:t.count] {
		order = append(order, int(to>>40))
	}
	return order
}
