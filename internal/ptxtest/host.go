package ptxtest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// HostShim lets a C++ compiler compile CUDA kernels as functions for one thread,
// selected by blockIdx and threadIdx.
const HostShim = `#include <cstdio>
#include <cstring>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
struct Dim { unsigned x; };
static Dim blockIdx, threadIdx;
template <class D, class S> static D bits_of(S s) { D d; memcpy(&d, &s, sizeof d); return d; }
static inline float __uint_as_float(unsigned u) { return bits_of<float>(u); }
static inline unsigned __float_as_uint(float f) { return bits_of<unsigned>(f); }
static inline float half_value(unsigned short b) { return (float)bits_of<_Float16>(b); }
static inline unsigned short half_bits(float f) { return bits_of<unsigned short>((_Float16)f); }
`

// Host compiles C++ for this machine and returns the program. It skips the test
// without a suitable compiler. Floating-point contraction is disabled, as in Go.
func Host(t *testing.T, code string, flags ...string) (program string) {
	t.Helper()
	cxx, err := exec.LookPath("g++")
	if err != nil {
		t.Skip("needs a C++ compiler, g++: ", err)
	}
	dir := t.TempDir()
	file, program := filepath.Join(dir, "host.cc"), filepath.Join(dir, "host")
	if err := os.WriteFile(file, []byte(code), 0o644); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"-std=c++17", "-O1", "-ffp-contract=off"}, flags...)
	out, err := exec.Command(cxx, append(args, "-o", program, file)...).CombinedOutput()
	if bytes.Contains(out, []byte("has no _Float16")) || bytes.Contains(out, []byte("_Float16’ was not declared")) {
		t.Skip("needs a C++ compiler with _Float16")
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}
