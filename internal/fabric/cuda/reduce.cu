#ifdef CHORUS_TYPE

// Reductions in packets: reduce-scatter, and the all-reduces for small sizes. A thread loads
// its first words before enter, so that these loads overlap with reading the epoch.

// reduce_scatter sends rank r the r-th chunk of the input, and reduces the received chunks
// with the rank's own chunk. A chunk has the given number of bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1) reduce_scatter(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	u64 word[MOST], i = first();
	loadEach(me, in, bytes, i, bytes, aligned, word);
	u64 own = word[0];
	enter(me);
	for (; i < words(bytes); i += stride()) {
		sendEach(me, i, word);
		loadEach(me, in, bytes, i + stride(), bytes, aligned, word);
	}
	entered(me);
	for (i = first(); i < words(bytes); i += stride()) {
		store(out, i, bytes, aligned, reduce(me, i, own));
		own = load(in + me.rank * bytes, i + stride(), bytes, aligned);
	}
}

// all_reduce_1 is the one-shot all-reduce: each rank sends all its words to all ranks, and
// each rank reduces all words. It takes one transfer.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_1(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	u64 i = first(), own = load(in, i, bytes, aligned), word = own;
	enter(me);
	for (; i < words(bytes); i += stride()) {
		sendAll(me, i, word);
		word = load(in, i + stride(), bytes, aligned);
	}
	entered(me);
	for (i = first(); i < words(bytes); i += stride()) {
		store(out, i, bytes, aligned, reduce(me, i, own));
		own = load(in, i + stride(), bytes, aligned);
	}
}

// loadShares loads the i-th word of each rank's share of an all-reduce: word[k] is for the
// k-th rank after this one. Each share has the given number of words.
static __device__ __forceinline__ void loadShares(const Rank& me, const char* in, u64 share, u64 i, u64 bytes, bool aligned, u64 (&word)[MOST]) {
#pragma unroll
	for (u32 k = 0; k < MOST; k++)
		if (k < count(me)) word[k] = load(in, after(me, k) * share + i, bytes, aligned);
}

// all_reduce_2 is the two-shot all-reduce: each rank reduces one share of the words and sends
// the result to all ranks. It takes two transfers, but fewer bytes than all_reduce_1. The
// last shares may be shorter or empty; ranks send zeros for the missing words.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_2(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	const u64 share = (words(bytes) + count(me) - 1) / count(me), mine = me.rank * share;
	u64 word[MOST], i = first();
	loadShares(me, in, share, i, bytes, aligned, word);
	u64 own = word[0];
	enter(me);
	for (; i < share; i += stride()) {
		sendEach(me, i, word);
		loadShares(me, in, share, i + stride(), bytes, aligned, word);
	}
	entered(me);
	for (i = first(); i < share; i += stride()) {
		const u64 sum = reduce(me, i, own);
#pragma unroll
		for (u32 k = 1; k < MOST; k++)
			if (k < count(me)) send(me, gathered(me, me.peer[k]), mine + i, sum);
		store(out, mine + i, bytes, aligned, sum);
		own = load(in, mine + i + stride(), bytes, aligned);
	}
	for (i = first(); i < share; i += stride()) {
		receive(me, others(me), gathered(me, me.peer[0]), share * sizeof(Packet), i, word);
#pragma unroll
		for (u32 r = 0; r < MOST; r++)
			if (r < count(me) && r != me.rank) store(out, r * share + i, bytes, aligned, word[r]);
	}
}

#endif
