// What CUDA kernels need of CUDA, for a C++ compiler of the host. A kernel is a function for one
// thread, selected by blockIdx and threadIdx.
#include <cstdio>
#include <cstring>
#include <vector>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>
#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx;
template <class D, class S> static D bits_of(S s) { D d; memcpy(&d, &s, sizeof d); return d; }
static inline float __uint_as_float(unsigned u) { return bits_of<float>(u); }
static inline unsigned __float_as_uint(float f) { return bits_of<unsigned>(f); }
static inline float half_value(unsigned short b) { return (float)bits_of<_Float16>(b); }
static inline unsigned short half_bits(float f) { return bits_of<unsigned short>((_Float16)f); }
