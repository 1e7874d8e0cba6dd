// Operations on the rows of contiguous tensors:
//   select1 ... select16   copy the rows that an index names, by the width of a part in bytes
//   none, ends, chain      link the entries of an index that name the same row, in their order
//   add_f16 ... add_i64    add the rows of each chain to its row
//   top                    find the greatest elements of each row
//   softmax_f16 ...        softmax of each row; softmax_grad_f16 ... are its gradient
//   scatter_add_f16 ...    add elements to those of a row that an index names
// An index has integers of 32 bits, or of 64 bits if wide is 1. As in torch, an entry that names
// no row stops the kernel, and with it all work of the process on the device.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// ---- the index ----

static __device__ __forceinline__ u64 row_at(const void* index, u64 i, u32 wide, u64 rows) {
	const i64 row = wide ? ((const i64*)index)[i] : ((const int*)index)[i];
	if (row < 0 || (u64)row >= rows) __trap();
	return (u64)row;
}

// A block has blockDim.y rows, and the threads of a row have its parts by turns. More blocks in
// the direction of y share wide rows.
#define EACH_ROW(i, n) for (u64 i = (u64)blockIdx.x * blockDim.y + threadIdx.y; i < (n); i += (u64)gridDim.x * blockDim.y)
#define EACH_PART(c, width) for (u64 c = (u64)blockIdx.y * blockDim.x + threadIdx.x; c < (width); c += (u64)gridDim.y * blockDim.x)
#define EACH_ENTRY(i, n) for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

// ---- select ----

struct __align__(16) Wide { u64 a, b; };

// n rows of width parts each become dst. src has the given number of rows.
#define SELECT(bytes, W) \
	extern "C" __global__ void select##bytes(W* dst, const W* src, const void* index, u64 n, u64 width, u64 rows, u32 wide) { \
		EACH_ROW(i, n) { \
			const W* const from = src + row_at(index, i, wide, rows) * width; \
			EACH_PART(c, width) dst[i * width + c] = from[c]; \
		} \
	}
SELECT(1, unsigned char)
SELECT(2, unsigned short)
SELECT(4, u32)
SELECT(8, u64)
SELECT(16, Wide)

// ---- add ----

// none sets all bits of n words.
extern "C" __global__ void none(u32* words, u64 n) {
	EACH_ENTRY(i, n) words[i] = 0xffffffff;
}

// ends finds the first and the last entry that names each row. Before, all bits of both are
// set: there is no entry.
extern "C" __global__ void ends(u32* first, int* last, const void* index, u64 n, u64 rows, u32 wide) {
	EACH_ENTRY(i, n) {
		const u64 row = row_at(index, i, wide, rows);
		atomicMin(first + row, (u32)i);
		atomicMax(last + row, (int)i);
	}
}

// chain finds the next entry that names the same row, or -1.
extern "C" __global__ void chain(int* next, const int* last, const void* index, u64 n, u64 rows, u32 wide) {
	EACH_ENTRY(i, n) {
		const u64 row = row_at(index, i, wide, rows);
		i64 at = -1;
		if ((u64)last[row] != i)
			for (at = i + 1; row_at(index, at, wide, rows) != row;) at++;
		next[i] = (int)at;
	}
}

#ifdef __CUDACC__
static __device__ __forceinline__ float half_value(unsigned short bits) {
	float x;
	asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
	return x;
}
static __device__ __forceinline__ unsigned short half_bits(float x) {
	unsigned short bits;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
	return bits;
}
#endif
static __device__ __forceinline__ float bfloat_value(unsigned short b) { return __uint_as_float((u32)b << 16); }
static __device__ __forceinline__ unsigned short bfloat_bits(float x) {
	const u32 u = __float_as_uint(x);
	return x != x ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// The numbers of the types in memory.DType.
enum { I32 = 6, I64 = 8, F16 = 10, BF16, F32, F64 };

// weight returns a factor, which has the type of the rows or is a float.
static __device__ __forceinline__ double weight(const void* w, u64 i, u32 type) {
	switch (type) {
	case F16: return half_value(((const unsigned short*)w)[i]);
	case BF16: return bfloat_value(((const unsigned short*)w)[i]);
	case F32: return ((const float*)w)[i];
	}
	return ((const double*)w)[i];
}

static __device__ __forceinline__ float times(float w, float x, float sum) { return __fmaf_rn(w, x, sum); }
static __device__ __forceinline__ double times(double w, double x, double sum) { return __fma_rn(w, x, sum); }
static __device__ __forceinline__ int times(int, int x, int sum) { return (int)((u32)sum + (u32)x); }
static __device__ __forceinline__ i64 times(i64, i64 x, i64 sum) { return (i64)((u64)sum + (u64)x); }

// The rows of src that a chain has are added to its row of dst in the order of the index, in
// the type A, and rounded once. Rows without a chain stay as they are. weights may be null.
#define ADD(name, T, A, value, bits) \
	extern "C" __global__ void add_##name(T* dst, const T* src, const u32* first, const int* next, const void* weights, u64 rows, u64 width, u32 type) { \
		EACH_ROW(row, rows) { \
			const u32 begin = first[row]; \
			if (begin == 0xffffffff) continue; \
			EACH_PART(c, width) { \
				A sum = value(dst[row * width + c]); \
				for (int i = (int)begin; i >= 0; i = next[i]) \
					sum = times(weights ? (A)weight(weights, i, type) : (A)1, (A)value(src[(u64)i * width + c]), sum); \
				dst[row * width + c] = (T)bits(sum); \
			} \
		} \
	}
ADD(f16, unsigned short, float, half_value, half_bits)
ADD(bf16, unsigned short, float, bfloat_value, bfloat_bits)
ADD(f32, float, float, , )
ADD(f64, double, double, , )
ADD(i32, int, int, , )
ADD(i64, i64, i64, , )

// ---- top ----

// order_float returns a number that is greater for a greater float. NaN is the greatest float,
// and both zeros are equal.
static __device__ __forceinline__ u64 order_float(float x) {
	const u32 u = x == 0 ? 0 : __float_as_uint(x);
	if (x != x) return ~0ull;
	return u >> 31 ? (u32)~u : u | 0x80000000;
}

static __device__ __forceinline__ u64 order(const void* p, u64 i, u32 type) {
	switch (type) {
	case I32: return (u64)((i64)((const int*)p)[i]) ^ 1ull << 63;
	case I64: return ((const u64*)p)[i] ^ 1ull << 63;
	case F16: return order_float(half_value(((const unsigned short*)p)[i]));
	case BF16: return order_float(bfloat_value(((const unsigned short*)p)[i]));
	case F32: return order_float(((const float*)p)[i]);
	}
	const double x = ((const double*)p)[i];
	const u64 u = x == 0 ? 0 : (u64)__double_as_longlong(x);
	if (x != x) return ~0ull;
	return u >> 63 ? ~u : u | 1ull << 63;
}

// A Best is an element that was found, or none.
struct Best {
	u64 key;
	u32 at;
	bool some;
	// before reports whether this element comes before the other one.
	__device__ __forceinline__ bool before(u64 k, u32 i) const { return some && (key > k || (key == k && at < i)); }
	__device__ __forceinline__ void take(u64 k, u32 i, bool other) {
		if (other && !before(k, i)) key = k, at = i, some = true;
	}
};

// better returns the best element of the lanes of a warp.
static __device__ __forceinline__ Best better(Best b) {
	for (int o = 16; o > 0; o /= 2) {
		const u64 k = __shfl_xor_sync(0xffffffff, b.key, o);
		const u32 i = __shfl_xor_sync(0xffffffff, b.at, o);
		const int some = __shfl_xor_sync(0xffffffff, (int)b.some, o);
		b.take(k, i, some != 0);
	}
	return b;
}

// A block has one row of n elements at a time, and finds its k greatest ones one after the
// other. Among equal elements the first one comes first.
extern "C" __global__ void top(void* values, void* places, const void* src, u64 rows, u32 n, u32 k, u32 type, u32 wide) {
	__shared__ Best found[32];
	const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
	for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
		Best last = {0, 0, false};
		for (u32 j = 0; j < k; j++) {
			Best b = {0, 0, false};
			for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
				const u64 key = order(src, row * n + i, type);
				b.take(key, i, !last.some || last.before(key, i));
			}
			b = better(b);
			if (warps > 1) {
				__syncthreads();
				if (lane == 0) found[warp] = b;
				__syncthreads();
				b = Best{0, 0, false};
				if (lane < warps) b = found[lane];
				b = better(b);
			}
			last = b;
			if (threadIdx.x != 0) continue;
			const u64 to = row * k + j, from = row * n + b.at;
			if (wide) ((i64*)places)[to] = b.at;
			else ((int*)places)[to] = (int)b.at;
			switch (type) {
			case F16: case BF16: ((unsigned short*)values)[to] = ((const unsigned short*)src)[from]; break;
			case I32: case F32: ((u32*)values)[to] = ((const u32*)src)[from]; break;
			default: ((u64*)values)[to] = ((const u64*)src)[from];
			}
		}
	}
}

// ---- softmax ----

static __device__ __forceinline__ float power_of_e(float x) { return expf(x); }
static __device__ __forceinline__ double power_of_e(double x) { return exp(x); }

// over_block returns the sum of the numbers of all threads, or the greatest one if most, to each of
// them. NaN counts nothing in the greatest number.
template <bool most, class A> static __device__ A over_block(A x) {
	__shared__ A warps[32];
	for (int o = 16; o > 0; o /= 2) {
		const A y = __shfl_xor_sync(0xffffffff, x, o);
		x = most ? (y > x ? y : x) : x + y;
	}
	__syncthreads(); // the warps of the call before have read
	if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
	__syncthreads();
	x = warps[0];
	for (u32 i = 1; i < blockDim.x / 32; i++) x = most ? (warps[i] > x ? warps[i] : x) : x + warps[i];
	return x;
}

// A block has one row of n elements at a time. Sums are in the type A.
#define EACH_OWN(i, n) for (u32 i = threadIdx.x; i < (n); i += blockDim.x)
#define SOFTMAX(name, T, A, value, bits) \
	extern "C" __global__ void softmax_##name(T* dst, const T* src, u64 rows, u32 n) { \
		for (u64 row = blockIdx.x; row < rows; row += gridDim.x) { \
			const T* const from = src + row * n; \
			A most = value(from[0]), sum = 0; \
			EACH_OWN(i, n) most = value(from[i]) > most ? value(from[i]) : most; \
			most = over_block<true, A>(most); \
			EACH_OWN(i, n) sum += power_of_e((A)value(from[i]) - most); \
			sum = over_block<false, A>(sum); \
			EACH_OWN(i, n) dst[row * n + i] = (T)bits(power_of_e((A)value(from[i]) - most) / sum); \
		} \
	} \
	extern "C" __global__ void softmax_grad_##name(T* dst, const T* grad, const T* out, u64 rows, u32 n) { \
		for (u64 row = blockIdx.x; row < rows; row += gridDim.x) { \
			const T *const g = grad + row * n, *const y = out + row * n; \
			A sum = 0; \
			EACH_OWN(i, n) sum += (A)value(g[i]) * (A)value(y[i]); \
			sum = over_block<false, A>(sum); \
			EACH_OWN(i, n) dst[row * n + i] = (T)bits(((A)value(g[i]) - sum) * (A)value(y[i])); \
		} \
	} \
	extern "C" __global__ void scatter_add_##name(T* dst, const T* src, const void* index, u64 rows, u32 n, u32 k, u32 wide) { \
		EACH_ENTRY(row, rows) { \
			for (u32 j = 0; j < k; j++) { \
				const u64 to = row * n + row_at(index, row * k + j, wide, n); \
				dst[to] = (T)bits((A)value(dst[to]) + (A)value(src[row * k + j])); \
			} \
		} \
	}
SOFTMAX(f16, unsigned short, float, half_value, half_bits)
SOFTMAX(bf16, unsigned short, float, bfloat_value, bfloat_bits)
SOFTMAX(f32, float, float, , )
SOFTMAX(f64, double, double, , )
