// What kernels.cu needs of CUDA, for the host. A block's threads are fibers of one thread of
// the host: each runs until it waits for others.
#include <math.h>
#include <ucontext.h>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#define __shared__ static __attribute__((section("shared")))
extern char __start_shared[], __stop_shared[];
struct Fiber {
	ucontext_t context;
	std::vector<char> stack;
	Dim thread;
	bool done;
};
static Dim gridDim, blockDim;
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;

static void yield() { swapcontext(&fibers[current].context, &scheduler); }

static unsigned arrived, generation;
static void __syncthreads() {
	const unsigned mine = generation;
	unsigned alive = 0;
	for (const Fiber& f : fibers) alive += !f.done;
	if (++arrived >= alive) arrived = 0, generation++;
	while (generation == mine) yield();
}

static void __threadfence() {}
static unsigned atomicAdd(unsigned* p, unsigned x) { return (*p += x) - x; }
static float __ldcg(const float* p) { return *p; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }

// All lanes of a warp are at the same exchange, so two places for each suffice.
static float exchange[2][1024];
static unsigned phases[1024];
static float __shfl_xor_sync(unsigned, float x, int other) {
	const unsigned t = threadIdx.x, phase = phases[t]++ & 1;
	exchange[phase][t] = x;
	yield();
	return exchange[phase][t ^ other];
}
