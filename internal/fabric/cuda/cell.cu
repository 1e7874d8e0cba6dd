// Cells of 16 bytes of data without marks, so that no bandwidth is lost.

// loadCell and storeCell are load and store for cells; aligned refers to 16 bytes. The
// accesses by bytes are functions that are not inlined. With inlined ones, the kernel had
// three times as many instructions and took a microsecond longer.
static __device__ __noinline__ Cell loadCellBytes(const char* p, u64 i, u64 bytes) {
	const Cell v = {loadBytes(p, i * 2, bytes), loadBytes(p, i * 2 + 1, bytes)};
	return v;
}
static __device__ __noinline__ void storeCellBytes(char* p, u64 i, u64 bytes, Cell v) {
	storeBytes(p, i * 2, bytes, v.a);
	storeBytes(p, i * 2 + 1, bytes, v.b);
}
static __device__ __forceinline__ Cell loadCell(const char* p, u64 i, u64 bytes, bool aligned) {
	if (aligned && i * 16 + 16 <= bytes) return ((const Cell*)p)[i];
	const Cell none = {0, 0};
	return i * 16 < bytes ? loadCellBytes(p, i, bytes) : none;
}
static __device__ __forceinline__ void storeCell(char* p, u64 i, u64 bytes, bool aligned, Cell v) {
	if (aligned && i * 16 + 16 <= bytes) ((Cell*)p)[i] = v;
	else if (i * 16 < bytes) storeCellBytes(p, i, bytes, v);
}

static __device__ __forceinline__ void sendCell(const Rank& me, Cell* to, Cell v) {
	if (!me.over) putCell(to, v);
}

// BATCH is the number of cells that a thread processes together.
#define BATCH (MOST == 2 ? 4 : 1)

#ifdef CHORUS_TYPE

// The all-reduce for medium sizes: a two-shot all-reduce of cells between barriers.

// A Share describes how the ranks divide an all-reduce: all is the number of cells, and share
// the number of cells for each rank. has reports whether rank r's share has an i-th cell;
// the last shares may be shorter or empty.
struct Share {
	u64 all, share;
	__device__ bool has(u32 r, u64 i) const { return i < share && r * share + i < all; }
};

// loadCells loads BATCH cells of each other rank's share: c[b][k] is for the k-th rank after
// this one.
static __device__ __forceinline__ void loadCells(const Rank& me, const char* in, const Share& of, u64 i, u64 bytes, bool aligned, Cell (&c)[BATCH][MOST]) {
#pragma unroll
	for (u32 b = 0; b < BATCH; b++)
#pragma unroll
		for (u32 k = 1; k < MOST; k++)
			if (k < count(me)) c[b][k] = loadCell(in, after(me, k) * of.share + i + b * stride(), bytes, aligned);
}

// reduceCell reduces the cells of all ranks, in rank order: c[r] is the cell of rank r, and
// own is this rank's cell.
static __device__ __forceinline__ Cell reduceCell(const Rank& me, const Cell (&c)[MOST], Cell own) {
	Values a = unpack(me.rank == 0 ? own.a : c[0].a), b = unpack(me.rank == 0 ? own.b : c[0].b);
#pragma unroll
	for (u32 r = 1; r < MOST; r++) {
		if (r >= count(me)) continue;
		join(a, me.rank == r ? own.a : c[r].a);
		join(b, me.rank == r ? own.b : c[r].b);
	}
	const Cell v = {finish(a, count(me)), finish(b, count(me))};
	return v;
}

// all_reduce_3 has three phases with a barrier after the first and the second: send each rank
// its share, reduce this rank's share and send the result to all ranks, copy the results of
// the other ranks to the output. Threads of the same block index write and read a cell, so
// barriers between single blocks are sufficient.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_3(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	const u64 all = (bytes + 15) / 16, step = BATCH * stride();
	const Share of = {all, (all + count(me) - 1) / count(me)};
	const u64 mine = me.rank * of.share;
	Cell c[BATCH][MOST], own[BATCH];
	u64 i = first();
	loadCells(me, in, of, i, bytes, aligned, c);
	enter(me);
	for (; i < of.share; i += step) {
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me) && of.has(after(me, k), i + b * stride()))
					sendCell(me, (Cell*)from(me, me.peer[k], me.rank) + i + b * stride(), c[b][k]);
		loadCells(me, in, of, i + step, bytes, aligned, c);
	}
	barrier(me, 0);
	for (i = first(); of.has(me.rank, i); i += step) {
#pragma unroll
		for (u32 b = 0; b < BATCH; b++) {
			const u64 at = i + b * stride();
			own[b] = loadCell(in, mine + at, bytes, aligned);
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				c[b][r] = getCell((const Cell*)from(me, me.peer[0], r) + at, r < count(me) && r != me.rank && of.has(me.rank, at));
		}
#pragma unroll
		for (u32 b = 0; b < BATCH; b++) {
			const u64 at = i + b * stride();
			if (!of.has(me.rank, at)) continue;
			const Cell sum = reduceCell(me, c[b], own[b]);
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me)) sendCell(me, (Cell*)gathered(me, me.peer[k]) + mine + at, sum);
			storeCell(out, mine + at, bytes, aligned, sum);
		}
	}
	barrier(me, 1);
	for (i = first(); i < of.share; i += step) {
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				c[b][r] = getCell((const Cell*)gathered(me, me.peer[0]) + r * of.share + i + b * stride(), r < count(me) && r != me.rank && of.has(r, i + b * stride()));
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				if (r < count(me) && r != me.rank && of.has(r, i + b * stride()))
					storeCell(out, r * of.share + i + b * stride(), bytes, aligned, c[b][r]);
	}
}

#endif
