// Compiles rng.cu followed by one of draws.cu, sort.cu and samples.cu as C++ for the host, and
// runs launches, to compare the kernels with the Go functions that stand in for them. Threads of a
// block are contexts that yield at barriers; blocks run one after the other.
//
// The input is a launch: the kernel, blocks, threads and number of arguments, and then each
// argument: "p BYTES" with that many bytes after the line, "n" for a null pointer, or the kind and
// the bits of a number, in hexadecimal. The output is the memory of all pointers.
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>
#include <ucontext.h>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim { unsigned x; };
static Dim gridDim, blockDim, blockIdx, threadIdx;

template <class To, class From> static To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the sizes differ");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static double __longlong_as_double(long long x) { return bits_as<double>(x); }
static long long __double_as_longlong(double x) { return bits_as<long long>(x); }

// CUDA's fast functions, without their errors. glibc has some of the names too.
#define __logf fast_logf
#define __expf fast_expf
#define __sincosf fast_sincosf
#define __tanf fast_tanf
static float __logf(float x) { return (float)log((double)x); }
static float __expf(float x) { return (float)exp((double)x); }
static float __tanf(float x) { return (float)tan((double)x); }
static void __sincosf(float x, float* s, float* c) { *s = (float)sin((double)x), *c = (float)cos((double)x); }
static void sincospi(double x, double* s, double* c) {
    long double pi = 3.14159265358979323846264338327950288L;
    *s = (double)sinl(x * pi), *c = (double)cosl(x * pi);
}
static float fast_rsqrt(float x) { return (float)(1 / sqrt((double)x)); }
static float fast_exp2(float x) { return (float)exp2((double)x); }
static float fast_log2(float x) { return (float)log2((double)x); }
static float fast_reciprocal(float x) { return 1 / x; }

// ---- threads ----

struct Thread {
    ucontext_t context;
    jmp_buf jump;
    bool entered;
    std::unique_ptr<char[]> stack;
    enum { ready, warp, block, done } state;
};
static std::vector<Thread> threads;
static jmp_buf scheduler;
static void (*body)();

// Each switch of contexts is a system call, for the mask of signals. So a context only enters a thread for the first
// time, and then it jumps.
__attribute__((noinline)) static void yield() {
    if (_setjmp(threads[threadIdx.x].jump) == 0) _longjmp(scheduler, 1);
}
__attribute__((noinline)) static void resume() {
    Thread& t = threads[threadIdx.x];
    if (_setjmp(scheduler) != 0) return;
    if (t.entered) _longjmp(t.jump, 1);
    t.entered = true;
    setcontext(&t.context);
}

static void wait_at(int barrier) {
    threads[threadIdx.x].state = barrier ? Thread::block : Thread::warp;
    yield();
}
static void __syncthreads() { wait_at(1); }
static void __syncwarp() { wait_at(0); }

static unsigned slots[1024];
static unsigned __match_any_sync(unsigned, unsigned value) {
    unsigned mask = 0, first = threadIdx.x / 32 * 32;
    slots[threadIdx.x] = value;
    __syncwarp();
    for (unsigned lane = 0; lane < 32; lane++) mask |= (unsigned)(slots[first + lane] == value) << lane;
    __syncwarp();
    return mask;
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static unsigned atomicAdd(unsigned* at, unsigned by) { return (*at += by) - by; }

static void start() {
    for (;;) { // a thread of each block
        body();
        threads[threadIdx.x].state = Thread::done;
        yield();
    }
}

// open lets the threads from first on go on if all of them are at the barrier, or done.
static bool open(size_t first, size_t n, int barrier) {
    bool any = false;
    for (size_t i = first; i < first + n; i++) {
        if (threads[i].state != barrier && threads[i].state != Thread::done) return false;
        any |= threads[i].state == barrier;
    }
    for (size_t i = first; any && i < first + n; i++)
        if (threads[i].state == barrier) threads[i].state = Thread::ready;
    return any;
}

static void run_block() {
    for (auto& t : threads) {
        t.state = Thread::ready;
        if (t.entered) continue;
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.get();
        t.context.uc_stack.ss_size = 1 << 16;
        t.context.uc_link = nullptr;
        makecontext(&t.context, start, 0);
    }
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < threads.size(); i++) {
            if (threads[i].state != Thread::ready) continue;
            threadIdx.x = (unsigned)i;
            more = true;
            resume();
        }
        for (size_t i = 0; i < threads.size(); i += 32) more |= open(i, 32, Thread::warp);
        more |= open(0, threads.size(), Thread::block);
    }
    for (auto& t : threads)
        if (t.state != Thread::done) exit(3); // a barrier that not all threads reach
}

// ---- the kernels ----

#ifndef __FLT16_DIG__
#error this compiler has no _Float16
#endif
struct Half;
static Half half_of(float);
static float wide(Half);

#include "kernels.cu"

static Half half_of(float x) { return Half{bits_as<u16>((_Float16)x)}; }
static float wide(Half h) { return (float)bits_as<_Float16>(h.bits); }

// An Arg converts to the type of a parameter.
struct Arg {
    std::vector<char> memory;
    bool null = false;
    u64 bits = 0;
    template <class T> operator T*() { return null ? nullptr : (T*)memory.data(); }
    operator u64() { return bits; }
    operator u32() { return (u32)bits; }
    operator int() { return (int)bits; }
    operator double() { return bits_as<double>(bits); }
};
static std::vector<Arg> args;

template <class... P, size_t... I> static void call(void (*kernel)(P...), std::index_sequence<I...>) { kernel((P)args[I]...); }
template <class... P> static void call(void (*kernel)(P...)) {
    if (args.size() != sizeof...(P)) exit(4);
    call(kernel, std::index_sequence_for<P...>());
}
#define KERNEL(name) if (kernel == #name) body = [] { call(name); };

int main() {
    char name[64], kind[4];
    unsigned blocks, count, n;
    while (scanf("%63s %u %u %u", name, &blocks, &n, &count) == 4) {
        args.assign(count, Arg());
        for (auto& a : args) {
            if (scanf("%3s", kind) != 1) return 2;
            if (*kind == 'n') a.null = true;
            else if (*kind != 'p') { if (scanf("%llx", &a.bits) != 1) return 2; }
            else {
                size_t bytes;
                if (scanf("%zu", &bytes) != 1 || getchar() != '\n') return 2;
                a.memory.resize(bytes);
                if (fread(a.memory.data(), 1, bytes, stdin) != bytes) return 2;
            }
        }
        const std::string kernel = name;
        body = nullptr;
        KERNELS
        if (!body) return 1;
        while (threads.size() < n) {
            threads.emplace_back();
            threads.back().stack.reset(new char[1 << 16]);
        }
        threads.resize(n);
        gridDim.x = blocks, blockDim.x = n;
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block();
        for (auto& a : args) fwrite(a.memory.data(), 1, a.memory.size(), stdout);
        fflush(stdout);
    }
    return 0;
}
