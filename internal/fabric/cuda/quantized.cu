// The all-reduce in blocks of 8-bit numbers: all_reduce_3 with chunks instead of cells (see
// block.cuh of package quant).

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

// all_reduce_quantized reduces a part of each share: so many elements from begin on. All lanes
// of a warp have units of the part, or none. Threads of the same block index write and read a unit.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_quantized(LINKS, T* x, float* errors, u64 n, u64 share, u64 begin, u64 length, u32 mean, u32 aligned) {
	Rank me = RANK;
	const u64 from0 = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * UNIT, step = (u64)gridDim.x * blockDim.x * UNIT;
	enter(me);
#pragma unroll
	for (u32 k = 1; k < MOST; k++) {
		if (k >= count(me)) continue;
		char* const chunk = from(me, me.peer[k], me.rank);
		for (u64 i = from0; i < length; i += step) {
			u32 exponent;
			const Words q = unitToBlock(x, errors, after(me, k) * share + begin + i, n, aligned, exponent);
			sendUnit(me, chunk, length, i, q, exponent);
		}
	}
	barrier(me, 0);
	for (u64 i = from0; i < length; i += step) {
		u32 exponent;
		const Words q = sumToBlock(x, errors, me.rank * share + begin + i, n, aligned, me.rank, count(me), mean, exponent,
			[&](u32 r, u32& scale) { return receiveUnit(from(me, me.peer[0], r), length, i, scale); });
#pragma unroll
		for (u32 k = 1; k < MOST; k++)
			if (k < count(me)) sendUnit(me, gathered(me, me.peer[k]) + me.rank * chunkBytes(length), length, i, q, exponent);
	}
	barrier(me, 1);
	for (u32 k = 1; k < count(me); k++) {
		const u32 r = after(me, k);
		for (u64 i = from0; i < length; i += step) {
			u32 exponent;
			const Words q = receiveUnit(gathered(me, me.peer[0]) + r * chunkBytes(length), length, i, exponent);
			unitFromBlock(x, r * share + begin + i, n, aligned, q, exponent);
		}
	}
}
