package handle

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type thing struct {
	owner Owner
	_     [64]byte
}

func TestCloseOnce(t *testing.T) {
	x := &thing{}
	require.True(t, x.owner.Closed(), "before Init nothing is open")
	require.False(t, x.owner.Close())
	Init(x, &x.owner, About{Kind: "thing"})
	require.False(t, x.owner.Closed())
	require.True(t, x.owner.Close())
	require.False(t, x.owner.Close())
	require.True(t, x.owner.Closed())
}

// A report names kind, size, device and place. The place of frequent objects is recorded
// only with Trace.
func TestLeaksAreReported(t *testing.T) {
	for _, traced := range []bool{false, true} {
		got := leaks(t, traced, func() {
			open, closed, frequent := &thing{}, &thing{}, &thing{}
			Init(open, &open.owner, About{Kind: "open thing", On: Name("board 3")})
			Init(closed, &closed.owner, About{Kind: "closed thing"})
			Init(frequent, &frequent.owner, About{Kind: "frequent thing", Bytes: 4096, On: Name("board 4"), Frequent: true})
			closed.owner.Close()
		}, 2)
		require.Equal(t, "open thing on board 3", got["open thing"].String())
		require.Contains(t, got["open thing"].Stack, "TestLeaksAreReported")
		require.Equal(t, "frequent thing of 4096 bytes on board 4", got["frequent thing"].String())
		if traced {
			require.Contains(t, got["frequent thing"].Stack, "TestLeaksAreReported")
		} else {
			require.Empty(t, got["frequent thing"].Stack)
		}
	}
}

// leaks runs fn and returns the n leaks that follow, by kind.
func leaks(t *testing.T, traced bool, fn func(), n int) map[string]Leak {
	old := OnLeak
	reports := make(chan Leak, n+1)
	OnLeak = func(l Leak) { reports <- l }
	Trace.Store(traced)
	defer func() { OnLeak = old; Trace.Store(false) }()
	fn()
	all := map[string]Leak{}
	deadline := time.After(20 * time.Second)
	for len(all) < n {
		runtime.GC()
		select {
		case l := <-reports:
			all[l.Kind] = l
		case <-deadline:
			t.Fatalf("only %d of %d reports", len(all), n)
		default:
			runtime.Gosched()
		}
	}
	require.Empty(t, reports)
	return all
}

// A closure of a generic function is named after the function of the program into which the compiler has inlined it.
func TestOfLibrary(t *testing.T) {
	_, here, _, _ := runtime.Caller(0)
	at := strings.TrimSuffix(here, "internal/handle/handle_test.go")
	for _, f := range []runtime.Frame{
		{Function: Module + "comm.Send[...]", File: at + "comm/collective.go"},
		{Function: "main.train.Send[...].func1", File: at + "comm/collective.go"},
		{Function: "example.org/train.step.Make[...].func2", File: at + "gds/safetensors/file.go"},
	} {
		require.True(t, OfLibrary(f), f.Function)
	}
	for _, f := range []runtime.Frame{
		{Function: "main.train", File: "/home/user/comm/main.go"},
		{Function: "main.main", File: at + "mine/main.go"},
		{Function: "main.main", File: at + "main.go"},
		{Function: Module + "examples/ring.main", File: at + "examples/ring/main.go"},
		{Function: Module + "comm_test.TestSend.Send[...].func1", File: at + "comm/send_test.go"},
	} {
		require.False(t, OfLibrary(f), f.Function)
	}
	dirs, err := os.ReadDir("../..")
	require.NoError(t, err)
	for _, d := range dirs {
		files, err := filepath.Glob(filepath.Join("../..", d.Name(), "*.go"))
		require.NoError(t, err)
		if len(files) > 0 {
			require.Contains(t, folders, d.Name())
		}
	}
}
