
// ---- multinomial samples ----
// The lines above are rng.cu. NVRTC compiles both at run time. CHORUS_ELEMENT is the type of the
// weights. Each row of the weights is a distribution over its columns, the categories.
//
// With replacement: weight_sums normalizes the rows, weight_scan computes their prefix sums,
// and sample_rows searches them for uniform numbers. Without replacement, each weight is
// divided by an exponentially distributed number, and the categories with the largest
// quotients are the sample: sample_best selects one category, and a sort of sample_keys
// orders several.
//
// Sums are rounded like torch's.

typedef CHORUS_ELEMENT Type;
typedef Element<Type>::Acc Acc;

#define EACH(i, n) for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

static __device__ __forceinline__ Type add(Type a, Type b) { return Element<Type>::of(wide(a) + wide(b)); }
static __device__ __forceinline__ Type divide(Type a, Type b) { return Element<Type>::of(wide(a) / wide(b)); }

// warp_sum adds the 32 numbers of each warp in shared memory: lane 0 gets the sum. All lanes
// call it after a __syncwarp.
static __device__ __forceinline__ Type warp_sum(Type* x) {
    const u32 t = threadIdx.x, lane = t % 32;
    for (u32 d = 16; d > 0; d /= 2) {
        if (lane < d) x[t] = add(x[t], x[t + d]);
        __syncwarp();
    }
    return x[t];
}

// weight_sums computes the sum of each row, one block for a row. If parts is not null, it
// stores the weights divided by the sum. It sets bad[row] if a weight is negative, infinite
// or NaN, or if the sum is not positive. Blocks have a multiple of 32 threads.
extern "C" __global__ void __launch_bounds__(1024) weight_sums(const Type* weights, Type* parts, u32* bad, u64 rows, u64 columns) {
    __shared__ Type x[1024], total[1];
    __shared__ u32 invalid;
    const u32 t = threadIdx.x;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        if (t == 0) invalid = 0;
        __syncthreads();
        Type sum = Element<Type>::of((Acc)0);
        for (u64 i = t; i < columns; i += blockDim.x) {
            const Type w = weights[row * columns + i];
            if (!(wide(w) >= 0 && wide(w) - wide(w) == 0)) invalid = 1;
            sum = add(sum, w);
        }
        x[t] = sum;
        __syncwarp();
        sum = warp_sum(x);
        __syncthreads();
        if (t < 32) x[t] = Element<Type>::of((Acc)0);
        __syncthreads();
        if (t % 32 == 0) x[t / 32] = sum;
        __syncthreads();
        if (t < 32) {
            sum = warp_sum(x);
            if (t == 0) total[0] = sum;
        }
        __syncthreads();
        const Acc all = wide(total[0]);
        if (t == 0) bad[row] = invalid || !(all > 0);
        if (parts)
            for (u64 i = t; i < columns; i += blockDim.x)
                parts[row * columns + i] = all > 0 ? divide(weights[row * columns + i], total[0]) : weights[row * columns + i];
        __syncthreads();
    }
}

// weight_scan stores the prefix sums of each row, one block for a row. Like torch.cumsum, it
// uses Sklansky's scan in shared memory, with two elements for each thread at a time.
extern "C" __global__ void __launch_bounds__(512) weight_scan(const Type* parts, Type* sums, u64 rows, u64 columns) {
    __shared__ Type x[1024];
    const u32 t = threadIdx.x, threads = blockDim.x;
    const Type zero = Element<Type>::of((Acc)0);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const Type* const in = parts + row * columns;
        Type* const out = sums + row * columns;
        Type before = zero;
        for (u64 at = 0; at < columns; at += 2 * threads) {
            const u64 i = at + t, j = at + threads + t;
            x[t] = i < columns ? in[i] : zero;
            x[threads + t] = j < columns ? in[j] : zero;
            if (t == 0) x[0] = add(x[0], before);
            __syncthreads();
            for (u32 s = 1; s <= threads; s *= 2) {
                const u32 from = t / s * (2 * s) + s;
                x[from + t % s] = add(x[from + t % s], x[from - 1]);
                __syncthreads();
            }
            if (i < columns) out[i] = x[t];
            if (j < columns) out[j] = x[threads + t];
            before = x[2 * threads - 1];
            __syncthreads();
        }
    }
}

// sample_rows draws with replacement: the result is the first category with a prefix sum that
// is not below a uniform number. span is the number of Philox subsequences of a row. Rows
// from 65535 on use the subsequences of earlier rows again, with the next counter.
extern "C" __global__ void __launch_bounds__(256) sample_rows(i64* out, const Type* sums, const Type* parts, const u32* bad,
        u64 rows, u64 columns, u64 samples, u64 span, u64 seed, u64 offset, const u64* place) {
    if (place) {
        seed = place[0];
        offset += place[1];
    }
    EACH(i, rows * samples) {
        const u64 row = i / samples, draws = rows < 65535 ? rows : 65535;
        const Words w = philox((u32)seed, (u32)(seed >> 32), offset / 4 + row / draws, (u32)(row % draws * span + i % samples));
        const Acc u = wide(Element<Type>::of((Acc)unit(w.x)));
        const Type* const sum = sums + row * columns;
        u64 start = 0, end = columns;
        while (start < end) {
            const u64 middle = start + (end - start) / 2;
            if (wide(sum[middle]) < u) start = middle + 1;
            else end = middle;
        }
        if (start == columns) start = columns - 1; // rounding: the sum is below u
        while (start > 0 && wide(parts[row * columns + start]) == 0) start--;
        out[i] = bad[row] ? -1 : (i64)start;
    }
}

// order maps floating-point numbers to integers of the same order. NaN is the largest.
static __device__ __forceinline__ u64 order(float v) {
    if (v != v) return 0xffffffffu;
    const u32 b = __float_as_uint(v);
    return b & 0x80000000u ? (u32)~b : b | 0x80000000u;
}
static __device__ __forceinline__ u64 order(double v) {
    if (v != v) return ~0ull;
    const u64 b = (u64)__double_as_longlong(v);
    return b >> 63 ? ~b : b | 0x8000000000000000ull;
}

// sample_best draws one category of each row, one block for a row: the category with the
// largest quotient of weight and wait, and the first one of equal quotients. A reduction in
// shared memory finds it. waits are exponentially distributed.
extern "C" __global__ void __launch_bounds__(256) sample_best(i64* out, const Type* weights, const Type* waits, const u32* bad, u64 rows, u64 columns) {
    __shared__ u64 best[256], index[256];
    const u32 t = threadIdx.x;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        best[t] = 0, index[t] = columns;
        for (u64 i = t; i < columns; i += blockDim.x) {
            const u64 v = order(wide(divide(weights[row * columns + i], waits[row * columns + i])));
            if (v > best[t] || index[t] == columns) best[t] = v, index[t] = i;
        }
        __syncthreads();
        for (u32 d = 128; d > 0; d /= 2) {
            if (t < d && (best[t + d] > best[t] || (best[t + d] == best[t] && index[t + d] < index[t]))) best[t] = best[t + d], index[t] = index[t + d];
            __syncthreads();
        }
        if (t == 0) out[row] = bad[row] ? -1 : (i64)index[0];
        __syncthreads();
    }
}

// sample_keys stores sort keys: ascending keys order the elements by descending quotients.
extern "C" __global__ void __launch_bounds__(256) sample_keys(u64* keys, const Type* weights, const Type* waits, u64 n) {
    const u64 most = sizeof(Acc) == 4 ? 0xffffffffull : ~0ull;
    EACH(i, n) keys[i] = most - order(wide(divide(weights[i], waits[i])));
}

// sample_row_keys stores the row of each sorted element as its key. A stable sort of these keys
// groups the elements by rows.
extern "C" __global__ void __launch_bounds__(256) sample_row_keys(u64* keys, const u32* values, u64 n, u64 columns) {
    EACH(i, n) keys[i] = values[i] / columns;
}

// sample_first stores the categories of the first elements of each row: the sample.
extern "C" __global__ void __launch_bounds__(256) sample_first(i64* out, const u32* values, const u32* bad, u64 rows, u64 columns, u64 samples) {
    EACH(i, rows * samples) {
        const u64 row = i / samples;
        out[i] = bad[row] ? -1 : (i64)(values[row * columns + i % samples] - row * columns);
    }
}
