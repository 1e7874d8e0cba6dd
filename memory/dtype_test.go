package memory_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

// What is too large is answered as torch's casts do.
func TestFloatsTooLarge(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, x := range []struct {
		x    float32
		want string // as the four types
	}{
		{0, "0 0 0 0"}, {-1.5, "-1.5 -1.5 -1.5 -1.5"}, {0.1, "0.099975586 0.100097656 0.1015625 0.09375"},
		{448, "448 448 448 448"}, {464, "464 464 448 448"}, {465, "465 464 NaN 448"},
		{57344, "57344 57344 NaN 57344"}, {61439, "61440 61440 NaN 57344"}, {-61440, "-61440 -61440 NaN -Inf"},
		{65519, "65504 65536 NaN +Inf"}, {65520, "+Inf 65536 NaN +Inf"},
		{math.MaxFloat32, "+Inf +Inf NaN +Inf"}, {-inf, "-Inf -Inf NaN -Inf"}, {float32(math.NaN()), "NaN NaN NaN NaN"},
	} {
		got := fmt.Sprint(memory.Float16Of(x.x), memory.BFloat16Of(x.x), memory.Float8E4M3Of(x.x), memory.Float8E5M2Of(x.x))
		require.Equal(t, x.want, got, "%g", x.x)
	}
}

// TestFloatsComeBack converts every number of each type to float32 and back.
func TestFloatsComeBack(t *testing.T) {
	comeBack(t, 1<<16, memory.Float16Bits.Float32, memory.Float16Of)
	comeBack(t, 1<<16, memory.BFloat16Bits.Float32, memory.BFloat16Of)
	comeBack(t, 1<<8, memory.Float8E4M3Bits.Float32, memory.Float8E4M3Of)
	comeBack(t, 1<<8, memory.Float8E5M2Bits.Float32, memory.Float8E5M2Of)
}

func comeBack[T ~uint8 | ~uint16](t *testing.T, patterns int, number func(T) float32, of func(float32) T) {
	t.Helper()
	nans := 0
	for q := range patterns {
		x := number(T(q))
		back := of(x)
		switch {
		case x != x:
			if nans++; number(back) == number(back) {
				t.Fatalf("%#x is NaN and comes back as %g", q, number(back))
			}
		case back != T(q):
			t.Fatalf("%#x is %g and comes back as %#x", q, x, back)
		}
	}
	require.Positive(t, nans)
}
