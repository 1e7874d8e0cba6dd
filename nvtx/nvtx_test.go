package nvtx_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/nvtx"
)

// The tool is chosen once in a process, so tests with one run in a process of
// their own.
const childVar = "CHORUS_TEST_NVTX_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childVar) != "" {
		child()
		return
	}
	os.Unsetenv(env.NVTXInjection.Name) // of a profiler of the tests
	os.Exit(m.Run())
}

func child() {
	runtime.LockOSThread()
	nvtx.Mark("grüß") // the first call of any function attaches the tool
	_, err := nvtx.Attached()
	fmt.Println("error:", err)
	a := nvtx.Start("a")
	done := make(chan struct{})
	b := nvtx.Start("b")
	go func() {
		defer close(done)
		a.End()
	}()
	<-done
	b.End()
	nvtx.Range("within", func() { nvtx.Mark("it") })
	func() {
		defer func() { _ = recover() }()
		nvtx.Range("panics", func() { panic("yes") })
	}()
	fmt.Println("depths:", nvtx.RangePush("outer"), nvtx.RangePush("inner"), nvtx.RangePop(), nvtx.RangePop())
	if lib, err := dl.Open(&dl.Spec{Name: "tool", Env: env.NVTXInjection}); err == nil {
		if events, ok := lib.Symbol("events"); ok {
			fmt.Println("events:", dl.Get().DoString(events))
		}
	}
}

// run runs child with a tool and returns what it printed.
func run(t *testing.T, tool string) string {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childVar+"=1", env.NVTXInjection.Name+"="+tool)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// A tool that is compiled in C is told everything, in order.
func TestTool(t *testing.T) {
	out := run(t, dltest.Compile(t, toolC, "libtool.so"))
	require.Contains(t, out, "error: <nil>")
	require.Contains(t, out, "depths: 0 1 1 0")
	require.Contains(t, out, "events: "+strings.Join([]string{
		"mark(grüß)=0", "start(a)=1", "start(b)=2", "end()=1", "end()=2",
		"start(within)=3", "mark(it)=0", "end()=3",
		"start(panics)=4", "end()=4",
		"push(outer)=0", "push(inner)=1", "pop()=1", "pop()=0",
	}, ";")+";\n")
}

// A tool that cannot be attached is told by Attached and nothing else.
func TestBadTools(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none.so")
	for name, c := range map[string]struct{ tool, want string }{
		"missing":  {none, "none.so"},
		"no tool":  {dltest.Compile(t, "int x;", "libx.so"), "has no InitializeInjectionNvtx2: it is not an NVTX tool"},
		"refusing": {dltest.Compile(t, strings.Replace(toolC, "return 1;", "return 0;", 1), "libno.so"), "failed"},
	} {
		t.Run(name, func(t *testing.T) {
			out := run(t, c.tool)
			require.Contains(t, out, "error: nvtx: attach: ")
			require.Contains(t, out, c.want)
			require.Contains(t, out, "depths: -2 -2 -2 -2")
			require.NotContains(t, out, "mark(")
		})
	}
}

// CUPTI's library is a tool: it takes the tables, whatever it makes of them.
func TestCUPTI(t *testing.T) {
	found := dl.Files(&dl.Spec{
		Sonames: []string{"libcupti.so.13", "libcupti.so.12"},
		Folders: []string{"/usr/local/cuda*/lib64", "/usr/local/cuda*/extras/CUPTI/lib64"},
		Wheels:  []string{"cu13/lib", "cuda_cupti/lib"},
	})
	if len(found) == 0 {
		t.Skip("no libcupti here")
	}
	out := run(t, found[0])
	t.Log(found[0], out)
	require.Contains(t, out, "depths:", "the process went on")
}

func TestDetached(t *testing.T) {
	on, err := nvtx.Attached()
	require.NoError(t, err)
	require.False(t, on)
	require.Equal(t, nvtx.NoTracking, nvtx.RangePush("x"))
	require.Equal(t, nvtx.NoTracking, nvtx.RangePop())
	ran := false
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		nvtx.Mark("mark")
		r := nvtx.Start("range")
		r.End()
		nvtx.Range("fn", func() { ran = true })
	}))
	require.True(t, ran)
	nvtx.Span{}.End()
}

func BenchmarkDetached(b *testing.B) {
	for name, f := range map[string]func(){
		"Mark":     func() { nvtx.Mark("mark") },
		"StartEnd": func() { nvtx.Start("range").End() },
		"PushPop":  func() { nvtx.RangePush("range"); nvtx.RangePop() },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
		})
	}
}
