package handle

import (
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
	Init(x, &x.owner, "thing")
	require.False(t, x.owner.Closed())
	require.True(t, x.owner.Close())
	require.False(t, x.owner.Close())
	require.True(t, x.owner.Closed())
}

func TestLeakIsReportedWithItsStack(t *testing.T) {
	old := OnLeak
	leaks := make(chan string, 2)
	OnLeak = func(kind, stack string) { leaks <- kind + "\n" + stack }
	Trace.Store(true)
	defer func() { OnLeak = old; Trace.Store(false) }()
	func() {
		open, closed := &thing{}, &thing{}
		Init(open, &open.owner, "open thing")
		Init(closed, &closed.owner, "closed thing")
		closed.owner.Close()
	}()
	deadline := time.After(20 * time.Second)
	for {
		runtime.GC()
		select {
		case l := <-leaks:
			require.True(t, strings.HasPrefix(l, "open thing\n"), l)
			require.Contains(t, l, "TestLeakIsReportedWithItsStack")
			require.Empty(t, leaks)
			return
		case <-deadline:
			t.Fatal("no report")
		default:
			runtime.Gosched()
		}
	}
}
