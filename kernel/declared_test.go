package kernel

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

func TestDeclarations(t *testing.T) {
	all := declarations(`
#include <cuda_fp16.h>
typedef struct { float a, b; } pair; // __global__ void comment(float* x)
extern "C" __global__ void __launch_bounds__(128, 2) plain(float* y, const double *__restrict__ x, float a, unsigned long long n) {}
extern "C" __global__ void __launch_bounds__(THREADS)
types(void* v, pair* p, const unsigned char *b, half* h, float4* f, int64_t *l, size_t n, pair q, float x[], float z[3], int**pp, long unsigned int u,
	const unsigned *) { if (a) { f(); } }
extern "C" __global__ void none() {}
extern "C" __global__ void macro(LIST(float, x)) {}
template <typename T> __global__ void generic(Pair<T, T> x) {}
# 	define  MORE , int k
#defined x
int my__global__ (int x), __global__s(int y), __global____global__(int z); int a = 4 / 2; /* __global__ void remark(int x) //
*/ extern "C" __global__ void divided(int x) {} /* open
extern "C" __global__ void defined(float* x, int n MORE) {}
extern "C" __global__ void header(LINKS, float* x) {}
#ifdef A
extern "C" __global__ void twice(float* x) {}
#else
extern "C" __global__ void twice(double* x) {}
#endif
`)
	for _, none := range []string{"comment", "remark", "my__global__", "s", "__global__"} {
		require.NotContains(t, all, none)
	}
	require.Len(t, all["divided"], 1)
	for _, unknown := range []string{"macro", "generic", "twice", "defined", "header"} {
		require.Nil(t, all[unknown], unknown)
	}
	require.Equal(t, []declared{}, all["none"])
	require.Equal(t, []declared{
		{"float* y", true, []memory.DType{memory.Float32}, "y", false, 0},
		{"const double *__restrict__ x", true, []memory.DType{memory.Float64}, "x", true, 0},
		{"float a", false, []memory.DType{memory.Float32}, "a", false, 0},
		{"unsigned long long n", false, bytes8, "n", false, 0},
	}, all["plain"])
	var types [][]memory.DType
	var names []string
	for _, p := range all["types"] {
		types = append(types, p.types)
		names = append(names, p.name)
	}
	require.Equal(t, []string{"v", "p", "b", "h", "f", "l", "n", "q", "x", "z", "pp", "u", ""}, names)
	require.Equal(t, [][]memory.DType{nil, nil, bytes1, half, {memory.Float32}, bytes8, bytes8, nil, {memory.Float32}, nil, nil, bytes8, bytes4}, types)
}

func TestWithoutComments(t *testing.T) {
	for code, want := range map[string]string{
		"":                      "",
		"a / b /":               "a / b /",
		"a // b\nc":             "a  \nc",
		"a //":                  "a  ",
		"a /* b // \n */ c":     "a   c",
		"a /*/ b */ c":          "a   c",
		"a /* b":                "a /* b",
		"a /* // b\nc":          "a /*  \nc",
		"//* a\n/**/ b /***/ c": " \n  b   c",
	} {
		require.Equal(t, want, withoutComments(code), code)
	}
}

func TestPointerToConst(t *testing.T) {
	for text, want := range map[string]bool{
		"const float* x": true, "float const* x": true, "const float x[3]": true, "const T *__restrict__ const x": true,
		"float* x": false, "float* const x": false, "const int n": false, "const float** x": false, "constant* x": false,
	} {
		require.Equal(t, want, pointerToConst(text), text)
	}
}
