package kernel

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/memory"
)

func TestParse(t *testing.T) {
	for code, want := range map[string]signature{
		"template <typename T> T f(T x) { return x; }": {name: "f", byReturn: true, params: []parameter{{"x", input}}},
		"// template <typename T> T no(T x) {\ntemplate<class T>\n__device__ inline T\ng ( const T x , T const& y, double z )\n{ return x; }": {
			name: "g", byReturn: true, params: []parameter{{"x", input}, {"y", input}, {"z", input}}},
		"template <typename T> T help(T a) { return a; }\ntemplate <typename T> void h(T& out, T x, T& rest) {}": {
			name: "h", params: []parameter{{"out", output}, {"x", input}, {"rest", output}}},
		"template <typename T> T f(const T& x) { return x; }": {name: "f", byReturn: true, params: []parameter{{"x", input}}},
	} {
		got, err := parse(code)
		require.NoError(t, err, code)
		require.Equal(t, &want, got, code)
	}
	for code, want := range map[string]string{
		"":                               "there is no function template",
		"float f(float x) { return x; }": "there is no function template",
		"/* template <typename T> T f(T x) { return x; } */":       "there is no function template",
		"template <typename T, typename U> T f(T x) { return x; }": "f is a template of <typename T, typename U>",
		"template <int n> int f(int x) { return x; }":              "f is a template of <int n>",
		"template <typename T> T f(T x);":                          "f has no body",
		"template <typename T> T f(T x":                            "f has no body",
		"template <typename T> T f(T) { return 1; }":               `parameter 0 of f, "T": it has no type or no name`,
		"template <typename T> T f() { return 1; }":                "has no type or no name",
		"template <typename T> T f(T* x) { return *x; }":           `"T* x": want T x`,
		"template <typename T> T f(T x = 1) { return x; }":         "want T x",
		"template <typename T> T f(T x, T& y) { return x; }":       "f returns a result and has outputs",
		"template <typename T> void f(T x) {}":                     "f returns nothing and has no output",
	} {
		_, err := parse(code)
		require.ErrorContains(t, err, want, code)
	}
}

// The rules that torch states for its table: bool, integers and floats are
// categories, the higher of which wins; within one the wider type wins; signed
// and unsigned bytes meet in int16, and the two 16-bit floats in float32.
func TestPromoteFollowsTheRules(t *testing.T) {
	category := func(d memory.DType) int {
		switch {
		case d == memory.Bool:
			return 0
		case dtype.Of(d).IsFloat():
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
