package testgpu

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

var updatePTX = flag.Bool("ptx", false, "compile the Chorus kernels and write their PTX archives; needs NVRTC and a GPU")

// unloaded is for machines without a GPU. Generate the archives again on a GPU machine later.
var unloadedPTX = flag.Bool("ptx-unloaded", false, "with -ptx: write PTX without loading it with a driver")

// everything is for a host with the NVRTC version that generated the archives.
var everyPTX = flag.Bool("ptx-all", false, "compile all sources again, instead of a sample")

// CheckPTX compares the packed archive with its manifest and its sources: each
// source has exactly one text, with the lowest possible PTX version. If the NVRTC
// version that compiled them is available, it must produce the same text again
// for a sample of the sources. With the flag -ptx, CheckPTX generates the archive
// and writes it to file.
func CheckPTX(t *testing.T, file string, packed []byte, sources []cudacc.Source) {
	t.Helper()
	if *updatePTX {
		write(t, file, sources)
		return
	}
	entries, err := cudacc.OpenArchive(packed).Entries()
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) == 0 {
		t.Logf("%s is empty: NVRTC compiles these kernels at run time until make ptx has run on a machine with a GPU", file)
		return
	}
	t.Run("reviewed", func(t *testing.T) { reviewed(t, file, entries) })
	t.Run("sources", func(t *testing.T) { belong(t, entries, sources) })
	t.Run("compiled again", func(t *testing.T) { compileAgain(t, entries, sources) })
}

func belong(t *testing.T, entries []cudacc.Entry, sources []cudacc.Source) {
	lowered := SampleRaced(t, 16)
	for _, p := range problems(entries, sources, lowered) {
		t.Error(p + ": run make ptx")
	}
}

// problems returns the differences between entries and sources, and parses the
// entries that drawn selects.
func problems(entries []cudacc.Entry, sources []cudacc.Source, drawn func() bool) (out []string) {
	have := map[string]*cudacc.Entry{}
	for i, e := range entries {
		have[e.Digest] = &entries[i]
		if !drawn() {
			continue
		}
		lowered, version, err := cudacc.LowerPTX(string(e.Text))
		if err != nil || lowered != string(e.Text) || version != e.Version {
			out = append(out, fmt.Sprintf("the PTX of %s does not have the lowest possible version (%s, %s, %v)", e.Name, e.Version, version, err))
		}
	}
	for _, s := range sources {
		digest := cudacc.Digest(s.CUDA, s.Options)
		switch e := have[digest]; {
		case e == nil:
			out = append(out, fmt.Sprintf("the source of %s has changed since its PTX was made", s.Name))
		case e.Name != s.Name || e.Arch != max(s.Arch, cudacc.Arch):
			out = append(out, fmt.Sprintf("the PTX of %s for compute_%d is that of %s for compute_%d", s.Name, max(s.Arch, cudacc.Arch), e.Name, e.Arch))
		}
		delete(have, digest)
	}
	for _, e := range entries {
		if have[e.Digest] != nil {
			out = append(out, fmt.Sprintf("the archive has PTX of %s, which is not a source", e.Name))
		}
	}
	return out
}

// compiler returns the name of an NVRTC, as in entries.
func compiler(t *testing.T, rtc cudacc.NVRTC) string {
	t.Helper()
	major, minor, r := rtc.Version()
	if r != cudacc.Success {
		t.Fatal(r)
	}
	return fmt.Sprintf("NVRTC-%d.%d", major, minor)
}

func compileAgain(t *testing.T, entries []cudacc.Entry, sources []cudacc.Source) {
	rtc, err := cudacc.OpenNVRTC()
	if err != nil {
		t.Skip(err)
	}
	name := compiler(t, rtc)
	archive := map[string]cudacc.Entry{}
	for _, e := range entries {
		archive[e.Digest] = e
	}
	step := (len(sources) + 15) / 16 // a module may take seconds
	if *everyPTX {
		step = 1
	}
	first := rand.IntN(step)
	t.Logf("one of %d sources each, from source %d on", step, first)
	for i := first; i < len(sources); i += step {
		s := &sources[i]
		e, ok := archive[cudacc.Digest(s.CUDA, s.Options)]
		if !ok || e.Compiler != name {
			continue // missing entries are already reported; another compiler produces other texts
		}
		again, err := CompilePTX(rtc, name, s)
		if err != nil {
			t.Error(err)
			continue
		}
		if string(again.Text) != string(e.Text) {
			t.Errorf("%s compiles %s to PTX that differs from the archive: run make ptx", name, s.Name)
		}
	}
}

// CompilePTX compiles a source to an entry.
func CompilePTX(rtc cudacc.NVRTC, compiler string, s *cudacc.Source) (cudacc.Entry, error) {
	fail := func(what string, cause any) (cudacc.Entry, error) {
		return cudacc.Entry{}, fmt.Errorf("testgpu: %s: %s: %v", s.Name, what, cause)
	}
	p, r := rtc.CreateProgram(s.CUDA, s.Name)
	if r != cudacc.Success {
		return fail("nvrtcCreateProgram", r)
	}
	defer rtc.DestroyProgram(p)
	if r := rtc.CompileProgram(p, s.CompilerOptions()); r != cudacc.Success {
		log, _ := rtc.GetProgramLog(p)
		return fail(r.Error(), log)
	}
	raw, r := rtc.GetPTX(p)
	if r != cudacc.Success {
		return fail("nvrtcGetPTX", r)
	}
	for len(raw) > 0 && raw[len(raw)-1] == 0 { // terminating zero
		raw = raw[:len(raw)-1]
	}
	text, version, err := cudacc.LowerPTX(string(raw))
	if err != nil {
		return fail("lower", err)
	}
	return cudacc.Entry{Digest: cudacc.Digest(s.CUDA, s.Options), Name: s.Name, Arch: max(s.Arch, cudacc.Arch),
		Compiler: compiler, Version: version, Text: []byte(text)}, nil
}

// write compiles all sources, loads each text with the driver, and writes the
// archive.
func write(t *testing.T, file string, sources []cudacc.Source) {
	t.Helper()
	load := loader(t)
	rtc, err := cudacc.OpenNVRTC()
	if err != nil {
		t.Fatal(err)
	}
	name := compiler(t, rtc)
	var entries []cudacc.Entry
	for _, s := range sources {
		e, err := CompilePTX(rtc, name, &s)
		if err != nil {
			t.Error(err)
			continue
		}
		if err := load(e.Text); err != nil {
			t.Errorf("%s as PTX %s: %v", s.Name, e.Version, err)
		}
		entries = append(entries, e)
	}
	if t.Failed() {
		return
	}
	packed := cudacc.PackArchive(entries)
	if err := os.WriteFile(file, packed, 0o644); err != nil {
		t.Fatal(err)
	}
	writeManifest(t, manifestOf(file), entries)
	t.Logf("%s: %d kernels by %s, %v, %d bytes", file, len(entries), name, versions(entries), len(packed))
}

// loader returns a function that loads a text with the driver, unless the flags say that
// no GPU is needed.
func loader(t *testing.T) func(text []byte) error {
	t.Helper()
	if *unloadedPTX {
		return func([]byte) error { return nil }
	}
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "cuda"})
	if err != nil {
		t.Fatal("the driver must load the new PTX: ", err)
	}
	return func(text []byte) error { return loadOn(sys.Devices()[0], text) }
}

// versions says how many texts have each version of PTX.
func versions(entries []cudacc.Entry) (all []string) {
	count := map[string]int{}
	for _, e := range entries {
		count[e.Version]++
	}
	for v, n := range count {
		all = append(all, fmt.Sprintf("%d of version %s", n, v))
	}
	slices.Sort(all)
	return all
}

// loadOn loads a text with the driver, which rejects it if its version is too low
// for its content.
func loadOn(dev *device.Device, text []byte) error {
	var m cudadrv.Module
	err := gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		m, r = drv.ModuleLoadData(text)
		return r
	})
	if err != nil {
		return err
	}
	return gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.ModuleUnload(m) })
}

// BuildForHost compiles C++ for this machine, unless the user's store has the program, and returns its path. It
// skips the test without a suitable compiler.
func BuildForHost(t *testing.T, code string, flags ...string) (program string) {
	t.Helper()
	return stored(t, append(flags, code), func() (*cudacc.HostProgram, error) { return cudacc.BuildHost(t.Context(), code, flags...) }).Path
}

// stored returns a program of the user's store, or builds it.
func stored(t *testing.T, key []string, build func() (*cudacc.HostProgram, error)) *cudacc.HostProgram {
	t.Helper()
	k, err := cudacc.HostKey()
	var p *cudacc.HostProgram
	if err == nil {
		k.Add(key...)
		p, err = cudacc.StoredHostProgram(k.Sum(), build)
	}
	switch {
	case err == nil:
		t.Cleanup(func() { _ = p.Close() })
	case errors.Is(err, exec.ErrNotFound), strings.Contains(err.Error(), "has no _Float16"), strings.Contains(err.Error(), "_Float16’ was not declared"):
		t.Skip("needs a C++ compiler with _Float16, g++: ", err)
	default:
		t.Fatal(err)
	}
	return p
}

// HostKernels runs the kernels of a CUDA source on the host.
type HostKernels struct {
	t       *testing.T
	program *cudacc.HostProgram
}

// CompileForHost compiles the named kernels of a source, like BuildForHost.
func CompileForHost(t *testing.T, cuda string, options []string, names ...string) *HostKernels {
	t.Helper()
	key := slices.Concat([]string{"kernels", cuda}, options, names)
	return &HostKernels{t, stored(t, key, func() (*cudacc.HostProgram, error) { return cudacc.CompileHost(t.Context(), cuda, options, names) })}
}

// Run runs a kernel. A slice is memory, which the kernel may write, and nil is a null pointer. A cudacc.HostArg is
// passed as it is, and everything else as a number or a struct.
func (k *HostKernels) Run(name string, blocks, threads int, args ...any) {
	k.t.Helper()
	list := make([]cudacc.HostArg, len(args))
	for i, a := range args {
		switch v := reflect.ValueOf(a); {
		case a == nil:
			list[i].Null = true
		case v.Kind() == reflect.Slice:
			list[i].Memory = unsafe.Slice((*byte)(v.UnsafePointer()), v.Len()*int(v.Type().Elem().Size()))
			list[i].Null = v.Len() == 0
		case v.Type() == reflect.TypeFor[cudacc.HostArg]():
			list[i] = a.(cudacc.HostArg)
		default:
			x := reflect.New(v.Type())
			x.Elem().Set(v)
			list[i].Value = unsafe.Slice((*byte)(x.UnsafePointer()), v.Type().Size())
		}
	}
	if err := k.program.Run(k.t.Context(), name, [3]uint32{uint32(blocks), 1, 1}, [3]uint32{uint32(threads), 1, 1}, 0, list); err != nil {
		k.t.Fatal(err)
	}
}

var updatePTXSums = flag.Bool("ptx-sums", false, "write the digests of the PTX texts that the archives have")

// PTXManifest lists the texts of an archive, one in each line: the digest of the
// text, and the compiler input. Archives are compressed, so a review cannot see
// changes in them; the manifest shows which kernels have new PTX.
func PTXManifest(entries []cudacc.Entry) string {
	var lines []string
	for _, e := range entries {
		lines = append(lines, fmt.Sprintf("%x %s compute_%d PTX-%s %s\n", sha256.Sum256(e.Text), e.Name, e.Arch, e.Version, e.Compiler))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// manifestOf returns the path of an archive's manifest.
func manifestOf(archive string) string {
	return filepath.Join("testdata", strings.TrimSuffix(archive, ".zst")+".sums")
}

// reviewed compares the texts with the manifest, without a compiler or a GPU.
func reviewed(t *testing.T, archive string, entries []cudacc.Entry) {
	file := manifestOf(archive)
	if *updatePTXSums {
		writeManifest(t, file, entries)
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range differences(string(want), PTXManifest(entries)) {
		t.Errorf("%s: %s: if make ptx generated the archive, commit its manifest, too; otherwise the archive was not reviewed", file, p)
	}
}

func writeManifest(t *testing.T, file string, entries []cudacc.Entry) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(file), 0o755)
	if err == nil {
		err = os.WriteFile(file, []byte(PTXManifest(entries)), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// differences returns at most ten lines that only one of two manifests has.
func differences(want, have string) (out []string) {
	only := func(a, b, what string) {
		other := map[string]int{}
		for line := range strings.Lines(b) {
			other[line]++
		}
		for line := range strings.Lines(a) {
			if other[line]--; other[line] < 0 && len(out) < 10 {
				out = append(out, what+" "+strings.TrimSpace(line))
			}
		}
	}
	only(want, have, "the archive lacks")
	only(have, want, "the manifest lacks")
	return out
}
