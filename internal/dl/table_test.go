package dl_test

import (
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

const tableC = `
#include <errno.h>
#include <unistd.h>
struct two { int a, b; };
struct two pair(int a, int b) { return (struct two){a, b}; }
struct two pairs(int *out) { *out = 7; return (struct two){-1, 2}; }
long fail(int code, long result) { if (code) errno = code; return result; }
`

type tableFn int

const (
	fnPair tableFn = iota
	fnPairs
	fnFail
	fnGone
)

// pair is struct two as it comes back in a register.
type pair uint64

func newTable(t *testing.T) dl.Table[tableFn, pair] {
	t.Helper()
	lib := dltest.Load(t, tableC)
	table, missing := dl.NewTable[tableFn](lib.Symbol, "test", []dl.Func{
		{Name: "pair"}, {Name: "pairs"}, {Name: "fail"}, {Name: "gone", Optional: true}}, pair(99))
	require.Empty(t, missing)
	return table
}

func TestTableOfTwoIntResults(t *testing.T) {
	table := newTable(t)
	require.Equal(t, pair(5<<32|4), table.Call(fnPair, dl.Get().In(4, 5)))
	v, r := table.Call1(fnPairs, dl.Get().Out())
	require.Equal(t, pair(2<<32|0xffffffff), r)
	require.EqualValues(t, 7, v)
	require.Equal(t, pair(99), table.Call(fnGone, dl.Get()))
}

// errno is that of the call and of nothing before it, on any thread.
func TestCallErrno(t *testing.T) {
	table := newTable(t)
	r, errno := table.CallErrno(fnGone, dl.Get())
	require.Equal(t, -1, int(r))
	require.Equal(t, syscall.ENOSYS, errno)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 200 {
				code := (i*200 + n) % 130
				r, errno := table.CallErrno(fnFail, dl.Get().In(uintptr(code), ^uintptr(n)))
				if int(r) != -1-n || errno != syscall.Errno(code) {
					t.Errorf("result %d and errno %d, want %d and %d", int(r), errno, -1-n, code)
					return
				}
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
}
