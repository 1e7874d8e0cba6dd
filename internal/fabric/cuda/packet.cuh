// Packets: data that carries its own flags, so that the receiver needs no other signal.

// A Packet is a word of 8 bytes and two marks. Each half of the word and its mark are 8 bytes,
// which are stored atomically, so a valid mark proves that its half has arrived. Both marks
// depend on the epoch, so packets of earlier operations are not valid and buffers are not
// cleared. mark repeats after 2^32 epochs, but age differs then. Both marks also depend on
// the signature: if ranks disagree about the operation, they wait until they are aborted.
struct Packet { u32 low, mark, high, age; };

static __device__ __forceinline__ u32 mark(const Rank& me) { return (u32)me.epoch + (u32)me.signature; }
static __device__ __forceinline__ u32 age(const Rank& me) { return (u32)me.epoch + (u32)(me.epoch >> 32) + (u32)(me.signature >> 32); }

// send stores a word as the i-th packet of a buffer. An aborted operation sends nothing.
static __device__ __forceinline__ void send(const Rank& me, char* to, u64 i, u64 word) {
	if (!me.over) put(to + i * sizeof(Packet), (u32)word, mark(me), (u32)(word >> 32), age(me));
}

// sendAll sends the same word to all other ranks, as the i-th packet of this rank's slot.
// sendEach sends word[k] to the k-th rank after this one.
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

// here reports whether both halves of a packet have arrived.
static __device__ __forceinline__ bool here(const Rank& me, const Packet& p) { return p.mark == mark(me) && p.age == age(me); }

// receive polls for the i-th packet of a buffer and returns its word. The word is not valid
// if the operation was aborted.
static __device__ __forceinline__ u64 receive(Rank& me, const char* in, u64 i) {
	Packet p = {};
	do get(in + i * sizeof(Packet), 1, p.low, p.mark, p.high, p.age);
	while (!here(me, p) && !stalled(me));
	return p.low | (u64)p.high << 32;
}

// receive polls for the i-th packets of several ranks together and stores their words in
// word, by rank. missing is the bit set of these ranks. The packets of rank r begin at
// in + r * pitch. Words of other ranks are 0.
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
