package kernel

import (
	"testing"

	"github.com/stretchr/testify/require"
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
