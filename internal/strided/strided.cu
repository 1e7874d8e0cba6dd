// Copies and sums of strided memory:
//   copy1 ... copy16      copy between any two layouts, by the width of an element in bytes
//   convert               copies and converts; it selects the types at run time, so that one
//                         kernel serves all pairs of types
//   pieces1 ... pieces16  make many small copies in one launch
//   fan1 ... fan16        copy many arrays to several destinations in one launch
//   sum1, sum16           add arrays of several lists in one launch
// The operands may be memory of other devices. Blocks have THREADS threads, and a thread of a
// copy has ITEMS elements.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define THREADS 256
#define ITEMS 4
#define LOOPS 8

// ---- offsets ----

// A Loop is a dimension of both tensors: its length, and its strides in the destination and
// in the source, in elements. The innermost dimension comes first.
struct Loop { u32 n; i64 dst, src; };

#define LOOP(k) , u32 n##k, i64 d##k, i64 s##k
#define LOOP_PARAMS LOOP(0) LOOP(1) LOOP(2) LOOP(3) LOOP(4) LOOP(5) LOOP(6) LOOP(7)
#define LOOP_VALUES {{n0, d0, s0}, {n1, d1, s1}, {n2, d2, s2}, {n3, d3, s3}, {n4, d4, s4}, {n5, d5, s5}, {n6, d6, s6}, {n7, d7, s7}}

// place computes the offsets of element i in both tensors. The outermost loop needs no
// division.
static __device__ __forceinline__ void place(const Loop (&loops)[LOOPS], u32 count, u32 i, i64& dst, i64& src) {
	dst = src = 0;
#pragma unroll
	for (u32 k = 0; k < LOOPS; k++) {
		if (k + 1 >= count) {
			dst += i * loops[k].dst;
			src += i * loops[k].src;
			return;
		}
		const u32 rest = i / loops[k].n, at = i - rest * loops[k].n;
		dst += at * loops[k].dst;
		src += at * loops[k].src;
		i = rest;
	}
}

// ---- copies ----

struct alignas(16) Wide { u64 a, b; };

// copy loads all elements of a thread before it stores the first one, so that the loads are
// in flight together.
template <class W> static __device__ __forceinline__ void copy(W* to, const W* from, u32 n, u32 count, const Loop (&loops)[LOOPS]) {
	const u32 first = blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
	W held[ITEMS];
	i64 at[ITEMS];
#pragma unroll
	for (int k = 0; k < ITEMS; k++) {
		const u32 i = first + k * THREADS;
		if (i >= n) continue;
		i64 src;
		place(loops, count, i, at[k], src);
		held[k] = from[src];
	}
#pragma unroll
	for (int k = 0; k < ITEMS; k++)
		if (first + k * THREADS < n) to[at[k]] = held[k];
}

#define COPY(bytes, W) \
	extern "C" __global__ void __launch_bounds__(THREADS) copy##bytes(W* to, const W* from, u32 n, u32 count LOOP_PARAMS) { \
		const Loop loops[LOOPS] = LOOP_VALUES; \
		copy(to, from, n, count, loops); \
	}
COPY(1, unsigned char)
COPY(2, unsigned short)
COPY(4, u32)
COPY(8, u64)
COPY(16, Wide)

// ---- many copies at once ----

// The tables are kernel parameters, so each launch has its own table, also in a graph.
#define PIECES 120
#define SOURCES 328
#define DESTINATIONS 16

// piece_of returns the piece that contains element i of the launch, and stores the index of
// the piece's first element in begin. end[p] is the number of elements of the pieces 0 to p.
// The search is binary.
static __device__ __forceinline__ u32 piece_of(const u32* end, u32 count, u32 i, u32& begin) {
	u32 low = 0, high = count - 1;
	while (low < high) {
		const u32 middle = (low + high) / 2;
		if (i < end[middle]) high = middle;
		else low = middle + 1;
	}
	begin = low ? end[low - 1] : 0;
	return low;
}

// A piece is a copy of contiguous rows. row is the length of a row, and to_step and from_step
// are the distances between rows, in elements. n is the number of elements of all pieces,
// and count the number of pieces.
struct Pieces {
	u64 to[PIECES], from[PIECES];
	u32 end[PIECES], row[PIECES], to_step[PIECES], from_step[PIECES];
	u32 n, count;
};

// pieces makes the copies of a table. Like copy, it loads before it stores.
template <class W> static __device__ __forceinline__ void pieces(const Pieces& t) {
	const u32 first = blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
	W held[ITEMS];
	W* at[ITEMS];
#pragma unroll
	for (int k = 0; k < ITEMS; k++) {
		u32 i = first + k * THREADS;
		if (i >= t.n) continue;
		u32 begin;
		const u32 p = piece_of(t.end, t.count, i, begin);
		u64 dst = i - begin, src = dst;
		if ((u32)dst >= t.row[p]) { // not the first row
			const u32 rows = (u32)dst / t.row[p], in = (u32)dst - rows * t.row[p];
			dst = (u64)rows * t.to_step[p] + in;
			src = (u64)rows * t.from_step[p] + in;
		}
		held[k] = ((const W*)t.from[p])[src];
		at[k] = (W*)t.to[p] + dst;
	}
#pragma unroll
	for (int k = 0; k < ITEMS; k++)
		if (first + k * THREADS < t.n) *at[k] = held[k];
}

// A Fan is a list of count arrays that are copied to several destinations. Each of the ways
// destinations gets all arrays, concatenated. n is the number of elements of all arrays.
struct Fan {
	u64 to[DESTINATIONS], from[SOURCES];
	u32 end[SOURCES];
	u32 n, count, ways;
};

// fan makes the copies of a table. It loads each element once.
template <class W> static __device__ __forceinline__ void fan(const Fan& t) {
	const u32 n = t.n, count = t.count, ways = t.ways;
	const u32 first = blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
	W held[ITEMS];
#pragma unroll
	for (int k = 0; k < ITEMS; k++) {
		const u32 i = first + k * THREADS;
		if (i >= n) continue;
		u32 begin;
		const u32 p = piece_of(t.end, count, i, begin);
		held[k] = ((const W*)t.from[p])[i - begin];
	}
	for (u32 d = 0; d < ways; d++) {
		W* const to = (W*)t.to[d];
#pragma unroll
		for (int k = 0; k < ITEMS; k++)
			if (first + k * THREADS < n) to[first + k * THREADS] = held[k];
	}
}

#define MANY(bytes, W) \
	extern "C" __global__ void __launch_bounds__(THREADS) pieces##bytes(const __grid_constant__ Pieces t) { pieces<W>(t); } \
	extern "C" __global__ void __launch_bounds__(THREADS) fan##bytes(const __grid_constant__ Fan t) { fan<W>(t); }
MANY(1, unsigned char)
MANY(2, unsigned short)
MANY(4, u32)
MANY(8, u64)
MANY(16, Wide)

// ---- conversions ----

// The numbers of the types in memory.DType.
enum { BOOL = 1, I8, U8, I16, U16, I32, U32, I64, U64, F16, BF16, F32, F64, F8E4M3, F8E5M2 };

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

// e4m3_value moves exponent and mantissa to their positions in a float. Then the exponent is
// too small by the difference of the biases, 120, so the value is multiplied by 2^120. This is
// also correct for subnormal numbers.
static __device__ __forceinline__ float e4m3_value(u32 q) {
	const u32 size = q & 0x7f;
	const float x = size == 0x7f ? __uint_as_float(0x7fc00000) : __uint_as_float(size << 20) * __uint_as_float((127 + 120) << 23);
	return __uint_as_float(__float_as_uint(x) | (q & 0x80) << 24);
}
static __device__ __forceinline__ float e5m2_value(u32 q) { return half_value((unsigned short)(q << 8)); }

// small_bits converts a float to an 8-bit float with the given number of mantissa bits and
// exponent bias. It rounds to nearest even. Numbers above largest become over, and NaN
// becomes nan, as in torch.
static __device__ __forceinline__ u32 small_bits(float x, int mantissa, int bias, u32 largest, u32 over, u32 nan) {
	const u32 bits = __float_as_uint(x), size = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
	if (size > 0x7f800000) return sign | nan;
	int exponent = (int)(size >> 23) - 127 + bias;
	int shift = 23 - mantissa;
	if (exponent <= 0) { // subnormal
		shift += 1 - exponent;
		exponent = 1;
	}
	if (shift > 24) return sign;
	const u32 m = (size & 0x7fffff) | 0x800000;
	u32 q = m >> shift;
	const u32 rest = m & ((1u << shift) - 1), tie = 1u << (shift - 1);
	if (rest > tie || (rest == tie && (q & 1))) q++;
	q += (u32)(exponent - 1) << mantissa; // the leading one carries into the exponent
	return sign | (q > largest ? over : q);
}

static __device__ __forceinline__ unsigned short bfloat_bits(float x) {
	const u32 u = __float_as_uint(x);
	return x != x ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// A Value is an element of any type. It is f if kind is FLOATING. Otherwise it is i, and for
// UNSIGNED, i has the bits of an unsigned integer.
struct Value { double f; i64 i; int kind; };
enum { FLOATING, SIGNED, UNSIGNED };

static __device__ __forceinline__ Value floating(double f) { return Value{f, 0, FLOATING}; }
static __device__ __forceinline__ Value whole(i64 i) { return Value{0, i, SIGNED}; }

static __device__ __forceinline__ Value load(const void* p, i64 i, u32 type) {
	switch (type) {
	case BOOL: return whole(((const unsigned char*)p)[i] != 0);
	case I8: return whole(((const signed char*)p)[i]);
	case U8: return whole(((const unsigned char*)p)[i]);
	case I16: return whole(((const short*)p)[i]);
	case U16: return whole(((const unsigned short*)p)[i]);
	case I32: return whole(((const int*)p)[i]);
	case U32: return whole(((const u32*)p)[i]);
	case I64: return whole(((const i64*)p)[i]);
	case U64: return Value{0, ((const i64*)p)[i], UNSIGNED};
	case F16: return floating(half_value(((const unsigned short*)p)[i]));
	case BF16: return floating(__uint_as_float((u32)((const unsigned short*)p)[i] << 16));
	case F32: return floating(((const float*)p)[i]);
	case F64: return floating(((const double*)p)[i]);
	case F8E4M3: return floating(e4m3_value(((const unsigned char*)p)[i]));
	}
	return floating(e5m2_value(((const unsigned char*)p)[i]));
}

static __device__ __forceinline__ float single(const Value& v) {
	if (v.kind == FLOATING) return (float)v.f;
	return v.kind == SIGNED ? (float)v.i : (float)(u64)v.i;
}

static __device__ __forceinline__ i64 integer(const Value& v) { return v.kind == FLOATING ? (i64)v.f : v.i; }

static __device__ __forceinline__ void store(void* p, i64 i, u32 type, const Value& v) {
	switch (type) {
	case BOOL: ((unsigned char*)p)[i] = v.kind == FLOATING ? v.f != 0 : v.i != 0; return;
	case I8: case U8: ((unsigned char*)p)[i] = (unsigned char)integer(v); return;
	case I16: case U16: ((unsigned short*)p)[i] = (unsigned short)integer(v); return;
	case I32: case U32: ((u32*)p)[i] = (u32)integer(v); return;
	case I64: ((i64*)p)[i] = integer(v); return;
	case U64: ((u64*)p)[i] = v.kind == FLOATING && v.f >= 9223372036854775808.0 ? (u64)v.f : (u64)integer(v); return;
	case F16: ((unsigned short*)p)[i] = half_bits(single(v)); return;
	case BF16: ((unsigned short*)p)[i] = bfloat_bits(single(v)); return;
	case F32: ((float*)p)[i] = single(v); return;
	case F64: ((double*)p)[i] = v.kind == FLOATING ? v.f : v.kind == SIGNED ? (double)v.i : (double)(u64)v.i; return;
	case F8E4M3: ((unsigned char*)p)[i] = (unsigned char)small_bits(single(v), 3, 7, 0x7e, 0x7f, 0x7f); return;
	case F8E5M2: ((unsigned char*)p)[i] = (unsigned char)small_bits(single(v), 2, 15, 0x7b, 0x7c, 0x7f); return;
	}
}

// convert is copy with a conversion from type stype to type dtype.
extern "C" __global__ void __launch_bounds__(THREADS) convert(void* to, const void* from, u32 n, u32 count LOOP_PARAMS, u32 dtype, u32 stype) {
	const Loop loops[LOOPS] = LOOP_VALUES;
	const u32 first = blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
	Value held[ITEMS];
	i64 at[ITEMS];
#pragma unroll
	for (int k = 0; k < ITEMS; k++) {
		const u32 i = first + k * THREADS;
		if (i >= n) continue;
		i64 src;
		place(loops, count, i, at[k], src);
		held[k] = load(from, src, stype);
	}
#pragma unroll
	for (int k = 0; k < ITEMS; k++)
		if (first + k * THREADS < n) store(to, at[k], dtype, held[k]);
}

// ---- sums ----

// A Sum adds several lists of arrays to one destination, which has the sums of the first
// arrays, of the second arrays, and so on. count is the number of arrays in a list, places is
// the number of lists, and n is the number of elements of the destination. words has the
// addresses of the first array in each list, then of the second array in each list, and so
// on. The table of ends for piece_of follows, two numbers in a word.
//
// A thread loads at most TERMS addends before it adds them.
#define WORDS 500
#define TERMS 7
struct Sum {
	u64 to, words[WORDS];
	u32 n, count, places, type;
};

// Number<type, R>::add adds two elements of a type. R is an unsigned type for its bits, or
// the type itself.
template <int type, class R> struct Number {
	static __device__ __forceinline__ R add(R a, R b) { return (R)(a + b); } // integers wrap around, signed ones too
};
template <class R> struct Number<BOOL, R> {
	static __device__ __forceinline__ R add(R a, R b) { return a || b; }
};
#define FLOATS(type, to_float, to_bits) \
	template <class R> struct Number<type, R> { \
		static __device__ __forceinline__ R add(R a, R b) { return (R)to_bits(to_float(a) + to_float(b)); } \
	};
static __device__ __forceinline__ float bfloat_value(unsigned short b) { return __uint_as_float((u32)b << 16); }
static __device__ __forceinline__ u32 e4m3_bits(float x) { return small_bits(x, 3, 7, 0x7e, 0x7f, 0x7f); }
static __device__ __forceinline__ u32 e5m2_bits(float x) { return small_bits(x, 2, 15, 0x7b, 0x7c, 0x7f); }
FLOATS(F16, half_value, half_bits)
FLOATS(BF16, bfloat_value, bfloat_bits)
FLOATS(F8E4M3, e4m3_value, e4m3_bits)
FLOATS(F8E5M2, e5m2_value, e5m2_bits)

// add_all adds V adjacent elements of all lists, in the order of the lists, and rounds after
// each addition. It loads up to TERMS addends before it adds the first one, so that loads from
// other devices are in flight together.
template <int type, class R, int V> static __device__ __forceinline__ void add_all(const Sum& t) {
	struct alignas(sizeof(R) * V) Pack { R x[V]; };
	const u32 i = blockIdx.x * THREADS + threadIdx.x;
	if (i >= t.n) return;
	u32 begin;
	const u32 p = piece_of((const u32*)(t.words + t.count * t.places), t.count, i, begin);
	const u64* const from = t.words + p * t.places;
	Pack sum = ((const Pack*)from[0])[i - begin];
	for (u32 first = 1; first < t.places; first += TERMS) {
		Pack term[TERMS];
#pragma unroll
		for (int k = 0; k < TERMS; k++)
			if (first + k < t.places) term[k] = ((const Pack*)from[first + k])[i - begin];
#pragma unroll
		for (int k = 0; k < TERMS; k++)
			if (first + k < t.places)
#pragma unroll
				for (int v = 0; v < V; v++) sum.x[v] = Number<type, R>::add(sum.x[v], term[k].x[v]);
	}
	((Pack*)t.to)[i] = sum;
}

// add_type selects the type. If wide, a thread adds 16 bytes; the 8-bit floats have only the
// narrow form, because their sums are rare.
template <bool wide> static __device__ __forceinline__ void add_type(const Sum& t) {
#define TYPE(type, R) case type: return add_all<type, R, wide ? 16 / sizeof(R) : 1>(t);
	switch (t.type) {
	TYPE(BOOL, unsigned char) TYPE(U8, unsigned char) TYPE(U16, unsigned short) TYPE(U32, u32) TYPE(U64, u64)
	TYPE(F16, unsigned short) TYPE(BF16, unsigned short) TYPE(F32, float) TYPE(F64, double)
	}
	if (wide) return;
	switch (t.type) {
	TYPE(F8E4M3, unsigned char) TYPE(F8E5M2, unsigned char)
	}
}

extern "C" __global__ void __launch_bounds__(THREADS) sum1(const __grid_constant__ Sum t) { add_type<false>(t); }
extern "C" __global__ void __launch_bounds__(THREADS) sum16(const __grid_constant__ Sum t) { add_type<true>(t); }
