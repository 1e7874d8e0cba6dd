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

const directC = `
#include <stdint.h>
static _Thread_local int current;
int weigh(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f, uintptr_t g, uintptr_t h) {
	char room[1 << 16]; /* more than a goroutine's stack has */
	volatile char *p = room;
	for (unsigned i = 0; i < sizeof room; i += 512) p[i] = 1;
	return (int)(a + 2*b + 3*c + 4*d + 5*e + 6*f + 7*g + 8*h) - 9 * p[512];
}
int bind(int v) { current = v; return v < 0 ? v : 0; }
int bound(int v) { return current == v ? -7 : 0; }
`

type directFn int

const (
	fnWeigh directFn = iota
	fnBind
	fnBound
	fnNone
)

func newDirect(t *testing.T) dl.Table[directFn, int32] {
	t.Helper()
	lib := dltest.Load(t, directC)
	table, missing := dl.NewTable[directFn](lib.Symbol, "test", []dl.Func{
		{Name: "weigh"}, {Name: "bind"}, {Name: "bound"}, {Name: "none", Optional: true}}, int32(99))
	require.Empty(t, missing)
	return table
}

func TestDirect(t *testing.T) {
	table := newDirect(t)
	require.EqualValues(t, 1+4+9+16+25+36+49+64-9, table.Direct(fnWeigh, &[dl.DirectWords]uintptr{1, 2, 3, 4, 5, 6, 7, 8}))
	require.EqualValues(t, 10-9, table.Direct(fnWeigh, &[dl.DirectWords]uintptr{10}), "the others are zeros")
	require.EqualValues(t, -1-9, table.Direct(fnWeigh, &[dl.DirectWords]uintptr{^uintptr(0)}), "a negative result")
	require.EqualValues(t, 99, table.Direct(fnNone, &[dl.DirectWords]uintptr{}))
}

// What comes before each call of a table comes before this one too.
func TestDirectAfter(t *testing.T) {
	table := newDirect(t)
	for _, v := range []uintptr{3, 4} {
		after := table.After(fnBind, v)
		require.EqualValues(t, -7, after.Direct(fnBound, &[dl.DirectWords]uintptr{v}))
	}
	refused := table.After(fnBind, ^uintptr(1))
	require.EqualValues(t, -2, refused.Direct(fnBound, &[dl.DirectWords]uintptr{3}))
}

// Goroutines whose stacks grow from deep calls.
func TestDirectByManyGoroutines(t *testing.T) {
	table := newDirect(t)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := range 500 {
				if got := deep(n%40, func() int32 {
					return table.Direct(fnWeigh, &[dl.DirectWords]uintptr{uintptr(i), 0, 0, 0, 0, 0, uintptr(n)})
				}); int(got) != i+7*n-9 {
					t.Errorf("goroutine %d got %d of its call %d", i, got, n)
				}
			}
		})
	}
	wg.Wait()
}

// deep calls f at a depth of the stack.
func deep(n int, f func() int32) int32 {
	var room [64]byte
	if n == 0 {
		return f()
	}
	room[n%64] = 1
	return deep(n-1, f) + int32(room[n%64]) - 1
}
