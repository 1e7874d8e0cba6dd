// Conversions between element types, for the kernels of Elementwise.
namespace chorus {

// The 16-bit floats are structs of their bits, because NVRTC does not include cuda_fp16.h.
struct Half { unsigned short bits; };
struct BFloat { unsigned short bits; };

#ifdef __CUDACC__
__device__ __forceinline__ float half_value(unsigned short bits) {
	float x;
	asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
	return x;
}
__device__ __forceinline__ unsigned short half_bits(float x) {
	unsigned short bits;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
	return bits;
}
#endif

__device__ __forceinline__ float plain(Half h) { return half_value(h.bits); }
__device__ __forceinline__ float plain(BFloat b) { return __uint_as_float((unsigned)b.bits << 16); }
template <class S> __device__ __forceinline__ S plain(S x) { return x; }

// plain returns an element as a C++ number. to<D>::of converts any element to a D, rounding to
// nearest even.
template <class D> struct to {
	template <class S> static __device__ __forceinline__ D of(S x) { return (D)plain(x); }
};
template <> struct to<Half> {
	static __device__ __forceinline__ Half of(Half x) { return x; }
	template <class S> static __device__ __forceinline__ Half of(S x) {
		return Half{half_bits((float)plain(x))};
	}
};
template <> struct to<BFloat> {
	static __device__ __forceinline__ BFloat of(BFloat x) { return x; }
	template <class S> static __device__ __forceinline__ BFloat of(S x) {
		float f = (float)plain(x);
		unsigned u = __float_as_uint(f);
		BFloat b;
		b.bits = f != f ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
		return b;
	}
};

// load converts an element to the common type of all inputs, and then to the type of the
// computation, which is wider for the 16-bit floats. store converts back.
template <class Common, class Compute, class S> __device__ __forceinline__ Compute load(S x) {
	return to<Compute>::of(to<Common>::of(x));
}
template <class Common, class D, class Compute> __device__ __forceinline__ D store(Compute x) {
	return to<D>::of(to<Common>::of(x));
}

// The generated kernel has one version for complete blocks, Whole, and one for the last,
// partial block, Part.
struct Whole { static const bool yes = true; };
struct Part { static const bool yes = false; };

} // namespace chorus
