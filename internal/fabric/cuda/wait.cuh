// Waits for other ranks: the abort check of polling loops, and a barrier.

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
