package dl_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

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
	require.EqualValues(t, 1+4+9+16+25+36+49+64-9, table.Direct(fnWeigh, [dl.DirectWords]uintptr{1, 2, 3, 4, 5, 6, 7, 8}))
	require.EqualValues(t, 10-9, table.Direct(fnWeigh, [dl.DirectWords]uintptr{10}), "the others are zeros")
	require.EqualValues(t, -1-9, table.Direct(fnWeigh, [dl.DirectWords]uintptr{^uintptr(0)}), "a negative result")
	require.EqualValues(t, 99, table.Direct(fnNone, [dl.DirectWords]uintptr{}))
}

// What comes before each call of a table comes before this one too.
func TestDirectAfter(t *testing.T) {
	table := newDirect(t)
	for _, v := range []uintptr{3, 4} {
		after := table.After(fnBind, v)
		require.EqualValues(t, -7, after.Direct(fnBound, [dl.DirectWords]uintptr{v}))
	}
	refused := table.After(fnBind, ^uintptr(1))
	require.EqualValues(t, -2, refused.Direct(fnBound, [dl.DirectWords]uintptr{3}))
}

// Goroutines whose stacks grow from deep calls.
func TestDirectByManyGoroutines(t *testing.T) {
	table := newDirect(t)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := range 500 {
				if got := deep(n%40, func() int32 {
					return table.Direct(fnWeigh, [dl.DirectWords]uintptr{uintptr(i), 0, 0, 0, 0, 0, uintptr(n)})
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
