// The kernels of package optim. Each kernel processes any number of tensors in one launch: a
// table in device memory has a row for each tensor, and a Place for each block, which says
// which chunk of which tensor the block processes.
//   adam, sgd                            a step of an optimiser
//   store_addresses                      gradients in other memory
//   sum_powers, clip_factor              the norm of gradients, and the factor that clips it
//   multiply, limit_size, unscale        changes of gradients

typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define LANES 4

// ---- elements ----

struct Half { unsigned short bits; };
struct BFloat { unsigned short bits; };

// The numbers of the types in memory.DType.
enum { F16 = 10, BF16 = 11, F32 = 12, F64 = 13 };

// wide<T>::type is the type that elements of T are computed in. load converts to it, and store
// converts back, rounding to nearest even.
template <class T> struct wide { typedef float type; };
template <> struct wide<double> { typedef double type; };

__device__ __forceinline__ double load(double x) { return x; }
__device__ __forceinline__ float load(float x) { return x; }
__device__ __forceinline__ float load(BFloat x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float load(Half x) {
	float f;
	asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
	return f;
}

template <class T> __device__ __forceinline__ T store(typename wide<T>::type x) { return x; }
template <> __device__ __forceinline__ Half store<Half>(float x) {
	Half h;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
	return h;
}
template <> __device__ __forceinline__ BFloat store<BFloat>(float x) {
	const u32 u = __float_as_uint(x);
	return BFloat{x != x ? (unsigned short)0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

// round_to returns x rounded to an element type.
__device__ __forceinline__ float round_to(u32 type, float x) {
	return type == F16 ? load(store<Half>(x)) : type == BF16 ? load(store<BFloat>(x)) : x;
}

// A Place is the work of a block: size elements of a row of the table, from element begin on.
struct Place { u32 row, size; u64 begin; };

// A Pack is LANES elements, which a thread loads and stores by one access.
template <class T> struct alignas(sizeof(T) * LANES) Pack { T x[LANES]; };

// each calls fn(i, pack) for the elements of the chunk that this thread processes: for the
// LANES elements from i on if pack, and otherwise for element i. packed reports that the
// tensors are aligned to packs.
template <class Fn> __device__ __forceinline__ void each(u64 n, const Place& at, bool packed, Fn fn) {
	const u64 begin = at.begin, end = min(n, begin + at.size);
	if (packed) {
		for (u64 i = begin + threadIdx.x * LANES; i + LANES <= end; i += THREADS * LANES) fn(i, true);
		const u64 rest = end - (end - begin) % LANES + threadIdx.x;
		if (rest < end) fn(rest, false);
		return;
	}
	for (u64 i = begin + threadIdx.x; i < end; i += THREADS) fn(i, false);
}

// ---- optimisers ----

// An Entry is one parameter: the addresses of its value, gradient, state and copy, or 0, and n
// elements. types has the types of value, gradient and copy, 8 bits each.
struct Entry { u64 value, grad, first, second, most, copy, n; u32 group, types; };

// A Group has the options of a group of parameters. a and b are the betas of Adam, or
// momentum and dampening of SGD.
struct Group { double lr, a, b, eps, decay, unused[3]; };

// A Work is the argument of both optimisers.
struct Work {
	const Entry* entries;
	const Place* blocks;
	const Group* groups;
	float* steps;                    // by group
	u32* done;                       // counts blocks
	const float *scale, *inf, *coef; // StepConfig: GradScale, FoundInf, Clip; or null
	u32 count, flags;                // the number of groups, and MAXIMIZE etc.
};
enum { MAXIMIZE = 1, DECOUPLED = 2, NESTEROV = 4 };

// finish ends a block. The last block of the grid counts the step in all groups, unless the
// step is skipped. At this point all blocks have read the counters. All threads call it.
__device__ void finish(const Work& w, bool skip) {
	__syncthreads();
	if (threadIdx.x != 0) return;
	__threadfence();
	if (atomicAdd(w.done, 1) != gridDim.x - 1) return;
	__threadfence();
	if (!skip)
		for (u32 i = 0; i < w.count; i++) w.steps[i] += 1;
	*w.done = 0;
}

// gradient returns the gradient for the update: unscaled, clipped, and negated to maximize.
template <class T> __device__ __forceinline__ T gradient(const Work& w, T g, T scale, T coef) {
	if (w.scale) g = g / scale;
	if (w.coef) g = g * coef;
	return w.flags & MAXIMIZE ? -g : g;
}

// fused, times and plus are not contracted by the compiler, so that the updates round as
// torch's do.
__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }

// An Adam is the update rule of Adam and AdamW with the numbers of one step.
template <class T> struct Adam {
	T rate, b1, b2, eps, decay, size, root; // size is the step size; size and root correct the bias
	bool decoupled, most;

	__device__ Adam(const Work& w, const Entry& e, const Group& g, float step) {
		rate = (T)g.lr, b1 = (T)g.a, b2 = (T)g.b, eps = (T)g.eps, decay = (T)g.decay;
		size = rate / ((T)1 - pow(b1, (T)step));
		root = sqrt((T)1 - pow(b2, (T)step));
		decoupled = w.flags & DECOUPLED, most = e.most != 0;
	}
	__device__ __forceinline__ void update(T& p, T g, T& m, T& v, T& top) const {
		if (decay != 0) {
			if (decoupled) p = fused(-times(rate, decay), p, p);
			else g = fused(p, decay, g);
		}
		m = fused(b1, m, fused(-b1, g, g));
		const T square = times(g, g);
		v = fused(b2, v, fused(-b2, square, square));
		T by = v;
		if (most) by = top = top > v || top != top ? top : v;
		p = p - times(size, m) / plus(sqrt(by) / root, eps);
	}
};

// An SGD is the update rule of SGD with the numbers of one step. other selects the rounding of
// torch's kernel for maximize if the length is a multiple of LANES.
template <class T> struct SGD {
	T rate, momentum, dampening, decay;
	bool first, nesterov, other;

	__device__ SGD(const Work& w, const Entry& e, const Group& g, float step) {
		rate = (T)g.lr, momentum = (T)g.a, dampening = (T)g.b, decay = (T)g.decay;
		first = step == 1, nesterov = w.flags & NESTEROV;
		other = (w.flags & MAXIMIZE) && e.n % LANES == 0;
	}
	__device__ __forceinline__ void update(T& p, T g, T& m, T&, T&) const {
		if (decay != 0) g = fused(decay, p, g);
		if (momentum != 0) {
			const T part = plus((T)1, -dampening);
			if (first) m = g;
			else if (other) m = fused(momentum, m, times(part, g));
			else m = fused(part, g, times(momentum, m));
			g = nesterov ? fused(momentum, m, g) : m;
		}
		p = fused(-rate, g, p);
	}
};

// update applies a rule to n elements, 1 or LANES, from element i on. It accesses each tensor
// once.
template <class P, class G, class Rule, int n> __device__ __forceinline__ void update(const Work& w, const Entry& e, const Rule& rule,
		u64 i, typename wide<P>::type scale, typename wide<P>::type coef) {
	typedef typename wide<P>::type T;
	struct alignas(sizeof(P) * n) Ps { P x[n]; };
	struct alignas(sizeof(G) * n) Gs { G x[n]; };
	Ps p = *(const Ps*)((P*)e.value + i), m{}, v{}, top{};
	const Gs g = *(const Gs*)((const G*)e.grad + i);
	if (e.first) m = *(const Ps*)((P*)e.first + i);
	if (e.second) v = *(const Ps*)((P*)e.second + i);
	if (e.most) top = *(const Ps*)((P*)e.most + i);
	T now[n];
#pragma unroll
	for (int k = 0; k < n; k++) {
		T one = load(m.x[k]), two = load(v.x[k]), most = load(top.x[k]);
		now[k] = load(p.x[k]);
		rule.update(now[k], gradient<T>(w, (T)load(g.x[k]), scale, coef), one, two, most);
		p.x[k] = store<P>(now[k]), m.x[k] = store<P>(one), v.x[k] = store<P>(two), top.x[k] = store<P>(most);
	}
	*(Ps*)((P*)e.value + i) = p;
	if (e.first) *(Ps*)((P*)e.first + i) = m;
	if (e.second) *(Ps*)((P*)e.second + i) = v;
	if (e.most) *(Ps*)((P*)e.most + i) = top;
	if (!e.copy) return;
#pragma unroll
	for (int k = 0; k < n; k++) {
		if ((e.types >> 16 & 0xff) == F16) ((Half*)e.copy)[i + k] = store<Half>((float)now[k]);
		else ((BFloat*)e.copy)[i + k] = store<BFloat>((float)now[k]);
	}
}

// step updates a chunk with values of type P and gradients of type G.
template <template <class> class Rule, class P, class G> __device__ __forceinline__ void step(const Work& w, const Entry& e, const Place& at) {
	typedef typename wide<P>::type T;
	const Rule<T> rule(w, e, w.groups[e.group], w.steps[e.group] + 1);
	const T scale = w.scale ? (T)*w.scale : (T)1, coef = w.coef ? (T)*w.coef : (T)1;
	const bool packed = ((e.value | e.first | e.second | e.most) & (sizeof(P) * LANES - 1)) == 0 && (e.grad & (sizeof(G) * LANES - 1)) == 0;
	each(e.n, at, packed, [&](u64 i, bool pack) {
		if (pack) update<P, G, Rule<T>, LANES>(w, e, rule, i, scale, coef);
		else update<P, G, Rule<T>, 1>(w, e, rule, i, scale, coef);
	});
}

// optimise is the body of the optimiser kernels: it selects the types of the block's parameter.
template <template <class> class Rule> __device__ __forceinline__ void optimise(const Work& w) {
	const bool skip = w.inf && *w.inf != 0;
	if (!skip) {
		const Place at = w.blocks[blockIdx.x];
		const Entry e = w.entries[at.row];
		switch (e.types & 0xffff) {
		case F32 | F32 << 8: step<Rule, float, float>(w, e, at); break;
		case F32 | F16 << 8: step<Rule, float, Half>(w, e, at); break;
		case F32 | BF16 << 8: step<Rule, float, BFloat>(w, e, at); break;
		case F16 | F16 << 8: step<Rule, Half, Half>(w, e, at); break;
		case BF16 | BF16 << 8: step<Rule, BFloat, BFloat>(w, e, at); break;
		case F64 | F64 << 8: step<Rule, double, double>(w, e, at); break;
		}
	}
	finish(w, skip);
}

#define WORK const Entry* entries, const Place* blocks, const Group* groups, float* steps, u32* done, \
	const float* scale, const float* inf, const float* coef, u32 count, u32 flags
#define WORK_VALUES {entries, blocks, groups, steps, done, scale, inf, coef, count, flags}

extern "C" __global__ void __launch_bounds__(THREADS) adam(WORK) { optimise<Adam>(Work WORK_VALUES); }
extern "C" __global__ void __launch_bounds__(THREADS) sgd(WORK) { optimise<SGD>(Work WORK_VALUES); }

// put64 stores a learning rate, and put32 stores the number of steps of a loaded state.
extern "C" __global__ void put64(double* to, double x) { *to = x; }
extern "C" __global__ void put32(float* to, float x) { *to = x; }

// An Addresses is a part of the addresses of gradients that have moved. store_addresses stores them in
// a table, in every words-th word from first on.
struct Addresses { u64 at[THREADS]; };
extern "C" __global__ void store_addresses(unsigned char* table, const Addresses values, u32 count, u32 first, u32 words) {
	if (threadIdx.x < count) ((u64*)table)[first + threadIdx.x * words] = values.at[threadIdx.x];
}

// ---- norms ----

// A List is one gradient of a table: its address, length and type, and its first block.
struct List { u64 at, n; u32 type, first; };

// combine adds two numbers or, if most, returns the larger one; NaN is the largest. over_warp
// combines the numbers of the lanes of a warp by shuffles, and over_block the numbers of all
// threads of a block. Lane 0 and thread 0 get the result. All threads call them. The order of
// additions is fixed.
template <bool most> __device__ __forceinline__ double combine(double a, double b) {
	return most ? (a > b || a != a ? a : b) : a + b;
}
template <bool most> __device__ double over_warp(double x) {
	for (int k = 16; k > 0; k /= 2) x = combine<most>(x, __shfl_down_sync(0xffffffff, x, k));
	return x;
}
template <bool most> __device__ double over_block(double x) {
	__shared__ double warps[THREADS / 32];
	x = over_warp<most>(x);
	if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
	__syncthreads();
	x = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0;
	if (threadIdx.x < 32) x = over_warp<most>(x);
	return x;
}

// power returns |x|^p, the addend of the norm of order p, and root its inverse. p = 0 stands
// for the infinity norm: the largest |x|.
__device__ __forceinline__ double power(double x, double p) {
	x = fabs(x);
	return p == 2 ? x * x : p == 1 || p == 0 ? x : pow(x, p);
}
__device__ __forceinline__ double root(double x, double p) {
	return p == 2 ? sqrt(x) : p == 1 || p == 0 ? x : pow(x, 1 / p);
}

// powers combines the powers of the elements of a chunk that this thread processes.
template <class T, bool most> __device__ double powers(const List& l, const Place& at, double p) {
	double sum = 0;
	const T* const xs = (const T*)l.at;
	each(l.n, at, (l.at & (sizeof(T) * LANES - 1)) == 0, [&](u64 i, bool pack) {
		if (!pack) {
			sum = combine<most>(sum, power(load(xs[i]), p));
			return;
		}
		const Pack<T> four = *(const Pack<T>*)(xs + i);
#pragma unroll
		for (int k = 0; k < LANES; k++) sum = combine<most>(sum, power(load(four.x[k]), p));
	});
	return sum;
}

// ended returns true in the last block of the grid that calls it. The block then sees the
// stores of all other blocks. All threads call it.
__device__ bool ended(u32* done) {
	__shared__ bool last;
	if (threadIdx.x == 0) {
		__threadfence();
		last = atomicAdd(done, 1) == gridDim.x - 1;
		if (last) *done = 0;
	}
	__syncthreads();
	if (last) __threadfence();
	return last;
}

// total combines the results of the blocks, parts, to *powers_of. Each warp combines the
// blocks of one gradient at a time. The norm of a gradient is rounded to its type, as in
// torch. All threads of the last block call it.
template <bool most> __device__ void total(const List* lists, u32 count, const double* parts, u32 blocks, double p, float* powers_of) {
	double sum = 0;
	for (u32 l = threadIdx.x / 32; l < count; l += THREADS / 32) {
		const u32 end = l + 1 < count ? lists[l + 1].first : blocks;
		double x = 0;
		for (u32 i = lists[l].first + threadIdx.x % 32; i < end; i += 32) x = combine<most>(x, parts[i]);
		x = over_warp<most>(x);
		if (threadIdx.x % 32 == 0 && end > lists[l].first)
			sum = combine<most>(sum, power(lists[l].type == F64 ? root(x, p) : (double)round_to(lists[l].type, (float)root(x, p)), p));
	}
	__syncthreads();
	sum = over_block<most>(sum);
	if (threadIdx.x == 0) *powers_of = (float)sum;
}

// sum_powers stores the sum of the powers of all elements in *powers_of, or their maximum if
// p is 0. Each block stores its sum in parts, and the last block combines the parts.
extern "C" __global__ void __launch_bounds__(THREADS) sum_powers(const List* lists, const Place* blocks, double* parts, float* powers_of, u32* done, u32 count, double p) {
	const Place at = blocks[blockIdx.x];
	const List l = lists[at.row];
	double x = 0;
	switch (l.type) {
	case F16: x = p == 0 ? powers<Half, true>(l, at, p) : powers<Half, false>(l, at, p); break;
	case BF16: x = p == 0 ? powers<BFloat, true>(l, at, p) : powers<BFloat, false>(l, at, p); break;
	case F32: x = p == 0 ? powers<float, true>(l, at, p) : powers<float, false>(l, at, p); break;
	case F64: x = p == 0 ? powers<double, true>(l, at, p) : powers<double, false>(l, at, p); break;
	}
	x = p == 0 ? over_block<true>(x) : over_block<false>(x);
	if (threadIdx.x == 0) parts[blockIdx.x] = x;
	if (!ended(done)) return;
	if (p == 0) total<true>(lists, count, parts, gridDim.x, p, powers_of);
	else total<false>(lists, count, parts, gridDim.x, p, powers_of);
}

// clip_factor stores the norm and the factor that clips it to limit. It rounds the norm and
// each intermediate result to the type, as torch does. One thread runs it.
extern "C" __global__ void clip_factor(const float* powers_of, float* norm, float* coef, double p, float limit, u32 type) {
	const float n = round_to(type, (float)root((double)*powers_of, p));
	const float inverse = round_to(type, 1.0f / round_to(type, n + 1e-6f));
	const float c = round_to(type, inverse * limit);
	*norm = n;
	*coef = c > 1 ? 1.0f : c; // NaN stays
}

// change applies fn to each element of the block's chunk. change_as does it for one type.
template <class T, class Fn> __device__ __forceinline__ void change_as(const List& l, const Place& at, Fn fn) {
	T* const xs = (T*)l.at;
	each(l.n, at, (l.at & (sizeof(T) * LANES - 1)) == 0, [&](u64 i, bool pack) {
		if (!pack) {
			xs[i] = store<T>(fn(load(xs[i])));
			return;
		}
		Pack<T> four = *(Pack<T>*)(xs + i);
#pragma unroll
		for (int k = 0; k < LANES; k++) four.x[k] = store<T>(fn(load(four.x[k])));
		*(Pack<T>*)(xs + i) = four;
	});
}
template <class Fn> __device__ __forceinline__ void change(const List* lists, const Place* blocks, Fn fn) {
	const Place at = blocks[blockIdx.x];
	const List l = lists[at.row];
	switch (l.type) {
	case F16: change_as<Half>(l, at, fn); break;
	case BF16: change_as<BFloat>(l, at, fn); break;
	case F32: change_as<float>(l, at, fn); break;
	case F64: change_as<double>(l, at, fn); break;
	}
}

// The functions for change. They are structs, because NVRTC treats generic lambdas as host
// functions.
struct Times {
	float by;
	template <class T> __device__ __forceinline__ T operator()(T x) const { return x * (T)by; }
};
struct Within {
	float limit;
	template <class T> __device__ __forceinline__ T operator()(T x) const { return x < -(T)limit ? -(T)limit : x > (T)limit ? (T)limit : x; }
};
struct Unscaled {
	float by;
	bool* bad;
	template <class T> __device__ __forceinline__ T operator()(T x) const {
		*bad |= !isfinite(x);
		return x * (T)by;
	}
};

// multiply multiplies by a factor, which is rounded to the type of each gradient.
extern "C" __global__ void __launch_bounds__(THREADS) multiply(const List* lists, const Place* blocks, const float* factor) {
	change(lists, blocks, Times{round_to(lists[blocks[blockIdx.x].row].type, *factor)});
}

// limit_size clamps each element to [-limit, limit].
extern "C" __global__ void __launch_bounds__(THREADS) limit_size(const List* lists, const Place* blocks, float limit) {
	change(lists, blocks, Within{limit});
}

// all_finite reports whether the elements of the chunk that this thread processes are finite.
template <class T> __device__ bool all_finite(const List& l, const Place& at) {
	bool good = true;
	const T* const xs = (const T*)l.at;
	each(l.n, at, (l.at & (sizeof(T) * LANES - 1)) == 0, [&](u64 i, bool pack) {
		if (!pack) {
			good &= isfinite(load(xs[i]));
			return;
		}
		const Pack<T> four = *(const Pack<T>*)(xs + i);
#pragma unroll
		for (int k = 0; k < LANES; k++) good &= isfinite(load(four.x[k]));
	});
	return good;
}

// unscale multiplies by *inverse and sets *found to 1 if an element is not finite. If inverse
// is null or *inverse is 1, it does not store elements, because other streams may read the
// gradients.
extern "C" __global__ void __launch_bounds__(THREADS) unscale(const List* lists, const Place* blocks, const float* inverse, float* found) {
	const float by = inverse ? *inverse : 1.0f;
	bool bad = false;
	if (by != 1)
		change(lists, blocks, Unscaled{by, &bad});
	else {
		const Place at = blocks[blockIdx.x];
		const List l = lists[at.row];
		switch (l.type) {
		case F16: bad = !all_finite<Half>(l, at); break;
		case BF16: bad = !all_finite<BFloat>(l, at); break;
		case F32: bad = !all_finite<float>(l, at); break;
		case F64: bad = !all_finite<double>(l, at); break;
		}
	}
	if (bad) *found = 1;
}
