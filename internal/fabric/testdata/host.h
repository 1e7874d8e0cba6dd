#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <pthread.h>
#include <random>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

// A block has the barrier of its threads.
struct Block {
	pthread_barrier_t all;
	std::atomic<int> any{0};
	std::atomic<unsigned> last{0}; // what the last thread has
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

// A block has the lanes of one line, which the host does not store or load as one: its mark,
// which the last lane has, is stored after all the rest, its own other half too, and loaded
// before it.
static inline void put_line(void* to, unsigned long long a, unsigned long long b) {
	if (threadIdx.x == 7) block->sync();
	atom(to)[0] = a, atom(to)[1] = b;
	if (threadIdx.x != 7) block->sync();
}
struct Load {
	const void* from;
	unsigned long long* to;
	void run() const { to[1] = atom(from)[1]; to[0] = atom(from)[0]; } // the mark is the second half
};
static thread_local std::vector<Load> loads; // that wait for those of the last lane
static inline void get_line(const void* from, unsigned long long* to) {
	if (threadIdx.x == 7) Load{from, to}.run();
	else loads.push_back({from, to});
}
static inline void __syncwarp(unsigned) {}
static inline unsigned __shfl_sync(unsigned, unsigned x, int, int) {
	if (threadIdx.x == 7) block->last = x;
	block->sync();
	x = block->last;
	for (const Load& l : loads) l.run();
	loads.clear();
	block->sync();
	return x;
}

// wait_a_moment is called between polls. Mostly the next one follows at once, so that it
// may meet what is being written; then the thread sleeps, since many of them that only
// yield take each other's processors, the more the busier the machine is.
static inline void wait_a_moment() {
	static thread_local unsigned polls;
	if (++polls % 64 == 0) usleep(20);
}
