#ifndef CHORUS_TYPE

// Collectives that move bytes: all-gather, all-to-all and broadcast. Ranks send their data
// in packets and then store the received words. A thread loads its first words before enter,
// so that these loads overlap with reading the epoch.

// spread is the algorithm of all-gather and all-to-all. It sends rank r the chunk at
// in + r * step and stores the chunk that it receives from rank r at out + r * bytes. It
// copies the rank's own chunk, unless input and output of this chunk are the same memory.
static __device__ __forceinline__ void spread(Rank& me, const char* in, u64 step, char* out, u64 bytes, bool aligned) {
	const bool keep = in + me.rank * step != out + me.rank * bytes;
	u64 word[MOST], i = first();
	loadEach(me, in, step, i, bytes, aligned, word);
	enter(me);
	for (; i < words(bytes); i += stride()) {
		sendEach(me, i, word);
		if (keep) store(out + me.rank * bytes, i, bytes, aligned, word[0]);
		loadEach(me, in, step, i + stride(), bytes, aligned, word);
	}
	entered(me);
	for (i = first(); i < words(bytes); i += stride()) {
		receive(me, others(me), from(me, me.peer[0], 0), me.slot, i, word);
#pragma unroll
		for (u32 r = 0; r < MOST; r++)
			if (r < count(me) && r != me.rank) store(out + r * bytes, i, bytes, aligned, word[r]);
	}
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_gather(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	spread(me, in, 0, out, bytes, aligned);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_to_all(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	spread(me, in, bytes, out, bytes, aligned);
}

// broadcast sends the root's data. The other ranks send one empty word, because the rule of
// epochs requires that each rank sends to every other rank (see prelude.cuh).
extern "C" __global__ void __launch_bounds__(THREADS, 1) broadcast(LINKS, const char* in, char* out, u64 bytes, u32 aligned, u32 root) {
	Rank me = RANK;
	const bool sends = me.rank == root;
	const u64 has = sends ? bytes : 0;
	u64 i = first(), word = load(in, i, has, aligned);
	enter(me);
	for (; i < (sends ? words(bytes) : 1); i += stride()) {
		sendAll(me, i, word);
		if (in != out) store(out, i, has, aligned, word);
		word = load(in, i + stride(), has, aligned);
	}
	entered(me);
	for (i = first(); i < words(bytes) && !sends; i += stride()) store(out, i, bytes, aligned, receive(me, from(me, me.peer[0], root), i));
	// The last thread of block 0 waits for the first packet of each other rank. It often has no
	// data to move.
	u64 came[MOST];
	if (first() == blockDim.x - 1) receive(me, others(me), from(me, me.peer[0], 0), me.slot, 0, came);
}

#endif
