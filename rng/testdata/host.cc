// Compiles rng.cu as C++ for the host and runs its threads one after the other,
// to compare it with the Go functions that stand in for it. Each line of the
// input is
//
//     distribution type n blocks seed offset a b c
//
// with numbers in hexadecimal from the seed on; its elements are the output.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim { unsigned x; };
static Dim gridDim, blockDim, blockIdx, threadIdx;

template <class To, class From> static To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the sizes differ");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static double __longlong_as_double(long long x) { return bits_as<double>(x); }

// CUDA's fast functions, without their errors. glibc has these names too.
#define __logf fast_log
#define __expf fast_exp
#define __sincosf fast_sincos
static float __logf(float x) { return (float)log((double)x); }
static float __expf(float x) { return (float)exp((double)x); }
static void __sincosf(float x, float* s, float* c) { *s = (float)sin((double)x), *c = (float)cos((double)x); }
static void sincospi(double x, double* s, double* c) {
    long double pi = 3.14159265358979323846264338327950288L;
    *s = (double)sinl(x * pi), *c = (double)cosl(x * pi);
}

#ifndef __FLT16_DIG__
#error this compiler has no _Float16
#endif

struct Half;
static Half half_of(float);
static float wide(Half);

#include "rng.cu"

static Half half_of(float x) { return Half{bits_as<u16>((_Float16)x)}; }
static float wide(Half h) { return (float)bits_as<_Float16>(h.bits); }

template <class Dist> struct Pick {};

template <class Dist, class T> static void start(Pick<Dist>, T* out, u32 n, u64 seed, u64 offset, Params p) {
    fill<Dist>(out, n, (u32)seed, (u32)(seed >> 32), offset, p);
}

// The one that the macros name goes through the kernel: as in a graph, where the
// seed is odd.
static void start(Pick<CHORUS_DIST<CHORUS_TYPE>>, CHORUS_TYPE* out, u32 n, u64 seed, u64 offset, Params p) {
#define HALVES(v) (i32)(v), (i32)((v) >> 32)
    const u64 place[2] = {seed, offset - 4};
    if (seed & 1)
        fill_kernel(out, (i32)n, 7, 7, HALVES(4ull), HALVES(p.p[0]), HALVES(p.p[1]), HALVES(p.p[2]), place);
    else
        fill_kernel(out, (i32)n, HALVES(seed), HALVES(offset), HALVES(p.p[0]), HALVES(p.p[1]), HALVES(p.p[2]), 0);
}

template <class Dist, class T> static void run(u32 n, u32 blocks, u64 seed, u64 offset, Params p) {
    std::vector<unsigned char> out((n + 1) * sizeof(T), 0xa5);
    gridDim.x = blocks;
    blockDim.x = 256;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++)
            start(Pick<Dist>(), (T*)out.data(), n, seed, offset, p);
    fwrite(out.data(), 1, out.size(), stdout); // the last one shows a write too far
}

#define TRY(D, T) \
    if (!strcmp(dist, #D) && !strcmp(type, #T)) { run<D<T>, T>(n, blocks, seed, offset, p); continue; }
#define FLOATS(D) TRY(D, Half) TRY(D, BFloat) TRY(D, float) TRY(D, double)
#define NUMBERS(D) FLOATS(D) TRY(D, i8) TRY(D, u8) TRY(D, i16) TRY(D, i32) TRY(D, i64)
#define ALL(D) NUMBERS(D) TRY(D, bool) TRY(D, u16) TRY(D, u32)

int main() {
    char dist[32], type[32];
    u32 n, blocks;
    u64 seed, offset;
    Params p;
    while (scanf("%31s %31s %u %u %llx %llx %llx %llx %llx", dist, type, &n, &blocks, &seed, &offset, p.p, p.p + 1, p.p + 2) == 9) {
        FLOATS(Uniform) FLOATS(Normal) FLOATS(LogNormal) FLOATS(Exponential)
        NUMBERS(Bernoulli) TRY(Bernoulli, bool) NUMBERS(Geometric)
        ALL(Random) ALL(RandomNear) ALL(RandomFar) TRY(RandomNear, u64) TRY(RandomFar, u64)
        fprintf(stderr, "no %s of %s\n", dist, type);
        return 1;
    }
    return 0;
}
