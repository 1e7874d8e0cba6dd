// Package kernel compiles CUDA C++ at run time and launches it.
//
//	m, err := kernel.Compile(dev, &kernel.Source{
//		Name: "scale.cu",
//		CUDA: `extern "C" __global__ void scale(float* x, float by, int n) {
//			int i = blockIdx.x * blockDim.x + threadIdx.x;
//			if (i < n) x[i] *= by;
//		}`,
//		Kernels: []kernel.Def{{
//			Name:   "scale",
//			Params: []kernel.Param{kernel.Pointer, kernel.F32, kernel.I32},
//			Go: func(c *kernel.Call) { // stands in on virtual devices
//				x := kernel.Update[float32](c, 0, int(kernel.Get[int32](c, 2)))
//				for i := range x {
//					x[i] *= kernel.Get[float32](c, 1)
//				}
//			},
//		}},
//	})
//	scale, err := m.Kernel("scale")
//	err = scale.Launch(s, kernel.Cover(n), kernel.Ptr(x), kernel.Scalar[float32](2), kernel.Scalar(int32(n)))
//
// NVRTC compiles the source for the device's compute capability, so neither a CUDA toolkit
// nor a prepared binary is needed. Binaries are cached on disk for other processes. A
// kernel's Go function does the work of the whole grid in one call; it is needed only for
// programs that also run without a GPU.
//
// If each element of the output depends on the same element of the inputs, an
// [Elementwise] needs no grid, no bounds checks and no types:
//
//	axpy, err := kernel.NewElementwise(`template <typename T> T axpy(T x, T y, T a) { return a * x + y; }`,
//		&kernel.ElementwiseConfig{Defaults: []kernel.Operand{kernel.Set("a", 1)}})
//	err = axpy.Launch(s, kernel.Out(z), kernel.In(x), kernel.In(y), kernel.Set("a", 2.5))
//
// Concurrency: modules, kernels and element-wise functions may be used by
// several goroutines.
package kernel
