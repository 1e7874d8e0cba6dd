// Torch's random fills, with the same bits. One kernel template serves all distributions and
// element types. The compiler gets the distribution and the type of a module by the macros
// CHORUS_DIST and CHORUS_TYPE.
//
// A fill has three steps: philox generates four random words, a Draw converts them to two or
// four numbers, and a distribution converts a number to an element.
//
// nvcc contracts multiplications and additions of torch's kernels. This file writes these
// fused multiply-adds explicitly, so that results do not depend on a compiler or its flags.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// ---- elements ----

// The 16-bit floats are structs of their bits, because NVRTC does not include cuda_fp16.h.
struct Half { u16 bits; };
struct BFloat { u16 bits; };

#ifdef __CUDACC__
static __device__ __forceinline__ Half half_of(float x) {
    Half h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
    return h;
}
static __device__ __forceinline__ float wide(Half h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
    return x;
}
#endif

// bfloat_of rounds to nearest even. It does not use the instruction for this, which needs
// compute capability 8.0. A fill is limited by its stores, so the instruction is not faster.
static __device__ __forceinline__ BFloat bfloat_of(float x) {
    u32 u = __float_as_uint(x);
    BFloat b;
    b.bits = x != x ? 0x7fff : (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    return b;
}
static __device__ __forceinline__ float wide(BFloat b) { return __uint_as_float((u32)b.bits << 16); }
static __device__ __forceinline__ float wide(float x) { return x; }
static __device__ __forceinline__ double wide(double x) { return x; }

// Element<T> has the properties of an element type. Acc is the type that torch computes
// values in. digits is the width of the significand, or 0 for integers. top is the largest
// value of an integer type.
template <class T> struct Element;
#define INTEGER(T, most) \
    template <> struct Element<T> { \
        typedef float Acc; \
        static const int digits = 0; \
        static const u64 top = most; \
        static __device__ __forceinline__ T of(float x) { return (T)x; } \
        static __device__ __forceinline__ T of(i64 x) { return (T)x; } \
    };
INTEGER(bool, 1)
INTEGER(i8, 0x7f)
INTEGER(u8, 0xff)
INTEGER(i16, 0x7fff)
INTEGER(u16, 0xffff)
INTEGER(i32, 0x7fffffff)
INTEGER(u32, 0xffffffff)
INTEGER(i64, 0x7fffffffffffffff)
INTEGER(u64, 0xffffffffffffffff)
#undef INTEGER

#define FLOATING(T, A, width, from_acc) \
    template <> struct Element<T> { \
        typedef A Acc; \
        static const int digits = width; \
        static const u64 top = 0; \
        static __device__ __forceinline__ T of(A x) { return from_acc(x); } \
        static __device__ __forceinline__ T of(i64 x) { return from_acc((A)x); } \
    };
FLOATING(Half, float, 11, half_of)
FLOATING(BFloat, float, 8, bfloat_of)
FLOATING(float, float, 24, float)
FLOATING(double, double, 53, double)
#undef FLOATING

// ---- the generator ----

struct Words { u32 x, y, z, w; };

// philox is Philox4x32-10: ten rounds on a counter of 128 bits with a key of 64 bits, the seed.
static __device__ __forceinline__ Words philox(u32 k0, u32 k1, u64 counter, u32 subsequence) {
    Words c = {(u32)counter, (u32)(counter >> 32), subsequence, 0};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 p = (u64)0xD2511F53u * c.x, q = (u64)0xCD9E8D57u * c.z;
        c = Words{(u32)(q >> 32) ^ c.y ^ k0, (u32)q, (u32)(p >> 32) ^ c.w ^ k1, (u32)p};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// ---- draws: numbers from four words ----

static __device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
static __device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

// unit returns a number in (0, 1]: the middle of one of 2^32 or 2^53 intervals.
static __device__ __forceinline__ float unit(u32 x) { return fmaf((float)x, 0x1p-32f, 0x1p-33f); }
static __device__ __forceinline__ double unit(u32 x, u32 y) {
    return fma((double)(x ^ (u64)y << 21), 0x1p-53, 0x1p-54);
}

// box_muller computes two normal values from two uniform ones. The value of the sine comes
// first.
static __device__ __forceinline__ void box_muller(u32 x, u32 y, float* out) {
    const float turn = 0x1.921fb6p-30f; // 2 pi / 2^32
    float sine, cosine, angle = fmaf((float)y, turn, turn / 2);
    float radius = sqrtf(-2.f * logf(unit(x)));
    __sincosf(angle, &sine, &cosine);
    out[0] = sine * radius;
    out[1] = cosine * radius;
}
static __device__ __forceinline__ void box_muller(Words w, double* out) {
    double sine, cosine, half_turns = fma((double)(w.z ^ (u64)w.w << 21), 0x1p-52, 0x1p-53);
    double radius = sqrt(-2. * log(unit(w.x, w.y)));
    sincospi(half_turns, &sine, &cosine);
    out[0] = sine * radius;
    out[1] = cosine * radius;
}

// A Draw has the type of its numbers, Value, their count, and the conversion of four words,
// draw.
template <class A> struct Unit;
template <> struct Unit<float> {
    typedef float Value;
    static const int count = 4;
    static __device__ __forceinline__ void draw(Words w, float* v) {
        v[0] = unit(w.x);
        v[1] = unit(w.y);
        v[2] = unit(w.z);
        v[3] = unit(w.w);
    }
};
template <> struct Unit<double> {
    typedef double Value;
    static const int count = 2;
    static __device__ __forceinline__ void draw(Words w, double* v) {
        v[0] = unit(w.x, w.y);
        v[1] = unit(w.z, w.w);
    }
};
template <class A> struct Gauss;
template <> struct Gauss<float> {
    typedef float Value;
    static const int count = 4;
    static __device__ __forceinline__ void draw(Words w, float* v) {
        box_muller(w.x, w.y, v);
        box_muller(w.z, w.w, v + 2);
    }
};
template <> struct Gauss<double> {
    typedef double Value;
    static const int count = 2;
    static __device__ __forceinline__ void draw(Words w, double* v) { box_muller(w, v); }
};
struct Bits32 {
    typedef u32 Value;
    static const int count = 4;
    static __device__ __forceinline__ void draw(Words w, u32* v) {
        v[0] = w.x;
        v[1] = w.y;
        v[2] = w.z;
        v[3] = w.w;
    }
};
struct Bits64 {
    typedef u64 Value;
    static const int count = 2;
    static __device__ __forceinline__ void draw(Words w, u64* v) {
        v[0] = (u64)w.x << 32 | w.y;
        v[1] = (u64)w.z << 32 | w.w;
    }
};

template <bool Yes, class A, class B> struct If { typedef A Type; };
template <class A, class B> struct If<false, A, B> { typedef B Type; };
template <class A, class B> struct Same { static const bool yes = false; };
template <class A> struct Same<A, A> { static const bool yes = true; };

// ---- distributions: elements from numbers ----

// Params are three parameters of 64 bits. Each distribution defines their meaning.
struct Params {
    u64 p[3];
    __device__ __forceinline__ double real(int i) const { return __longlong_as_double((i64)p[i]); }
};

// The functions that torch uses: fast approximations for float, and accurate ones for double.
static __device__ __forceinline__ float log_of(float x) { return __logf(x); }
static __device__ __forceinline__ double log_of(double x) { return log(x); }
static __device__ __forceinline__ float log_1p(float x) { return __logf(1.f + x); }
static __device__ __forceinline__ double log_1p(double x) { return log1p(x); }
static __device__ __forceinline__ float exp_of(float x) { return __expf(x); }
static __device__ __forceinline__ double exp_of(double x) { return exp(x); }
static __device__ __forceinline__ float ceil_of(float x) { return ceilf(x); }
static __device__ __forceinline__ double ceil_of(double x) { return ceil(x); }

// Uniform is uniform in [from, to). A value that rounds to `to` becomes `from`.
template <class T> struct Uniform {
    typedef typename Element<T>::Acc A;
    typedef Unit<A> Draw;
    A from, to, range;
    __device__ Uniform(Params p) : from((A)p.real(0)), to((A)p.real(1)), range((A)p.real(2)) {}
    __device__ __forceinline__ T operator()(A u) const {
        T v = Element<T>::of(fused(u, range, from));
        return wide(v) == to ? Element<T>::of(from) : v;
    }
};

template <class T> struct Normal {
    typedef typename Element<T>::Acc A;
    typedef Gauss<A> Draw;
    A mean, std;
    __device__ Normal(Params p) : mean((A)p.real(0)), std((A)p.real(1)) {}
    __device__ __forceinline__ T operator()(A z) const { return Element<T>::of(fused(z, std, mean)); }
};

template <class T> struct LogNormal {
    typedef typename Element<T>::Acc A;
    typedef Gauss<A> Draw;
    A mean, std;
    __device__ LogNormal(Params p) : mean((A)p.real(0)), std((A)p.real(1)) {}
    __device__ __forceinline__ T operator()(A z) const { return Element<T>::of(exp_of(fused(z, std, mean))); }
};

// Exponential has the parameter scale = -1/lambda. Close to 1, it replaces the logarithm by
// half an epsilon, as torch does: the fast logarithm is inaccurate there, and the value must
// not be 0.
template <class T> struct Exponential {
    typedef typename Element<T>::Acc A;
    typedef Unit<A> Draw;
    A scale;
    __device__ Exponential(Params p) : scale((A)p.real(0)) {}
    __device__ __forceinline__ T operator()(A u) const {
        const A half_epsilon = sizeof(A) == 4 ? (A)0x1p-24 : (A)0x1p-53;
        return Element<T>::of(scale * (u >= 1 - half_epsilon ? -half_epsilon : log_of(u)));
    }
};

template <class T> struct Bernoulli {
    typedef typename Element<T>::Acc A;
    typedef Unit<A> Draw;
    A p;
    __device__ Bernoulli(Params q) : p((A)q.real(0)) {}
    __device__ __forceinline__ T operator()(A u) const { return Element<T>::of((A)(u < p)); }
};

// Geometric is the number of trials up to the first success.
template <class T> struct Geometric {
    typedef typename Element<T>::Acc A;
    typedef Unit<A> Draw;
    A failure; // log(1 - p)
    __device__ Geometric(Params q) : failure(log_1p(-(A)q.real(0))) {}
    __device__ __forceinline__ T operator()(A u) const { return Element<T>::of(ceil_of(log_of(u) / failure)); }
};

// Random is uniform over the values of an integer type that are not negative, or over the
// integers from 0 to 2^digits for a floating-point type.
template <class T> struct Random {
    typedef typename If<Same<T, double>::yes || Same<T, i64>::yes, Bits64, Bits32>::Type Draw;
    __device__ Random(Params) {}
    __device__ __forceinline__ T operator()(typename Draw::Value v) const {
        if (Element<T>::digits == 0) return (Element<T>::of((i64)(v & Element<T>::top)));
        return Element<T>::of((i64)(v % (typename Draw::Value)((1ull << Element<T>::digits) + 1)));
    }
};

// RandomRange is uniform over the range integers from base on. RandomNear draws 32 bits.
// RandomFar draws 64 bits, for large ranges.
template <class T, class D> struct RandomRange {
    typedef D Draw;
    typename D::Value range;
    i64 base;
    __device__ RandomRange(Params p) : range((typename D::Value)p.p[0]), base((i64)p.p[1]) {}
    __device__ __forceinline__ T operator()(typename D::Value v) const {
        return Element<T>::of((i64)((u64)(v % range) + (u64)base));
    }
};
template <class T> struct RandomNear : RandomRange<T, Bits32> {
    __device__ RandomNear(Params p) : RandomRange<T, Bits32>(p) {}
};
template <class T> struct RandomFar : RandomRange<T, Bits64> {
    __device__ RandomFar(Params p) : RandomRange<T, Bits64>(p) {}
};

// ---- the fill ----

// fill is the grid-stride loop of all fills. Thread t of the grid uses Philox subsequence t and
// fills the elements t, t+threads, t+2*threads, and so on. The values of elements therefore
// depend on the grid, which must be torch's.
template <class Dist, class T>
static __device__ __forceinline__ void fill(T* out, u32 n, u32 k0, u32 k1, u64 offset, Params p) {
    typedef typename Dist::Draw Draw;
    const u32 threads = gridDim.x * blockDim.x;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const Dist dist(p);
    u64 counter = offset / 4;
    for (u32 at = thread; at < n; at += threads * Draw::count) {
        typename Draw::Value v[Draw::count];
        Draw::draw(philox(k0, k1, counter++, thread), v);
#pragma unroll
        for (int i = 0; i < Draw::count; i++) {
            u32 to = at + threads * i;
            if (to < n) out[to] = dist(v[i]);
        }
    }
}

// fill_kernel fills out. Numbers of 64 bits are passed in halves, the low one first. k is the
// seed, o the offset, and a, b and c are the distribution's parameters. In a graph, place is
// not null: it has the seed and the offset of the launch, and the fill adds its offset o.
#define PAIR(lo, hi) ((u64)(u32)(hi) << 32 | (u32)(lo))

#ifdef CHORUS_DIST
extern "C" __global__ void __launch_bounds__(256, 4)
fill_kernel(CHORUS_TYPE* out, int n, int k0, int k1, int o0, int o1,
            int a0, int a1, int b0, int b1, int c0, int c1, const u64* place) {
    Params p = {{PAIR(a0, a1), PAIR(b0, b1), PAIR(c0, c1)}};
    // Two calls, because a seed that is a kernel parameter is known to be the same for all
    // threads. This makes the generator a quarter faster.
    if (place)
        fill<CHORUS_DIST<CHORUS_TYPE>>(out, (u32)n, (u32)place[0], (u32)(place[0] >> 32), PAIR(o0, o1) + place[1], p);
    else
        fill<CHORUS_DIST<CHORUS_TYPE>>(out, (u32)n, (u32)k0, (u32)k1, PAIR(o0, o1), p);
}
#endif
