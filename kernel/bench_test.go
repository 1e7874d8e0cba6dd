package kernel_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The bytes a second that an element-wise function moves, beside a copy of as
// many.
func BenchmarkElementwise(b *testing.B) {
	const n = 1 << 26
	s, err := stream.New(testgpu.CUDA(b, 1)[0], nil)
	require.NoError(b, err)
	defer s.Close()
	e, err := kernel.NewElementwise("2 * x", &kernel.ElementwiseConfig{Inputs: []string{"x"}})
	require.NoError(b, err)
	defer e.Close()
	x, err := memory.Make[uint8](s, 8*n)
	require.NoError(b, err)
	defer x.Close()
	y, err := memory.Make[uint8](s, 8*n)
	require.NoError(b, err)
	defer y.Close()
	run := func(name string, bytes int64, op func() error) {
		b.Run(name, func(b *testing.B) {
			require.NoError(b, op())
			require.NoError(b, s.Sync(testgpu.Context(b)))
			b.SetBytes(bytes)
			b.ResetTimer()
			for range b.N { // not b.Loop, which would leave the wait out of the time
				if err := op(); err != nil {
					b.Fatal(err)
				}
			}
			require.NoError(b, s.Sync(testgpu.Context(b)))
		})
	}
	f4, g4 := viewOf[float32](b, x, n), viewOf[float32](b, y, n)
	run("copy", 8*n, func() error { return memory.Copy(s, g4, f4) })
	run("float32", 8*n, func() error { return e.Launch(s, kernel.Out(g4), kernel.In(f4)) })
	f2, g2 := viewOf[memory.BFloat16Bits](b, x, n), viewOf[memory.BFloat16Bits](b, y, n)
	run("bfloat16", 4*n, func() error { return e.Launch(s, kernel.Out(g2), kernel.In(f2)) })
	i1, j1 := viewOf[int8](b, x, n), viewOf[int8](b, y, n)
	run("int8", 2*n, func() error { return e.Launch(s, kernel.Out(j1), kernel.In(i1)) })
	f8, g8 := viewOf[float64](b, x, n), viewOf[float64](b, y, n)
	run("float64", 16*n, func() error { return e.Launch(s, kernel.Out(g8), kernel.In(f8)) })
}

func viewOf[T memory.Element](b *testing.B, x memory.Slice[uint8], n int) memory.Slice[T] {
	b.Helper()
	v, err := memory.View[T](x.Buffer(), 0, n)
	require.NoError(b, err)
	return v
}

type axpyArgs struct {
	Y, X memory.Slice[float32]
	A    float32
	N    int32
}

// The cost of a launch on the host.
func BenchmarkLaunch(b *testing.B) {
	s, err := stream.New(testgpu.CUDA(b, 1)[0], nil)
	require.NoError(b, err)
	defer s.Close()
	e, err := kernel.NewElementwise("2 * x", &kernel.ElementwiseConfig{Inputs: []string{"x"}})
	require.NoError(b, err)
	defer e.Close()
	m, err := kernel.Compile(s.Device(), &axpy)
	require.NoError(b, err)
	defer m.Close()
	k, err := m.Kernel("axpy")
	require.NoError(b, err)
	src := &kernel.Source{Name: "axpy.cu", CUDA: axpy.CUDA}
	f := kernel.Define[axpyArgs](src, "axpy", nil)
	typed, err := kernel.Compile(s.Device(), src)
	require.NoError(b, err)
	defer typed.Close()
	x, err := memory.Make[float32](s, 256)
	require.NoError(b, err)
	defer x.Close()
	for name, op := range map[string]func() error{
		"kernel": func() error {
			return k.Launch(s, kernel.Cover(256), kernel.Ptr(x), kernel.Ptr(x), kernel.Scalar[float32](1), kernel.Scalar[int32](256))
		},
		"func":        func() error { return f.Launch(s, kernel.Cover(256), axpyArgs{x, x, 1, 256}) },
		"elementwise": func() error { return e.Launch(s, kernel.Out(x), kernel.In(x)) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for i := range b.N {
				if i%256 == 0 { // a stream that is full would make the launch wait for the device
					b.StopTimer()
					require.NoError(b, s.Sync(testgpu.Context(b)))
					b.StartTimer()
				}
				if err := op(); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			require.NoError(b, s.Sync(testgpu.Context(b)))
		})
	}
}
