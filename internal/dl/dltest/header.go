package dltest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gochorus/chorus/internal/dl"
)

// headerFolders has where toolkits, distributions and wheels put headers.
var headerFolders = []string{
	"$CUDA_HOME/include", "$CUDA_PATH/include", "$CONDA_PREFIX/include",
	"/usr/local/cuda*/include", "/usr/include",
}

var headerWheels = []string{"cu13/include", "cuda_runtime/include", "cuda_nvrtc/include", "cublas/include", "nccl/include", "cufile/include"}

// A Header is an installed C header.
type Header struct {
	t    *testing.T
	path string
	text string
	dirs []string // directories of the header and its includes
}

// FindHeader finds an installed header and its includes, or skips the test.
func FindHeader(t *testing.T, name string, includes ...string) *Header {
	t.Helper()
	h := &Header{t: t}
	for _, n := range append([]string{name}, includes...) {
		found := dl.Files(&dl.Spec{Sonames: []string{n}, Folders: headerFolders, Wheels: headerWheels})
		if len(found) == 0 {
			t.Skipf("no header %s: checked only where a CUDA toolkit or NVIDIA's wheels are installed", n)
		}
		if h.path == "" {
			h.path = found[0]
		}
		if dir := filepath.Dir(found[0]); !slices.Contains(h.dirs, dir) {
			h.dirs = append(h.dirs, dir)
		}
	}
	b, err := os.ReadFile(h.path)
	if err != nil {
		t.Fatal(err)
	}
	h.text = string(b)
	return h
}

// Enum returns the enumerators and numeric macros whose names match, with their
// values.
func (h *Header) Enum(name string) map[string]int64 {
	out := map[string]int64{}
	re := regexp.MustCompile(`\b(` + name + `)\s*=?\s*(-?(?:0x)?[0-9a-fA-F]+)\b`)
	for _, m := range re.FindAllStringSubmatch(h.text, -1) {
		if v, err := strconv.ParseInt(m[2], 0, 64); err == nil {
			out[m[1]] = v
		}
	}
	return out
}

// Names returns the matches of the first group of a regular expression in the header.
func (h *Header) Names(expr string) []string {
	var out []string
	for _, m := range regexp.MustCompile(expr).FindAllStringSubmatch(h.text, -1) {
		if !slices.Contains(out, m[1]) {
			out = append(out, m[1])
		}
	}
	return out
}

// Mentions reports whether the header has the word.
func (h *Header) Mentions(word string) bool {
	return regexp.MustCompile(`\b` + regexp.QuoteMeta(word) + `\b`).MatchString(h.text)
}

// RequireResults checks that a result table has every matching enumerator of the header
// with its value.
func (h *Header) RequireResults(name string, table map[string]int64) {
	h.t.Helper()
	in := h.Enum(name)
	if len(in) == 0 {
		h.t.Fatalf("%s has no %s", h.path, name)
	}
	for c, v := range in {
		got, ok := table[c]
		if !ok {
			h.t.Errorf("%s = %d of %s is not in the table", c, v, h.path)
		} else if got != v {
			h.t.Errorf("%s is %d here and %d in %s", c, got, v, h.path)
		}
	}
}

// RequireValues compiles an assertion for each C constant expression: a name, a
// sizeof or an offsetof.
func (h *Header) RequireValues(values map[string]int64) {
	h.t.Helper()
	var b strings.Builder
	for c, v := range values {
		fmt.Fprintf(&b, "static_assert((long long)(%s) == %dLL, %q);\n", c, v, fmt.Sprintf("%s is not %d", c, v))
	}
	h.compile(b.String())
}

// prototypeC classifies the arguments of functions at compile time, in the letters of
// Signatures.
const prototypeC = `
#include <cstddef>
#include <type_traits>
// The width of the type that a pointer points at: 0 for void, char and opaque structs.
template<class P, class = void> struct width { static constexpr size_t value = 0; };
template<class P> struct width<P, std::void_t<decltype(sizeof(P))>> {
	static constexpr size_t value = std::is_void_v<P> || std::is_same_v<std::remove_cv_t<P>, char> ? 0 : sizeof(P);
};
template<class T> constexpr size_t pointee() { return width<std::remove_pointer_t<T>>::value; }
template<class A> constexpr bool fits(char kind, size_t size) {
	switch (kind) {
	case 'i': return sizeof(A) == 4 && !std::is_floating_point_v<A>;
	case 'w': return sizeof(A) == 8 && !std::is_floating_point_v<A>;
	case 'b': return sizeof(A) == 1;
	case 'S': return sizeof(A) == 128;
	case 'T': return sizeof(A) == 64;
	case 'f': return std::is_pointer_v<A>;
	case 's': return std::is_pointer_v<A>;
	case 'a': return std::is_pointer_v<A>;
	case 'p': return std::is_pointer_v<A>;
	case 'o': if constexpr (std::is_pointer_v<A>) return pointee<A>() == 0 || pointee<A>() == size; else return false;
	case 'O': if constexpr (std::is_pointer_v<A>) return pointee<A>() > 0 && pointee<A>() < size && size % pointee<A>() == 0; else return false;
	}
	return false;
}
struct arg { char kind; size_t size; };
template<class R> constexpr bool returns(char kind) {
	if constexpr (std::is_void_v<R>) return kind == '-';
	else if constexpr (std::is_pointer_v<R>) return kind == '*';
	else return sizeof(R) == (kind == '#' ? 8 : 4) && (kind == '#' || kind == 'i');
}
template<class R, class... A, size_t N> constexpr bool takes(R (*)(A...), const arg (&want)[N], char kind) {
	if (sizeof...(A) + 1 != N) return false;
	if (!returns<R>(kind)) return false;
	size_t i = 0;
	return (true && ... && (fits<A>(want[i].kind, want[i].size) && ++i));
}
`

// RequirePrototypes compiles a check of each signature against the function's
// declaration. Functions that the header does not declare are left out.
func (h *Header) RequirePrototypes(sigs Signatures) {
	h.t.Helper()
	b := strings.Builder{}
	b.WriteString(prototypeC)
	checked := 0
	code := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(h.text, "") // comments name functions of other headers
	var left []string
	for name, sig := range sigs {
		// A name with a version is declared under the plain one and a macro.
		if !regexp.MustCompile(`\b` + name + `\b`).MatchString(code) {
			left = append(left, name)
			continue
		}
		checked++
		kind, args := split(sig)
		fmt.Fprintf(&b, "static_assert(takes(%s, {", name)
		for i, a := range args {
			kind, size, _ := parse(a, i)
			fmt.Fprintf(&b, "{'%c', %d}, ", kind, size)
		}
		fmt.Fprintf(&b, "{0, 0}}, '%c'), %q);\n", kind, name+" does not take "+sig)
	}
	if len(left) > 0 {
		h.t.Logf("%s does not declare %s", h.path, strings.Join(left, ", "))
	}
	if checked == 0 {
		h.t.Fatalf("%s declares none of the functions", h.path)
	}
	h.compile(b.String())
}

// compile checks C++ source behind the header.
func (h *Header) compile(source string) {
	h.t.Helper()
	cxx := compiler(h.t, "c++", "g++", "clang++")
	src := filepath.Join(h.t.TempDir(), "check.cpp")
	// cuda.h declares only the newest version of each function without this.
	source = "#define __CUDA_API_VERSION_INTERNAL\n#include <cstddef>\n#include \"" + h.path + "\"\n" + source
	if err := os.WriteFile(src, []byte(source), 0o600); err != nil {
		h.t.Fatal(err)
	}
	args := []string{"-std=c++17", "-fsyntax-only", "-w"}
	for _, d := range h.dirs {
		args = append(args, "-isystem", d)
	}
	if out, err := exec.Command(cxx, append(args, src)...).CombinedOutput(); err != nil {
		h.t.Errorf("%s, against %s: %v\n%s", cxx, h.path, err, out)
	}
}
