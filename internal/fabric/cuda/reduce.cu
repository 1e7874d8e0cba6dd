#ifdef CHORUS_TYPE

// Collectives that reduce words, which go by packets.

// reduce_scatter sends each rank its chunk of bytes bytes, of which there is one after the other
// in in, and reduces what comes.
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

// all_reduce_1 sends everything to everybody, by packets: one way for each word.
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

// loadShares loads the i-th words of the shares, of share words, that the k-th rank after
// this one reduces.
static __device__ __forceinline__ void loadShares(const Rank& me, const char* in, u64 share, u64 i, u64 bytes, bool aligned, u64 (&word)[MOST]) {
#pragma unroll
	for (u32 k = 0; k < MOST; k++)
		if (k < count(me)) word[k] = load(in, after(me, k) * share + i, bytes, aligned);
}

// all_reduce_2 lets each rank reduce a share and send that to the others, both by
// packets. The last shares may be shorter, or nothing: then zeros are sent.
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
