package dl_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
	"github.com/gochorus/chorus/internal/testhost"
)

const frameC = `
#include <stdint.h>
#include <string.h>
int add(uint64_t *out, uintptr_t n) { *out = n + 1; return 0; }
int inout(uint64_t *a, uint64_t *b) { uint64_t t = *a; *a = *b; *b = t; return -5; }
int width(int *out, int v, unsigned char b) { *out = v + b; return v; }
long long wide(void) { return 0x1234567800000007ll; }
int real(float *out) { *out = 1.5f; return 0; }
uintptr_t words(
	uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f, uintptr_t g, uintptr_t h,
	uintptr_t i, uintptr_t j, uintptr_t k, uintptr_t l, uintptr_t m, uintptr_t n, uintptr_t o, uintptr_t p,
	uintptr_t q, uintptr_t r, uintptr_t s) {
	return a+2*b+3*c+4*d+5*e+6*f+7*g+8*h+9*i+10*j+11*k+12*l+13*m+14*n+15*o+16*p+17*q+18*r+19*s;
}
struct id { char b[128]; };
int by_value(char *out, int n, struct id id, int rank, int *cfg) {
	memcpy(out, id.b, sizeof id.b);
	memset(id.b, 0, sizeof id.b); /* the callee owns its copy */
	return 100 * n + 10 * rank + *cfg;
}
struct small { char b[64]; };
int by_value_64(char *out, struct small s, int flags) {
	memcpy(out, s.b, sizeof s.b);
	memset(s.b, 0, sizeof s.b);
	return flags;
}
const char *greet(int yes) { return yes ? "grüß" : 0; }
int length(const char *s) { return (int)strlen(s); }
int last(int n, const char *const *v) { return n ? v[n-1][0] * 256 + v[0][0] : v == 0; }
`

// caller is what an API package looks like to its users: calls go through an
// interface.
type caller interface {
	Add(n uintptr) (uint64, int32)
	Words(a, b, c, d, e, f, g, h uintptr) int32
	ByValue(out *[128]byte, n int32, id *[128]byte, rank int32, cfg *int32) int32
}

type clib struct{ add, words, byValue uintptr }

func (l *clib) Add(n uintptr) (uint64, int32) { return dl.Get().Out().In(n).Do1(l.add) }

func (l *clib) Words(a, b, c, d, e, f, g, h uintptr) int32 {
	return dl.Get().In(a, b, c, d, e, f, g, h).In(9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19).Do(l.words)
}

func (l *clib) ByValue(out *[128]byte, n int32, id *[128]byte, rank int32, cfg *int32) int32 {
	return dl.Get().Ptr(unsafe.Pointer(out)).In(uintptr(n)).Struct128(id).In(uintptr(rank)).Ptr(unsafe.Pointer(cfg)).Do(l.byValue)
}

func find(t *testing.T, lib *dl.Library, name string) uintptr {
	t.Helper()
	p, ok := lib.Symbol(name)
	require.True(t, ok, name)
	return p
}

func newCaller(t *testing.T, lib *dl.Library) caller {
	return &clib{find(t, lib, "add"), find(t, lib, "words"), find(t, lib, "by_value")}
}

func TestFrame(t *testing.T) {
	lib := dltest.Load(t, frameC)
	fn := func(name string) uintptr { return find(t, lib, name) }
	c := newCaller(t, lib)

	p, r := c.Add(7)
	require.Equal(t, uint64(8), p)
	require.Zero(t, r)

	want := int32(0)
	for i := int32(1); i <= 19; i++ {
		want += i * i
	}
	require.Equal(t, want, c.Words(1, 2, 3, 4, 5, 6, 7, 8), "each word is at its place, in registers and on the stack")

	a, b, r := dl.Get().InOut(3).InOut(4).Do2(fn("inout"))
	require.Equal(t, []any{uint64(4), uint64(3), int32(-5)}, []any{a, b, r})

	minus := int32(-9)
	v, r := dl.Get().Out().In(uintptr(minus), 2).Do1(fn("width"))
	require.Equal(t, []int32{-7, -9}, []int32{int32(v), r}, "signed ints keep their sign")
	require.Zero(t, v>>32, "C wrote 4 bytes of a zeroed cell")

	require.Equal(t, int32(7), dl.Get().Do(fn("wide")), "an int is the low half of the result register")
	f := dl.Get()
	require.Equal(t, uintptr(0x1234567800000007), f.Call(fn("wide")))
	f.Put()

	bits, _ := dl.Get().Out().Do1(fn("real"))
	require.Equal(t, float32(1.5), math.Float32frombits(uint32(bits)))
}

// Frames of every length between 0 and 32 words, one after the other: what one
// leaves behind is nothing to the next.
func TestFrameLengths(t *testing.T) {
	var args, sum []string
	for i := range 32 {
		args = append(args, fmt.Sprintf("uintptr_t a%d", i))
		sum = append(sum, fmt.Sprintf("%d * a%d", i+1, i))
	}
	var c strings.Builder
	c.WriteString("#include <stdint.h>\nuintptr_t f0(void) { return 1; }\n")
	for n := 1; n <= 32; n++ {
		fmt.Fprintf(&c, "uintptr_t f%d(%s) { return 1 + %s; }\n", n, strings.Join(args[:n], ", "), strings.Join(sum[:n], " + "))
	}
	lib := dltest.Load(t, c.String())
	for _, n := range append([]int{32, 0, 7, 6}, rand.Perm(33)...) {
		f, want := dl.Get(), uintptr(1)
		for i := range n {
			v := uintptr(rand.Uint64())
			f.In(v)
			want += uintptr(i+1) * v
		}
		require.Equal(t, want, f.Call(find(t, lib, fmt.Sprintf("f%d", n))), "%d words", n)
		f.Put()
	}
}

func TestFrameStrings(t *testing.T) {
	lib := dltest.Load(t, frameC)
	fn := func(name string) uintptr { return find(t, lib, name) }
	require.Equal(t, "grüß", dl.Get().In(1).DoString(fn("greet")))
	require.Empty(t, dl.Get().In(0).DoString(fn("greet")), "NULL")
	require.Equal(t, int32(5), dl.Get().String("hello").Do(fn("length")))
	require.Equal(t, int32(0), dl.Get().String("").Do(fn("length")))
	require.Equal(t, int32('z')*256+'x', dl.Get().Strings([]string{"x=1", "", "z"}).Do(fn("last")))
	require.Equal(t, int32(1), dl.Get().Strings(nil).Do(fn("last")), "an empty list is NULL")

	require.Equal(t, "ab", dl.CString([]byte("ab\x00cd")))
	require.Equal(t, "ab", dl.CString([]byte("ab")))
}

func TestFrameStructByValue(t *testing.T) {
	lib := dltest.Load(t, frameC)
	c := newCaller(t, lib)
	var id, before [128]byte
	for i := range id {
		id[i] = byte(i*7 + 1)
	}
	before = id
	out, cfg := new([128]byte), int32(3)
	require.Equal(t, int32(123), c.ByValue(out, 1, &id, 2, &cfg))
	require.Equal(t, id, *out)
	require.Equal(t, before, id, "C got a copy")

	p, _ := c.Add(1)
	require.Equal(t, uint64(2), p, "the next call has nothing of the struct")

	small, got := [64]byte(id[7:71]), new([64]byte)
	require.Equal(t, int32(5), dl.Get().Ptr(unsafe.Pointer(got)).Struct64(&small).In(5).Do(find(t, lib, "by_value_64")))
	require.Equal(t, [64]byte(id[7:71]), *got)
	require.Equal(t, *got, small)
}

func TestCallsDoNotAllocate(t *testing.T) {
	c := newCaller(t, dltest.Load(t, frameC))
	id, out, cfg := new([128]byte), new([128]byte), new(int32)
	for name, call := range map[string]func(){
		"one out-parameter": func() { c.Add(7) },
		"19 words":          func() { c.Words(1, 2, 3, 4, 5, 6, 7, 8) },
		"struct by value":   func() { c.ByValue(out, 1, id, 2, cfg) },
	} {
		require.Zero(t, testing.AllocsPerRun(1000, call), name)
	}
}

// A pointee that only the frame knows must survive a collection that happens
// before the call.
func TestFrameKeepsPointees(t *testing.T) {
	length := find(t, dltest.Load(t, frameC), "length")
	for range 20 {
		f := dl.Get().String(strings.Repeat("x", 1000))
		runtime.GC()
		_ = make([]byte, 1001)
		require.Equal(t, int32(1000), f.Do(length))
	}
}

func TestFrameParallel(t *testing.T) {
	c := newCaller(t, dltest.Load(t, frameC))
	for g := range 8 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for i := range 2000 {
				p, _ := c.Add(uintptr(g*10000 + i))
				if p != uint64(g*10000+i+1) {
					t.Fatal("a frame served two calls at once:", p)
				}
			}
		})
	}
}

func TestFrameOverflow(t *testing.T) {
	one := byte(0)
	for name, f := range map[string]func(){
		"words": func() { dl.Get().In(make([]uintptr, 33)...) },
		"cells": func() { dl.Get().Out().Out().Out().Out().Out() },
		"pointers": func() {
			f := dl.Get()
			for range 9 {
				f.Ptr(unsafe.Pointer(&one))
			}
		},
		"two blocks": func() { dl.Get().Struct128(new([128]byte)).Struct128(new([128]byte)).Call(1) },
	} {
		require.Panics(t, f, name)
	}
}

func BenchmarkFrame(b *testing.B) {
	lib, err := dl.Open(&dl.Spec{Name: "the C library", Sonames: []string{"libc.so.6"}})
	if err != nil {
		b.Skip(err)
	}
	abs, _ := lib.Symbol("abs")
	b.Run("1 word", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			dl.Get().In(7).Do(abs)
		}
	})
	b.Run("1 word, parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				dl.Get().In(7).Do(abs)
			}
		})
	})
	b.Run("7 words, 1 cell", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			dl.Get().In(7, 1, 2, 3, 4, 5, 6).Out().Do1(abs)
		}
	})
	b.Run("struct by value", func(b *testing.B) {
		id := new([128]byte)
		b.ReportAllocs()
		for b.Loop() {
			dl.Get().In(7, 2).Struct128(id).In(3).Do(abs)
		}
	})
}

func libc(t *testing.T) *dl.Library {
	t.Helper()
	lib, err := dl.Open(&dl.Spec{Name: "the C library", Sonames: []string{"libc.so.6"}})
	if err != nil {
		t.Skip(err)
	}
	return lib
}

// The C library sorts numbers by a function of Go.
func TestCallback(t *testing.T) {
	qsort := find(t, libc(t), "qsort")
	calls := 0
	less := dl.Callback(func(a, b *int32) int32 {
		calls++
		return *a - *b
	})
	v := make([]int32, 1000)
	for i := range v {
		v[i] = int32(i * 7919 % 1009)
	}
	dl.Get().Ptr(unsafe.Pointer(&v[0])).In(uintptr(len(v)), 4, less).Do(qsort)
	require.True(t, slices.IsSorted(v))
	require.Greater(t, calls, len(v)/2)
}

// Functions are called on threads that Go did not make, many more than there can
// be callbacks.
func TestClosuresOnForeignThreads(t *testing.T) {
	lib := libc(t)
	create, join := find(t, lib, "pthread_create"), find(t, lib, "pthread_join")
	var sum atomic.Int64
	n := testhost.Rounds(300, 3000)
	for i := range n {
		f := dl.OnceClosure(func() {
			runtime.GC()
			sum.Add(int64(i))
		})
		if i > 10 {
			f.Call() // a thread each would take long
			continue
		}
		thread, r := dl.Get().Out().In(0, dl.CallClosure(), uintptr(f)).Do1(create)
		require.Zero(t, r)
		require.Zero(t, dl.Get().In(uintptr(thread), 0).Do(join))
		f.Call() // nothing: it was released by its first call
	}
	require.Equal(t, int64(n*(n-1)/2), sum.Load())
}

func TestClosureReferences(t *testing.T) {
	calls := 0
	f := dl.NewClosure(func() { calls++ })
	f.Call()
	f.Retain()
	f.Release()
	f.Call()
	require.Equal(t, 2, calls)
	lib := libc(t)
	create, join := find(t, lib, "pthread_create"), find(t, lib, "pthread_join")
	thread, r := dl.Get().Out().In(0, dl.ReleaseClosure(), uintptr(f)).Do1(create)
	require.Zero(t, r)
	require.Zero(t, dl.Get().In(uintptr(thread), 0).Do(join))
	f.Call()
	f.Release()
	f.Retain()
	require.Equal(t, 2, calls, "what was released is called no more")
}
