// The state of a rank: where its buffers are, and how a kernel finds its epoch.

// Control is the state that a rank keeps between operations, in its private device memory.
// An epoch is EPOCH ticks. Each block of a kernel adds some ticks after all its threads have
// read them, and all blocks together add EPOCH. Until the last block has added its ticks,
// all threads compute the same epoch; the next kernel of the rank computes the next one.
// The threads do not wait for these additions.
struct alignas(16) Control {
	u64 ticks;
	u64 gaveUp; // the epoch in which the rank was aborted, or 0
};
#define EPOCH 256 // ticks; at least BLOCKS, because each block adds at least one

// The scratch memory of a rank has these parts:
//   1. signals of barriers: four per sending rank and block, see barrier
//   2. buffers of packets and cells for even epochs: a slot for the data from each rank,
//      and a whole for the gathered results of all ranks
//   3. the same for odd epochs
//   4. the buffers of lines for even epochs, and for odd epochs, as in 2 and 3
struct Rank {
	char* peer[RANKS]; // scratch memory of the k-th rank after this one; peer[0] is this rank's
	u32 rank, ranks;
	u64 slot, whole;   // their sizes in bytes
	Control* control;
	u32* host;         // two words of pinned host memory: the abort request, and its confirmation
	u64 signature;     // hash of the operation's kind, length, type, reduction and root
	u64 epoch;
	u64 place;         // offset of the epoch's buffers in scratch memory, the same on all ranks
	u32 spins;         // unsuccessful polls
	bool over;         // aborted: the values are not valid and must not be sent
};

#define LINKS char *p0, char *p1, char *p2, char *p3, char *p4, char *p5, char *p6, char *p7, u32 rank, u32 ranks, u64 slot, u64 whole, Control *control, u32 *host, u64 signature
#define RANK {{p0, p1, p2, p3, p4, p5, p6, p7}, rank, ranks, slot, whole, control, host, signature}

// count is the number of ranks. MOST is its maximum at compile time: loops over ranks are
// unrolled MOST times, and skip the ranks from count on.
#ifdef CHORUS_RANKS
#define MOST CHORUS_RANKS
static __device__ __forceinline__ u32 count(const Rank& me) { return CHORUS_RANKS; }
#else
#define MOST RANKS
static __device__ __forceinline__ u32 count(const Rank& me) { return me.ranks; }
#endif

static const u64 signals = (u64)BLOCKS * RANKS * 4 * sizeof(u64);

// enter begins the operation: it computes the epoch and the place of its buffers. All threads
// call it, after their first loads. The operation is aborted from its beginning if the rank
// was aborted in an earlier epoch. An abort by another thread in this epoch does not
// count, so that all threads begin in the same state.
static __device__ __forceinline__ void enter(Rank& me) {
	u64 ticks, gaveUp;
	asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(ticks), "=l"(gaveUp) : "l"(me.control) : "memory");
	me.epoch = ticks / EPOCH + 1;
	me.place = signals + ((me.epoch & 1) != 0 ? count(me) * me.slot + me.whole : 0);
	me.over = gaveUp != 0 && gaveUp < me.epoch;
	me.spins = 0;
}

// counted adds the block's ticks. All threads of the block call it, after a __syncthreads
// that follows enter. The additions of all blocks sum up to EPOCH.
static __device__ __forceinline__ void counted(const Rank& me) {
	if (threadIdx.x == blockDim.x - 1) atomicAdd(&me.control->ticks, blockIdx.x == 0 ? (u64)EPOCH - (gridDim.x - 1) : 1);
}

// entered adds the block's ticks. All threads call it after they have sent their data, so
// that the addition overlaps with the transfer. Kernels with barriers do not need it.
static __device__ __forceinline__ void entered(const Rank& me) {
	__syncthreads();
	counted(me);
}

// from returns the slot for the data from rank r in a rank's scratch memory. gathered returns
// the whole, which follows the slots.
static __device__ __forceinline__ char* from(const Rank& me, char* scratch, u32 r) {
	return scratch + r * me.slot + me.place;
}
static __device__ __forceinline__ char* gathered(const Rank& me, char* scratch) { return from(me, scratch, count(me)); }

// after returns the k-th rank after this one.
static __device__ __forceinline__ u32 after(const Rank& me, u32 k) {
	const u32 r = me.rank + k;
	return r < count(me) ? r : r - count(me);
}

// others returns a bit set of all ranks except this one.
static __device__ __forceinline__ u32 others(const Rank& me) { return ((1u << count(me)) - 1) & ~(1u << me.rank); }
