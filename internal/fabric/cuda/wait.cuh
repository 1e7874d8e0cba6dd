// Waits for other ranks: the abort check of polling loops, a barrier, and signals that are sent and awaited beside other work.

// stalled reports whether the operation is aborted. Polling loops call it after each
// unsuccessful poll. stalled reads the host's abort request only every 4096 calls, because a
// load from host memory takes a microsecond. If the host requests an abort, stalled confirms
// it in host memory and records the epoch for later operations.
static __device__ __forceinline__ bool stalled(Rank& me) {
	if (!me.over && (++me.spins & 0xfff) == 0 && relaxed(me.host) != 0) {
		me.over = true;
		*(volatile u32*)(me.host + 1) = 1;
		*(volatile u64*)&me.control->gaveUp = me.epoch;
	}
	return me.over;
}

// barrier returns when the block of the same index on every rank has called it. All stores
// of these blocks before the barrier are then visible. All threads of the block call it. The barriers
// of an operation are numbered; number 0 also adds the block's ticks.
//
// Thread k sends a signal to the k-th rank after this one and waits for that rank's signal.
// The release store follows a __syncthreads, so it publishes the stores of the whole block.
// Signals need no reset: their value is unique to the operation and the barrier. Epochs alternate between
// two sets of signals, and the barriers of an epoch between the two signals of a set, so no rank
// overwrites a signal before its receiver has read it.
static __device__ __forceinline__ void barrier(Rank& me, u64 n) {
	const u64 want = me.epoch + me.signature + (n >> 1) * 0x9e3779b97f4a7c15ull;
	const u64 at = (u64)blockIdx.x * RANKS * 4 + (me.epoch & 1) * 2 + (n & 1);
	__syncthreads();
	if (n == 0) counted(me);
	const u32 k = threadIdx.x;
	if (k > 0 && k < count(me)) {
		char* peer = me.peer[1];
#pragma unroll
		for (u32 j = 2; j < MOST; j++) peer = k == j ? me.peer[j] : peer; // no branch, so all lanes signal at once
		if (!me.over) release((u64*)peer + at + me.rank * 4, want);
		const u64* mine = (const u64*)me.peer[0] + at + after(me, k) * 4;
		while (acquire(mine) != want && !stalled(me)) {}
	}
	// If a thread has detected an abort, its whole block aborts.
	me.over = __syncthreads_or(me.over);
}

// Kernels with steps do without barriers: the first warp of a block sends and awaits the signals that steps are done, while the other
// threads do the next step. So no data waits for a signal: step n needs what the other ranks have sent in step n - 2, whose
// signals come during step n - 1. Their values are unique to the operation and grow by one from step to step.
#define SENTRIES 32 // threads of the first warp

// aborted begins step n of the block, and reports whether the operation is aborted. All threads call it. The other
// ranks' blocks of the same index have then done their step n - 2.
static __device__ __forceinline__ bool aborted(Rank& me, u64 n) {
	const bool is = __syncthreads_or(me.over);
	if (n == 0) counted(me);
	return me.over = is;
}

// keepsWatch reports whether the calling thread is of the first warp. During step n it then signals that step n - 1 is done, and waits until
// the other ranks have done theirs. Signals after the last one have no receiver. A rank is at most one signal ahead of the others,
// because its next one needs theirs.
static __device__ __forceinline__ bool keepsWatch(Rank& me, u64 n, u64 last) {
	if (threadIdx.x >= SENTRIES) return false;
	if (n == 0 || n > last) return true;
	const u64 want = (me.epoch + me.signature) * 0x9e3779b97f4a7c15ull + n;
	const u64 at = (u64)blockIdx.x * RANKS * 4 + (me.epoch & 1) * 2;
	for (u32 k = 1 + threadIdx.x; k < count(me); k += SENTRIES) {
		char* peer = me.peer[1];
#pragma unroll
		for (u32 j = 2; j < MOST; j++) peer = k == j ? me.peer[j] : peer; // no branch, so all lanes signal at once
		release((u64*)peer + at + me.rank * 4, want);
		if (SENTRIES >= RANKS) break; // so that the compiler does not unroll the loop
	}
	for (u32 k = 1 + threadIdx.x; k < count(me); k += SENTRIES) {
		const u64* mine = (const u64*)me.peer[0] + at + after(me, k) * 4;
		while (acquire(mine) - want > 1 && !stalled(me)) {}
		if (SENTRIES >= RANKS) break;
	}
	return true;
}
