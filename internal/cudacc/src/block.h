// The threads of a block are fibers of one thread of the host: each runs until it waits for
// others. Blocks run one after the other.
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#define __align__(n) alignas(n)
#define __maxnreg__(n)
#define __cluster_dims__(...)
#define __trap abort
#define clock clock_of_cuda // C's function counts something else
#define VECTOR2(T, name, align) struct alignas(align) name##2 { T x, y; }; \
	static inline name##2 make_##name##2(T x, T y) { return {x, y}; }
#define VECTOR4(T, name, align) struct alignas(align) name##4 { T x, y, z, w; }; \
	static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR2(char, char, 2) VECTOR2(unsigned char, uchar, 2) VECTOR2(short, short, 4) VECTOR2(unsigned short, ushort, 4)
VECTOR2(int, int, 8) VECTOR2(unsigned, uint, 8) VECTOR2(float, float, 8) VECTOR2(double, double, 16)
VECTOR2(long long, longlong, 16) VECTOR2(unsigned long long, ulonglong, 16)
VECTOR4(char, char, 4) VECTOR4(unsigned char, uchar, 4) VECTOR4(short, short, 8) VECTOR4(unsigned short, ushort, 8)
VECTOR4(int, int, 16) VECTOR4(unsigned, uint, 16) VECTOR4(float, float, 16)

#define __shared__ static __attribute__((section("shared")))
extern char __start_shared[], __stop_shared[];
static __attribute__((section("shared"), used)) char some_shared = 1; // so that the section exists

struct Fiber {
	ucontext_t context;
	jmp_buf jump;
	std::unique_ptr<char[]> stack;
	Dim thread;
	bool entered, done, atBarrier, released; // released from the exchange of its warp
	unsigned long long exchanged;
};
static Dim gridDim, blockDim;
static const int warpSize = 32;
static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static unsigned current;
static bool progress; // since the last turn of all fibers
static std::vector<char> dynamicShared;

// Each switch of contexts is a system call, for the mask of signals. So a context only enters a fiber for the first
// time, and then it jumps.
__attribute__((noinline)) static void yield() {
	if (_setjmp(fibers[current].jump) == 0) _longjmp(scheduler, 1);
}
__attribute__((noinline)) static void resume() {
	Fiber& f = fibers[current];
	if (_setjmp(scheduler) != 0) return;
	if (f.entered) _longjmp(f.jump, 1);
	f.entered = true;
	setcontext(&f.context);
}

static unsigned waiting, finished; // threads at the barrier, and threads that have returned

static void __syncthreads() {
	Fiber& me = fibers[current];
	me.atBarrier = progress = true;
	waiting++;
	while (me.atBarrier) {
		if (waiting + finished < fibers.size()) {
			yield();
			continue;
		}
		for (Fiber& f : fibers) f.atBarrier = false;
		waiting = 0, progress = true;
	}
}

// Lanes of a mask wait for each other: each has its bit in arrived until all have come.
static unsigned arrived[32];
static void warp_wait(unsigned mask) {
	const unsigned warp = current / 32;
	fibers[current].released = false;
	arrived[warp] |= 1u << current % 32;
	progress = true;
	while (!fibers[current].released) {
		unsigned alive = 0;
		for (unsigned l = 0; l < 32 && warp * 32 + l < fibers.size(); l++) alive |= unsigned(!fibers[warp * 32 + l].done) << l;
		if (alive & mask & ~arrived[warp]) {
			yield();
			continue;
		}
		for (unsigned l = 0; l < 32; l++)
			if (alive & mask & 1u << l) fibers[warp * 32 + l].released = true;
		arrived[warp] &= ~mask;
		progress = true;
	}
}
static void __syncwarp(unsigned mask = 0xffffffff) { warp_wait(mask); }

// exchange returns the value of another lane; a lane that does not exist gives the lane's own.
template <class T> static T exchange(unsigned mask, T x, unsigned lane) {
	static_assert(sizeof(T) <= 8, "a lane exchanges at most 8 bytes");
	memcpy(&fibers[current].exchanged, &x, sizeof x);
	warp_wait(mask);
	const unsigned from = current / 32 * 32 + lane;
	T y;
	memcpy(&y, &fibers[lane < 32 && from < fibers.size() ? from : current].exchanged, sizeof y);
	warp_wait(mask); // until all lanes have read
	return y;
}
static unsigned lane() { return current % 32; }
template <class T> static T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
	return exchange(mask, x, lane() / width * width + (unsigned)from % width);
}
template <class T> static T __shfl_xor_sync(unsigned mask, T x, int other, int width = 32) {
	const unsigned from = lane() ^ other;
	return exchange(mask, x, from / width > lane() / width ? lane() : from);
}
template <class T> static T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32) {
	return exchange(mask, x, lane() % width + by < (unsigned)width ? lane() + by : lane());
}
template <class T> static T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32) {
	return exchange(mask, x, lane() % width >= by ? lane() - by : lane());
}
static unsigned __ballot_sync(unsigned mask, int on) {
	unsigned all = 0;
	fibers[current].exchanged = on != 0;
	warp_wait(mask);
	for (unsigned l = 0; l < 32 && current / 32 * 32 + l < fibers.size(); l++)
		if (mask & 1u << l && !fibers[current / 32 * 32 + l].done) all |= unsigned(fibers[current / 32 * 32 + l].exchanged) << l;
	warp_wait(mask);
	return all;
}
static unsigned __match_any_sync(unsigned mask, unsigned x) {
	unsigned all = 0;
	fibers[current].exchanged = x;
	warp_wait(mask);
	for (unsigned l = 0; l < 32 && current / 32 * 32 + l < fibers.size(); l++) {
		const Fiber& f = fibers[current / 32 * 32 + l];
		if (mask & 1u << l && !f.done) all |= unsigned(f.exchanged == x) << l;
	}
	warp_wait(mask);
	return all;
}
static int __any_sync(unsigned mask, int on) { return __ballot_sync(mask, on) != 0; }
static int __all_sync(unsigned mask, int on) { return __ballot_sync(mask, !on) == 0; }

static void __threadfence() {}
static void __threadfence_block() {}
static void __threadfence_system() {}
template <class T> struct NotDeduced { typedef T Type; };
template <class T> static T atomicAdd(T* p, typename NotDeduced<T>::Type x) { const T was = *p; *p = was + x; return was; }
template <class T> static T atomicSub(T* p, typename NotDeduced<T>::Type x) { const T was = *p; *p = was - x; return was; }
template <class T> static T atomicMin(T* p, typename NotDeduced<T>::Type x) { const T was = *p; if (x < was) *p = x; return was; }
template <class T> static T atomicMax(T* p, typename NotDeduced<T>::Type x) { const T was = *p; if (was < x) *p = x; return was; }
template <class T> static T atomicAnd(T* p, typename NotDeduced<T>::Type x) { const T was = *p; *p = was & x; return was; }
template <class T> static T atomicOr(T* p, typename NotDeduced<T>::Type x) { const T was = *p; *p = was | x; return was; }
template <class T> static T atomicXor(T* p, typename NotDeduced<T>::Type x) { const T was = *p; *p = was ^ x; return was; }
template <class T> static T atomicExch(T* p, typename NotDeduced<T>::Type x) { const T was = *p; *p = x; return was; }
static unsigned atomicInc(unsigned* p, unsigned most) { const unsigned was = *p; *p = was >= most ? 0 : was + 1; return was; }
static unsigned atomicDec(unsigned* p, unsigned most) { const unsigned was = *p; *p = was == 0 || was > most ? most : was - 1; return was; }
template <class T> static T atomicCAS(T* p, typename NotDeduced<T>::Type old, typename NotDeduced<T>::Type x) {
	const T was = *p;
	if (was == old) *p = x;
	return was;
}
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static double rsqrt(double x) { return 1 / sqrt(x); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dsub_rn(double a, double b) { return a - b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }
static double __dsqrt_rn(double a) { return sqrt(a); }
static float __fdividef(float a, float b) { return a / b; }
#define __expf expf // the C library has functions of these names
#define __logf logf
#define __sinf sinf
#define __cosf cosf
#define __powf powf
#define __tanf tanf
#define __sincosf sincosf
static void sincospi(double x, double* s, double* c) {
	const long double angle = x * 3.14159265358979323846264338327950288L;
	*s = (double)sinl(angle), *c = (double)cosl(angle);
}
static int __float_as_int(float x) { return bits_of<int>(x); }
static float __int_as_float(int x) { return bits_of<float>(x); }
static long long __double_as_longlong(double x) { return bits_of<long long>(x); }
static double __longlong_as_double(long long x) { return bits_of<double>(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static int __ffs(int x) { return __builtin_ffs(x); }
