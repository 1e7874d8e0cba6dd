// The collectives for large sizes. They divide the operands into chunks, and handle three chunks in a step: a block sends the
// parts of chunk n, reduces those of chunk n - 2, and copies the results of chunk n - 4. The first warp only sends and awaits the signals
// that a step is done (see wait.cuh). Four chunks have buffers: when a rank sends a part of chunk n, the receiver has read that
// of chunk n - 4 in step n - 2.

// firstCell and cellStride are first and stride for the threads that move data.
static __device__ __forceinline__ u64 firstCell() { return (u64)blockIdx.x * (blockDim.x - SENTRIES) + threadIdx.x - SENTRIES; }
static __device__ __forceinline__ u64 cellStride() { return (u64)gridDim.x * (blockDim.x - SENTRIES); }

// Chunks describe how an operand is divided. The part of rank r of chunk n begins n * step + r * pitch bytes after the beginning
// of the operand, and has share cells. The last chunk may be shorter.
struct Chunks {
	u64 bytes;  // of the operand, or of each rank's part of it
	u64 share;  // cells
	u64 step;   // bytes from chunk to chunk
	u64 pitch;  // bytes from rank to rank
	bool whole; // all ranks share the operand: bytes is its size

	__device__ u64 count() const { return (bytes + step - 1) / step; }
	__device__ u64 at(u64 n, u32 r) const { return n * step + r * pitch; }
	// left returns how many bytes a part has. It may be more than its cells have.
	__device__ u64 left(u64 n, u32 r) const {
		const u64 from = whole ? at(n, r) : n * step;
		return from < bytes ? bytes - from : 0;
	}
	__device__ bool has(u64 n, u32 r, u64 i) const { return i < share && i * 16 < left(n, r); }
};

// dividedChunks divides an operand among the ranks. partChunks divides operands of a part for each rank, or for all ranks
// the same if pitch is 0.
static __device__ __forceinline__ Chunks dividedChunks(const Rank& me, u64 bytes, u64 share) {
	const Chunks of = {bytes, share, count(me) * share * 16, share * 16, true};
	return of;
}
static __device__ __forceinline__ Chunks partChunks(u64 bytes, u64 share, u64 pitch) {
	const Chunks of = {bytes, share, share * 16, pitch, false};
	return of;
}

// slotOf and gatheredOf are from and gathered for chunk n, in cells.
static __device__ __forceinline__ Cell* slotOf(const Rank& me, char* scratch, u32 r, u64 n) {
	return (Cell*)(from(me, scratch, r) + (n & 3) * (me.slot / 4));
}
static __device__ __forceinline__ Cell* gatheredOf(const Rank& me, char* scratch, u64 n) {
	return (Cell*)(gathered(me, scratch) + (n & 3) * (me.whole / 4));
}

// scatter sends each other rank its part of chunk n.
static __device__ __forceinline__ void scatter(const Rank& me, const Chunks& of, u64 n, const char* in, bool aligned) {
	Cell c[BATCH][MOST];
	for (u64 i = firstCell(); i < of.share; i += BATCH * cellStride()) {
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me)) c[b][k] = k > 1 && of.pitch == 0 ? c[b][1] : loadCell(in + of.at(n, after(me, k)), i + b * cellStride(), of.left(n, after(me, k)), aligned);
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me) && of.has(n, after(me, k), i + b * cellStride())) sendCell(me, slotOf(me, me.peer[k], me.rank, n) + i + b * cellStride(), c[b][k]);
	}
}

// collect copies the parts of chunk n that the other ranks have sent, that of rank r from box + r * cells, to the output.
static __device__ __forceinline__ void collect(const Rank& me, const Chunks& of, u64 n, const Cell* box, u64 cells, char* out, bool aligned) {
	Cell c[BATCH][MOST];
	for (u64 i = firstCell(); i < of.share; i += BATCH * cellStride()) {
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				c[b][r] = getCell(box + r * cells + i + b * cellStride(), r < count(me) && r != me.rank && of.has(n, r, i + b * cellStride()));
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				if (r < count(me) && r != me.rank && of.has(n, r, i + b * cellStride())) storeCell(out + of.at(n, r), i + b * cellStride(), of.left(n, r), aligned, c[b][r]);
	}
}

#ifndef CHORUS_TYPE

// exchange is the algorithm of all-gather and all-to-all. keep says that the rank's own part is already in its place.
static __device__ __forceinline__ void exchange(Rank& me, const Chunks& ins, const char* in, const Chunks& outs, char* out, bool keep, bool aligned) {
	enter(me);
	for (u64 n = 0; n < outs.count() + 2; n++) {
		if (aborted(me, n)) return;
		if (keepsWatch(me, n, outs.count())) continue;
		if (n < outs.count()) {
			scatter(me, ins, n, in, aligned);
			for (u64 i = firstCell(); i < outs.share && !keep; i += cellStride())
				storeCell(out + outs.at(n, me.rank), i, outs.left(n, me.rank), aligned, loadCell(in + ins.at(n, me.rank), i, ins.left(n, me.rank), aligned));
		}
		if (n > 1) collect(me, outs, n - 2, slotOf(me, me.peer[0], 0, n - 2), me.slot / 16, out, aligned);
	}
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_gather_2(LINKS, const char* in, char* out, u64 bytes, u32 aligned, u32 share) {
	Rank me = RANK;
	exchange(me, partChunks(bytes, share, 0), in, partChunks(bytes, share, bytes), out, in == out + me.rank * bytes, aligned);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_to_all_2(LINKS, const char* in, char* out, u64 bytes, u32 aligned, u32 share) {
	Rank me = RANK;
	exchange(me, partChunks(bytes, share, bytes), in, partChunks(bytes, share, bytes), out, in == out, aligned);
}

#else

// reduceChunk reduces this rank's part of chunk n, stores it in the output, and sends it to the other ranks if they share the
// operand.
static __device__ __forceinline__ void reduceChunk(const Rank& me, const Chunks& of, u64 n, const char* in, char* out, bool aligned) {
	Cell c[BATCH][MOST], own[BATCH];
	for (u64 i = firstCell(); of.has(n, me.rank, i); i += BATCH * cellStride()) {
#pragma unroll
		for (u32 b = 0; b < BATCH; b++) {
			const u64 at = i + b * cellStride();
			own[b] = loadCell(in + of.at(n, me.rank), at, of.left(n, me.rank), aligned);
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				c[b][r] = getCell(slotOf(me, me.peer[0], r, n) + at, r < count(me) && r != me.rank && of.has(n, me.rank, at));
		}
#pragma unroll
		for (u32 b = 0; b < BATCH; b++) {
			const u64 at = i + b * cellStride();
			if (!of.has(n, me.rank, at)) continue;
			const Cell sum = reduceCell(me, c[b], own[b]);
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me) && of.whole) sendCell(me, gatheredOf(me, me.peer[k], n) + me.rank * of.share + at, sum);
			storeCell(out + (of.whole ? of.at(n, me.rank) : n * of.step), at, of.left(n, me.rank), aligned, sum);
		}
	}
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_5(LINKS, const char* in, char* out, u64 bytes, u32 aligned, u32 share) {
	Rank me = RANK;
	const Chunks of = dividedChunks(me, bytes, share);
	enter(me);
	for (u64 n = 0; n < of.count() + 4; n++) {
		if (aborted(me, n)) return;
		if (keepsWatch(me, n, of.count() + 2)) continue;
		if (n < of.count()) scatter(me, of, n, in, aligned);
		if (n > 1 && n < of.count() + 2) reduceChunk(me, of, n - 2, in, out, aligned);
		if (n > 3) collect(me, of, n - 4, gatheredOf(me, me.peer[0], n - 4), share, out, aligned);
	}
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) reduce_scatter_2(LINKS, const char* in, char* out, u64 bytes, u32 aligned, u32 share) {
	Rank me = RANK;
	const Chunks of = partChunks(bytes, share, bytes);
	enter(me);
	for (u64 n = 0; n < of.count() + 2; n++) {
		if (aborted(me, n)) return;
		if (keepsWatch(me, n, of.count())) continue;
		if (n < of.count()) scatter(me, of, n, in, aligned);
		if (n > 1) reduceChunk(me, of, n - 2, in, out, aligned);
	}
}

#endif
