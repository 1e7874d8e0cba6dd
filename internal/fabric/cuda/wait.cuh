// stalled is called while nothing comes, and reports whether to go on without. A load
// from the host's memory takes a microsecond.
static __device__ __forceinline__ bool stalled(Rank& me) {
	if (!me.over && (++me.spins & 0xfff) == 0 && relaxed(me.host) != 0) {
		me.over = true;
		*(volatile u32*)(me.host + 1) = 1;
		*(volatile u64*)&me.control->gaveUp = me.epoch;
	}
	return me.over;
}

// barrier returns when the same block of all ranks has come to it: what their threads
// stored before is there. An operation has two, n is 0 and 1. A signal has the number
// that only this operation has: nobody is past a barrier of the same parity before
// all have ended this one.
static __device__ __forceinline__ void barrier(Rank& me, u32 n) {
	const u64 want = me.epoch + me.signature;
	const u64 at = (u64)blockIdx.x * RANKS * 4 + (me.epoch & 1) * 2 + n;
	__syncthreads();
	if (n == 0) counted(me);
	const u32 k = threadIdx.x;
	if (k > 0 && k < count(me)) {
		char* peer = me.peer[1];
#pragma unroll
		for (u32 j = 2; j < MOST; j++) peer = k == j ? me.peer[j] : peer; // and no branch: all signal at once
		if (!me.over) release((u64*)peer + at + me.rank * 4, want);
		const u64* mine = (const u64*)me.peer[0] + at + after(me, k) * 4;
		while (acquire(mine) != want && !stalled(me)) {}
	}
	// Who gives up does so with its block.
	me.over = __syncthreads_or(me.over);
}
