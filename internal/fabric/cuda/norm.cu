#ifdef CHORUS_TYPE

// Fused kernels: an all-reduce of rows, plus a residual, and the RMS norm of each row.
//
// The sum of a row's squares has the same order in all kernels: it depends only on the number of
// threads, which the host computes from the number of words. Therefore a row's result does not
// depend on the number of rows or on the algorithm.

// KEEP is the number of words of a row that a thread handles together. Their packets of all
// ranks are in registers.
#define KEEP (MOST == 2 ? 4 : MOST <= 4 ? 2 : 1)

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

// loadWords loads the words i, i + blockDim.x and so on of a row. Words from limit on are 0.
static __device__ __forceinline__ void loadWords(const u64* row, u32 i, u32 limit, u64 (&w)[KEEP]) {
#pragma unroll
	for (u32 j = 0; j < KEEP; j++) {
		const u32 k = i + j * blockDim.x;
		w[j] = k < limit ? row[k] : 0;
	}
}

// receiveWords polls for the packets of KEEP words from R senders together. Bit j * R + r of
// missing is set for the word j of sender r, whose packet is at in + r * pitch.
template <u32 R> static __device__ __forceinline__ void receiveWords(Rank& me, u32 missing, const char* in, u64 pitch, u64 (&word)[KEEP][R]) {
	Packet p[KEEP][R] = {};
	do {
#pragma unroll
		for (u32 j = 0; j < KEEP; j++)
#pragma unroll
			for (u32 r = 0; r < R; r++)
				get(in + r * pitch + j * blockDim.x * sizeof(Packet), missing >> (j * R + r) & 1, p[j][r].low, p[j][r].mark, p[j][r].high, p[j][r].age);
#pragma unroll
		for (u32 j = 0; j < KEEP; j++)
#pragma unroll
			for (u32 r = 0; r < R; r++)
				if (here(me, p[j][r])) missing &= ~(1u << (j * R + r));
	} while (missing != 0 && !stalled(me));
#pragma unroll
	for (u32 j = 0; j < KEEP; j++)
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

// total returns the sum of x over all threads of the block. All threads call it.
static __device__ __forceinline__ float total(float x) {
	__shared__ float warps[THREADS / 32];
#pragma unroll
	for (u32 by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffff, x, by);
	if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
	__syncthreads();
	float sum = warps[0];
	for (u32 w = 1; w < blockDim.x / 32; w++) sum += warps[w];
	__syncthreads(); // the next row overwrites warps
	return sum;
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

// finishRow normalizes a row of sums. If a thread has more than KEEP words, it loads the sums,
// which it has stored in the residual; otherwise they are in sum, and the weight in weight.
static __device__ __forceinline__ void finishRow(const Norm& n, u32 row, float squares, u64 (&sum)[KEEP], u64 (&weight)[KEEP]) {
	const float mean = __fdiv_rn(total(squares), (float)(n.words * COUNT));
	const float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, n.eps))), scale = n.scale ? *n.scale : 1.0f;
	const u64 at = (u64)row * n.words;
	for (u32 i = threadIdx.x; i < n.words; i += KEEP * blockDim.x) {
		if (n.words > KEEP * blockDim.x) {
			loadWords(n.residual + at, i, n.words, sum);
			loadWords(n.weight, i, n.words, weight);
		}
#pragma unroll
		for (u32 j = 0; j < KEEP; j++)
			if (i + j * blockDim.x < n.words) putWord(n, at + i + j * blockDim.x, sum[j], weight[j], factor, scale);
	}
}

// all_reduce_norm_1 is the one-shot algorithm: each rank sends all its words to all ranks. A
// block handles complete rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_norm_1(LINKS, OPERANDS) {
	Rank me = RANK;
	const Norm n = NORM;
	const u32 step = KEEP * blockDim.x;
	u64 own[KEEP], old[KEEP], sum[KEEP], weights[KEEP], word[KEEP][MOST];
	loadWords(in + (u64)blockIdx.x * words, threadIdx.x, words, own);
	loadWords(weight, threadIdx.x, words, weights);
	enter(me);
	for (u32 row = blockIdx.x; row < rows; row += gridDim.x)
		for (u32 i = threadIdx.x; i < words; i += step) {
			if (row != blockIdx.x || i != threadIdx.x) loadWords(in + (u64)row * words, i, words, own);
#pragma unroll
			for (u32 j = 0; j < KEEP; j++)
				if (i + j * blockDim.x < words) sendAll(me, (u64)row * words + i + j * blockDim.x, own[j]);
		}
	entered(me);
	for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
		const u64 at = (u64)row * words;
		float squares = 0;
		for (u32 i = threadIdx.x; i < words; i += step) {
			loadWords(in + at, i, words, own);
			loadWords(residual + at, i, words, old);
			u32 missing = 0;
#pragma unroll
			for (u32 j = 0; j < KEEP; j++)
				if (i + j * blockDim.x < words) missing |= others(me) << (j * MOST);
			receiveWords(me, missing, from(me, me.peer[0], 0) + (at + i) * sizeof(Packet), me.slot, word);
#pragma unroll
			for (u32 j = 0; j < KEEP; j++) {
				if (i + j * blockDim.x >= words) continue;
				sum[j] = sumOf(me, word[j], own[j], old[j]);
				residual[at + i + j * blockDim.x] = sum[j];
				squares = addSquares(squares, sum[j]);
			}
		}
		finishRow(n, row, squares, sum, weights);
	}
}

// all_reduce_norm_2 is the two-shot algorithm: each rank adds one share of each row and sends
// the sums to all ranks, which normalize all rows. The last shares may be shorter or empty.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_norm_2(LINKS, OPERANDS) {
	Rank me = RANK;
	const Norm n = NORM;
	const u32 share = (words + count(me) - 1) / count(me), mine = me.rank * share;
	const u32 has = mine >= words ? 0 : words - mine < share ? words - mine : share;
	u64 sum[KEEP], weights[KEEP], word[KEEP][1];
	loadWords(weight, threadIdx.x, words, weights);
	enter(me);
	for (u32 row = blockIdx.x; row < rows; row += gridDim.x)
		for (u32 i = threadIdx.x; i < share; i += blockDim.x)
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me) && after(me, k) * share + i < words)
					send(me, from(me, me.peer[k], me.rank), (u64)row * share + i, in[(u64)row * words + after(me, k) * share + i]);
	entered(me);
	for (u32 row = blockIdx.x; row < rows; row += gridDim.x)
		for (u32 i = threadIdx.x; i < has; i += blockDim.x) {
			const u64 at = (u64)row * words + mine + i, own = in[at], old = residual[at];
			u64 all[MOST];
			receive(me, others(me), from(me, me.peer[0], 0), me.slot, (u64)row * share + i, all);
			const u64 x = sumOf(me, all, own, old);
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me)) send(me, gathered(me, me.peer[k]), at, x);
			residual[at] = x;
		}
	__syncthreads(); // other threads of the block load this rank's sums
	for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
		const u64 at = (u64)row * words;
		float squares = 0;
		for (u32 i = threadIdx.x; i < words; i += KEEP * blockDim.x) {
			u32 missing = 0;
#pragma unroll
			for (u32 j = 0; j < KEEP; j++) {
				const u32 k = i + j * blockDim.x;
				if (k < words && k - mine >= has) missing |= 1u << j;
			}
			const u32 received = missing;
			receiveWords(me, missing, gathered(me, me.peer[0]) + (at + i) * sizeof(Packet), 0, word);
#pragma unroll
			for (u32 j = 0; j < KEEP; j++) {
				const u32 k = i + j * blockDim.x;
				if (k >= words) continue;
				if (received >> j & 1) residual[at + k] = word[j][0];
				sum[j] = received >> j & 1 ? word[j][0] : residual[at + k];
				squares = addSquares(squares, sum[j]);
			}
		}
		finishRow(n, row, squares, sum, weights);
	}
}

// add_norm is the same without other ranks: the rows are added already.
extern "C" __global__ void __launch_bounds__(THREADS, 1) add_norm(OPERANDS) {
	const Norm n = NORM;
	u64 sum[KEEP], old[KEEP], weights[KEEP];
	loadWords(weight, threadIdx.x, words, weights);
	for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
		const u64 at = (u64)row * words;
		float squares = 0;
		for (u32 i = threadIdx.x; i < words; i += KEEP * blockDim.x) {
			loadWords(in + at, i, words, sum);
			loadWords(residual + at, i, words, old);
#pragma unroll
			for (u32 j = 0; j < KEEP; j++) {
				if (i + j * blockDim.x >= words) continue;
				sum[j] = plus(unpack(sum[j]), old[j]);
				residual[at + i + j * blockDim.x] = sum[j];
				squares = addSquares(squares, sum[j]);
			}
		}
		finishRow(n, row, squares, sum, weights);
	}
}

#endif
