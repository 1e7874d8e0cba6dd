// A packet is a word of 8 bytes with a mark beside each half, so that who polls it sees
// for each half whether it is there. No memory has to be cleared: what an earlier
// operation left has another epoch, of which the one mark has the lower half, and the
// other what tells one that is 2^32 later. The marks have the signature of the operation
// too: what a rank sends that takes it for another one never comes.
struct Packet { u32 low, mark, high, age; };

static __device__ __forceinline__ u32 mark(const Rank& me) { return (u32)me.epoch + (u32)me.signature; }
static __device__ __forceinline__ u32 age(const Rank& me) { return (u32)me.epoch + (u32)(me.epoch >> 32) + (u32)(me.signature >> 32); }

static __device__ __forceinline__ void send(const Rank& me, char* to, u64 i, u64 word) {
	if (!me.over) put(to + i * sizeof(Packet), (u32)word, mark(me), (u32)(word >> 32), age(me));
}

// sendAll sends the i-th word to all other ranks, sendEach the k-th of word to the k-th
// rank after this one.
static __device__ __forceinline__ void sendAll(const Rank& me, u64 i, u64 word) {
#pragma unroll
	for (u32 k = 1; k < MOST; k++)
		if (k < count(me)) send(me, from(me, me.peer[k], me.rank), i, word);
}
static __device__ __forceinline__ void sendEach(const Rank& me, u64 i, const u64 (&word)[MOST]) {
#pragma unroll
	for (u32 k = 1; k < MOST; k++)
		if (k < count(me)) send(me, from(me, me.peer[k], me.rank), i, word[k]);
}

static __device__ __forceinline__ bool here(const Rank& me, const Packet& p) { return p.mark == mark(me) && p.age == age(me); }

// receive waits for the i-th word of in.
static __device__ __forceinline__ u64 receive(Rank& me, const char* in, u64 i) {
	Packet p = {};
	do get(in + i * sizeof(Packet), 1, p.low, p.mark, p.high, p.age);
	while (!here(me, p) && !stalled(me));
	return p.low | (u64)p.high << 32;
}

// receive waits for the i-th word of each rank of missing, a bit each, whose packets
// begin pitch bytes after each other.
static __device__ __forceinline__ void receive(Rank& me, u32 missing, const char* in, u64 pitch, u64 i, u64 (&word)[MOST]) {
	Packet p[MOST] = {};
	in += i * sizeof(Packet);
	do {
#pragma unroll
		for (u32 r = 0; r < MOST; r++) get(in + r * pitch, missing >> r & 1, p[r].low, p[r].mark, p[r].high, p[r].age);
#pragma unroll
		for (u32 r = 0; r < MOST; r++)
			if (here(me, p[r])) missing &= ~(1u << r);
	} while (missing != 0 && !stalled(me));
#pragma unroll
	for (u32 r = 0; r < MOST; r++) word[r] = p[r].low | (u64)p[r].high << 32;
}
