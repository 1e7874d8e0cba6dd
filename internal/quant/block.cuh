// Blocks of 8-bit numbers for an all-reduce. A block is 32 elements and the exponent of their
// scale, a power of two; the elements are divided by it and rounded to nearest even. The exponent
// is the smallest one with which no element of the block is out of range.
//
// The compiler gets the macros CHORUS_TYPE, the element type (Half, BFloat or float), and
// CHORUS_CODE, the type of the 8-bit numbers (E4M3 or Int8).
//
// The elements of an operand are divided into shares, one for each rank, of a multiple of 512
// elements. Elements beyond the end count as 0. A chunk is a share or a part of it in blocks:
// first its 8-bit numbers, and then the exponents, one byte for each block.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Half { u16 bits; };
struct BFloat { u16 bits; };

#define UNIT 16 // elements of a thread; two threads have a block
#define BLOCK 32
#define INFINITE 0x7f800000u
#define NOT_FINITE 255 // the exponent of a block that has an infinity or a NaN

// ---- elements ----

#ifdef __CUDACC__
static __device__ __forceinline__ float half_value(u16 bits) {
	float x;
	asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
	return x;
}
static __device__ __forceinline__ u16 half_bits(float x) {
	u16 bits;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
	return bits;
}
#endif

// An Element converts elements. largest is the largest finite one, and from the bits of over on, a
// float is rounded to infinity.
template <class E> struct Element;
template <> struct Element<float> {
	static const u32 largest = 0x7f7fffff, over = INFINITE;
	static __device__ __forceinline__ float wide(float x) { return x; }
	static __device__ __forceinline__ float narrow(float x) { return x; }
};
template <> struct Element<BFloat> {
	static const u32 largest = 0x7f7f0000, over = 0x7f7f8000;
	static __device__ __forceinline__ float wide(BFloat x) { return __uint_as_float((u32)x.bits << 16); }
	static __device__ __forceinline__ BFloat narrow(float x) {
		const u32 u = __float_as_uint(x);
		return BFloat{x != x ? (u16)0x7fff : (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
	}
};
template <> struct Element<Half> {
	static const u32 largest = 0x477fe000, over = 0x477ff000;
	static __device__ __forceinline__ float wide(Half x) { return half_value(x.bits); }
	static __device__ __forceinline__ Half narrow(float x) { return Half{x != x ? (u16)0x7fff : half_bits(x)}; }
};

typedef CHORUS_TYPE T;
struct alignas(16) Words { u32 w[4]; };

// A Unit has the elements of a thread.
union Unit {
	T x[UNIT];
	Words w[sizeof(T) * UNIT / 16];
	__device__ Unit() {}
};

// unitAt loads the elements from i on; those beyond the end are 0. aligned says that x is a multiple of 16 bytes.
static __device__ __forceinline__ Unit unitAt(const T* x, u64 i, u64 n, u32 aligned) {
	Unit u;
	if (aligned && i + UNIT <= n) {
#pragma unroll
		for (u32 k = 0; k < sizeof(T) * UNIT / 16; k++) u.w[k] = ((const Words*)(x + i))[k];
		return u;
	}
#pragma unroll
	for (u32 k = 0; k < UNIT; k++) u.x[k] = i + k < n ? x[i + k] : T();
	return u;
}

static __device__ __forceinline__ void widen(const Unit& u, float (&v)[UNIT]) {
#pragma unroll
	for (u32 k = 0; k < UNIT; k++) v[k] = Element<T>::wide(u.x[k]);
}

// load is unitAt with the elements as floats.
static __device__ __forceinline__ void load(const T* x, u64 i, u64 n, u32 aligned, float (&v)[UNIT]) { widen(unitAt(x, i, n, aligned), v); }

// store writes the elements that exist, and changes v to what they became.
static __device__ __forceinline__ void store(T* x, u64 i, u64 n, u32 aligned, float (&v)[UNIT]) {
	Unit u;
#pragma unroll
	for (u32 k = 0; k < UNIT; k++) {
		u.x[k] = Element<T>::narrow(v[k]);
		v[k] = Element<T>::wide(u.x[k]);
	}
	if (aligned && i + UNIT <= n) {
#pragma unroll
		for (u32 k = 0; k < sizeof(T) * UNIT / 16; k++) ((Words*)(x + i))[k] = u.w[k];
		return;
	}
#pragma unroll
	for (u32 k = 0; k < UNIT; k++)
		if (i + k < n) x[i + k] = u.x[k];
}

// Errors are floats, or null: the errors of earlier calls, which are added to the elements.
static __device__ __forceinline__ void addErrors(const float* errors, u64 i, u64 n, u32 aligned, float (&v)[UNIT]) {
	if (!errors) return;
	if (aligned && i + UNIT <= n) {
#pragma unroll
		for (u32 k = 0; k < UNIT / 4; k++) {
			const Words e = ((const Words*)(errors + i))[k];
#pragma unroll
			for (u32 j = 0; j < 4; j++) v[4 * k + j] += __uint_as_float(e.w[j]);
		}
		return;
	}
#pragma unroll
	for (u32 k = 0; k < UNIT; k++)
		if (i + k < n) v[k] += errors[i + k];
}
static __device__ __forceinline__ void storeErrors(float* errors, u64 i, u64 n, u32 aligned, const float (&v)[UNIT]) {
	if (aligned && i + UNIT <= n) {
#pragma unroll
		for (u32 k = 0; k < UNIT / 4; k++) {
			Words e;
#pragma unroll
			for (u32 j = 0; j < 4; j++) e.w[j] = __float_as_uint(v[4 * k + j]);
			((Words*)(errors + i))[k] = e;
		}
		return;
	}
#pragma unroll
	for (u32 k = 0; k < UNIT; k++)
		if (i + k < n) errors[i + k] = v[k];
}

// ---- 8-bit numbers ----

// A type of 8-bit numbers has:
//   shift, carry   the exponent of a block is that of its largest element plus carry, minus shift
//   encode         the bits of four floats, rounded to nearest even
//   decode         the floats of four numbers
// E4M3 is float8_e4m3fn: 448 is the largest number, 1.75 * 2^8.
struct E4M3 {
	static const u32 shift = 8, carry = 0x1fffff;
	static __device__ __forceinline__ u32 encode(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
		u16 lo, hi;
		asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
		asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
		return lo | (u32)hi << 16;
#else
		return one(a) | one(b) << 8 | one(c) << 16 | one(d) << 24;
#endif
	}
	static __device__ __forceinline__ void decode(u32 q, float* v) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
		for (u32 k = 0; k < 2; k++) {
			u32 pair;
			asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)(q >> 16 * k)));
			v[2 * k] = half_value((u16)pair);
			v[2 * k + 1] = half_value((u16)(pair >> 16));
		}
#else
#pragma unroll
		for (u32 k = 0; k < 4; k++) {
			// Exponent and mantissa at their places in a float, times the difference of the biases.
			const u32 x = q >> 8 * k, size = __float_as_uint(__uint_as_float((x & 0x7f) << 20) * __uint_as_float((254 - 7) << 23));
			v[k] = __uint_as_float(size | (x & 0x80) << 24);
		}
#endif
	}
	// one rounds a number of at most 448.
	static __device__ __forceinline__ u32 one(float x) {
		const u32 all = __float_as_uint(x), size = all & 0x7fffffff, sign = all >> 24 & 0x80;
		if (size < 0x3c800000) // below 2^-6: a multiple of 2^-9
			return sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) & 0xf);
		return sign | (((size + 0x7ffff + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3));
	}
};

// Int8 is the integers from -127 to 127.
struct Int8 {
	static const u32 shift = 6, carry = 0x1ffff;
	// The sum with 1.5 * 2^23 has the rounded number in its last bits.
	static __device__ __forceinline__ u32 one(float x) { return __float_as_uint(x + 12582912.0f) & 0xff; }
	static __device__ __forceinline__ u32 encode(float a, float b, float c, float d) {
		return one(a) | one(b) << 8 | one(c) << 16 | one(d) << 24;
	}
	static __device__ __forceinline__ void decode(u32 q, float* v) {
#pragma unroll
		for (u32 k = 0; k < 4; k++) v[k] = (float)(signed char)(q >> 8 * k);
	}
};

// ---- blocks ----

typedef CHORUS_CODE Code;

// powerOf returns 2^(exponent - 127), which is subnormal for exponent 0.
static __device__ __forceinline__ float powerOf(u32 exponent) {
	return __uint_as_float(exponent == 0 ? 0x400000 : exponent << 23);
}

// exponentOf returns the exponent of the block that this thread has half of. over is the bits of
// the smallest float that counts as infinite. Both threads of a block call it.
static __device__ __forceinline__ u32 exponentOf(const float (&v)[UNIT], u32 over) {
	u32 most = 0;
#pragma unroll
	for (u32 k = 0; k < UNIT; k++) most = max(most, __float_as_uint(v[k]) & 0x7fffffff);
	most = max(most, __shfl_xor_sync(0xffffffff, most, 1));
	if (most >= over) return NOT_FINITE;
	const u32 exponent = (most + Code::carry) >> 23;
	return exponent > Code::shift ? exponent - Code::shift : 0;
}

// decode returns the numbers of a thread. Numbers that are larger than a float become the largest
// float of those with the given bits.
static __device__ __forceinline__ void decode(const Words& q, u32 exponent, u32 largest, float (&v)[UNIT]) {
	const float scale = exponent == NOT_FINITE ? __uint_as_float(0x7fffffff) : powerOf(exponent), most = __uint_as_float(largest);
#pragma unroll
	for (u32 k = 0; k < UNIT / 4; k++) Code::decode(q.w[k], v + 4 * k);
#pragma unroll
	for (u32 k = 0; k < UNIT; k++) {
		const float y = v[k] * scale;
		v[k] = y > most ? most : y < -most ? -most : y;
	}
}

// encode rounds the numbers of a thread.
static __device__ __forceinline__ Words encode(const float (&v)[UNIT], u32 exponent) {
	Words q = {};
	if (exponent == NOT_FINITE) return q;
	const float scale = __uint_as_float((254 - exponent) << 23);
#pragma unroll
	for (u32 k = 0; k < UNIT / 4; k++) q.w[k] = Code::encode(v[4 * k] * scale, v[4 * k + 1] * scale, v[4 * k + 2] * scale, v[4 * k + 3] * scale);
	return q;
}

// ---- units ----

// chunkBytes returns the size of a chunk of so many elements.
static __device__ __forceinline__ u64 chunkBytes(u64 length) { return length + length / BLOCK; }

// unitToBlock returns the numbers of a unit, whose elements begin at i, with their errors, and the exponent of
// their block. The rounding errors become the errors. A block that is not finite has no errors.
static __device__ __forceinline__ Words unitToBlock(const Unit& u, float* errors, u64 i, u64 n, u32 aligned, u32& exponent) {
	float v[UNIT], y[UNIT];
	widen(u, v);
	addErrors(errors, i, n, aligned, v);
	exponent = exponentOf(v, INFINITE);
	const Words q = encode(v, exponent);
	if (!errors) return q;
	decode(q, exponent, Element<float>::largest, y);
#pragma unroll
	for (u32 k = 0; k < UNIT; k++) v[k] = exponent == NOT_FINITE ? 0 : v[k] - y[k];
	storeErrors(errors, i, n, aligned, v);
	return q;
}

// unitFromBlock writes the elements from i on.
static __device__ __forceinline__ void unitFromBlock(T* x, u64 i, u64 n, u32 aligned, const Words& q, u32 exponent) {
	float v[UNIT];
	decode(q, exponent, Element<T>::largest, v);
	store(x, i, n, aligned, v);
}

// sumToBlock adds a unit of x, which begins at i, with its errors, to the numbers of the other ranks, by
// rank: get(r, exponent) returns those of rank r. If mean is 1, it divides the sum by the
// number of ranks. It returns the sum's numbers, and writes them as elements. The rounding
// errors of the sum become the errors.
template <class Get> static __device__ __forceinline__ Words sumToBlock(const Unit& u, T* x, float* errors, u64 i, u64 n, u32 aligned, u32 mine, u32 ranks, u32 mean, u32& exponent, Get get) {
	float own[UNIT], sum[UNIT], y[UNIT];
	widen(u, own);
	addErrors(errors, i, n, aligned, own);
#pragma unroll 1
	for (u32 r = 0; r < ranks; r++) {
		if (r != mine) {
			u32 scale;
			const Words q = get(r, scale);
			decode(q, scale, Element<float>::largest, y);
		}
#pragma unroll
		for (u32 k = 0; k < UNIT; k++) {
			const float z = r == mine ? own[k] : y[k];
			sum[k] = r == 0 ? z : sum[k] + z;
		}
	}
	if (mean) {
#pragma unroll
		for (u32 k = 0; k < UNIT; k++) sum[k] = sum[k] / (float)ranks;
	}
	exponent = exponentOf(sum, Element<T>::over);
	const Words q = encode(sum, exponent);
	decode(q, exponent, Element<T>::largest, y);
	store(x, i, n, aligned, y);
	if (!errors) return q;
#pragma unroll
	for (u32 k = 0; k < UNIT; k++) y[k] = exponent == NOT_FINITE ? 0 : (sum[k] - y[k]) * (mean ? (float)ranks : 1.0f);
	storeErrors(errors, i, n, aligned, y);
	return q;
}
