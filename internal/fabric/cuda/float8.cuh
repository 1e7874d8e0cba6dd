#ifdef CHORUS_TYPE

// The 8-bit floats. Chorus kernels compute their reductions in float.
struct E4M3 { u8 bits; };
struct E5M2 { u8 bits; };

// Small converts 8-bit floats with the given number of mantissa bits and exponent bias. Numbers
// above largest become over, and NaN becomes 0x7f with the sign, as in torch.
template <int mantissa, int bias, u32 largest, u32 over> struct Small {
	// value moves exponent and mantissa to their positions in a float, and multiplies by the
	// difference of the biases. This is also correct for subnormal numbers.
	static __device__ __forceinline__ float value(u32 q) {
		const u32 size = q & 0x7f, sign = (q & 0x80) << 24;
		if (size > largest) return __uint_as_float(sign | (size == over && over != 0x7f ? 0x7f800000 : 0x7fc00000));
		return __uint_as_float(sign | __float_as_uint(__uint_as_float(size << (23 - mantissa)) * __uint_as_float((254 - bias) << 23)));
	}
	// bits rounds to nearest even.
	static __device__ __forceinline__ u32 bits(float x) {
		const u32 all = __float_as_uint(x), size = all & 0x7fffffff, sign = all >> 24 & 0x80;
		if (size > 0x7f800000) return sign | 0x7f;
		int exponent = (int)(size >> 23) - 127 + bias, shift = 23 - mantissa;
		if (exponent <= 0) { // subnormal
			shift += 1 - exponent;
			exponent = 1;
		}
		if (shift > 24) return sign;
		const u32 m = (size & 0x7fffff) | 0x800000, rest = m & ((1u << shift) - 1), tie = 1u << (shift - 1);
		u32 q = m >> shift;
		if (rest > tie || (rest == tie && (q & 1))) q++;
		q += (u32)(exponent - 1) << mantissa; // the leading one carries into the exponent
		return sign | (q > largest ? over : q);
	}
};
typedef Small<3, 7, 0x7e, 0x7f> E4M3Bits;
typedef Small<2, 15, 0x7b, 0x7c> E5M2Bits;

template <> struct Element<E4M3> {
	typedef float Acc;
	static __device__ __forceinline__ float wide(E4M3 x) { return E4M3Bits::value(x.bits); }
	static __device__ __forceinline__ E4M3 narrow(float x) { return E4M3{(u8)E4M3Bits::bits(x)}; }
};
template <> struct Element<E5M2> {
	typedef float Acc;
	static __device__ __forceinline__ float wide(E5M2 x) { return E5M2Bits::value(x.bits); }
	static __device__ __forceinline__ E5M2 narrow(float x) { return E5M2{(u8)E5M2Bits::bits(x)}; }
};

#endif
