#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <math.h>
#include <memory>
#include <pthread.h>
#include <thread>
#include <unistd.h>
#include <vector>

// A Barrier is for a number of threads.
struct Barrier {
	pthread_barrier_t all;
	explicit Barrier(unsigned threads) { pthread_barrier_init(&all, nullptr, threads); }
	~Barrier() { pthread_barrier_destroy(&all); }
	void sync() { pthread_barrier_wait(&all); }
};

// A Block has the barriers of its threads, and what they exchange.
struct Block {
	Barrier all;
	std::vector<std::unique_ptr<Barrier>> warps;
	std::vector<unsigned> lanes;
	std::atomic<int> any{0};
	unsigned long long sums[128];
	unsigned rows[8]; // of the experts that a block counts together
	Barrier* cluster;      // of the threads of all its blocks
	Block* const* cousins; // the blocks of the cluster
	Block(unsigned threads, Barrier* cluster, Block* const* cousins) : all(threads), lanes(threads), cluster(cluster), cousins(cousins) {
		for (unsigned i = 0; i < threads; i += 32) warps.push_back(std::make_unique<Barrier>(32));
		memset(sums, 0x01, sizeof sums); // turns that never come
	}
};
static thread_local Block* block;
static thread_local unsigned lateness; // of the thread after __syncthreads_or, in µs

static inline void __syncthreads() { block->all.sync(); }
static inline void __syncwarp() {}
static inline int __syncthreads_or(int is) {
	if (is) block->any = 1;
	block->all.sync();
	const int any = block->any;
	block->all.sync();
	block->any = 0;
	block->all.sync();
	if (lateness != 0) usleep(lateness);
	return any;
}
static inline void put_line(void*, unsigned long long, unsigned long long) { abort(); }
static inline void get_line(const void*, unsigned long long*) { abort(); }
static inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) { return ((std::atomic<unsigned long long>*)p)->fetch_add(v); }
static inline unsigned atomicAdd(unsigned* p, unsigned v) { return ((std::atomic<unsigned>*)p)->fetch_add(v); }
static inline std::atomic<unsigned long long>* atom(const void* p) { return (std::atomic<unsigned long long>*)p; }

// All threads of a warp call __shfl_xor_sync together.
template <class X> static inline X __shfl_xor_sync(unsigned, X x, int by) {
	Barrier& warp = *block->warps[threadIdx.x / 32];
	block->lanes[threadIdx.x] = bits_of<unsigned>(x);
	warp.sync();
	x = bits_of<X>(block->lanes[threadIdx.x ^ by]);
	warp.sync();
	return x;
}
// The same is true of __shfl_sync and __ballot_sync.
template <class X> static inline X __shfl_sync(unsigned, X x, int from) {
	Barrier& warp = *block->warps[threadIdx.x / 32];
	block->lanes[threadIdx.x] = bits_of<unsigned>(x);
	warp.sync();
	x = bits_of<X>(block->lanes[threadIdx.x / 32 * 32 + from]);
	warp.sync();
	return x;
}
static inline unsigned __ballot_sync(unsigned, bool on) {
	Barrier& warp = *block->warps[threadIdx.x / 32];
	block->lanes[threadIdx.x] = on;
	warp.sync();
	unsigned all = 0;
	for (unsigned l = 0; l < 32; l++) all |= block->lanes[threadIdx.x / 32 * 32 + l] << l;
	warp.sync();
	return all;
}
static inline int __ffs(int x) { return __builtin_ffs(x); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1 / a; }
static float __fsqrt_rn(float a) { return sqrtf(a); }

static inline void wait_a_moment() {
	static thread_local unsigned polls;
	if (++polls % 8 == 0) usleep(std::min(20 * polls, 5000u)); // of hundreds of threads
}

// putOther stores a word in another block of the cluster, where at is in this one.
static inline void putOther(unsigned long long* at, unsigned r, unsigned long long v) { *atom(block->cousins[r]->sums + (at - block->sums)) = v; }
#define __CUDA_ARCH__ 900
#define __cluster_dims__(...)
