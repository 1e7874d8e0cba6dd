// The kernels of the model: embedding, layer norm, attention, GELU and loss, with their
// backward passes. cuBLAS computes the matrix products. kernels.go defines ELEMENT, the sizes
// of the model and the shapes of some launches. Arithmetic is in float. A sum over rows has a
// fixed order, so that runs repeat exactly.

struct bf16 { unsigned short bits; };

typedef ELEMENT T; // of the matrices that matrix products read and write: float or bf16

__device__ __forceinline__ float load(float x) { return x; }
__device__ __forceinline__ float load(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

template <class E> __device__ __forceinline__ E store(float x) { return x; }
template <> __device__ __forceinline__ bf16 store<bf16>(float x) { // to nearest even
#if __CUDA_ARCH__ >= 800
	bf16 r;
	asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
	return r;
#endif
#if __CUDA_ARCH__ >= 800
	bf16 y;
	asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
	return y;
#else
	const unsigned u = __float_as_uint(x);
	return bf16{x != x ? (unsigned short)0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
#endif
}

// rounded returns x rounded to the type of activations.
__device__ __forceinline__ float rounded(float x) { return load(store<T>(x)); }

#define THREADS 256 // of a block, unless the kernel's comment names another number
#define WARPS (THREADS / 32)
#define HEAD (WIDTH / HEADS) // columns of a head
#define LOWEST -3.402823466e38f
#define ALL 0xffffffff // lanes of a warp

// Flags of the kernels of the backward pass.
#define ACCUMULATE 1 // add to the gradient of the micro-batches before
#define RESIDUAL 2   // add to the gradient that is already in dh
#define TIED 4       // add to the gradient that is already in dtok

// exponential returns e to the power of x, and reciprocal 1 / x. For activations of bfloat16 the
// functions of the hardware are precise enough.
__device__ __forceinline__ float exponential(float x) {
#if __CUDA_ARCH__ >= 800
	if (sizeof(T) == 2) {
		asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x * 1.4426950408889634f));
		return x;
	}
#endif
	return expf(x);
}
__device__ __forceinline__ float reciprocal(float x) {
#if __CUDA_ARCH__ >= 800
	if (sizeof(T) == 2) {
		asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
		return x;
	}
#endif
	return 1 / x;
}

// A Pack is N elements that one instruction loads or stores.
template <class E, int N> struct alignas(N * sizeof(E)) Pack { E x[N]; };
#define LANES (16 / (int)sizeof(T)) // elements of 16 bytes

template <int N, class E> __device__ __forceinline__ void load_pack(float* x, const E* from) {
	const Pack<E, N> p = *(const Pack<E, N>*)from;
	for (int i = 0; i < N; i++) x[i] = load(p.x[i]);
}

template <int N, class E> __device__ __forceinline__ void store_pack(E* to, const float* x) {
	Pack<E, N> p;
	for (int i = 0; i < N; i++) p.x[i] = store<E>(x[i]);
	*(Pack<E, N>*)to = p;
}

// ---- sums ----

// warp_sum returns the sum over the lanes of the warp, in all lanes. All lanes call it.
template <class N> __device__ N warp_sum(N x) {
	for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(ALL, x, other);
	return x;
}

// last_block returns true in the last block of the grid that calls it. The block then sees the
// partial sums of all other blocks. All threads call it. *count is 0 before and after a kernel.
__device__ bool last_block(unsigned* count) {
	__shared__ bool last;
	__threadfence();
	__syncthreads();
	if (threadIdx.x == 0) {
		last = atomicAdd(count, 1) == gridDim.x - 1;
		if (last) *count = 0;
	}
	__syncthreads();
	__threadfence();
	return last;
}

// put stores a gradient or, for ACCUMULATE, adds to it.
__device__ void put(float* to, float x, int flags) { *to = flags & ACCUMULATE ? *to + x : x; }

// ---- embedding and layer norm: one warp for each row ----

#define PER (WIDTH / 32)                              // columns of a lane
#define PACK (PER % 4 == 0 ? 4 : PER % 2 == 0 ? 2 : 1) // of them that are side by side

// column returns the column of number i of a lane.
__device__ __forceinline__ int column(int i, int lane) { return (i / PACK * 32 + lane) * PACK + i % PACK; }

template <class E> __device__ __forceinline__ void load_row(float (&x)[PER], const E* row, int lane) {
	for (int i = 0; i < PER; i += PACK) load_pack<PACK>(x + i, row + column(i, lane));
}

template <class E> __device__ __forceinline__ void store_row(E* row, const float (&x)[PER], int lane) {
	for (int i = 0; i < PER; i += PACK) store_pack<PACK>(row + column(i, lane), x + i);
}

// standardize scales a row to mean 0 and variance 1, and returns 1 / sigma. A warp calls it;
// each lane has PER columns in x.
__device__ float standardize(float (&x)[PER]) {
	float sum = 0, squares = 0;
	for (int i = 0; i < PER; i++) sum += x[i];
	const float mean = warp_sum(sum) / WIDTH;
	for (int i = 0; i < PER; i++) x[i] -= mean, squares += x[i] * x[i];
	const float inverse = rsqrtf(warp_sum(squares) / WIDTH + 1e-5f);
	for (int i = 0; i < PER; i++) x[i] *= inverse;
	return inverse;
}

// layer_norm stores the layer norm of a row in a. A warp calls it.
__device__ void layer_norm(float (&x)[PER], const float* w, const float* b, T* a, int lane) {
	float weight[PER], bias[PER];
	load_row(weight, w, lane);
	load_row(bias, b, lane);
	standardize(x);
	for (int i = 0; i < PER; i++) x[i] = x[i] * weight[i] + bias[i];
	store_row(a, x, lane);
}

// line returns the index of the token that a row of the batch reads. The row predicts the
// next token. Each sequence has CONTEXT + 1 tokens, and CONTEXT rows.
__device__ int line(int row) { return row / CONTEXT * (CONTEXT + 1) + row % CONTEXT; }

// h = tok[token] + pos[place]; a = layer_norm(h).
extern "C" __global__ void embed_norm(const int* tokens, const float* tok, const float* pos, float* h,
		const float* w, const float* b, T* a, int rows) {
	const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
	if (row >= rows) return;
	float x[PER], place[PER];
	load_row(x, tok + (size_t)tokens[line(row)] * WIDTH, lane);
	load_row(place, pos + row % CONTEXT * WIDTH, lane);
	for (int i = 0; i < PER; i++) x[i] += place[i];
	store_row(h + (size_t)row * WIDTH, x, lane);
	layer_norm(x, w, b, a + (size_t)row * WIDTH, lane);
}

// h = before + y; a = layer_norm(h).
extern "C" __global__ void add_norm(const float* before, const T* y, float* h, const float* w, const float* b, T* a,
		int rows) {
	const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
	if (row >= rows) return;
	const size_t at = (size_t)row * WIDTH;
	float x[PER], more[PER];
	load_row(x, before + at, lane);
	load_row(more, y + at, lane);
	for (int i = 0; i < PER; i++) x[i] += more[i];
	store_row(h + at, x, lane);
	layer_norm(x, w, b, a + at, lane);
}

// column_sums stores the sums of all warps' columns in to. All threads call it.
__device__ void column_sums(const float (&x)[PER], float* to) {
	const int most = 1024; // columns that fit in shared memory
	__shared__ float sums[WARPS][WIDTH < most ? WIDTH : most];
	for (int from = 0; from < WIDTH; from += most) {
		__syncthreads();
		for (int i = from / 32; i < PER && i < (from + most) / 32; i++)
			sums[threadIdx.x / 32][column(i, threadIdx.x % 32) - from] = x[i];
		__syncthreads();
		for (int c = threadIdx.x; c < WIDTH - from && c < most; c += THREADS) {
			float sum = 0;
			for (int k = 0; k < WARPS; k++) sum += sums[k][c];
			to[from + c] = sum;
		}
	}
}

// norm_back is the backward pass of a = layer_norm(h). It computes dh, dw and db from da. dy
// is dh in type T: the gradient of the product that was added to h. A block has some rows, per,
// and stores its sums for dw and db in parts; the last block adds the parts.
extern "C" __global__ void __launch_bounds__(THREADS) norm_back(const T* da, const float* h, const float* w, float* dh, T* dy,
		float* dw, float* db, float* parts, unsigned* count, int rows, int per, int flags) {
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	float sw[PER] = {}, sb[PER] = {};
	for (int k = warp; k < per; k += WARPS) {
		const int row = blockIdx.x * per + k;
		if (row >= rows) break;
		const size_t at = (size_t)row * WIDTH;
		float x[PER], g[PER], weight[PER], mean = 0, along = 0;
		load_row(x, h + at, lane);
		load_row(g, da + at, lane);
		load_row(weight, w, lane);
		const float inverse = standardize(x);
		for (int i = 0; i < PER; i++) {
			sw[i] += g[i] * x[i], sb[i] += g[i];
			g[i] *= weight[i];
			mean += g[i], along += g[i] * x[i];
		}
		mean = warp_sum(mean) / WIDTH, along = warp_sum(along) / WIDTH;
		for (int i = 0; i < PER; i++) g[i] = inverse * (g[i] - mean - x[i] * along);
		if (flags & RESIDUAL) {
			load_row(x, dh + at, lane);
			for (int i = 0; i < PER; i++) g[i] += x[i];
		}
		store_row(dh + at, g, lane);
		store_row(dy + at, g, lane);
	}
	column_sums(sw, parts + (size_t)blockIdx.x * 2 * WIDTH);
	column_sums(sb, parts + (size_t)blockIdx.x * 2 * WIDTH + WIDTH);
	if (!last_block(count)) return;
	const int columns = (2 * WIDTH + THREADS - 1) / THREADS; // of a thread, whose loads are in flight together
	float sum[columns] = {};
#pragma unroll 8
	for (int k = 0; k < gridDim.x; k++)
		for (int j = 0; j < columns; j++) {
			const int c = threadIdx.x + j * THREADS;
			if (c < 2 * WIDTH) sum[j] += __ldcg(parts + (size_t)k * 2 * WIDTH + c);
		}
	for (int j = 0; j < columns; j++) {
		const int c = threadIdx.x + j * THREADS;
		if (c < 2 * WIDTH) put(c < WIDTH ? dw + c : db + c - WIDTH, sum[j], flags);
	}
}

#define EMBED_THREADS (EMBED_GROUPS * EMBED_COLUMNS)
#define EMBED_CHUNK 8192 // rows whose tokens a block reads together
#define EMBED_EACH (EMBED_CHUNK / 1024) // masks of one of 32 parts of a chunk

// embed_back is the backward pass of both embeddings. The grid has a block for each
// EMBED_ENTRIES tokens of the vocabulary, and then one for each position, with EMBED_THREADS
// threads; blockIdx.y selects EMBED_COLUMNS columns. Each group of threads adds some of the rows,
// and the first group adds the sums of all groups.
extern "C" __global__ void __launch_bounds__(EMBED_THREADS) embed_back(
		const int* tokens, const float* dh, float* dtok, float* dpos, int rows, int flags) {
	__shared__ float sums[EMBED_ENTRIES][EMBED_THREADS];
	__shared__ unsigned masks[32][EMBED_EACH]; // which rows have a token of the block
	__shared__ unsigned short list[EMBED_CHUNK]; // these rows of a chunk, in order, and their tokens
	static_assert(EMBED_CHUNK * EMBED_ENTRIES <= 1 << 16, "a row and its token fit in 16 bits");
	const int tid = threadIdx.x, group = tid / EMBED_COLUMNS, c = blockIdx.y * EMBED_COLUMNS + tid % EMBED_COLUMNS;
	const int begin = blockIdx.x * EMBED_ENTRIES, blocks = (VOCAB + EMBED_ENTRIES - 1) / EMBED_ENTRIES;
	for (int e = 0; e < EMBED_ENTRIES; e++) sums[e][tid] = 0;
	if (blockIdx.x >= blocks) {
		const int place = blockIdx.x - blocks;
		float sum = 0;
#pragma unroll 4
		for (int row = group * CONTEXT + place; row < rows; row += EMBED_GROUPS * CONTEXT)
			if (c < WIDTH) sum += dh[(size_t)row * WIDTH + c];
		sums[0][tid] = sum;
		__syncthreads();
		if (group > 0 || c >= WIDTH) return;
		for (int k = 1; k < EMBED_GROUPS; k++) sum += sums[0][k * EMBED_COLUMNS + tid];
		put(dpos + place * WIDTH + c, sum, flags);
		return;
	}
	const int warp = tid / 32, lane = tid % 32;
	bool found = false;
	for (int base = 0; base < rows; base += EMBED_CHUNK) {
		for (int part = warp; part < 32; part += EMBED_THREADS / 32) {
			unsigned e[EMBED_EACH];
			for (int i = 0; i < EMBED_EACH; i++) {
				const int row = base + (part * EMBED_EACH + i) * 32 + lane;
				e[i] = row < rows ? tokens[line(row)] - begin : EMBED_ENTRIES;
			}
			for (int i = 0; i < EMBED_EACH; i++) {
				const unsigned mask = __ballot_sync(ALL, e[i] < EMBED_ENTRIES);
				if (lane == 0) masks[part][i] = mask;
			}
		}
		__syncthreads();
		int mine = 0; // rows of the part that has this lane's number
		for (int i = 0; i < EMBED_EACH; i++) mine += __popc(masks[lane][i]);
		for (int part = warp; part < 32; part += EMBED_THREADS / 32) {
			int at = warp_sum(lane < part ? mine : 0);
			for (int i = 0; i < EMBED_EACH; i++) {
				const unsigned mask = masks[part][i];
				const int row = (part * EMBED_EACH + i) * 32 + lane;
				if (mask >> lane & 1)
					list[at + __popc(mask & ((1u << lane) - 1))] = row * EMBED_ENTRIES + tokens[line(base + row)] - begin;
				at += __popc(mask);
			}
		}
		const int n = warp_sum(mine);
		found = found || n > 0;
		__syncthreads();
		if (c >= WIDTH) continue;
		for (int k = group; k < n; k += 4 * EMBED_GROUPS) { // four loads at once
			float x[4];
			for (int i = 0; i < 4; i++) {
				const int at = k + i * EMBED_GROUPS;
				x[i] = at < n ? dh[(size_t)(base + list[at] / EMBED_ENTRIES) * WIDTH + c] : 0;
			}
			for (int i = 0; i < 4; i++) {
				const int at = k + i * EMBED_GROUPS;
				if (at < n) sums[list[at] % EMBED_ENTRIES][tid] += x[i];
			}
		}
	}
	if (!found && flags & (ACCUMULATE | TIED)) return;
	__syncthreads();
	if (group > 0 || c >= WIDTH) return;
	for (int e = 0; e < EMBED_ENTRIES && begin + e < VOCAB; e++) {
		float sum = 0;
		for (int k = 0; k < EMBED_GROUPS; k++) sum += sums[e][k * EMBED_COLUMNS + tid];
		put(dtok + (size_t)(begin + e) * WIDTH + c, sum, flags & TIED ? ACCUMULATE : flags);
	}
}

// ---- attention: a block for each sequence, head and TILE positions, with a thread for each
// position. flash.cu is faster, if it supports the sizes. ----

#define TILE (HEAD > 64 ? 32 : 64)

// scale is exact if the columns of a head are a power of four: then a product with it needs no rounding.
__device__ __forceinline__ float scale() { return 1 / sqrtf(HEAD); }

typedef float Tile[TILE][HEAD]; // rows of a matrix, in shared memory

// A Block is the place of a block in the batch.
struct Block {
	int row, column; // of the first position, in the matrices
	int first;       // position
	int lse;         // of the first position

	__device__ Block() {
		const int tiles = (CONTEXT + TILE - 1) / TILE, head = blockIdx.x / tiles;
		row = head / HEADS * CONTEXT, column = head % HEADS * HEAD;
		first = blockIdx.x % tiles * TILE, lse = head * CONTEXT;
	}

	// fetch copies the rows of TILE positions from a matrix with that many columns. All threads call it.
	__device__ void fetch(Tile& to, const T* from, int columns, int first) const {
		for (int i = threadIdx.x; i < TILE * HEAD; i += TILE) {
			const int j = first + i / HEAD;
			to[i / HEAD][i % HEAD] = j < CONTEXT ? load(from[(size_t)(row + j) * columns + column + i % HEAD]) : 0;
		}
	}

	// get loads the row of position i.
	__device__ void get(float (&x)[HEAD], const T* from, int columns, int i) const {
		for (int d = 0; d < HEAD; d++) x[d] = load(from[(size_t)(row + i) * columns + column + d]);
	}

	__device__ void set(T* to, int columns, int i, const float (&x)[HEAD]) const {
		for (int d = 0; d < HEAD; d++) to[(size_t)(row + i) * columns + column + d] = store<T>(x[d]);
	}
};

__device__ __forceinline__ float dot(const float (&a)[HEAD], const float (&b)[HEAD]) {
	float s = 0;
	for (int d = 0; d < HEAD; d++) s += a[d] * b[d];
	return s;
}

// score is rounded as the output of a product of type T.
__device__ __forceinline__ float score(const float (&q)[HEAD], const float (&k)[HEAD]) { return rounded(dot(q, k) * scale()); }

// attention computes o = softmax(q k / sqrt(HEAD)) v with a causal mask, and lse, the
// logarithm of the sum of the exponentials of the scores of each position.
extern "C" __global__ void __launch_bounds__(TILE) attention(const T* qkv, T* o, float* lse) {
	__shared__ Tile k, v;
	const Block b;
	const int i = b.first + threadIdx.x, end = i < CONTEXT ? i + 1 : 0; // the keys that this query sees
	float q[HEAD], out[HEAD] = {}, top = LOWEST, sum = 0;
	if (end) b.get(q, qkv, 3 * WIDTH, i);
	for (int first = 0; first <= b.first; first += TILE) {
		__syncthreads();
		b.fetch(k, qkv + WIDTH, 3 * WIDTH, first);
		__syncthreads();
		for (int j = first; j < min(end, first + TILE); j++) {
			const float s = score(q, k[j - first]);
			if (s > top) sum *= expf(top - s), top = s;
			sum += expf(s - top);
		}
	}
	for (int first = 0; first <= b.first; first += TILE) {
		__syncthreads();
		b.fetch(k, qkv + WIDTH, 3 * WIDTH, first);
		b.fetch(v, qkv + 2 * WIDTH, 3 * WIDTH, first);
		__syncthreads();
		for (int j = first; j < min(end, first + TILE); j++) {
			const float p = rounded(expf(score(q, k[j - first]) - top) / sum);
			for (int d = 0; d < HEAD; d++) out[d] += p * v[j - first][d];
		}
	}
	if (!end) return;
	b.set(o, WIDTH, i, out);
	lse[b.lse + i] = top + logf(sum);
}

// attention_back is the backward pass of attention. It computes the weights again, from lse.
// Each thread computes dq of its position from all keys that it sees, and then dk and dv from all
// queries that see it.
extern "C" __global__ void __launch_bounds__(TILE) attention_back(const T* qkv, const T* o, const T* dout, const float* lse, T* dqkv) {
	__shared__ Tile left, right; // keys and values, and then queries and gradients of outputs
	__shared__ float sums[TILE], along[TILE];
	const Block b;
	const int i = b.first + threadIdx.x;
	const bool on = i < CONTEXT;
	{
		float q[HEAD], g[HEAD], dq[HEAD] = {}, mine = 0, delta = 0;
		if (on) {
			b.get(dq, o, WIDTH, i);
			b.get(q, qkv, 3 * WIDTH, i);
			b.get(g, dout, WIDTH, i);
			delta = dot(g, dq), mine = lse[b.lse + i];
			for (int d = 0; d < HEAD; d++) dq[d] = 0;
		}
		for (int first = 0; first <= b.first; first += TILE) {
			__syncthreads();
			b.fetch(left, qkv + WIDTH, 3 * WIDTH, first);
			b.fetch(right, qkv + 2 * WIDTH, 3 * WIDTH, first);
			__syncthreads();
			for (int j = first; on && j < min(i + 1, first + TILE); j++) {
				const float p = expf(score(q, left[j - first]) - mine);
				const float ds = rounded(p * (rounded(dot(g, right[j - first])) - delta) * scale());
				for (int d = 0; d < HEAD; d++) dq[d] += ds * left[j - first][d];
			}
		}
		if (on) b.set(dqkv, 3 * WIDTH, i, dq);
	}
	float k[HEAD], v[HEAD], dk[HEAD] = {}, dv[HEAD] = {};
	if (on) {
		b.get(k, qkv + WIDTH, 3 * WIDTH, i);
		b.get(v, qkv + 2 * WIDTH, 3 * WIDTH, i);
	}
	for (int first = b.first; first < CONTEXT; first += TILE) {
		__syncthreads();
		b.fetch(left, qkv, 3 * WIDTH, first);
		b.fetch(right, dout, WIDTH, first);
		const int query = first + threadIdx.x;
		if (query < CONTEXT) {
			float out[HEAD], g[HEAD];
			b.get(out, o, WIDTH, query);
			b.get(g, dout, WIDTH, query);
			along[threadIdx.x] = dot(g, out), sums[threadIdx.x] = lse[b.lse + query];
		}
		__syncthreads();
		for (int j = max(i, first); on && j < min(CONTEXT, first + TILE); j++) {
			const int at = j - first;
			const float p = expf(score(left[at], k) - sums[at]);
			const float ds = rounded(p * (rounded(dot(right[at], v)) - along[at]) * scale()), weight = rounded(p);
			for (int d = 0; d < HEAD; d++) dk[d] += ds * left[at][d], dv[d] += weight * right[at][d];
		}
	}
	if (!on) return;
	b.set(dqkv + WIDTH, 3 * WIDTH, i, dk);
	b.set(dqkv + 2 * WIDTH, 3 * WIDTH, i, dv);
}

// ---- single elements: a thread has LANES of them ----

// gelu_sigmoid returns (1 + tanh(u)) / 2 of gelu(approximate='tanh').
__device__ __forceinline__ float gelu_sigmoid(float x) {
	return reciprocal(1 + exponential(-2 * 0.7978845608f * (x + 0.044715f * x * x * x)));
}

__device__ __forceinline__ float gelu_of(float x) { return x * gelu_sigmoid(x); }

__device__ __forceinline__ float gelu_slope(float x) {
	const float s = gelu_sigmoid(x);
	return s + 2 * x * s * (1 - s) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

// elements returns the first of this thread's elements.
__device__ __forceinline__ long long elements() { return ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES; }

extern "C" __global__ void gelu(const T* x, T* y, long long n) {
	const long long at = elements();
	if (at + LANES > n) {
		for (long long i = at; i < n; i++) y[i] = store<T>(gelu_of(load(x[i])));
		return;
	}
	float v[LANES];
	load_pack<LANES>(v, x + at);
	for (int i = 0; i < LANES; i++) v[i] = gelu_of(v[i]);
	store_pack<LANES>(y + at, v);
}

// d is the gradient of gelu(x) before the kernel, and the gradient of x after it.
extern "C" __global__ void gelu_back(const T* x, T* d, long long n) {
	const long long at = elements();
	if (at + LANES > n) {
		for (long long i = at; i < n; i++) d[i] = store<T>(load(d[i]) * gelu_slope(load(x[i])));
		return;
	}
	float v[LANES], g[LANES];
	load_pack<LANES>(v, x + at);
	load_pack<LANES>(g, d + at);
	for (int i = 0; i < LANES; i++) g[i] *= gelu_slope(v[i]);
	store_pack<LANES>(d + at, g);
}

// sum (=|+=) x, in float.
extern "C" __global__ void widen(const T* x, float* sum, long long n, int flags) {
	const long long at = elements();
	if (at + LANES > n) {
		for (long long i = at; i < n; i++) put(sum + i, load(x[i]), flags);
		return;
	}
	float v[LANES];
	load_pack<LANES>(v, x + at);
	for (int i = 0; i < LANES; i += 4) {
		float s[4] = {};
		if (flags & ACCUMULATE) load_pack<4>(s, sum + at + i);
		for (int j = 0; j < 4; j++) s[j] += v[i + j];
		store_pack<4>(sum + at + i, s);
	}
}

// ---- loss, and the end of a step ----

// A Softmax is the largest of some numbers, and the sum of exp(x - top).
struct Softmax {
	float top, sum;

	// add adds the numbers of other.
	__device__ void add(Softmax other) {
		const float higher = fmaxf(top, other.top);
		sum = sum * exponential(top - higher) + other.sum * exponential(other.top - higher), top = higher;
	}
};

// cross_entropy computes loss = scale * the sum over all rows of the cross-entropy of the
// logits z and the next token. It overwrites z with the gradient of the loss. A block with
// LOSS_THREADS threads has a row; the last block adds the losses of all rows.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS) cross_entropy(T* z, const int* tokens, float* loss, float* parts,
		unsigned* count, float scale, int rows, int flags) {
	__shared__ Softmax warps[LOSS_THREADS / 32];
	const int tid = threadIdx.x, row = blockIdx.x, want = tokens[line(row) + 1];
	const int n = VOCAB % LANES ? 1 : LANES; // elements of a thread that are side by side
	T* at = z + (size_t)row * VOCAB;
	const float wanted = load(at[want]);
	Softmax all = {LOWEST, 0};
	for (int c = tid * n; c < VOCAB; c += LOSS_THREADS * n) {
		float x[n];
		load_pack<n>(x, at + c);
		Softmax these = {x[0], 0};
		for (int i = 1; i < n; i++) these.top = fmaxf(these.top, x[i]);
		for (int i = 0; i < n; i++) these.sum += exponential(x[i] - these.top);
		all.add(these);
	}
	for (int other = 16; other > 0; other /= 2)
		all.add(Softmax{__shfl_xor_sync(ALL, all.top, other), __shfl_xor_sync(ALL, all.sum, other)});
	if (tid % 32 == 0) warps[tid / 32] = all;
	__syncthreads();
	all = warps[0];
	for (int k = 1; k < LOSS_THREADS / 32; k++) all.add(warps[k]);
	const float factor = scale / all.sum;
	for (int c = tid * n; c < VOCAB; c += LOSS_THREADS * n) {
		float x[n];
		load_pack<n>(x, at + c);
		for (int i = 0; i < n; i++) x[i] = exponential(x[i] - all.top) * factor - (c + i == want ? scale : 0);
		store_pack<n>(at + c, x);
	}
	if (tid == 0) parts[row] = all.top - wanted + logf(all.sum);
	if (!last_block(count)) return;
	float mine = 0;
	for (int k = tid; k < rows; k += LOSS_THREADS) mine += __ldcg(parts + k);
	mine = warp_sum(mine);
	if (tid % 32 == 0) warps[tid / 32].sum = mine;
	__syncthreads();
	if (tid > 0) return;
	for (int k = 1; k < LOSS_THREADS / 32; k++) mine += warps[k].sum;
	put(loss, scale * mine, flags);
}

// end_step writes the loss and the norm of the gradients to the log, which has room for n
// steps, and counts the step. It sets both learning rates of the next step, which grow to peak
// in warmup steps. One thread runs it.
extern "C" __global__ void end_step(const float* loss, const float* norm, int* step, float* log, int n,
		double* rate, double* other, double peak, int warmup) {
	const int s = *step;
	if (s < n) log[2 * s] = *loss, log[2 * s + 1] = *norm;
	*step = s + 1;
	*rate = *other = s + 2 < warmup ? peak * ((double)(s + 2) / warmup) : peak;
}
