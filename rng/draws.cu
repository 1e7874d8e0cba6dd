
// ---- draws ----
// The lines above are rng.cu. NVRTC compiles this file at run time, after rng.cu: the
// distributions that are not in the embedded PTX, parameters in device memory, permutations and
// multinomial samples. CHORUS_TYPE is the element type of the kernels that have one.

#define EACH(i, n) for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

// in_graph applies the seed and the offset of a graph's launch, if place is not null: it
// replaces the seed and adds to the offset.
static __device__ __forceinline__ void in_graph(const u64* place, u64& seed, u64& offset) {
    if (!place) return;
    seed = place[0];
    offset += place[1];
}
static __device__ __forceinline__ Words words(u64 seed, u64 counter, u32 subsequence) {
    return philox((u32)seed, (u32)(seed >> 32), counter, subsequence);
}

static __device__ __forceinline__ float tan_of(float x) { return __tanf(x); }
static __device__ __forceinline__ double tan_of(double x) { return tan(x); }

// Cauchy moves draws next to 0 and 1 inward for float, because the fast tangent is infinite
// there.
template <class T> struct Cauchy {
    typedef typename Element<T>::Acc A;
    typedef Unit<A> Draw;
    A median, sigma;
    __device__ Cauchy(Params p) : median((A)p.real(0)), sigma((A)p.real(1)) {}
    __device__ __forceinline__ T operator()(A u) const {
        if (sizeof(A) == 4) {
            const A epsilon = (A)0x1p-23;
            u = u > 1 - epsilon ? 1 - epsilon : u;
            u = u < epsilon ? epsilon : u;
        }
        return Element<T>::of(fused(sigma, tan_of((A)3.14159265358979323846 * (u - (A)0.5)), median));
    }
};

// ---- parameters in device memory ----

// The numbers of the types in memory.DType.
enum { F16 = 10, BF16 = 11, F32 = 12, F64 = 13 };

// A Param is a parameter of a distribution: one number for all elements, or a slice with one
// number for each element. step is the distance of its numbers, in elements.
struct Param {
    const void* at; // the slice, or null
    double number;
    int type, step;
    __device__ __forceinline__ double operator[](u64 i) const {
        i *= step;
        if (!at) return number;
        switch (type) {
        case F16: return wide(((const Half*)at)[i]);
        case BF16: return wide(((const BFloat*)at)[i]);
        case F32: return ((const float*)at)[i];
        default: return ((const double*)at)[i];
        }
    }
};
#define PARAM(name) const void* name##_at, double name##_number, int name##_type, int name##_step
#define PARAM_VALUE(name) Param{name##_at, name##_number, name##_type, name##_step}

// ---- Poisson, with the algorithms of cuRAND ----

// A Stream is the sequence of 32-bit random numbers of one thread, four for each counter.
struct Stream {
    u64 seed, counter;
    u32 subsequence, used;
    Words w;
    __device__ __forceinline__ Stream(u64 seed, u64 counter, u32 subsequence)
        : seed(seed), counter(counter), subsequence(subsequence), used(0), w(words(seed, counter, subsequence)) {}
    __device__ __forceinline__ u32 next() {
        if (used == 4) {
            w = words(seed, ++counter, subsequence);
            used = 0;
        }
        u32 x = used == 0 ? w.x : used == 1 ? w.y : used == 2 ? w.z : w.w;
        used++;
        return x;
    }
};

#ifdef __CUDACC__
static __device__ __forceinline__ float fast_rsqrt(float x) {
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
}
static __device__ __forceinline__ float fast_exp2(float x) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
}
static __device__ __forceinline__ float fast_log2(float x) {
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
}
static __device__ __forceinline__ float fast_reciprocal(float x) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
}
#endif
static __device__ __forceinline__ float fast_exp(float x) { return fast_exp2((float)(x * 1.4426950408889634)); }
static __device__ __forceinline__ float fast_log(float x) { return (float)(fast_log2(x) * 0.69314718055994531); }

// A Gamma approximates the regularised incomplete gamma function of order a by the square of a
// logistic function.
struct Gamma {
    float a, slope, shift;
    __device__ __forceinline__ Gamma(float a) : a(a) {
        slope = fused(1.43248035075540910f, fast_rsqrt(a - 0.12400979329415655f), 0.00025361074907033f);
        shift = fused(0.21096734870196546f, fast_rsqrt(a - 1.97381164089999420f), 0.94201734077887530f);
    }
    __device__ __forceinline__ float value(float x) const {
        float t = 1.0f + fast_exp(fused(slope, a - x, -shift));
        return fast_reciprocal(t * t);
    }
    __device__ __forceinline__ float inverse(float y) const {
        float t = shift + fast_log(fast_rsqrt(y) - 1.0f);
        return fused(-t, fast_reciprocal(slope), a);
    }
};

// poisson_small is for rates below 64: it multiplies e^rate by uniform numbers until the
// product is at most 1, and counts them.
static __device__ u32 poisson_small(Stream& s, float rate) {
    u32 k = 0;
    float p = expf(rate);
    do {
        k++;
        p *= unit(s.next());
    } while (p > 1.0f);
    return k - 1;
}

// poisson_middle is for rates from 64 to 4000: it draws from the Gamma approximation and
// rejects values with the probability that corrects the distribution.
static __device__ u32 poisson_middle(Stream& s, float rate) {
    const Gamma gamma(rate);
    const float log_rate = fast_log(rate);
    for (;;) {
        float x = floorf(gamma.inverse(unit(s.next())));
        float z = unit(s.next());
        float v = (gamma.value(x + 1.0f) - gamma.value(x)) * 1.3f;
        float t = fast_exp(fused(x, log_rate, -rate) - (float)lgamma((double)(1.0f + x)));
        if (z * v < t && v >= 1e-20) return (u32)x;
    }
}

// poisson_large is for rates above 4000: it rounds a normal value.
static __device__ u32 poisson_large(const Stream& s, double rate) {
    double z[2];
    box_muller(s.w, z);
    double v = fused(sqrt(rate), z[0], rate) + 0.5;
    return v != v ? 0 : v >= 4294967295.0 ? 0xffffffffu : (u32)v; // NaN: the rate is infinite
}

// poisson draws one value. The result for a negative rate or NaN is NaN.
static __device__ __forceinline__ double poisson(u64 seed, u64 counter, u32 subsequence, double rate) {
    if (!(rate >= 0)) return rate - rate + __longlong_as_double(0x7ff8000000000000); // NaN
    Stream s(seed, counter, subsequence);
    if (rate < 64) return poisson_small(s, (float)rate);
    if (rate > 4000) return poisson_large(s, rate);
    return poisson_middle(s, (float)rate);
}

#ifdef CHORUS_ELEMENT
typedef CHORUS_ELEMENT Type;
typedef Element<Type>::Acc Acc;

// bernoulli_kernel writes 1 with probability p, and otherwise 0. Four adjacent elements share
// one Philox subsequence.
extern "C" __global__ void __launch_bounds__(256)
bernoulli_kernel(Type* out, u64 n, u64 seed, u64 offset, const u64* place, PARAM(p)) {
    const Param p = PARAM_VALUE(p);
    in_graph(place, seed, offset);
    EACH(quad, (n + 3) / 4) {
        const Words w = words(seed, offset / 4, (u32)quad);
        const u32 x[4] = {w.x, w.y, w.z, w.w};
        for (u64 i = quad * 4; i < n && i < quad * 4 + 4; i++) {
            double limit = p[i];
            if (!Same<Type, double>::yes) limit = (float)limit;
            out[i] = Element<Type>::of((Acc)((double)unit(x[i % 4]) <= limit));
        }
    }
}
#endif

#ifdef CHORUS_FLOATING
// cauchy_kernel has the parameters and the grid of fill_kernel.
extern "C" __global__ void __launch_bounds__(256, 4)
cauchy_kernel(Type* out, int n, int k0, int k1, int o0, int o1,
              int a0, int a1, int b0, int b1, int c0, int c1, const u64* place) {
    const Params p = {{PAIR(a0, a1), PAIR(b0, b1), PAIR(c0, c1)}};
    u64 seed = PAIR(k0, k1), offset = PAIR(o0, o1);
    in_graph(place, seed, offset);
    fill<Cauchy<Type>>(out, (u32)n, (u32)seed, (u32)(seed >> 32), offset, p);
}

// poisson_kernel draws element i from Philox subsequence i.
extern "C" __global__ void __launch_bounds__(256)
poisson_kernel(Type* out, u64 n, u64 seed, u64 offset, const u64* place, PARAM(rate)) {
    const Param rate = PARAM_VALUE(rate);
    in_graph(place, seed, offset);
    EACH(i, n) out[i] = Element<Type>::of((Acc)poisson(seed, offset / 4, (u32)i, rate[i]));
}

// product and sum round like torch. It computes in double if one of the types is double.
static __device__ __forceinline__ Type product(Type a, double b, bool in_double) {
    return Element<Type>::of(in_double ? (Acc)((double)wide(a) * b) : (Acc)((float)wide(a) * (float)b));
}
static __device__ __forceinline__ Type sum(Type a, double b, bool in_double) {
    return Element<Type>::of(in_double ? (Acc)((double)wide(a) + b) : (Acc)((float)wide(a) + (float)b));
}

// normal_kernel completes a normal fill with parameters in device memory. The elements are
// normal with mean 0. The kernel multiplies them by std if std is a slice, and adds the mean.
extern "C" __global__ void __launch_bounds__(256) normal_kernel(Type* out, u64 n, PARAM(mean), PARAM(std)) {
    const Param mean = PARAM_VALUE(mean), std = PARAM_VALUE(std);
    const bool all = Same<Type, double>::yes;
    EACH(i, n) {
        Type v = out[i];
        if (std_at) v = product(v, std[i], all || std_type == F64);
        out[i] = sum(v, mean[i], all || (mean_at && mean_type == F64));
    }
}
#endif
