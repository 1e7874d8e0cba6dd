package dl_test

import (
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/testgpu/tsan"
)

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
	n := tsan.Rounds(300, 3000)
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
