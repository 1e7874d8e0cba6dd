package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/safe"
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
		require.ErrorIs(t, err, cudacc.ErrorCompilation)
		require.ErrorContains(t, err, "kernel: compile my (1).cu: NVRTC_ERROR_COMPILATION:\n"+log)
	}
	require.Empty(t, kernelFiles(t, c.store.Folder), "a failure is not kept")

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

// fakeNVRTC compiles nothing: its binary names all that it was given.
type fakeNVRTC struct {
	cudacc.NVRTC
	minor int32
	log   string // makes a compilation fail
	image []byte // the binary, instead of what names the inputs

	mu       sync.Mutex
	programs []string
	compiled int
}

func (f *fakeNVRTC) Version() (int32, int32, cudacc.Result) { return 13, f.minor, cudacc.Success }

func (f *fakeNVRTC) SupportedArchs() ([]int32, cudacc.Result) {
	return []int32{75, 80, 86, 90, 100}, cudacc.Success
}

func (f *fakeNVRTC) GetPTX(p cudacc.NVRTCProgram) ([]byte, cudacc.Result) {
	b, r := f.GetCUBIN(p)
	return append([]byte("PTX "), b...), r
}

func (f *fakeNVRTC) CreateProgram(source, name string) (cudacc.NVRTCProgram, cudacc.Result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.programs = append(f.programs, name+"|"+source)
	return cudacc.NVRTCProgram(len(f.programs)), cudacc.Success
}

func (f *fakeNVRTC) CompileProgram(p cudacc.NVRTCProgram, options []string) cudacc.Result {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.compiled++
	f.programs[p-1] += "|" + strings.Join(options, " ")
	if f.log != "" {
		return cudacc.ErrorCompilation
	}
	return cudacc.Success
}

func (f *fakeNVRTC) GetCUBIN(p cudacc.NVRTCProgram) ([]byte, cudacc.Result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.image != nil {
		return f.image, cudacc.Success
	}
	return []byte(strings.Repeat(f.programs[p-1], 100)), cudacc.Success
}

func (f *fakeNVRTC) GetProgramLog(cudacc.NVRTCProgram) (string, cudacc.Result) {
	return f.log, cudacc.Success
}
func (f *fakeNVRTC) DestroyProgram(cudacc.NVRTCProgram) cudacc.Result { return cudacc.Success }

func fakeCompiler(folder string) (*compiler, *fakeNVRTC) {
	f := &fakeNVRTC{}
	return &compiler{rtc: f, arch: 90, store: &safe.Store{Folder: folder, Limit: safe.StoreLimit}}, f
}

func kernelFiles(t *testing.T, folder string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(folder, "*"+safe.StoreSuffix))
	require.NoError(t, err)
	return found
}

// Whatever changes the binary changes the key, and nothing else does.
func TestStoreKey(t *testing.T) {
	base := Source{Name: "a.cu", CUDA: "#include <mine.h>\nx", Options: []string{"-DA", "-DB"}}
	dir := t.TempDir()
	include := t.TempDir()
	header := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(include, name), []byte(text), 0o644))
	}
	base.Options = append(base.Options, "--include-path="+include)
	header("mine.h", "#include \"deeper.h\"\n")
	header("deeper.h", "1")
	c, f := fakeCompiler(dir)
	change := func(what string, want int, edit func(c *compiler, f *fakeNVRTC, s *Source)) {
		t.Helper()
		d, g, s := *c, &fakeNVRTC{}, base
		d.rtc = g
		edit(&d, g, &s)
		image, err := d.binary(&s)
		require.NoError(t, err)
		require.Equal(t, want, g.compiled, what)
		require.NotEmpty(t, image)
	}
	first, err := c.binary(&base)
	require.NoError(t, err)
	require.Equal(t, 1, f.compiled)
	again, err := c.binary(&base)
	require.NoError(t, err)
	require.Equal(t, first, again)
	require.Equal(t, 1, f.compiled)

	change("nothing", 0, func(*compiler, *fakeNVRTC, *Source) {})
	change("kernels are not compiled in", 0, func(_ *compiler, _ *fakeNVRTC, s *Source) { s.Kernels = []Def{{Name: "f"}} })
	change("source", 1, func(_ *compiler, _ *fakeNVRTC, s *Source) { s.CUDA += " " })
	change("name", 1, func(_ *compiler, _ *fakeNVRTC, s *Source) { s.Name = "b.cu" })
	change("options", 1, func(_ *compiler, _ *fakeNVRTC, s *Source) { s.Options = append([]string{"-DA-DB"}, s.Options[2:]...) })
	change("architecture", 1, func(c *compiler, _ *fakeNVRTC, _ *Source) { c.arch = 80 })
	change("compiler", 1, func(_ *compiler, f *fakeNVRTC, _ *Source) { f.minor = 1 })
	header("unused.h", "1")
	change("a header that is not included", 0, func(*compiler, *fakeNVRTC, *Source) {})
	header("deeper.h", "2")
	change("a header", 1, func(*compiler, *fakeNVRTC, *Source) {})
	change("the same header", 0, func(*compiler, *fakeNVRTC, *Source) {})
	change("no store", 1, func(c *compiler, _ *fakeNVRTC, _ *Source) { c.store = nil })
	change("CUDA's headers", 1, func(c *compiler, _ *fakeNVRTC, _ *Source) { c.toolkit = include })
}

func TestStoreFilesArePrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "er")
	c, f := fakeCompiler(dir)
	_, err := c.binary(&Source{Name: "a.cu"})
	require.NoError(t, err)
	st, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), st.Mode().Perm())
	files := kernelFiles(t, dir)
	require.Len(t, files, 1)
	st, err = os.Stat(files[0])
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode().Perm())

	for i, mode := range []os.FileMode{0o602, 0o620} { // somebody else may have written it
		require.NoError(t, os.Chmod(files[0], mode))
		_, err = c.binary(&Source{Name: "a.cu"})
		require.NoError(t, err)
		require.Equal(t, 2+i, f.compiled)
		st, err = os.Stat(files[0])
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), st.Mode().Perm(), "it was replaced")
	}
}

// A spoilt file is compiled anew and replaced, never loaded.
func TestStoreSpoiltFile(t *testing.T) {
	src := &Source{Name: "a.cu", CUDA: "x"}
	for what, spoil := range map[string]func(b []byte) []byte{
		"empty":          func(b []byte) []byte { return nil },
		"header only":    func(b []byte) []byte { return b[:len(storeLine)+32] },
		"truncated":      func(b []byte) []byte { return b[:len(b)-1] },
		"longer":         func(b []byte) []byte { return append(b, 0) },
		"a bit":          func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"its seal":       func(b []byte) []byte { b[len(storeLine)] ^= 1; return b },
		"another format": func(b []byte) []byte { b[len(storeLine)-2]++; return b },
		"zeros":          func(b []byte) []byte { return make([]byte, len(b)) },
	} {
		c, f := fakeCompiler(t.TempDir())
		want, err := c.binary(src)
		require.NoError(t, err)
		path := kernelFiles(t, c.store.Folder)[0]
		good, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, spoil(bytes.Clone(good)), 0o600))
		got, err := c.binary(src)
		require.NoError(t, err, what)
		require.Equal(t, want, got, what)
		require.Equal(t, 2, f.compiled, what)
		now, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, good, now, what)
	}

	// A sound file under the name of another key is no better.
	c, f := fakeCompiler(t.TempDir())
	_, err := c.binary(src)
	require.NoError(t, err)
	a := kernelFiles(t, c.store.Folder)[0]
	other := &Source{Name: "b.cu", CUDA: "y"}
	want, err := c.binary(other)
	require.NoError(t, err)
	for _, b := range kernelFiles(t, c.store.Folder) {
		if b != a {
			data, err := os.ReadFile(a)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(b, data, 0o600))
		}
	}
	got, err := c.binary(other)
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Equal(t, 3, f.compiled)
}

// A folder that cannot be used costs a compilation and is no error.
func TestStoreUnusableFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, folder := range []string{file, filepath.Join(file, "below"), "/proc/none"} {
		c, f := fakeCompiler(folder)
		for range 2 {
			_, err := c.binary(&Source{Name: "a.cu"})
			require.NoError(t, err, folder)
		}
		require.Equal(t, 2, f.compiled)
	}
}

func TestStoreGoroutines(t *testing.T) {
	c, _ := fakeCompiler(t.TempDir())
	var wg sync.WaitGroup
	errs := make(chan error, 64)
	for g := range 8 {
		wg.Go(func() {
			for i := range 50 {
				src := &Source{Name: "a.cu", CUDA: fmt.Sprint(i % 5)}
				image, err := c.binary(src)
				if err == nil && !bytes.HasPrefix(image, []byte("a.cu|"+src.CUDA+"|")) {
					err = fmt.Errorf("goroutine %d got %.20q for source %s", g, image, src.CUDA)
				}
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	require.NoError(t, <-errs)
	require.Len(t, kernelFiles(t, c.store.Folder), 5)
}

// storeLine is the first line of a file of a store.
const storeLine = "chorus kernel 1\n"

const storeWorker = "KERNEL_TEST_STORE"

// Processes that compile the same at once, one of them killed while it writes,
// all get what they compiled.
func TestStoreProcesses(t *testing.T) {
	if folder := os.Getenv(storeWorker); folder != "" {
		c, f := fakeCompiler(folder)
		for i := range 200 {
			src := &Source{Name: "a.cu", CUDA: fmt.Sprint(i % 20)}
			image, err := c.binary(src)
			require.NoError(t, err)
			require.True(t, bytes.HasPrefix(image, []byte("a.cu|"+src.CUDA+"|")))
		}
		require.LessOrEqual(t, f.compiled, 20)
		return
	}
	dir := t.TempDir()
	// What a writer leaves that was killed before it could rename its file.
	require.NoError(t, os.WriteFile(filepath.Join(dir, ".new-killed"), []byte(storeLine+"half"), 0o600))
	var all []*exec.Cmd
	outs := make([]bytes.Buffer, 8)
	for i := range outs {
		cmd := exec.Command(os.Args[0], "-test.run=^TestStoreProcesses$")
		cmd.Env = append(os.Environ(), storeWorker+"="+dir)
		cmd.Stdout, cmd.Stderr = &outs[i], &outs[i]
		require.NoError(t, cmd.Start())
		all = append(all, cmd)
	}
	require.NoError(t, all[0].Process.Kill())
	for i, cmd := range all {
		err := cmd.Wait()
		var dead *exec.ExitError
		if i == 0 && errors.As(err, &dead) {
			continue
		}
		require.NoError(t, err, "%s", &outs[i])
	}
	require.Len(t, kernelFiles(t, dir), 20)
	for _, path := range kernelFiles(t, dir) {
		key := strings.TrimSuffix(filepath.Base(path), safe.StoreSuffix)
		_, ok := (&safe.Store{Folder: dir, Limit: safe.StoreLimit}).Load(key)
		require.True(t, ok, path)
	}
}

// A binary from a folder that another user can change, or of another user, is compiled anew.
func TestStoreTrustsThisUserOnly(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700))
	c, f := fakeCompiler(dir)
	compiles := func(why string, want int) {
		t.Helper()
		before := f.compiled
		_, err := c.binary(&Source{Name: "a.cu"})
		require.NoError(t, err)
		require.Equal(t, want, f.compiled-before, why)
	}
	compiles("the store is empty", 1)
	compiles("the store has it", 0)
	path := kernelFiles(t, dir)[0]
	for _, mode := range []os.FileMode{0o777, 0o777 | os.ModeSticky, 0o770, 0o720} {
		require.NoError(t, os.Chmod(dir, mode))
		compiles(fmt.Sprintf("a folder of mode %v", mode), 1)
	}
	require.NoError(t, os.Chmod(dir, 0o700))
	compiles("the folder is this user's again", 0)

	require.NoError(t, os.Rename(path, path+"-moved"))
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	compiles("a named pipe", 1)
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Symlink(path+"-moved", path))
	compiles("a link", 1)
	c.store.Limit = 10
	compiles("a file above the limit", 1)
	c.store.Limit = safe.StoreLimit

	if os.Geteuid() != 0 {
		t.Skip("only root can give the folder to another user")
	}
	compiles("a new file", 1)
	require.NoError(t, os.Chown(kernelFiles(t, dir)[0], 65534, 65534))
	compiles("a file of another user", 1)
	require.NoError(t, os.Chown(dir, 65534, 65534))
	compiles("a folder of another user", 1)
}
