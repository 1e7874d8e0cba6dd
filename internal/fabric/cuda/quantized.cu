// The all-reduce in blocks of 8-bit numbers: all_reduce_5 with units instead of cells (see block.cuh of package quant, and pipeline.cu).
// A chunk is a part of each share. In step n a thread sends units of chunk n, adds those of chunk n - 2, and reads the sums of
// chunk n - 4. It loads all of them before it uses the first one.

// sendUnit stores the numbers of a unit in the scratch memory of a rank, and receiveUnit loads
// them. A chunk has so many elements, and i is the unit's first one.
static __device__ __forceinline__ void sendUnit(const Rank& me, char* chunk, u64 length, u64 i, const Words& q, u32 exponent) {
	if (me.over) return;
	put(chunk + i, q.w[0], q.w[1], q.w[2], q.w[3]);
	if (i % BLOCK == 0) *(volatile u8*)(chunk + length + i / BLOCK) = (u8)exponent;
}
static __device__ __forceinline__ Words receiveUnit(const char* chunk, u64 length, u64 i, u32& exponent) {
	Words q;
	get(chunk + i, 1, q.w[0], q.w[1], q.w[2], q.w[3]);
	exponent = *(volatile const u8*)(chunk + length + i / BLOCK);
	return q;
}

// slotOf and gatheredOf are from and gathered for chunk n. A chunk that is alone may be as large as the four buffers together.
static __device__ __forceinline__ char* slotOf(const Rank& me, char* scratch, u32 r, u64 n) { return from(me, scratch, r) + (n & 3) * (me.slot / 4); }
static __device__ __forceinline__ char* gatheredOf(const Rank& me, char* scratch, u32 r, u64 n, u64 length) {
	return gathered(me, scratch) + (n & 3) * (me.whole / 4) + r * chunkBytes(length);
}

// kth returns the k-th value, which is not the first one, without a branch.
template <class V> static __device__ __forceinline__ V kth(V const* of, u32 k) {
	V v = of[1];
#pragma unroll
	for (u32 j = 2; j < MOST; j++) v = k == j ? of[j] : v;
	return v;
}

// all_reduce_quantized divides each share into chunks of so many elements. All lanes of a warp have units of a chunk, or none. Threads of
// the same block index write and read a unit. A chunk that is alone has nothing to overlap with: all warps move it, with barriers at
// the odd steps.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_quantized(LINKS, T* x, float* errors, u64 n, u64 share, u64 length, u32 mean, u32 aligned) {
	Rank me = RANK;
	const u64 chunks = (share + length - 1) / length;
	const u32 sentries = chunks == 1 ? 0 : SENTRIES, movers = blockDim.x - sentries;
	enter(me);
	for (u64 c = 0; c < chunks + 4; c++) {
		if (sentries == 0) {
			if (c & 1) barrier(me, c / 2);
		} else {
			if (aborted(me, c)) return;
			if (keepsWatch(me, c, chunks + 2)) continue;
		}
		for (u64 i = ((u64)blockIdx.x * movers + threadIdx.x - sentries) * UNIT; i < length; i += (u64)gridDim.x * movers * UNIT) {
			// The unit's places in a share, and whether its chunks have them.
			const u64 sent = c * length + i, added = sent - 2 * length, read = sent - 4 * length;
			const bool sends = sent < share, adds = c > 1 && added < share, reads = c > 3 && read < share;
			Unit own;
			Words theirs[MOST];
			u32 scale[MOST], exponent;
			if (adds) {
				own = unitAt(x, me.rank * share + added, n, aligned);
#pragma unroll
				for (u32 k = 1; k < MOST; k++)
					if (k < count(me)) theirs[k] = receiveUnit(slotOf(me, me.peer[0], after(me, k), c - 2), length, i, scale[k]);
			}
#pragma unroll 1
			for (u32 k = 1; k < count(me); k++) {
				const u32 r = after(me, k);
				Unit u;
				Words sum;
				u32 sumScale;
				if (sends) u = unitAt(x, r * share + sent, n, aligned);
				if (reads) sum = receiveUnit(gatheredOf(me, me.peer[0], r, c - 4, length), length, i, sumScale);
				if (sends) {
					const Words q = unitToBlock(u, errors, r * share + sent, n, aligned, exponent);
					sendUnit(me, slotOf(me, kth(me.peer, k), me.rank, c), length, i, q, exponent);
				}
				if (reads) unitFromBlock(x, r * share + read, n, aligned, sum, sumScale);
			}
			if (!adds) continue;
			const Words q = sumToBlock(own, x, errors, me.rank * share + added, n, aligned, me.rank, count(me), mean, exponent, [&](u32 r, u32& e) {
				const u32 k = r > me.rank ? r - me.rank : r + count(me) - me.rank;
				e = kth(scale, k);
				return kth(theirs, k);
			});
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me)) sendUnit(me, gatheredOf(me, me.peer[k], me.rank, c - 2, length), length, i, q, exponent);
		}
	}
}
