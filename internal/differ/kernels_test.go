package differ

import (
	"time"

	"github.com/gochorus/chorus/kernel"
)

// The kernels of programs calculate with integers, which wrap around alike on all
// devices, and with sums of floats, which IEEE 754 defines.
var kernelSource = kernel.Source{
	Name: "differ.cu",
	CUDA: `
extern "C" __global__ void iota(unsigned* x, unsigned a, unsigned b, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) x[i] = a * i + b;
}
extern "C" __global__ void axpb(unsigned* y, const unsigned* x, unsigned a, unsigned b, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) y[i] = a * x[i] + b;
}
extern "C" __global__ void swap2(unsigned* x, unsigned* y, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) { unsigned t = x[i]; x[i] = y[i]; y[i] = t; }
}
extern "C" __global__ void total(unsigned* sum, const unsigned* x, int n) {
	unsigned t = 0;
	for (int i = 0; i < n; i++) t += x[i];
	*sum = t;
}
extern "C" __global__ void stride(unsigned* y, const unsigned* x, int by, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) y[i] = x[i * by];
}
extern "C" __global__ void spin(unsigned long long ns) {
	unsigned long long start, now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	} while (now - start < ns);
}
extern "C" __global__ void poke(unsigned* x, long long at) { x[at] = 1; }
`,
	Kernels: []kernel.Def{
		{Name: "iota", Params: []kernel.Param{kernel.Pointer, kernel.U32, kernel.U32, kernel.I32}, Go: func(c *kernel.Call) {
			x := kernel.Update[uint32](c, 0, int(kernel.Get[int32](c, 3)))
			for i := range x {
				x[i] = kernel.Get[uint32](c, 1)*uint32(i) + kernel.Get[uint32](c, 2)
			}
		}},
		{Name: "axpb", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.U32, kernel.U32, kernel.I32}, Go: func(c *kernel.Call) {
			n := int(kernel.Get[int32](c, 4))
			x, y := kernel.Read[uint32](c, 1, n), kernel.Update[uint32](c, 0, n)
			for i := range y {
				y[i] = kernel.Get[uint32](c, 2)*x[i] + kernel.Get[uint32](c, 3)
			}
		}},
		{Name: "swap2", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.I32}, Go: func(c *kernel.Call) {
			n := int(kernel.Get[int32](c, 2))
			x, y := kernel.Update[uint32](c, 0, n), kernel.Update[uint32](c, 1, n)
			for i := range x {
				x[i], y[i] = y[i], x[i]
			}
		}},
		{Name: "total", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.I32}, Go: func(c *kernel.Call) {
			sum := uint32(0)
			for _, v := range kernel.Read[uint32](c, 1, int(kernel.Get[int32](c, 2))) {
				sum += v
			}
			kernel.Update[uint32](c, 0, 1)[0] = sum
		}},
		{Name: "stride", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.I32, kernel.I32}, Go: func(c *kernel.Call) {
			by, n := int(kernel.Get[int32](c, 2)), int(kernel.Get[int32](c, 3))
			y := kernel.Update[uint32](c, 0, n)
			for i := range y {
				y[i] = kernel.ReadAddress[uint32](c, c.Address(1)+uint64(4*i*by), 1)[0]
			}
		}},
		{Name: "spin", Params: []kernel.Param{kernel.U64}, Go: func(c *kernel.Call) {
			for start := time.Now(); time.Since(start) < time.Duration(kernel.Get[uint64](c, 0)); {
			}
		}},
		{Name: "poke", Params: []kernel.Param{kernel.Pointer, kernel.I64}, Go: func(c *kernel.Call) {
			kernel.UpdateAddress[uint32](c, c.Address(0)+uint64(4*kernel.Get[int64](c, 1)), 1)[0] = 1
		}},
	},
}
