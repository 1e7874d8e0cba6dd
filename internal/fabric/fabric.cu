// Collectives between the GPUs of one host, over scratch memory that all of them
// have mapped. CHORUS_TYPE and CHORUS_OP, macros given to the compiler, say which
// elements the module reduces and how; without them it is the module of the
// collectives that only move bytes. CHORUS_RANKS, if it is given, is the number of ranks.
//
// Every kernel is one operation of one rank, in the order in which all ranks have
// them: its epoch. Whatever an operation is, each rank sends something to each other
// one and waits for something of each. So a rank that has begun epoch e + 1 knows, when
// that is over, that all have ended epoch e, and two copies of the scratch memory, used
// in turn, are enough.
//
// What takes time is a word's way to another GPU and, once it is there, each load of a
// thread that waits for the one before. So threads ask for all that they need before
// they use the first of it, and nothing but the words themselves lies between the
// beginning of a kernel and its end. A block waits for nothing but the same block of the
// other ranks, so that not all of them must have room on a device at once.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define RANKS 8
#define THREADS 512 // at most, as the rest
#define BLOCKS 128

// ---- memory that several GPUs use at once ----

struct alignas(16) Cell { u64 a, b; };

// put and get move 16 bytes past the caches, in one transaction. Of its four words
// only those of the same 8 bytes are sure to come together.
static __device__ __forceinline__ void put(void* p, u32 a, u32 b, u32 c, u32 d) {
	asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// get does nothing unless on is 1, and that without a branch, behind which the next one
// would have to wait.
static __device__ __forceinline__ void get(const void* p, u32 on, u32& a, u32& b, u32& c, u32& d) {
	asm volatile("{.reg .pred on; setp.ne.u32 on, %5, 0; @on ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];}" : "+r"(a), "+r"(b), "+r"(c), "+r"(d) : "l"(p), "r"(on) : "memory");
}
static __device__ __forceinline__ void putCell(Cell* p, Cell v) { put(p, (u32)v.a, (u32)(v.a >> 32), (u32)v.b, (u32)(v.b >> 32)); }
static __device__ __forceinline__ Cell getCell(const Cell* p, u32 on) {
	u32 a = 0, b = 0, c = 0, d = 0;
	get(p, on, a, b, c, d);
	Cell v = {a | (u64)b << 32, c | (u64)d << 32};
	return v;
}
static __device__ __forceinline__ void release(u64* p, u64 v) {
	asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
static __device__ __forceinline__ u64 acquire(const u64* p) {
	u64 v;
	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	return v;
}
static __device__ __forceinline__ u32 relaxed(const u32* p) {
	u32 v;
	asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

// ---- a rank ----

// Control is what a rank keeps from one operation to the next, in memory of its own.
// Each block adds its share of EPOCH to ticks when all its threads have read them: until
// all blocks have, a thread finds the same epoch in them, and the next kernel, which
// begins when this one has ended, the next one. Nobody waits for the additions.
struct alignas(16) Control {
	u64 ticks;
	u64 gaveUp; // the epoch in which the rank gave up, or 0
};
#define EPOCH 256 // ticks, of which each block has at least one

// Scratch memory begins with the signals, four of each rank for each block, and has then
// twice, for even and odd epochs, a slot for what each rank sends, and a whole for what
// is gathered.
struct Rank {
	char* peer[RANKS]; // the scratch memory of the k-th rank after this one: the first is its own
	u32 rank, ranks;
	u64 slot, whole;   // bytes of them
	Control* control;
	u32* host;         // two words in the host's memory: not 0 when the rank gives up, and when it has
	u64 signature;     // of the operation
	u64 epoch;
	u64 place;         // of what belongs to this epoch, in the scratch memory of any rank
	u32 spins;
	bool over;         // given up: what it has is no result, and nothing of it is sent
};

#define LINKS char *p0, char *p1, char *p2, char *p3, char *p4, char *p5, char *p6, char *p7, u32 rank, u32 ranks, u64 slot, u64 whole, Control *control, u32 *host, u64 signature
#define RANK {{p0, p1, p2, p3, p4, p5, p6, p7}, rank, ranks, slot, whole, control, host, signature}

// Loops over ranks are unrolled for as many as CHORUS_RANKS says, or for all that there
// may be. count is how many there are.
#ifdef CHORUS_RANKS
#define MOST CHORUS_RANKS
static __device__ __forceinline__ u32 count(const Rank& me) { return CHORUS_RANKS; }
#else
#define MOST RANKS
static __device__ __forceinline__ u32 count(const Rank& me) { return me.ranks; }
#endif

static const u64 signals = (u64)BLOCKS * RANKS * 4 * sizeof(u64);

// enter begins the operation. An operation is over from its beginning if the rank gave
// up in an earlier one, whatever its other threads do in this one meanwhile.
static __device__ __forceinline__ void enter(Rank& me) {
	u64 ticks, gaveUp;
	asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(ticks), "=l"(gaveUp) : "l"(me.control) : "memory");
	me.epoch = ticks / EPOCH + 1;
	me.place = signals + ((me.epoch & 1) != 0 ? count(me) * me.slot + me.whole : 0);
	me.over = gaveUp != 0 && gaveUp < me.epoch;
	me.spins = 0;
}

// counted adds the block's ticks. All its threads have entered.
static __device__ __forceinline__ void counted(const Rank& me) {
	if (threadIdx.x == blockDim.x - 1) atomicAdd(&me.control->ticks, blockIdx.x == 0 ? (u64)EPOCH - (gridDim.x - 1) : 1);
}

// entered lets the block count, while what it has sent is on its way.
static __device__ __forceinline__ void entered(const Rank& me) {
	__syncthreads();
	counted(me);
}

// from returns where a rank's scratch has, in this epoch, what rank r sends to it.
static __device__ __forceinline__ char* from(const Rank& me, char* scratch, u32 r) {
	return scratch + r * me.slot + me.place;
}
static __device__ __forceinline__ char* gathered(const Rank& me, char* scratch) { return from(me, scratch, count(me)); }

// after returns the k-th rank after this one.
static __device__ __forceinline__ u32 after(const Rank& me, u32 k) {
	const u32 r = me.rank + k;
	return r < count(me) ? r : r - count(me);
}

// others has a bit for each rank but this one.
static __device__ __forceinline__ u32 others(const Rank& me) { return ((1u << count(me)) - 1) & ~(1u << me.rank); }

// stalled is called while nothing comes, and reports whether to go on without. A load
// from the host's memory takes a microsecond.
static __device__ __forceinline__ bool stalled(Rank& me) {
	if (!me.over && (++me.spins & 0xfff) == 0 && relaxed(me.host) != 0) {
		me.over = true;
		*(volatile u32*)(me.host + 1) = 1;
		*(volatile u64*)&me.control->gaveUp = me.epoch;
	}
	return me.over;
}

// barrier returns when the same block of all ranks has come to it: what their threads
// stored before is there. An operation has two, n is 0 and 1. A signal has the number
// that only this operation has: nobody is past a barrier of the same parity before
// all have ended this one.
static __device__ __forceinline__ void barrier(Rank& me, u32 n) {
	const u64 want = me.epoch + me.signature;
	const u64 at = (u64)blockIdx.x * RANKS * 4 + (me.epoch & 1) * 2 + n;
	__syncthreads();
	if (n == 0) counted(me);
	const u32 k = threadIdx.x;
	if (k > 0 && k < count(me)) {
		char* peer = me.peer[1];
#pragma unroll
		for (u32 j = 2; j < MOST; j++) peer = k == j ? me.peer[j] : peer; // and no branch: all signal at once
		if (!me.over) release((u64*)peer + at + me.rank * 4, want);
		const u64* mine = (const u64*)me.peer[0] + at + after(me, k) * 4;
		while (acquire(mine) != want && !stalled(me)) {}
	}
	// Who gives up does so with its block.
	me.over = __syncthreads_or(me.over);
}

// ---- packets ----

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

// load and store move the i-th word of bytes bytes, of which the last word may have
// fewer than 8, and what lies beyond none: it is 0. Where p is said to be aligned, whole
// words go as one.
static __device__ __forceinline__ u64 load(const char* p, u64 i, u64 bytes, bool aligned) {
	if (aligned && i * 8 + 8 <= bytes) return ((const u64*)p)[i];
	u64 word = 0;
	for (u32 j = 0; j < 8 && i * 8 + j < bytes; j++) word |= (u64)(u8)p[i * 8 + j] << 8 * j;
	return word;
}
static __device__ __forceinline__ void store(char* p, u64 i, u64 bytes, bool aligned, u64 word) {
	if (aligned && i * 8 + 8 <= bytes) {
		((u64*)p)[i] = word;
		return;
	}
	for (u32 j = 0; j < 8 && i * 8 + j < bytes; j++) p[i * 8 + j] = (char)(word >> 8 * j);
}

// loadEach loads the i-th words of what the k-th rank after this one gets, which begins
// at its number times step.
static __device__ __forceinline__ void loadEach(const Rank& me, const char* in, u64 step, u64 i, u64 bytes, bool aligned, u64 (&word)[MOST]) {
#pragma unroll
	for (u32 k = 0; k < MOST; k++)
		if (k < count(me)) word[k] = k > 0 && step == 0 ? word[0] : load(in + after(me, k) * step, i, bytes, aligned);
}

static __device__ __forceinline__ u64 words(u64 bytes) { return (bytes + 7) / 8; }
static __device__ __forceinline__ u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 stride() { return (u64)gridDim.x * blockDim.x; }

#ifndef CHORUS_TYPE

// ---- collectives that move bytes ----

// spread sends chunks of bytes bytes: the k-th rank after this one gets what lies at its
// number times step. Each rank has the chunks of all in its output, by rank; a rank keeps
// its own unless it is there already.
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

// broadcast lets the ranks other than the root send a word that says no more than that
// they have come.
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
	// A thread that has no data, or not the first, looks for the others.
	u64 came[MOST];
	if (first() == blockDim.x - 1) receive(me, others(me), from(me, me.peer[0], 0), me.slot, 0, came);
}

#else

// ---- elements ----

// The 16-bit floats are their bits: NVRTC comes without cuda_fp16.h.
struct Half { u16 bits; };
struct BFloat { u16 bits; };

// Element<T>::Acc is the type in which elements are reduced: the floats of 16 bits as
// float, everything else as it is.
template <class T> struct Element {
	typedef T Acc;
	static __device__ __forceinline__ T wide(T x) { return x; }
	static __device__ __forceinline__ T narrow(T x) { return x; }
};
template <> struct Element<Half> {
	typedef float Acc;
	static __device__ __forceinline__ float wide(Half h) {
		float x;
		asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
		return x;
	}
	static __device__ __forceinline__ Half narrow(float x) {
		Half h;
		asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
		return h;
	}
};
template <> struct Element<BFloat> {
	typedef float Acc;
	static __device__ __forceinline__ float wide(BFloat b) { return __uint_as_float((u32)b.bits << 16); }
	static __device__ __forceinline__ BFloat narrow(float x) {
		const u32 u = __float_as_uint(x);
		BFloat b;
		b.bits = x != x ? 0x7fff : (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
		return b;
	}
};

// ---- operations ----

// An operation joins two values, and finishes with the number of ranks. Of a number and
// a NaN the greatest and the least are the number.
template <class A> struct Sum {
	static __device__ __forceinline__ A join(A a, A b) { return a + b; }
	static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
template <class A> struct Prod {
	static __device__ __forceinline__ A join(A a, A b) { return a * b; }
	static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
template <class A> struct Max {
	static __device__ __forceinline__ A join(A a, A b) { return a != a || b > a ? b : a; }
	static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
template <class A> struct Min {
	static __device__ __forceinline__ A join(A a, A b) { return a != a || b < a ? b : a; }
	static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
template <class A> struct Avg : Sum<A> {
	static __device__ __forceinline__ A finish(A a, u32 ranks) { return a / (A)ranks; }
};

typedef CHORUS_TYPE T;
typedef Element<T>::Acc Acc;
typedef CHORUS_OP<Acc> Op;

// A Word is 8 bytes of elements, Values what they are reduced in.
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

// reduce joins the i-th words that the ranks have sent with this one's own, in the order
// of the ranks, so that all of them get the same bits.
static __device__ __forceinline__ u64 reduce(Rank& me, u64 i, u64 own) {
	u64 word[MOST];
	receive(me, others(me), from(me, me.peer[0], 0), me.slot, i, word);
	Values x = unpack(me.rank == 0 ? own : word[0]);
#pragma unroll
	for (u32 r = 1; r < MOST; r++)
		if (r < count(me)) join(x, me.rank == r ? own : word[r]);
	return finish(x, count(me));
}

// ---- collectives that reduce ----

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

// loadCell and storeCell are load and store for cells, to which aligned refers.
static __device__ __forceinline__ Cell loadCell(const char* p, u64 i, u64 bytes, bool aligned) {
	if (aligned && i * 16 + 16 <= bytes) return ((const Cell*)p)[i];
	const Cell v = {load(p, i * 2, bytes, false), load(p, i * 2 + 1, bytes, false)};
	return v;
}
static __device__ __forceinline__ void storeCell(char* p, u64 i, u64 bytes, bool aligned, Cell v) {
	if (aligned && i * 16 + 16 <= bytes) {
		((Cell*)p)[i] = v;
		return;
	}
	store(p, i * 2, bytes, false, v.a);
	store(p, i * 2 + 1, bytes, false, v.b);
}

static __device__ __forceinline__ void sendCell(const Rank& me, Cell* to, Cell v) {
	if (!me.over) putCell(to, v);
}

// A Share is the cells of a rank's share of an all-reduce: of each rank share of them,
// all in all.
struct Share {
	u64 all, share;
	__device__ bool has(u32 r, u64 i) const { return i < share && r * share + i < all; }
};

// BATCH is how many cells of a share a thread has at once.
#define BATCH (MOST == 2 ? 4 : 1)

// loadCells loads cells of the shares of the k-th ranks after this one.
static __device__ __forceinline__ void loadCells(const Rank& me, const char* in, const Share& of, u64 i, u64 bytes, bool aligned, Cell (&c)[BATCH][MOST]) {
#pragma unroll
	for (u32 b = 0; b < BATCH; b++)
#pragma unroll
		for (u32 k = 1; k < MOST; k++)
			if (k < count(me)) c[b][k] = loadCell(in, after(me, k) * of.share + i + b * stride(), bytes, aligned);
}

// reduceCell is reduce for cells.
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

// all_reduce_3 is the same with cells, of which nothing but their bytes goes
// over the links, and a barrier of each block before they are read.
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
