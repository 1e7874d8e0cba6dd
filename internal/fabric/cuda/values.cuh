#ifdef CHORUS_TYPE

typedef CHORUS_TYPE T;
typedef Element<T>::Acc Acc;
typedef CHORUS_OP<Acc> Op;

// The reduction of words: 8 bytes of elements at once.

// A Word is the elements of 8 bytes. Values are the same elements in the type of the
// computation.
#define COUNT (8 / (int)sizeof(T))
struct Values { Acc v[COUNT]; };
union Word {
	u64 bits;
	T v[COUNT];
	__device__ Word() {}
};

static __device__ __forceinline__ Values unpack(u64 bits) {
	Word w;
	Values x;
	w.bits = bits;
#pragma unroll
	for (int j = 0; j < COUNT; j++) x.v[j] = Element<T>::wide(w.v[j]);
	return x;
}

// join combines x with the elements of a word.
static __device__ __forceinline__ void join(Values& x, u64 bits) {
	const Values y = unpack(bits);
#pragma unroll
	for (int j = 0; j < COUNT; j++) x.v[j] = Op::join(x.v[j], y.v[j]);
}
static __device__ __forceinline__ u64 finish(const Values& x, u32 ranks) {
	Word w;
#pragma unroll
	for (int j = 0; j < COUNT; j++) w.v[j] = Element<T>::narrow(Op::finish(x.v[j], ranks));
	return w.bits;
}

// reduce receives the i-th packet from every other rank and returns the reduction of all
// ranks' words; own is this rank's word. The order is by rank, so that all ranks compute the
// same bits.
static __device__ __forceinline__ u64 reduce(Rank& me, u64 i, u64 own) {
	u64 word[MOST];
	receive(me, others(me), from(me, me.peer[0], 0), me.slot, i, word);
	Values x = unpack(me.rank == 0 ? own : word[0]);
#pragma unroll
	for (u32 r = 1; r < MOST; r++)
		if (r < count(me)) join(x, me.rank == r ? own : word[r]);
	return finish(x, count(me));
}

#endif
