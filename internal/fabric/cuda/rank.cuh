// Control is what a rank keeps from one operation to the next, in memory of its own.
// Each block adds its share of EPOCH to ticks when all its threads have read them: until
// all blocks have, a thread finds the same epoch in them, and the next kernel, which
// begins when this one has ended, the next one. Nobody waits for the additions.
struct alignas(16) Control {
	u64 ticks;
	u64 gaveUp; // the epoch in which the rank gave up, or 0
};
#define EPOCH 256 // ticks, of which each block has at least one

// Scratch memory begins with the signals, four of each rank for each block, and has then
// twice, for even and odd epochs, a slot for what each rank sends, and a whole for what
// is gathered; and behind them as much again for lines alone.
struct Rank {
	char* peer[RANKS]; // the scratch memory of the k-th rank after this one: the first is its own
	u32 rank, ranks;
	u64 slot, whole;   // bytes of them
	Control* control;
	u32* host;         // two words in the host's memory: not 0 when the rank gives up, and when it has
	u64 signature;     // of the operation
	u64 epoch;
	u64 place;         // of what belongs to this epoch, in the scratch memory of any rank
	u32 spins;
	bool over;         // given up: what it has is no result, and nothing of it is sent
};

#define LINKS char *p0, char *p1, char *p2, char *p3, char *p4, char *p5, char *p6, char *p7, u32 rank, u32 ranks, u64 slot, u64 whole, Control *control, u32 *host, u64 signature
#define RANK {{p0, p1, p2, p3, p4, p5, p6, p7}, rank, ranks, slot, whole, control, host, signature}

// Loops over ranks are unrolled for as many as CHORUS_RANKS says, or for all that there
// may be. count is how many there are.
#ifdef CHORUS_RANKS
#define MOST CHORUS_RANKS
static __device__ __forceinline__ u32 count(const Rank& me) { return CHORUS_RANKS; }
#else
#define MOST RANKS
static __device__ __forceinline__ u32 count(const Rank& me) { return me.ranks; }
#endif

static const u64 signals = (u64)BLOCKS * RANKS * 4 * sizeof(u64);

// enter begins the operation. An operation is over from its beginning if the rank gave
// up in an earlier one, whatever its other threads do in this one meanwhile.
static __device__ __forceinline__ void enter(Rank& me) {
	u64 ticks, gaveUp;
	asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(ticks), "=l"(gaveUp) : "l"(me.control) : "memory");
	me.epoch = ticks / EPOCH + 1;
	me.place = signals + ((me.epoch & 1) != 0 ? count(me) * me.slot + me.whole : 0);
	me.over = gaveUp != 0 && gaveUp < me.epoch;
	me.spins = 0;
}

// counted adds the block's ticks. All its threads have entered.
static __device__ __forceinline__ void counted(const Rank& me) {
	if (threadIdx.x == blockDim.x - 1) atomicAdd(&me.control->ticks, blockIdx.x == 0 ? (u64)EPOCH - (gridDim.x - 1) : 1);
}

// entered lets the block count, while what it has sent is on its way.
static __device__ __forceinline__ void entered(const Rank& me) {
	__syncthreads();
	counted(me);
}

// from returns where a rank's scratch has, in this epoch, what rank r sends to it.
static __device__ __forceinline__ char* from(const Rank& me, char* scratch, u32 r) {
	return scratch + r * me.slot + me.place;
}
static __device__ __forceinline__ char* gathered(const Rank& me, char* scratch) { return from(me, scratch, count(me)); }

// after returns the k-th rank after this one.
static __device__ __forceinline__ u32 after(const Rank& me, u32 k) {
	const u32 r = me.rank + k;
	return r < count(me) ? r : r - count(me);
}

// others has a bit for each rank but this one.
static __device__ __forceinline__ u32 others(const Rank& me) { return ((1u << count(me)) - 1) & ~(1u << me.rank); }
