#include <atomic>
#include <cstdlib>
#include <functional>
#include <pthread.h>
#include <random>
#include <thread>
#include <unistd.h>

// A block has the barrier of its threads.
struct Block {
	pthread_barrier_t all;
	std::atomic<int> any{0};
	Block() { pthread_barrier_init(&all, nullptr, 8); }
	~Block() { pthread_barrier_destroy(&all); }
	void sync() { pthread_barrier_wait(&all); }
};
static thread_local Block* block;

static inline void __syncthreads() { block->sync(); }
static inline int __syncthreads_or(int is) {
	if (is) block->any = 1;
	block->sync();
	const int any = block->any;
	block->sync();
	block->any = 0;
	block->sync();
	return any;
}
static inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) { return ((std::atomic<unsigned long long>*)p)->fetch_add(v); }
static inline std::atomic<unsigned long long>* atom(const void* p) { return (std::atomic<unsigned long long>*)p; }

// wait_a_moment is called between polls. Mostly the next one follows at once, so that it
// may meet what is being written; then the thread sleeps, since many of them that only
// yield take each other's processors, the more the busier the machine is.
static inline void wait_a_moment() {
	static thread_local unsigned polls;
	if (++polls % 64 == 0) usleep(20);
}
