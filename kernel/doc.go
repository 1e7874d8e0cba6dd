// Package kernel compiles CUDA C++ at run time and launches it.
//
//	type scaleArgs struct { // as the parameters in CUDA
//		X  memory.Slice[float32]
//		By float32
//		N  int32
//	}
//
//	src := &kernel.Source{Name: "scale.cu", CUDA: `extern "C" __global__ void scale(float* x, float by, int n) {
//		int i = blockIdx.x * blockDim.x + threadIdx.x;
//		if (i < n) x[i] *= by;
//	}`}
//	scale := kernel.Define(src, "scale", func(c *kernel.Call, a scaleArgs) { // stands in on virtual devices
//		x := kernel.Data(c, a.X)
//		for i := range x {
//			x[i] *= a.By
//		}
//	})
//	m, err := kernel.Compile(dev, src)
//	err = scale.Launch(s, kernel.Cover(n), scaleArgs{x, 2, int32(n)})
//
// NVRTC compiles the source for the device's compute capability, so neither a CUDA toolkit
// nor a prepared binary is needed. Binaries are cached on disk for other processes. A
// kernel's Go function does the work of the whole grid in one call; it is needed only for
// programs that also run without a GPU. [Verify] tests that it agrees with the source. In tests
// virtual devices compare some launches of each kernel with the source by themselves, if g++ is
// installed and can compile it. CHORUS_VIRTUAL_KERNELS=go switches that off, for example for a
// kernel whose results depend on the order of its threads.
//
// A [Def] with Params, and [Kernel.Launch] with a list of arguments, are for parameters that
// fields cannot express: structs, pinned memory, and pointers that vary in type.
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
