// Collectives between the GPUs of one host, over scratch memory that all of them
// have mapped. CHORUS_TYPE and CHORUS_OP, macros given to the compiler, say which
// elements the module reduces and how; without them it is the module of the
// collectives that only move bytes.
//
// Every kernel is one operation of one rank, in the order in which all ranks have
// them: its epoch. Whatever an operation is, each rank sends something to each other
// one and waits for something of each. So a rank that has begun epoch e + 1 knows, when
// that is over, that all have ended epoch e, and two copies of the scratch memory, used
// in turn, are enough.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define RANKS 8
#define THREADS 512
#define BLOCKS 64 // at most

// ---- memory that several GPUs use at once ----

struct alignas(16) Cell { u64 a, b; };

// put and get move 16 bytes past the caches, in one transaction. Of its four words
// only those of the same 8 bytes are sure to come together.
static __device__ __forceinline__ void put(void* p, u32 a, u32 b, u32 c, u32 d) {
	asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
static __device__ __forceinline__ void get(const void* p, u32& a, u32& b, u32& c, u32& d) {
	asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(p) : "memory");
}
static __device__ __forceinline__ void putCell(Cell* p, Cell v) { put(p, (u32)v.a, (u32)(v.a >> 32), (u32)v.b, (u32)(v.b >> 32)); }
static __device__ __forceinline__ Cell getCell(const Cell* p) {
	u32 a, b, c, d;
	get(p, a, b, c, d);
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
struct Control {
	u64 epoch;
	u32 arrived; // blocks of the operation that have ended
	u32 over;    // GIVING while an operation is being given up, OVER in those that follow
};
#define OVER 1
#define GIVING 2

// Scratch memory begins with the signals, one of each rank for each block, and has then
// twice, for even and odd epochs, a slot for what each rank sends, and a whole for what
// is gathered.
struct Rank {
	char* peer[RANKS]; // the scratch memory of the k-th rank after this one: the first is its own
	u32 rank, ranks;
	u64 slot, whole;   // bytes of them
	Control* control;
	u32* host;         // two words in the host's memory: not 0 when the rank gives up, and when it has
	u64 epoch;
	u32 spins;
	bool over;         // given up: what it has is no result, and nothing of it is sent
};

#define LINKS char *p0, char *p1, char *p2, char *p3, char *p4, char *p5, char *p6, char *p7, u32 rank, u32 ranks, u64 slot, u64 whole, Control *control, u32 *host
#define RANK {{p0, p1, p2, p3, p4, p5, p6, p7}, rank, ranks, slot, whole, control, host, control->epoch + 1, 0, (control->over & OVER) != 0}

static const u64 signals = (u64)BLOCKS * RANKS * sizeof(u64);

// from returns where a rank's scratch has, in this epoch, what rank r sends to it.
static __device__ __forceinline__ char* from(const Rank& me, char* scratch, u32 r) {
	return scratch + signals + (me.epoch & 1) * (me.ranks * me.slot + me.whole) + r * me.slot;
}
static __device__ __forceinline__ char* gathered(const Rank& me, char* scratch) { return from(me, scratch, me.ranks); }

// after returns the k-th rank after this one.
static __device__ __forceinline__ u32 after(const Rank& me, u32 k) {
	const u32 r = me.rank + k;
	return r < me.ranks ? r : r - me.ranks;
}

// stalled is called while nothing comes, and reports whether to go on without. A load
// from the host's memory takes a microsecond.
static __device__ __forceinline__ bool stalled(Rank& me) {
	if (!me.over && (++me.spins & 0xfff) == 0 && relaxed(me.host) != 0) {
		me.over = true;
		*(volatile u32*)(me.host + 1) = 1;
		*(volatile u32*)&me.control->over = GIVING;
		__threadfence(); // before end
	}
	return me.over;
}

// end is the last thing that every thread does: the last block of all says that the
// epoch is over, and so are the next operations where this one was given up. Not before
// all blocks have looked for that: a block must not be of two minds.
static __device__ __forceinline__ void end(const Rank& me) {
	__syncthreads();
	if (threadIdx.x == 0 && atomicAdd(&me.control->arrived, 1) == gridDim.x - 1) {
		me.control->arrived = 0;
		if (*(volatile u32*)&me.control->over != 0) me.control->over = OVER;
		me.control->epoch = me.epoch;
	}
}

// barrier returns when the same block of all ranks has come to it: what their threads
// stored before is there. The n-th of an operation has the number n, from 0 on, of 4.
static __device__ __forceinline__ void barrier(Rank& me, u32 n) {
	const u64 want = me.epoch * 4 + n;
	__syncthreads();
#pragma unroll
	for (u32 k = 1; k < RANKS; k++) {
		if (k >= me.ranks || threadIdx.x != k) continue;
		if (!me.over) release((u64*)me.peer[k] + blockIdx.x * RANKS + me.rank, want);
		const u64* mine = (const u64*)me.peer[0] + blockIdx.x * RANKS + after(me, k);
		while (acquire(mine) < want && !stalled(me)) {}
	}
	// Who gives up does so with its block.
	me.over = __syncthreads_or(me.over);
}

// ---- packets ----

// A packet is a word of 8 bytes with the epoch beside each half, so that who polls it
// sees for each half whether it is there. No memory has to be cleared: what an earlier
// operation left has another epoch, and the second half tells one that is 2^32 later.
struct Packet { u32 low, epoch, high, age; };

static __device__ __forceinline__ void send(const Rank& me, char* to, u64 i, u64 word) {
	if (!me.over) put(to + i * sizeof(Packet), (u32)word, (u32)me.epoch, (u32)(word >> 32), (u32)me.epoch + (u32)(me.epoch >> 32));
}
static __device__ __forceinline__ bool arrived(const Rank& me, const char* in, u64 i, u64& word) {
	Packet p;
	get(in + i * sizeof(Packet), p.low, p.epoch, p.high, p.age);
	word = p.low | (u64)p.high << 32;
	return p.epoch == (u32)me.epoch && p.age == (u32)me.epoch + (u32)(me.epoch >> 32);
}
static __device__ __forceinline__ u64 receive(Rank& me, const char* in, u64 i) {
	u64 word;
	while (!arrived(me, in, i, word) && !stalled(me)) {}
	return word;
}

// load and store move the i-th word of bytes bytes, of which the last word may have
// fewer than 8. Where p is said to be aligned, whole words go as one.
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

static __device__ __forceinline__ u64 words(u64 bytes) { return (bytes + 7) / 8; }
static __device__ __forceinline__ u64 first() { return (u64)blockIdx.x * THREADS + threadIdx.x; }
static __device__ __forceinline__ u64 stride() { return (u64)gridDim.x * THREADS; }

#ifndef CHORUS_TYPE

// ---- collectives that move bytes ----

// spread sends chunks of bytes bytes: the k-th rank after this one gets what lies at its
// number times step. Each rank has the chunks of all in its output, by rank; a rank keeps
// its own unless it is there already.
static __device__ __forceinline__ void spread(Rank& me, const char* in, u64 step, char* out, u64 bytes, bool aligned) {
	const char* own = in + me.rank * step;
	for (u64 i = first(); i < words(bytes); i += stride()) {
#pragma unroll
		for (u32 k = 1; k < RANKS; k++)
			if (k < me.ranks) send(me, from(me, me.peer[k], me.rank), i, load(in + after(me, k) * step, i, bytes, aligned));
		if (own != out + me.rank * bytes) store(out + me.rank * bytes, i, bytes, aligned, load(own, i, bytes, aligned));
	}
	for (u64 i = first(); i < words(bytes); i += stride()) {
#pragma unroll
		for (u32 k = 1; k < RANKS; k++)
			if (k < me.ranks) store(out + after(me, k) * bytes, i, bytes, aligned, receive(me, from(me, me.peer[0], after(me, k)), i));
	}
}

extern "C" __global__ void __launch_bounds__(THREADS) all_gather(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	spread(me, in, 0, out, bytes, aligned);
	end(me);
}

extern "C" __global__ void __launch_bounds__(THREADS) all_to_all(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	spread(me, in, bytes, out, bytes, aligned);
	end(me);
}

// broadcast lets the ranks other than the root send a word that says no more than that
// they have come.
extern "C" __global__ void __launch_bounds__(THREADS) broadcast(LINKS, const char* in, char* out, u64 bytes, u32 aligned, u32 root) {
	Rank me = RANK;
	const bool sends = me.rank == root;
	for (u64 i = first(); i < (sends ? words(bytes) : 1); i += stride()) {
		const u64 word = sends ? load(in, i, bytes, aligned) : 0;
#pragma unroll
		for (u32 k = 1; k < RANKS; k++)
			if (k < me.ranks) send(me, from(me, me.peer[k], me.rank), i, word);
		if (sends && in != out) store(out, i, bytes, aligned, word);
	}
	for (u64 i = first(); i < words(bytes); i += stride()) {
#pragma unroll
		for (u32 k = 1; k < RANKS; k++) {
			const u32 r = after(me, k);
			if (k >= me.ranks || i > 0 && r != root) continue;
			const u64 word = receive(me, from(me, me.peer[0], r), i);
			if (r == root) store(out, i, bytes, aligned, word);
		}
	}
	end(me);
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
// of the ranks, so that all of them get the same bits. It asks for all before it waits
// for the first.
static __device__ __forceinline__ u64 reduce(Rank& me, u64 i, u64 own) {
	u64 word[RANKS];
	u32 missing = 0;
#pragma unroll
	for (u32 r = 0; r < RANKS; r++) {
		if (r >= me.ranks) continue;
		if (r == me.rank) word[r] = own;
		else if (!arrived(me, from(me, me.peer[0], r), i, word[r])) missing |= 1u << r;
	}
	while (missing != 0 && !stalled(me)) {
#pragma unroll
		for (u32 r = 0; r < RANKS; r++)
			if ((missing >> r & 1) != 0 && arrived(me, from(me, me.peer[0], r), i, word[r])) missing &= ~(1u << r);
	}
	Values x = unpack(word[0]);
#pragma unroll
	for (u32 r = 1; r < RANKS; r++)
		if (r < me.ranks) join(x, word[r]);
	return finish(x, me.ranks);
}

// ---- collectives that reduce ----

// reduce_scatter sends each rank its chunk of bytes bytes, of which there is one after
// the other in in, and reduces what comes.
extern "C" __global__ void __launch_bounds__(THREADS) reduce_scatter(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	for (u64 i = first(); i < words(bytes); i += stride()) {
#pragma unroll
		for (u32 k = 1; k < RANKS; k++)
			if (k < me.ranks) send(me, from(me, me.peer[k], me.rank), i, load(in + after(me, k) * bytes, i, bytes, aligned));
	}
	for (u64 i = first(); i < words(bytes); i += stride())
		store(out, i, bytes, aligned, reduce(me, i, load(in + me.rank * bytes, i, bytes, aligned)));
	end(me);
}

// all_reduce_1 sends everything to everybody, by packets: one way for each word.
extern "C" __global__ void __launch_bounds__(THREADS) all_reduce_1(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	for (u64 i = first(); i < words(bytes); i += stride()) {
		const u64 word = load(in, i, bytes, aligned);
#pragma unroll
		for (u32 k = 1; k < RANKS; k++)
			if (k < me.ranks) send(me, from(me, me.peer[k], me.rank), i, word);
	}
	for (u64 i = first(); i < words(bytes); i += stride())
		store(out, i, bytes, aligned, reduce(me, i, load(in, i, bytes, aligned)));
	end(me);
}

// all_reduce_2 lets each rank reduce a share, of share words, and send that to the
// others, both by packets.
extern "C" __global__ void __launch_bounds__(THREADS) all_reduce_2(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	const u64 all = words(bytes), share = (all + me.ranks - 1) / me.ranks;
	for (u64 i = first(); i < share; i += stride()) {
#pragma unroll
		for (u32 k = 1; k < RANKS; k++) {
			const u64 at = after(me, k) * share + i;
			if (k < me.ranks) send(me, from(me, me.peer[k], me.rank), i, at < all ? load(in, at, bytes, aligned) : 0);
		}
	}
	for (u64 i = first(); i < share; i += stride()) {
		const u64 at = me.rank * share + i;
		const u64 word = reduce(me, i, at < all ? load(in, at, bytes, aligned) : 0);
#pragma unroll
		for (u32 k = 1; k < RANKS; k++)
			if (k < me.ranks) send(me, gathered(me, me.peer[k]), at, word);
		if (at < all) store(out, at, bytes, aligned, word);
	}
	for (u64 i = first(); i < share; i += stride()) {
#pragma unroll
		for (u32 k = 1; k < RANKS; k++) {
			const u64 at = after(me, k) * share + i;
			if (k >= me.ranks) continue;
			const u64 word = receive(me, gathered(me, me.peer[0]), at);
			if (at < all) store(out, at, bytes, aligned, word);
		}
	}
	end(me);
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

// all_reduce_3 is the same with cells, of which nothing but their bytes goes over the
// links, and a barrier of each block before they are read.
extern "C" __global__ void __launch_bounds__(THREADS) all_reduce_3(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	const u64 all = (bytes + 15) / 16, share = (all + me.ranks - 1) / me.ranks;
	for (u64 i = first(); i < share; i += stride()) {
#pragma unroll
		for (u32 k = 1; k < RANKS; k++) {
			const u64 at = after(me, k) * share + i;
			if (k < me.ranks && at < all) sendCell(me, (Cell*)from(me, me.peer[k], me.rank) + i, loadCell(in, at, bytes, aligned));
		}
	}
	barrier(me, 0);
	for (u64 i = first(); i < share && me.rank * share + i < all; i += stride()) {
		const u64 at = me.rank * share + i;
		Cell c[RANKS];
#pragma unroll
		for (u32 r = 0; r < RANKS; r++)
			if (r < me.ranks) c[r] = r == me.rank ? loadCell(in, at, bytes, aligned) : getCell((const Cell*)from(me, me.peer[0], r) + i);
		Values a = unpack(c[0].a), b = unpack(c[0].b);
#pragma unroll
		for (u32 r = 1; r < RANKS; r++) {
			if (r >= me.ranks) continue;
			join(a, c[r].a);
			join(b, c[r].b);
		}
		const Cell v = {finish(a, me.ranks), finish(b, me.ranks)};
#pragma unroll
		for (u32 k = 1; k < RANKS; k++)
			if (k < me.ranks) sendCell(me, (Cell*)gathered(me, me.peer[k]) + at, v);
		storeCell(out, at, bytes, aligned, v);
	}
	barrier(me, 1);
	for (u64 i = first(); i < share; i += stride()) {
#pragma unroll
		for (u32 k = 1; k < RANKS; k++) {
			const u64 at = after(me, k) * share + i;
			if (k < me.ranks && at < all) storeCell(out, at, bytes, aligned, getCell((const Cell*)gathered(me, me.peer[0]) + at));
		}
	}
	end(me);
}

#endif
