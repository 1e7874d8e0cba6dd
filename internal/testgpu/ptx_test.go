package testgpu

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudacc"
)

func TestMain(m *testing.M) { Main(m) }

// fakeNVRTC writes PTX that has the source in it.
type fakeNVRTC struct {
	cudacc.NVRTC
	text string
}

func (f *fakeNVRTC) CreateProgram(source, name string) (cudacc.NVRTCProgram, cudacc.Result) {
	f.text = source
	return 1, cudacc.Success
}

func (f *fakeNVRTC) CompileProgram(_ cudacc.NVRTCProgram, options []string) cudacc.Result {
	f.text = ".version 9.0\n.target " + strings.ReplaceAll(strings.TrimPrefix(options[0], "--gpu-architecture="), "compute", "sm") +
		"\n.address_size 64\n.visible .entry f()\n{\n" + f.text + "\n}\n\x00"
	if strings.Contains(f.text, "mistake") {
		return cudacc.ErrorCompilation
	}
	return cudacc.Success
}
func (f *fakeNVRTC) GetPTX(cudacc.NVRTCProgram) ([]byte, cudacc.Result) {
	return []byte(f.text), cudacc.Success
}
func (f *fakeNVRTC) GetProgramLog(cudacc.NVRTCProgram) (string, cudacc.Result) {
	return "the log", cudacc.Success
}
func (f *fakeNVRTC) DestroyProgram(cudacc.NVRTCProgram) cudacc.Result { return cudacc.Success }

func TestCompile(t *testing.T) {
	f := &fakeNVRTC{}
	e, err := CompilePTX(f, "NVRTC-13.0", &cudacc.Source{Name: "f", CUDA: "\tret;"})
	require.NoError(t, err)
	require.Equal(t, cudacc.Entry{Digest: cudacc.Digest("\tret;", nil), Name: "f", Arch: 75, Compiler: "NVRTC-13.0", Version: "6.3",
		Text: []byte(".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry f()\n{\n\tret;\n}\n")}, e)
	e, err = CompilePTX(f, "NVRTC-13.0", &cudacc.Source{Name: "f", CUDA: "\tret;", Arch: 80})
	require.NoError(t, err)
	require.Equal(t, 80, e.Arch)
	require.Equal(t, "7.0", e.Version)
	_, err = CompilePTX(f, "NVRTC-13.0", &cudacc.Source{Name: "f", CUDA: "mistake"})
	require.EqualError(t, err, "testgpu: f: NVRTC_ERROR_COMPILATION: the log")
	_, err = CompilePTX(f, "NVRTC-13.0", &cudacc.Source{Name: "f", CUDA: "frobnicate.b32 %r1;"})
	require.ErrorContains(t, err, "testgpu: f: lower: ptx: the instruction")
}

// Another text under the same name and source is seen without a compiler.
func TestManifest(t *testing.T) {
	entries := []cudacc.Entry{
		{Digest: "d1", Name: "f", Arch: 75, Compiler: "NVRTC-13.0", Version: "6.3", Text: []byte("ret;")},
		{Digest: "d2", Name: "g", Arch: 80, Compiler: "NVRTC-13.0", Version: "7.0", Text: []byte("ret;")},
	}
	was := PTXManifest(entries)
	require.Empty(t, differences(was, PTXManifest(ptxOf(t, entries))))
	for _, spoil := range []func(){
		func() { entries[1].Text = []byte("trap; ret;") },
		func() { entries[0].Name = "g" },
		func() { entries = entries[:1] },
		func() { entries = append(entries, entries[0]) },
	} {
		saved := append([]cudacc.Entry(nil), entries...)
		spoil()
		require.NotEmpty(t, differences(was, PTXManifest(ptxOf(t, entries))))
		entries = saved
	}
}

// ptxOf packs and unpacks entries.
func ptxOf(t *testing.T, entries []cudacc.Entry) []cudacc.Entry {
	t.Helper()
	list, err := cudacc.OpenArchive(cudacc.PackArchive(entries)).Entries()
	require.NoError(t, err)
	return list
}

// The check notices what it is for.
func TestProblems(t *testing.T) {
	f := &fakeNVRTC{}
	sources := []cudacc.Source{{Name: "a", CUDA: "\tret;"}, {Name: "b", CUDA: "\tret;", Options: []string{"-DB"}}}
	var entries []cudacc.Entry
	for _, s := range sources {
		e, err := CompilePTX(f, "NVRTC-13.0", &s)
		require.NoError(t, err)
		entries = append(entries, e)
	}
	all := func() bool { return true }
	require.Empty(t, problems(entries, sources, all))
	check := func(want string, edit func(e []cudacc.Entry, s []cudacc.Source) ([]cudacc.Entry, []cudacc.Source)) {
		t.Helper()
		e, s := edit(append([]cudacc.Entry(nil), entries...), append([]cudacc.Source(nil), sources...))
		got := problems(e, s, all)
		require.Contains(t, strings.Join(got, "\n"), want)
	}
	type es = []cudacc.Entry
	type ss = []cudacc.Source
	check("the source of a has changed", func(e es, s ss) (es, ss) { s[0].CUDA += " "; return e, s })
	check("the archive has PTX of a, which is not a source", func(e es, s ss) (es, ss) { s[0].CUDA += " "; return e, s })
	check("the source of b has changed", func(e es, s ss) (es, ss) { s[1].Options = nil; return e, s })
	check("the source of b has changed", func(e es, s ss) (es, ss) { return e[:1], s })
	check("the archive has PTX of b, which is not a source", func(e es, s ss) (es, ss) { return e, s[:1] })
	check("the PTX of a for compute_90 is that of a for compute_75", func(e es, s ss) (es, ss) { s[0].Arch = 90; return e, s })
	check("the PTX of a does not have the lowest possible version", func(e es, s ss) (es, ss) {
		e[0].Text = []byte(strings.Replace(string(e[0].Text), "6.3", "7.8", 1))
		return e, s
	})
}
