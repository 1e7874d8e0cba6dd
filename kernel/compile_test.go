package kernel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/nvrtcapi"
)

// The program has the source as it is, so that lines in messages are the
// user's, and the options in their order.
func TestCompilerInput(t *testing.T) {
	c, f := fakeCompiler(t.TempDir())
	_, err := c.binary(&Source{Name: "a.cu", CUDA: "code", Options: []string{"-DX"}})
	require.NoError(t, err)
	require.Equal(t, []string{"a.cu|code|--gpu-architecture=sm_90 --std=c++17 -DX"}, f.programs)

	c.toolkit = "/cuda/include"
	_, err = c.binary(&Source{Name: "b.cu", CUDA: "code"})
	require.NoError(t, err)
	_, err = c.binary(&Source{Name: "b.cu", CUDA: "// x\n #  include <cuda_fp16.h>\n", Options: []string{"-I", "/mine"}})
	require.NoError(t, err)
	require.Equal(t, []string{
		"b.cu|code|--gpu-architecture=sm_90 --std=c++17",
		"b.cu|// x\n #  include <cuda_fp16.h>\n|--gpu-architecture=sm_90 --std=c++17 -I /mine --include-path=/cuda/include",
	}, f.programs[1:])
}

// A GPU that is newer than the compiler gets PTX.
func TestCompilerTarget(t *testing.T) {
	c, f := fakeCompiler(t.TempDir())
	for arch, want := range map[int]string{75: "sm_75", 90: "sm_90", 89: "compute_86", 120: "compute_100"} {
		c.arch, f.programs = arch, nil
		image, err := c.binary(&Source{Name: "a.cu", CUDA: "code"})
		require.NoError(t, err)
		require.Equal(t, []string{"a.cu|code|--gpu-architecture=" + want + " --std=c++17"}, f.programs)
		require.Equal(t, strings.HasPrefix(want, "compute"), strings.HasPrefix(string(image), "PTX "))
	}
	c.arch = 70
	_, err := c.binary(&Source{Name: "a.cu", CUDA: "code"})
	require.ErrorContains(t, err, "kernel: compile a.cu: this NVRTC compiles for the architectures [75 80 86 90 100] and not for sm_70")
}

func TestCompileErrorSaysWhere(t *testing.T) {
	c, f := fakeCompiler(t.TempDir())
	src := &Source{Name: "my (1).cu", CUDA: "code"}
	for log, line := range map[string]int{
		"my (1).cu(7): error: expected a \";\"\n":                                     7,
		"my (1).cu(3): warning #177-D: unused\n\nmy (1).cu(12): error: what\n":        12,
		"other.h(3): error: what\n":                                                   0,
		"my (1).cu(1): catastrophic error: cannot open source file \"cuda_fp16.h\"\n": 1,
		"nvrtc: error: invalid value for --gpu-architecture (-arch)":                  0,
	} {
		f.log = log
		_, err := c.binary(src)
		var e *CompileError
		require.ErrorAs(t, err, &e)
		require.Equal(t, line, e.Line, log)
		require.Equal(t, log, e.Log)
		require.ErrorIs(t, err, nvrtcapi.ErrorCompilation)
		require.ErrorContains(t, err, "kernel: compile my (1).cu: NVRTC_ERROR_COMPILATION:\n"+log)
	}
	require.Empty(t, kernelFiles(t, c.store.folder), "a failure is not kept")

	f.log = `a.cu(1): catastrophic error: cannot open source file "cuda_fp16.h"`
	_, err := c.binary(&Source{Name: "a.cu", CUDA: "#include <cuda_fp16.h>"})
	require.ErrorContains(t, err, "set CUDA_HOME to the folder that has include/")
	c.toolkit = "/cuda/include"
	_, err = c.binary(&Source{Name: "a.cu", CUDA: "#include <mine.h>"})
	require.NotContains(t, err.Error(), "CUDA_HOME")
}

func TestFindHeaders(t *testing.T) {
	root := t.TempDir()
	put := func(path string) string {
		path = filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, nil, 0o644))
		return filepath.Dir(path)
	}
	t.Setenv("CUDA_HOME", filepath.Join(root, "home"))
	t.Setenv("CUDA_PATH", "")
	home := put("home/include/cuda_fp16.h")
	cu13 := put("cu13/include/cuda_fp16.h")
	run := put("nvidia/cuda_runtime/include/cuda_fp16.h")
	toolkit := put("toolkit/targets/x86_64-linux/include/cuda_fp16.h")
	for lib, want := range map[string]string{
		"cu13/lib/libnvrtc.so.13":                      cu13,
		"nvidia/cuda_nvrtc/lib/libnvrtc.so.12":         run,
		"toolkit/targets/x86_64-linux/lib/libnvrtc.so": toolkit,
		"elsewhere/libnvrtc.so":                        home,
	} {
		folder, _ := findHeaders(filepath.Join(root, lib))
		require.Equal(t, want, folder, lib)
	}
}

func TestIncludeFolders(t *testing.T) {
	require.Equal(t, []string{"/a", "/b", "/c", "/d", "/e"},
		includeFolders([]string{"--include-path=/a", "-I/b", "-DX", "-I", "/c", "--include-path", "/d", "-I=/e"}))
}
