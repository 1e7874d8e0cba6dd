package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

func TestDefinitions(t *testing.T) {
	all := definitions(`
#define THREADS 128
#define TWICE (2 * THREADS)
#define COLUMNS 32
constexpr int rows = COLUMNS + 1;
extern "C" __global__ void __launch_bounds__(THREADS) bounds(float* x) {}
extern "C" __global__ __launch_bounds__(TWICE, 2) void twice(float* x) {}
extern "C" __global__ void __launch_bounds__(sizeof(int)) unknown(float* x) {}
extern "C" __global__ void shared(float* x) {
	__shared__ float tile[COLUMNS][rows];
	if (x) { __shared__ double one[2]; __shared__ float4 vectors[ 3 ]; }
	float local[100];
}
extern "C" __global__ void dynamic(float* x) { extern __shared__ float room[]; __shared__ int n[1]; }
extern "C" __global__ void local(float* x) { float room[150000]; float small[100000]; }
__global__ void plain(float* x) {}
template <class T> __global__ void generic(T* x) {}
extern "C" {
struct s { int x; };
__global__ void inside(float* x) { if (x) { } }
static __global__ void also(float* x) {}
}
__global__ void outside(float* x) {}
#define KERNEL extern "C" __global__ void
KERNEL macro(float* x) {}
#define LINKAGE extern "C"
LINKAGE __global__ void linked(float* x) {}
extern "C" __global__ void declared(float* x);
__global__ void declared(float* x) {}
`)
	require.Equal(t, machine.Limits{MaxThreads: 128}, all["bounds"].limits)
	require.Equal(t, machine.Limits{MaxThreads: 256}, all["twice"].limits)
	require.Equal(t, machine.Limits{}, all["unknown"].limits)
	require.Equal(t, machine.Limits{SharedBytes: 32*33*4 + 16 + 48}, all["shared"].limits)
	require.False(t, all["shared"].dynamic)
	require.Equal(t, machine.Limits{SharedBytes: 4}, all["dynamic"].limits)
	require.True(t, all["dynamic"].dynamic)
	require.Equal(t, machine.Limits{LocalBytes: 600000}, all["local"].limits)
	for name, mangled := range map[string]bool{"plain": true, "generic": true, "outside": true, "bounds": false, "inside": false, "also": false,
		"macro": false, "linked": false, "declared": false} {
		require.Equal(t, mangled, all[name].mangled, name)
	}
}

// The types of parameters may have other names.
func TestTypeNames(t *testing.T) {
	all := declarations(`
typedef double real;
using count = unsigned int;
typedef real number;
typedef struct { int x; } pair;
#ifdef HALF
typedef half maybe;
#else
typedef float maybe;
#endif
extern "C" __global__ void f(real a, const number* b, count n, pair p, maybe m, maybe* q) {}
extern "C" __global__ void v(float4* a, const double2* b, uchar4* c, float3* d, float* e) {}
`)
	var types [][]memory.DType
	for _, p := range all["f"] {
		types = append(types, p.types)
	}
	require.Equal(t, [][]memory.DType{{memory.Float64}, {memory.Float64}, bytes4, nil, nil, nil}, types)
	var aligns []int
	for _, p := range all["v"] {
		aligns = append(aligns, p.align)
	}
	require.Equal(t, []int{16, 16, 4, 0, 0}, aligns)
}

func TestCheckText(t *testing.T) {
	for _, options := range [][]string{nil, {"-DX=1", "-I", "/a", "--use_fast_math", "--fmad=false", "-lineinfo", "--include-path=/b", "-std=c++20", "-I/c"}} {
		require.NoError(t, (&Source{Options: options, CUDA: "#include <cuda_fp16.h>\n#include <cuda/std/atomic>\n// #include \"none.h\"\n"}).checkText())
	}
	err := (&Source{Name: "a.cu", Options: []string{"--fast"}}).checkText()
	require.ErrorIs(t, err, cudacc.ErrorInvalidOption)
	require.ErrorContains(t, err, `kernel: compile a.cu: NVRTC_ERROR_INVALID_OPTION: "--fast" is not an option of NVRTC`)
	err = (&Source{Name: "a.cu", CUDA: "#include \"mine/none.h\"\n"}).checkText()
	require.ErrorIs(t, err, cudacc.ErrorCompilation)
	require.ErrorContains(t, err, `cannot open source file "mine/none.h"`)
}

// cubin returns a binary with the kernels f and g.
func cubin(t *testing.T) []byte {
	t.Helper()
	info := func(format, attr byte, words ...uint32) []byte {
		b := binary.LittleEndian.AppendUint16([]byte{format, attr}, uint16(4*len(words)))
		for _, w := range words {
			b = binary.LittleEndian.AppendUint32(b, w)
		}
		return b
	}
	names := []string{"", ".symtab", ".strtab", ".nv.info", ".nv.info.f", ".text.f", ".nv.shared.f", ".text.g", ".nv.constant3"}
	strtab := []byte("\x00f\x00g\x00")
	var symtab bytes.Buffer
	for _, s := range []elf.Sym64{{}, {Name: 1}, {Name: 3}} {
		require.NoError(t, binary.Write(&symtab, binary.LittleEndian, s))
	}
	contents := [][]byte{nil, symtab.Bytes(), strtab, bytes.Join([][]byte{info(4, 0x2f, 1, 168), info(4, 0x2f, 2, 24), info(4, 0x11, 1, 400), {1, 0x1d, 0, 0}}, nil),
		info(4, 0x05, 64, 2, 1), make([]byte, 128), nil, make([]byte, 128), make([]byte, 12)}
	var image, shstr bytes.Buffer
	image.Write(make([]byte, 64))
	sections := make([]elf.Section64, len(names)+1)
	for i, name := range names {
		h := &sections[i]
		h.Name, h.Off, h.Size, h.Type = uint32(shstr.Len()), uint64(image.Len()), uint64(len(contents[i])), uint32(elf.SHT_PROGBITS)
		shstr.WriteString(name + "\x00")
		image.Write(contents[i])
	}
	sections[0] = elf.Section64{}
	sections[1].Type, sections[1].Link, sections[1].Entsize = uint32(elf.SHT_SYMTAB), 2, 24
	sections[2].Type = uint32(elf.SHT_STRTAB)
	sections[6].Type, sections[6].Size = uint32(elf.SHT_NOBITS), 41024
	sections[len(names)] = elf.Section64{Name: uint32(shstr.Len()), Type: uint32(elf.SHT_STRTAB), Off: uint64(image.Len()), Size: uint64(shstr.Len()) + 10}
	shstr.WriteString(".shstrtab\x00")
	image.Write(shstr.Bytes())
	at := uint64(image.Len())
	require.NoError(t, binary.Write(&image, binary.LittleEndian, sections))
	var head bytes.Buffer
	require.NoError(t, binary.Write(&head, binary.LittleEndian, elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT), 0x33},
		Type:  uint16(elf.ET_EXEC), Machine: 190, Version: 0x82, Shoff: at, Ehsize: 64, Shentsize: 64, Shnum: uint16(len(sections)), Shstrndx: uint16(len(names)),
	}))
	return append(head.Bytes(), image.Bytes()[64:]...)
}

// A binary has the registers, the memory and the bounds of its kernels.
func TestCubinLimits(t *testing.T) {
	data := cubin(t)
	for arch, shared := range map[int]int{80: 41024, 90: 40000, 100: 40000} {
		limits, err := cubinLimits(data, arch)
		require.NoError(t, err)
		require.Equal(t, map[string]machine.Limits{
			"f": {MaxThreads: 128, Registers: 168, LocalBytes: 400, SharedBytes: shared, ConstBytes: 12},
			"g": {Registers: 24, ConstBytes: 12},
		}, limits, "sm_%d", arch)
	}
	for n := range len(data) { // a damaged file is an error, or has fewer limits
		_, _ = cubinLimits(data[:n], 90)
	}
	_, err := cubinLimits([]byte("PTX"), 90)
	require.Error(t, err)
}

// With NVRTC a mistake that it finds is an error, and the binary has the limits. A compiler that is
// too old for the device makes PTX, which has none.
func TestCompiledLimits(t *testing.T) {
	declared := map[string]machine.Limits{"f": {MaxThreads: 7}}
	src := func(names ...string) *Source {
		s := &Source{Name: "a.cu", CUDA: "code"}
		for _, n := range names {
			s.Kernels = append(s.Kernels, Def{Name: n})
		}
		return s
	}
	c, f := fakeCompiler(t.TempDir())
	f.image = cubin(t)
	limits, err := c.limits(src("f", "g"), declared)
	require.NoError(t, err)
	require.Equal(t, 168, limits["f"].Registers)
	_, err = c.limits(src("f", "h"), declared)
	require.ErrorContains(t, err, `kernel: find h in a.cu: the binary has no kernel of this name: declare it extern "C" __global__`)
	f.log = "a.cu(1): error: what"
	_, err = c.limits(&Source{Name: "b.cu"}, declared)
	require.ErrorIs(t, err, cudacc.ErrorCompilation)
	f.log, c.arch = "", 89
	limits, err = c.limits(src("f"), declared)
	require.NoError(t, err)
	require.Equal(t, declared, limits)
}

// Only a missing NVRTC makes virtual devices rely on declarations: another error is returned.
func TestErrorBeforeCompilation(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuDeviceGetAttribute#2=CUDA_ERROR_INVALID_HANDLE"})[0]
	_, err := limitsOfVirtual(dev, &Source{Name: "a.cu", CUDA: "code"}, nil)
	if _, e := gpu.DeviceOf(dev).System().NVRTC(); e != nil {
		require.ErrorIs(t, e, errors.ErrUnsupported)
		require.NoError(t, err)
		return
	}
	require.ErrorIs(t, err, device.ErrorInvalidHandle)
}
