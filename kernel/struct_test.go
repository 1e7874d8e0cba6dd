package kernel_test

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// table adds numbers that come in a struct as large as it can be, between others.
var table = kernel.Source{
	Name: "table.cu",
	CUDA: `struct Table { unsigned long long sum; unsigned count; unsigned numbers[1013]; };
extern "C" __global__ void add(unsigned long long* out, const Table t, unsigned more) {
	unsigned long long sum = t.sum + more;
	for (unsigned i = 0; i < t.count; i++) sum += t.numbers[i];
	out[0] = sum;
}`,
	Kernels: []kernel.Def{{
		Name:   "add",
		Params: []kernel.Param{kernel.Pointer, kernel.Struct(tableBytes), kernel.U32},
		Go: func(c *kernel.Call) {
			b := c.Bytes(1)
			sum := binary.LittleEndian.Uint64(b) + uint64(kernel.Get[uint32](c, 2))
			for i := range binary.LittleEndian.Uint32(b[8:]) {
				sum += uint64(binary.LittleEndian.Uint32(b[12+4*i:]))
			}
			kernel.Update[uint64](c, 0, 1)[0] = sum
		},
	}},
}

const tableBytes = 8 + 4 + 4*1013

// tableOf returns a table of count numbers from first on, and their sum.
func tableOf(first, count int) (b []byte, sum uint64) {
	b = make([]byte, tableBytes)
	binary.LittleEndian.PutUint64(b, 1<<40)
	binary.LittleEndian.PutUint32(b[8:], uint32(count))
	sum = 1 << 40
	for i := range 1013 {
		binary.LittleEndian.PutUint32(b[12+4*i:], uint32(first+i))
		if i < count {
			sum += uint64(first + i)
		}
	}
	return b, sum
}

// A struct arrives as it was when it was passed, also in a graph.
func TestStructByValue(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &table)
		out, err := memory.MakeFrom(s, make([]uint64, 1))
		require.NoError(t, err)
		defer out.Close()
		got := make([]uint64, 1)
		for _, count := range []int{0, 1, 1013} {
			b, sum := tableOf(count, count)
			require.NoError(t, k.Launch(s, flat(1, 1, 0), kernel.Ptr(out), kernel.Bytes(b), kernel.Scalar[uint32](5)))
			clear(b)
			require.NoError(t, out.CopyTo(s, got))
			require.Equal(t, sum+5, got[0], "%d numbers", count)
		}
		b, sum := tableOf(7, 900)
		exec, err := graph.Capture([]*stream.Stream{s}, func() error {
			return k.Launch(s, flat(1, 1, 0), kernel.Ptr(out), kernel.Bytes(b), kernel.Scalar[uint32](1))
		}, nil)
		require.NoError(t, err)
		defer exec.Close()
		clear(b)
		require.NoError(t, out.Zero(s))
		require.NoError(t, exec.Launch(s))
		require.NoError(t, out.CopyTo(s, got))
		require.Equal(t, sum+1, got[0])
	})
}

func TestStructsAreChecked(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &table)
		x, err := memory.MakeFrom(s, make([]uint64, 1))
		require.NoError(t, err)
		defer x.Close()
		for want, b := range map[string][]byte{
			"argument 1 is a struct of 8 bytes: want a struct of 4064 bytes": make([]byte, 8),
			"argument 1: a struct without bytes":                             nil,
		} {
			require.ErrorContains(t, k.Launch(s, flat(1, 1, 0), kernel.Ptr(x), kernel.Bytes(b), kernel.Scalar[uint32](5)), want)
		}
		require.ErrorContains(t, k.Launch(s, flat(1, 1, 0), kernel.Ptr(x), kernel.Scalar[uint64](1), kernel.Scalar[uint32](5)),
			"argument 1 is an unsigned long long: want a struct of 4064 bytes")
		require.ErrorContains(t, k.Launch(s, flat(1, 1, 0), kernel.Ptr(x), kernel.Bytes(make([]byte, tableBytes)), kernel.Bytes(make([]byte, 4))),
			"argument 2 is a struct of 4 bytes: want an unsigned")
	})
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	stand := func(*kernel.Call) {}
	for want, params := range map[string][]kernel.Param{
		"the parameters of a take 4097 bytes: at most 4096": {kernel.Struct(4097)},
		"the parameters of a take 4100 bytes: at most 4096": {kernel.U8, kernel.Struct(4084 - 4), kernel.U32}, // from 16 on
		"parameter 1 of a has no type":                      {kernel.I32, kernel.Struct(0)},
		"parameter 0 of a has no type":                      {kernel.Struct(1 << 30)},
	} {
		_, err := kernel.Compile(devs[0], &kernel.Source{Name: "bad.cu", Kernels: []kernel.Def{{Name: "a", Go: stand, Params: params}}})
		require.ErrorContains(t, err, want)
	}
	m, err := kernel.Compile(devs[0], &kernel.Source{Name: "full.cu", CUDA: `struct __align__(16) Full { char bytes[4080]; };
extern "C" __global__ void a(unsigned char x, Full f) {}`, Kernels: []kernel.Def{{Name: "a", Go: stand, Params: []kernel.Param{kernel.U8, kernel.Struct(4080)}}}})
	require.NoError(t, err)
	require.NoError(t, m.Close())
}
