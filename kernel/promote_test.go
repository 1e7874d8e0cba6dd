package kernel

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/memory"
)

// The rules that torch states for its table: bool, integers and floats are
// categories, the higher of which wins; within one the wider type wins; signed
// and unsigned bytes meet in int16, and the two 16-bit floats in float32.
func TestPromoteFollowsTheRules(t *testing.T) {
	category := func(d memory.DType) int {
		switch {
		case d == memory.Bool:
			return 0
		case element.IsFloat(d):
			return 2
		}
		return 1
	}
	for _, a := range promoted {
		for _, b := range promoted {
			got, err := Promote(a, b)
			require.NoError(t, err)
			back, err := Promote(b, a)
			require.NoError(t, err)
			require.Equal(t, got, back, "%s and %s", a, b)
			want := a
			switch ca, cb := category(a), category(b); {
			case ca < cb:
				want = b
			case ca > cb || a == b:
			case a.Size() < b.Size():
				want = b
			case a.Size() == b.Size() && ca == 1:
				want = memory.Int16
			case a.Size() == b.Size():
				want = memory.Float32
			}
			require.Equal(t, want, got, "%s and %s", a, b)
		}
	}
}

// Rows of torch's documentation of torch.result_type and torch.promote_types.
func TestResultType(t *testing.T) {
	const none = memory.Invalid
	for _, c := range []struct{ arrays, numbers, want memory.DType }{
		{memory.Int32, memory.Float64, memory.Float32}, // torch.result_type(torch.tensor([1, 2], dtype=torch.int), 1.0)
		{memory.Uint8, memory.Int64, memory.Uint8},
		{memory.Bool, memory.Int64, memory.Int64},
		{memory.Bool, memory.Float64, memory.Float32},
		{memory.Bool, memory.Bool, memory.Bool},
		{memory.Float16, memory.Float64, memory.Float16},
		{memory.BFloat16, memory.Int64, memory.BFloat16},
		{memory.Float64, memory.Float64, memory.Float64},
		{memory.Int8, memory.Bool, memory.Int8},
		{memory.Uint32, memory.Int64, memory.Uint32},
		{memory.Uint32, memory.Float64, memory.Float32},
		{none, memory.Int64, memory.Int64},
		{none, memory.Float64, memory.Float32},
		{memory.Float32, none, memory.Float32},
	} {
		got, err := resultType(c.arrays, c.numbers)
		require.NoError(t, err)
		require.Equal(t, c.want, got, "slices of %s and numbers of %s", c.arrays, c.numbers)
	}
	for _, c := range [][2]memory.DType{{memory.Uint16, memory.Int32}, {memory.Uint64, memory.Uint32}, {memory.Bool, memory.Uint16},
		{memory.Float8E4M3, memory.Float32}, {memory.Float8E5M2, memory.Int8}} {
		_, err := Promote(c[0], c[1])
		require.ErrorContains(t, err, "numbers of both "+c[0].String()+" and "+c[1].String())
	}
	got, err := Promote(memory.Uint64, memory.BFloat16)
	require.NoError(t, err)
	require.Equal(t, memory.BFloat16, got)
}

func TestCanCast(t *testing.T) {
	for _, c := range []struct {
		from, to memory.DType
		want     bool
	}{
		{memory.Float64, memory.Int64, false}, {memory.Float64, memory.Float16, true}, {memory.Int64, memory.Float16, true},
		{memory.Int64, memory.Int8, true}, {memory.Int8, memory.Bool, false}, {memory.Bool, memory.Bool, true},
		{memory.Bool, memory.Int8, true}, {memory.Float16, memory.Bool, false},
	} {
		require.Equal(t, c.want, CanCast(c.from, c.to), "%s to %s", c.from, c.to)
	}
}
