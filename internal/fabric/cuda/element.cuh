// Element types and reductions.

// The 16-bit floats are structs of their bits, because NVRTC does not include cuda_fp16.h.
struct Half { u16 bits; };
struct BFloat { u16 bits; };

// Element<T>::Acc is the type that reductions compute in: float for the 16-bit floats, and T
// for all other types. wide converts to it. narrow converts back, rounding to nearest even.
template <class T> struct Element {
	typedef T Acc;
	static __device__ __forceinline__ T wide(T x) { return x; }
	static __device__ __forceinline__ T narrow(T x) { return x; }
};
template <> struct Element<Half> {
	typedef float Acc;
	static __device__ __forceinline__ float wide(Half h) {
		float x;
		asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
		return x;
	}
	static __device__ __forceinline__ Half narrow(float x) {
		Half h;
		asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
		return h;
	}
};
template <> struct Element<BFloat> {
	typedef float Acc;
	static __device__ __forceinline__ float wide(BFloat b) { return __uint_as_float((u32)b.bits << 16); }
	static __device__ __forceinline__ BFloat narrow(float x) {
		const u32 u = __float_as_uint(x);
		BFloat b;
		b.bits = x != x ? 0x7fff : (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
		return b;
	}
};

// A reduction combines values by join, and computes the result of all ranks by finish. Max
// and Min of a number and a NaN are the number.
template <class A> struct Sum {
	static __device__ __forceinline__ A join(A a, A b) { return a + b; }
	static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
template <class A> struct Prod {
	static __device__ __forceinline__ A join(A a, A b) { return a * b; }
	static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
template <class A> struct Max {
	static __device__ __forceinline__ A join(A a, A b) { return a != a || b > a ? b : a; }
	static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
template <class A> struct Min {
	static __device__ __forceinline__ A join(A a, A b) { return a != a || b < a ? b : a; }
	static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
template <class A> struct Avg : Sum<A> {
	static __device__ __forceinline__ A finish(A a, u32 ranks) { return a / (A)ranks; }
};
