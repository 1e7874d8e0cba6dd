#ifdef CHORUS_TYPE

// Fused kernels: an all-reduce of rows, plus a residual, and the RMS norm of each row.
//
// The order of the sum of a row's squares depends only on the number of words. A row has whole
// warps of slots: one for each word, but at most SLOTS. Slot s adds the words s, s + slots and so
// on. Then each warp adds its slots, and then the warps are added. Therefore a row's result does
// not depend on the number of rows, on the algorithm or on the blocks that handle the row.
//
// A block waits also for its cluster, whose blocks the device runs together. A team of blocks waits
// only for the teams of the same rows on the other ranks. These have the same index, even if only
// some ranks have clusters: teams of several blocks have one row each.

#define SLOTS 2048
#define SUMS (SLOTS / 32)

// KEEP is the number of words of a row that a thread of a team of C blocks handles together.
// Their packets of all ranks are in registers.
#define KEEP(C) ((C) >= 4 || MOST > 4 ? 1 : (C) == 2 || MOST > 2 ? 2 : 4)

// A Norm describes the operands: rows of so many words. The residual of a row is replaced by
// the sum of all ranks' rows and the residual. The output is normalized: elements of T or,
// if scale is not null, 8-bit floats of the quotients by scale.
struct Norm {
	const u64* in;
	u64* residual;
	const u64* weight;
	char* out;
	const float* scale;
	u32 rows, words;
	float eps;
};
#define OPERANDS const u64 *in, u64 *residual, const u64 *weight, char *out, const float *scale, u32 rows, u32 words, float eps
#define NORM {in, residual, weight, out, scale, rows, words, eps}

// A Team is C blocks that handle a row together: a cluster, or one block. Its threads are lanes:
// lane l has the slots l, l + lanes and so on. Consecutive warps of lanes are in different blocks.
struct Team {
	u32 row, step; // the first row, and the distance to the next one
	u32 lane, lanes;
	u32 slots;     // of a row
	u64* sums;     // of the warps, for two rows in turn: see give
	bool kept;     // a lane has all its words of a row in registers
};

// teamOf returns the team of the block. Other threads may use sums after arrive, __syncthreads and
// assembled.
template <u32 C> static __device__ __forceinline__ Team teamOf(const Norm& n) {
	__shared__ u64 sums[2 * SUMS];
	if (threadIdx.x < 32)
		for (u32 i = threadIdx.x; i < 2 * SUMS; i += 32) sums[i] = 0;
	const u32 padded = (n.words + 31) / 32 * 32, slots = padded < SLOTS ? padded : SLOTS, lanes = C * blockDim.x;
	return {blockIdx.x / C, gridDim.x / C, (threadIdx.x / 32 * C + blockIdx.x % C) * 32 + threadIdx.x % 32, lanes,
		slots, sums, n.words <= slots && slots <= KEEP(C) * lanes};
}

// arrive and assembled are the two halves of a barrier of the cluster: a block must not store into
// another block's shared memory before that block runs and has zeroed its sums. PTX's memory model
// demands a release for that, but a release also waits for the global memory. Instead, arrive relies
// on the hardware, which performs a thread's accesses to shared memory in order: a thread that has
// read its zeros has stored them.
template <u32 C> static __device__ __forceinline__ void arrive(const Team& t) {
	if (C == 1) return;
	if (threadIdx.x < 32)
		for (u32 i = threadIdx.x; i < 2 * SUMS; i += 32)
			while (*(const volatile u64*)(t.sums + i) != 0) {}
	__syncwarp();
	asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
template <u32 C> static __device__ __forceinline__ void assembled() {
	if (C == 1) return;
	__syncwarp();
	asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// has reports whether the j-th word of a lane, from word i of slot s on, exists.
static __device__ __forceinline__ bool has(const Norm& n, const Team& t, u32 s, u32 i, u32 j) {
	return s + j * t.lanes < t.slots && i + j * t.lanes < n.words;
}

// loadWords loads the words i, i + lanes and so on of a row. Missing words are 0.
template <u32 K> static __device__ __forceinline__ void loadWords(const Norm& n, const Team& t, const u64* row, u32 s, u32 i, u64 (&w)[K]) {
#pragma unroll
	for (u32 j = 0; j < K; j++) w[j] = has(n, t, s, i, j) ? row[i + j * t.lanes] : 0;
}

// receiveWords polls for the packets of K words from R senders together. Bit j * R + r of
// missing is set for the word j of sender r, whose packet is at in + r * pitch.
template <u32 K, u32 R> static __device__ __forceinline__ void receiveWords(Rank& me, const Team& t, u32 missing, const char* in, u64 pitch, u64 (&word)[K][R]) {
	Packet p[K][R] = {};
	do {
#pragma unroll
		for (u32 j = 0; j < K; j++)
#pragma unroll
			for (u32 r = 0; r < R; r++)
				get(in + r * pitch + j * t.lanes * sizeof(Packet), missing >> (j * R + r) & 1, p[j][r].low, p[j][r].mark, p[j][r].high, p[j][r].age);
#pragma unroll
		for (u32 j = 0; j < K; j++)
#pragma unroll
			for (u32 r = 0; r < R; r++)
				if (here(me, p[j][r])) missing &= ~(1u << (j * R + r));
	} while (missing != 0 && !stalled(me));
#pragma unroll
	for (u32 j = 0; j < K; j++)
#pragma unroll
		for (u32 r = 0; r < R; r++) word[j][r] = p[j][r].low | (u64)p[j][r].high << 32;
}

// plus adds a word of the residual, and rounds.
static __device__ __forceinline__ u64 plus(const Values& x, u64 residual) {
	const Values y = unpack(residual);
	Word w;
#pragma unroll
	for (int j = 0; j < COUNT; j++) w.v[j] = Element<T>::narrow(x.v[j] + y.v[j]);
	return w.bits;
}

// sumOf adds the words of all ranks in rank order, and then the residual. It rounds once.
static __device__ __forceinline__ u64 sumOf(const Rank& me, const u64 (&word)[MOST], u64 own, u64 residual) {
	Values x = unpack(me.rank == 0 ? own : word[0]);
#pragma unroll
	for (u32 r = 1; r < MOST; r++)
		if (r < count(me)) join(x, me.rank == r ? own : word[r]);
	return plus(x, residual);
}

static __device__ __forceinline__ float addSquares(float sum, u64 word) {
	const Values x = unpack(word);
#pragma unroll
	for (int j = 0; j < COUNT; j++) sum = __fmaf_rn(x.v[j], x.v[j], sum);
	return sum;
}

static __device__ __forceinline__ float warpSum(float x) {
#pragma unroll
	for (u32 by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffff, x, by);
	return x;
}

// putSum stores a sum in the shared memory of the r-th block of the cluster, at the place that at
// is in this block.
template <u32 C> static __device__ __forceinline__ void putSum(u64* at, u32 r, u64 sum) {
	if (C == 1) *(volatile u64*)at = sum;
	else asm volatile("{.reg .u64 a; mapa.u64 a, %0, %1; st.relaxed.cluster.u64 [a], %2;}" :: "l"(at), "r"(r), "l"(sum) : "memory");
}

// give adds the squares of a warp's slots s, s + lanes and so on, and gives the sums to all blocks
// of the team that have slots. A sum carries the turn, so that a receiver needs no barrier: the
// team's first row is turn 1, the next one is turn 2. Two sets of sums are enough, because a warp
// gives its sums of a turn after it has received all sums of the previous turn.
template <u32 C, u32 K> static __device__ __forceinline__ void give(const Team& t, u32 turn, u32 s, const float (&squares)[K]) {
	const u32 r = threadIdx.x % 32;
#pragma unroll
	for (u32 j = 0; j < K; j++) {
		const u32 slot = s + j * t.lanes;
		const u64 sum = __float_as_uint(warpSum(squares[j])) | (u64)turn << 32;
		if (slot < t.slots && r < C && r * 32 < t.slots) putSum<C>(t.sums + turn % 2 * SUMS + slot / 32, r, sum);
	}
}

static __device__ __forceinline__ bool came(u64 sum, u32 turn) {
	return (u32)(sum >> 32) == turn;
}

// total receives the sums of all warps, and adds them. All lanes with slots call it. An abort does
// not end it: the other blocks of the cluster still give their sums then, and a block must not exit
// while they store into its shared memory.
static __device__ __forceinline__ float total(const Team& t, u32 turn) {
	const u32 l = threadIdx.x % 32, warps = t.slots / 32;
	const volatile u64 *low = t.sums + turn % 2 * SUMS + (l < warps ? l : 0), *high = l + 32 < warps ? low + 32 : low;
	u64 a, b;
	do a = *low, b = *high;
	while (!came(a, turn) || !came(b, turn));
	return warpSum((l < warps ? __uint_as_float((u32)a) : 0) + (l + 32 < warps ? __uint_as_float((u32)b) : 0));
}

// putWord stores a normalized word. 8-bit floats saturate.
static __device__ __forceinline__ void putWord(const Norm& n, u64 at, u64 sum, u64 weight, float factor, float scale) {
	const Values x = unpack(sum), w = unpack(weight);
	Word y;
	u32 small = 0;
#pragma unroll
	for (int j = 0; j < COUNT; j++) {
		const float v = __fmul_rn(__fmul_rn(x.v[j], factor), w.v[j]);
		if (n.scale) {
			const float q = __fdiv_rn(v, scale);
			small |= E4M3Bits::bits(q > 448.0f ? 448.0f : q < -448.0f ? -448.0f : q) << 8 * j;
		} else y.v[j] = Element<T>::narrow(v);
	}
	if (!n.scale) ((u64*)n.out)[at] = y.bits;
	else if (COUNT == 4) ((u32*)n.out)[at] = small;
	else ((u16*)n.out)[at] = (u16)small;
}

// finishRow normalizes a row of sums. If the lane has kept its words, they are in sum, and the weight
// in weight. Otherwise it loads the sums, which it has stored in the residual.
template <u32 K> static __device__ __forceinline__ void finishRow(const Norm& n, const Team& t, u32 row, u32 turn, float inverse, float scale, u64 (&sum)[K], u64 (&weight)[K]) {
	if (t.lane >= t.slots) return;
	const float mean = __fmul_rn(total(t, turn), inverse);
	const float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, n.eps)));
	const u64 at = (u64)row * n.words;
	for (u32 s = t.lane; s < t.slots; s += K * t.lanes)
		for (u32 i = s; i < n.words; i += t.slots) {
			if (!t.kept) {
				loadWords(n, t, n.residual + at, s, i, sum);
				loadWords(n, t, n.weight, s, i, weight);
			}
#pragma unroll
			for (u32 j = 0; j < K; j++)
				if (has(n, t, s, i, j)) putWord(n, at + i + j * t.lanes, sum[j], weight[j], factor, scale);
		}
}

// A Start is what a lane loads at the beginning, so that these loads overlap with reading the
// epoch: its first words, and what normalizes rows.
template <u32 K> struct Start {
	u64 own[K], old[K], weight[K];
	float inverse, scale; // inverse is 1 / the number of elements in a row
};
template <u32 K> static __device__ __forceinline__ void load(const Norm& n, const Team& t, Start<K>& x) {
	const u32 s = t.row < n.rows ? t.lane : t.slots; // no words if the team has no row
	loadWords(n, t, n.in + (u64)t.row * n.words, s, t.lane, x.own);
	loadWords(n, t, n.residual + (u64)t.row * n.words, s, t.lane, x.old);
	loadWords(n, t, n.weight, s, t.lane, x.weight);
	x.scale = n.scale ? *n.scale : 1.0f;
	x.inverse = __fdiv_rn(1.0f, (float)(n.words * COUNT));
}

// oneShot is the one-shot algorithm: each rank sends all its words to all ranks.
template <u32 C> static __device__ __forceinline__ void oneShot(Rank me, const Norm& n) {
	constexpr u32 K = KEEP(C);
	const Team t = teamOf<C>(n);
	Start<K> x;
	u64 sum[K], word[K][MOST];
	load(n, t, x);
	enter(me);
	arrive<C>(t);
	for (u32 row = t.row; row < n.rows; row += t.step)
		for (u32 s = t.lane; s < t.slots; s += K * t.lanes)
			for (u32 i = s; i < n.words; i += t.slots) {
				const u64 at = (u64)row * n.words;
				if (!t.kept || row != t.row) loadWords(n, t, n.in + at, s, i, x.own);
#pragma unroll
				for (u32 j = 0; j < K; j++)
					if (has(n, t, s, i, j)) sendAll(me, at + i + j * t.lanes, x.own[j]);
			}
	entered(me);
	assembled<C>();
	u32 turn = 0;
	for (u32 row = t.row; row < n.rows; row += t.step) {
		const u64 at = (u64)row * n.words;
		turn++;
		for (u32 s = t.lane; s < t.slots; s += K * t.lanes) {
			float squares[K] = {};
			for (u32 i = s; i < n.words; i += t.slots) {
				if (!t.kept || t.row + t.step < n.rows) {
					loadWords(n, t, n.in + at, s, i, x.own);
					loadWords(n, t, n.residual + at, s, i, x.old);
				}
				u32 missing = 0;
#pragma unroll
				for (u32 j = 0; j < K; j++)
					if (has(n, t, s, i, j)) missing |= others(me) << (j * MOST);
				receiveWords(me, t, missing, from(me, me.peer[0], 0) + (at + i) * sizeof(Packet), me.slot, word);
#pragma unroll
				for (u32 j = 0; j < K; j++) {
					if (!has(n, t, s, i, j)) continue;
					sum[j] = sumOf(me, word[j], x.own[j], x.old[j]);
					n.residual[at + i + j * t.lanes] = sum[j];
					squares[j] = addSquares(squares[j], sum[j]);
				}
			}
			give<C>(t, turn, s, squares);
		}
		finishRow(n, t, row, turn, x.inverse, x.scale, sum, x.weight);
	}
}

// sendTo sends a word as the i-th packet of this rank's slot to one rank.
static __device__ __forceinline__ void sendTo(const Rank& me, u32 rank, u64 i, u64 word) {
	char* peer = me.peer[1];
#pragma unroll
	for (u32 k = 2; k < MOST; k++)
		if (k < count(me)) peer = after(me, k) == rank ? me.peer[k] : peer;
	send(me, from(me, peer, me.rank), i, word);
}

// ownerOf returns the rank whose share has word k of a row.
static __device__ __forceinline__ u32 ownerOf(const Rank& me, u32 k, u32 share) {
	u32 owner = 0;
#pragma unroll
	for (u32 r = 1; r < MOST; r++) owner += r < count(me) && k >= r * share;
	return owner;
}

// twoShot is the two-shot algorithm: each rank adds one share of each row and sends the sums to
// all ranks, which normalize all rows. The last shares may be shorter or empty. A word has the
// same lane in all steps, so lanes do not wait for each other before the sums of squares.
template <u32 C> static __device__ __forceinline__ void twoShot(Rank me, const Norm& n) {
	constexpr u32 K = KEEP(C);
	const Team t = teamOf<C>(n);
	const u32 share = (n.words + count(me) - 1) / count(me), mine = me.rank * share;
	const bool one = t.kept && t.row + t.step >= n.rows; // the lane keeps its words of the only row
	Start<K> x;
	u64 sum[K], word[K][MOST], gather[K][1];
	load(n, t, x);
	enter(me);
	arrive<C>(t);
	for (u32 row = t.row; row < n.rows; row += t.step)
		for (u32 s = t.lane; s < t.slots; s += K * t.lanes)
			for (u32 i = s; i < n.words; i += t.slots) {
				if (!t.kept || row != t.row) loadWords(n, t, n.in + (u64)row * n.words, s, i, x.own);
#pragma unroll
				for (u32 j = 0; j < K; j++) {
					const u32 k = i + j * t.lanes, owner = ownerOf(me, k, share);
					if (has(n, t, s, i, j) && owner != me.rank) sendTo(me, owner, (u64)row * share + k - owner * share, x.own[j]);
				}
			}
	entered(me);
	assembled<C>();
	for (u32 row = t.row; row < n.rows; row += t.step)
		for (u32 s = t.lane; s < t.slots; s += K * t.lanes)
			for (u32 i = s; i < n.words; i += t.slots) {
				const u64 at = (u64)row * n.words;
				u32 missing = 0;
#pragma unroll
				for (u32 j = 0; j < K; j++)
					if (has(n, t, s, i, j) && i + j * t.lanes - mine < share) missing |= others(me) << (j * MOST);
				if (missing == 0) continue;
				if (!one) {
					loadWords(n, t, n.in + at, s, i, x.own);
					loadWords(n, t, n.residual + at, s, i, x.old);
				}
				receiveWords(me, t, missing, from(me, me.peer[0], 0) + ((u64)row * share + i - mine) * sizeof(Packet), me.slot, word);
#pragma unroll
				for (u32 j = 0; j < K; j++) {
					if ((missing >> (j * MOST) & others(me)) == 0) continue;
					const u64 to = at + i + j * t.lanes;
					sum[j] = sumOf(me, word[j], x.own[j], x.old[j]);
#pragma unroll
					for (u32 k = 1; k < MOST; k++)
						if (k < count(me)) send(me, gathered(me, me.peer[k]), to, sum[j]);
					n.residual[to] = sum[j];
				}
			}
	u32 turn = 0;
	for (u32 row = t.row; row < n.rows; row += t.step) {
		const u64 at = (u64)row * n.words;
		turn++;
		for (u32 s = t.lane; s < t.slots; s += K * t.lanes) {
			float squares[K] = {};
			for (u32 i = s; i < n.words; i += t.slots) {
				u32 missing = 0;
#pragma unroll
				for (u32 j = 0; j < K; j++)
					if (has(n, t, s, i, j) && i + j * t.lanes - mine >= share) missing |= 1u << j;
				receiveWords(me, t, missing, gathered(me, me.peer[0]) + (at + i) * sizeof(Packet), 0, gather);
#pragma unroll
				for (u32 j = 0; j < K; j++) {
					if (!has(n, t, s, i, j)) continue;
					if (missing >> j & 1) n.residual[at + i + j * t.lanes] = sum[j] = gather[j][0];
					else if (!one) sum[j] = n.residual[at + i + j * t.lanes];
					squares[j] = addSquares(squares[j], sum[j]);
				}
			}
			give<C>(t, turn, s, squares);
		}
		finishRow(n, t, row, turn, x.inverse, x.scale, sum, x.weight);
	}
}

// add_norm is the same without other ranks: the rows are added already.
extern "C" __global__ void __launch_bounds__(THREADS, 1) add_norm(OPERANDS) {
	constexpr u32 K = KEEP(1);
	const Norm n = NORM;
	const Team t = teamOf<1>(n);
	Start<K> x;
	u64 sum[K];
	load(n, t, x);
	__syncthreads();
	u32 turn = 0;
	for (u32 row = t.row; row < n.rows; row += t.step) {
		const u64 at = (u64)row * n.words;
		turn++;
		for (u32 s = t.lane; s < t.slots; s += K * t.lanes) {
			float squares[K] = {};
			for (u32 i = s; i < n.words; i += t.slots) {
				if (!t.kept || row != t.row) {
					loadWords(n, t, n.in + at, s, i, x.own);
					loadWords(n, t, n.residual + at, s, i, x.old);
				}
#pragma unroll
				for (u32 j = 0; j < K; j++) {
					if (!has(n, t, s, i, j)) continue;
					sum[j] = plus(unpack(x.own[j]), x.old[j]);
					n.residual[at + i + j * t.lanes] = sum[j];
					squares[j] = addSquares(squares[j], sum[j]);
				}
			}
			give<1>(t, turn, s, squares);
		}
		finishRow(n, t, row, turn, x.inverse, x.scale, sum, x.weight);
	}
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_norm_1(LINKS, OPERANDS) { oneShot<1>(RANK, NORM); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_norm_2(LINKS, OPERANDS) { twoShot<1>(RANK, NORM); }

// The same with a cluster for each row. Compilers for older GPUs make kernels in which each block
// has rows of its own.
#if __CUDA_ARCH__ >= 900
#define CLUSTER(C) __cluster_dims__(C, 1, 1)
#define BLOCKS_OF(C) C
#else
#define CLUSTER(C)
#define BLOCKS_OF(C) 1
#endif
#define CLUSTERS(C) \
	extern "C" __global__ void CLUSTER(C) __launch_bounds__(THREADS, 1) all_reduce_norm_1x##C(LINKS, OPERANDS) { oneShot<BLOCKS_OF(C)>(RANK, NORM); } \
	extern "C" __global__ void CLUSTER(C) __launch_bounds__(THREADS, 1) all_reduce_norm_2x##C(LINKS, OPERANDS) { twoShot<BLOCKS_OF(C)>(RANK, NORM); }
CLUSTERS(2)
CLUSTERS(4)
CLUSTERS(8)

#endif
