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
	const unsigned u = __float_as_uint(x);
	return bf16{x != x ? (unsigned short)0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

// rounded returns x rounded to the type of activations.
__device__ __forceinline__ float rounded(float x) { return load(store<T>(x)); }

#define THREADS 256 // of a block, unless the kernel's comment names another number
#define WARPS (THREADS / 32)
#define HEAD (WIDTH / HEADS) // columns of a head
#define PER (WIDTH / 32)     // columns of a lane: lane, lane + 32, ...
#define LOWEST -3.402823466e38f

// Flags of the kernels of the backward pass.
#define ACCUMULATE 1 // add to the gradient of the micro-batches before
#define RESIDUAL 2   // add to the gradient that is already in dh

// ---- sums ----

// warp_sum returns the sum over the lanes of the warp, in all lanes. All lanes call it.
__device__ float warp_sum(float x) {
	for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(0xffffffff, x, other);
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
	standardize(x);
	for (int i = 0; i < PER; i++) {
		const int c = lane + 32 * i;
		a[c] = store<T>(x[i] * w[c] + b[c]);
	}
}

// line returns the index of the token that a row of the batch reads. The row predicts the
// next token. Each sequence has CONTEXT + 1 tokens, and CONTEXT rows.
__device__ int line(int row) { return row / CONTEXT * (CONTEXT + 1) + row % CONTEXT; }

// h = tok[token] + pos[place]; a = layer_norm(h).
extern "C" __global__ void embed_norm(const int* tokens, const float* tok, const float* pos, float* h,
		const float* w, const float* b, T* a, int rows) {
	const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
	if (row >= rows) return;
	const float *word = tok + tokens[line(row)] * WIDTH, *place = pos + row % CONTEXT * WIDTH;
	float x[PER];
	for (int i = 0; i < PER; i++) {
		const int c = lane + 32 * i;
		h[row * WIDTH + c] = x[i] = word[c] + place[c];
	}
	layer_norm(x, w, b, a + row * WIDTH, lane);
}

// h = before + y; a = layer_norm(h).
extern "C" __global__ void add_norm(const float* before, const T* y, float* h, const float* w, const float* b, T* a,
		int rows) {
	const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
	if (row >= rows) return;
	float x[PER];
	for (int i = 0; i < PER; i++) {
		const int at = row * WIDTH + lane + 32 * i;
		h[at] = x[i] = before[at] + load(y[at]);
	}
	layer_norm(x, w, b, a + row * WIDTH, lane);
}

// norm_back is the backward pass of a = layer_norm(h). It computes dh, dw and db from da. dy
// is dh in type T: the gradient of the product that was added to h. A block has NORM_ROWS
// rows and stores its sums for dw and db in parts; the last block adds the parts.
extern "C" __global__ void norm_back(const T* da, const float* h, const float* w, float* dh, T* dy,
		float* dw, float* db, float* parts, unsigned* count, int rows, int flags) {
	__shared__ float sums[2 * WIDTH][WARPS];
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	float sw[PER] = {}, sb[PER] = {};
	for (int k = warp; k < NORM_ROWS; k += WARPS) {
		const int row = blockIdx.x * NORM_ROWS + k;
		if (row >= rows) break;
		float x[PER], g[PER], mean = 0, along = 0;
		for (int i = 0; i < PER; i++) x[i] = h[row * WIDTH + lane + 32 * i];
		const float inverse = standardize(x);
		for (int i = 0; i < PER; i++) {
			const float d = load(da[row * WIDTH + lane + 32 * i]);
			sw[i] += d * x[i], sb[i] += d;
			g[i] = d * w[lane + 32 * i];
			mean += g[i], along += g[i] * x[i];
		}
		mean = warp_sum(mean) / WIDTH, along = warp_sum(along) / WIDTH;
		for (int i = 0; i < PER; i++) {
			const int at = row * WIDTH + lane + 32 * i;
			const float d = inverse * (g[i] - mean - x[i] * along) + (flags & RESIDUAL ? dh[at] : 0);
			dh[at] = d;
			dy[at] = store<T>(d);
		}
	}
	for (int i = 0; i < PER; i++) sums[lane + 32 * i][warp] = sw[i], sums[WIDTH + lane + 32 * i][warp] = sb[i];
	__syncthreads();
	for (int c = threadIdx.x; c < 2 * WIDTH; c += THREADS) {
		float sum = 0;
		for (int k = 0; k < WARPS; k++) sum += sums[c][k];
		parts[blockIdx.x * 2 * WIDTH + c] = sum;
	}
	if (!last_block(count)) return;
	for (int c = threadIdx.x; c < 2 * WIDTH; c += THREADS) {
		float sum = 0;
		for (int k = 0; k < gridDim.x; k++) sum += __ldcg(parts + k * 2 * WIDTH + c);
		put(c < WIDTH ? dw + c : db + c - WIDTH, sum, flags);
	}
}

// embed_back is the backward pass of both embeddings. The grid has a block for each token of
// the vocabulary and for each position, with EMBED_GROUPS groups of WIDTH threads. Each group
// adds some of the rows, and the first group adds the sums of all groups.
extern "C" __global__ void __launch_bounds__(EMBED_GROUPS * WIDTH) embed_back(
		const int* tokens, const float* dh, float* dtok, float* dpos, int rows, int flags) {
	__shared__ float sums[EMBED_GROUPS][WIDTH];
	const int group = threadIdx.x / WIDTH, c = threadIdx.x % WIDTH;
	const int token = blockIdx.x, place = token - VOCAB; // negative in the blocks of tokens
	float sum = 0;
	if (place >= 0)
		for (int row = group * CONTEXT + place; row < rows; row += EMBED_GROUPS * CONTEXT) sum += dh[row * WIDTH + c];
	else
		for (int row = group; row < rows; row += EMBED_GROUPS)
			if (tokens[line(row)] == token) sum += dh[row * WIDTH + c];
	sums[group][c] = sum;
	__syncthreads();
	if (group > 0) return;
	for (int k = 1; k < EMBED_GROUPS; k++) sum += sums[k][c];
	put(place >= 0 ? dpos + place * WIDTH + c : dtok + token * WIDTH + c, sum, flags);
}

// ---- attention: a block for each sequence and head, with ATTENTION_THREADS threads; thread i
// computes position i ----

// A Heads is the input of a block: the query of this thread's position, and in shared memory
// the keys and values of all positions. All threads of the block construct it.
struct Heads {
	float q[HEAD];
	float (*k)[HEAD], (*v)[HEAD];
	int row, column; // of the first position, in the matrix of queries, keys and values

	__device__ Heads(const T* qkv, float (*k)[HEAD], float (*v)[HEAD]) : k(k), v(v) {
		row = blockIdx.x / HEADS * CONTEXT, column = blockIdx.x % HEADS * HEAD;
		for (int i = threadIdx.x; i < CONTEXT * HEAD; i += ATTENTION_THREADS) {
			const T* at = qkv + (row + i / HEAD) * 3 * WIDTH + column + i % HEAD;
			k[i / HEAD][i % HEAD] = load(at[WIDTH]);
			v[i / HEAD][i % HEAD] = load(at[2 * WIDTH]);
		}
		if (threadIdx.x < CONTEXT)
			for (int d = 0; d < HEAD; d++) q[d] = load(qkv[(row + threadIdx.x) * 3 * WIDTH + column + d]);
		__syncthreads();
	}

	// weights computes the attention weights of this thread's query: the softmax of its scores
	// over the positions up to its own one.
	__device__ void weights(float* p) const {
		float top = LOWEST, sum = 0;
		for (int j = 0; j <= threadIdx.x; j++) {
			float s = 0;
			for (int d = 0; d < HEAD; d++) s += q[d] * k[j][d];
			p[j] = rounded(s * scale());
			top = fmaxf(top, p[j]);
		}
		for (int j = 0; j <= threadIdx.x; j++) sum += p[j] = expf(p[j] - top);
		for (int j = 0; j <= threadIdx.x; j++) p[j] /= sum;
	}

	// scale is a power of two, so that a product with it needs no rounding.
	static __device__ float scale() { return 1 / sqrtf(HEAD); }
};

// attention computes o = softmax(q k / sqrt(HEAD)) v with a causal mask.
extern "C" __global__ void attention(const T* qkv, T* o) {
	__shared__ float k[CONTEXT][HEAD], v[CONTEXT][HEAD], p[CONTEXT][CONTEXT];
	const Heads in(qkv, k, v);
	const int i = threadIdx.x;
	if (i >= CONTEXT) return;
	in.weights(p[i]);
	float sum[HEAD] = {};
	for (int j = 0; j <= i; j++) {
		const float weight = rounded(p[i][j]);
		for (int d = 0; d < HEAD; d++) sum[d] += weight * v[j][d];
	}
	for (int d = 0; d < HEAD; d++) o[(in.row + i) * WIDTH + in.column + d] = store<T>(sum[d]);
}

// attention_back is the backward pass of attention. It computes the weights again. Thread i
// computes dq of position i, and after a barrier dk and dv of position i.
extern "C" __global__ void attention_back(const T* qkv, const T* dout, T* dqkv) {
	__shared__ float q[CONTEXT][HEAD], k[CONTEXT][HEAD], v[CONTEXT][HEAD], g[CONTEXT][HEAD];
	__shared__ float p[CONTEXT][CONTEXT], ds[CONTEXT][CONTEXT]; // weights, and gradients of the scores
	const Heads in(qkv, k, v);
	const int i = threadIdx.x;
	T* out = dqkv + (in.row + i) * 3 * WIDTH + in.column;
	if (i < CONTEXT) {
		float mine[HEAD], along = 0, sum[HEAD] = {};
		for (int d = 0; d < HEAD; d++) {
			q[i][d] = in.q[d];
			g[i][d] = mine[d] = load(dout[(in.row + i) * WIDTH + in.column + d]);
		}
		in.weights(p[i]);
		for (int j = 0; j <= i; j++) {
			float s = 0;
			for (int d = 0; d < HEAD; d++) s += mine[d] * v[j][d];
			ds[i][j] = rounded(s);
			along += p[i][j] * ds[i][j];
		}
		for (int j = 0; j <= i; j++) {
			ds[i][j] = rounded(p[i][j] * (ds[i][j] - along) * in.scale());
			p[i][j] = rounded(p[i][j]);
			for (int d = 0; d < HEAD; d++) sum[d] += ds[i][j] * k[j][d];
		}
		for (int d = 0; d < HEAD; d++) out[d] = store<T>(sum[d]);
	}
	__syncthreads();
	if (i >= CONTEXT) return;
	float dk[HEAD] = {}, dv[HEAD] = {};
	for (int j = 0; j < CONTEXT; j++) {
		if (j < i) continue; // this query does not see the key; all threads are at the same j
		for (int d = 0; d < HEAD; d++) dk[d] += ds[j][i] * q[j][d], dv[d] += p[j][i] * g[j][d];
	}
	for (int d = 0; d < HEAD; d++) out[WIDTH + d] = store<T>(dk[d]), out[2 * WIDTH + d] = store<T>(dv[d]);
}

// ---- single elements ----

// gelu_inner is the argument of tanh in gelu(approximate='tanh').
__device__ float gelu_inner(float x) { return 0.7978845608f * (x + 0.044715f * x * x * x); }

extern "C" __global__ void gelu(const T* x, T* y, int n) {
	const int i = blockIdx.x * THREADS + threadIdx.x;
	if (i >= n) return;
	const float v = load(x[i]);
	y[i] = store<T>(0.5f * v * (1 + tanhf(gelu_inner(v))));
}

// d is the gradient of gelu(x) before the kernel, and the gradient of x after it.
extern "C" __global__ void gelu_back(const T* x, T* d, int n) {
	const int i = blockIdx.x * THREADS + threadIdx.x;
	if (i >= n) return;
	const float v = load(x[i]), t = tanhf(gelu_inner(v));
	const float slope = 0.5f * (1 + t) + 0.5f * v * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * v * v);
	d[i] = store<T>(load(d[i]) * slope);
}

// sum (=|+=) x, in float.
extern "C" __global__ void widen(const T* x, float* sum, int n, int flags) {
	const int i = blockIdx.x * THREADS + threadIdx.x;
	if (i < n) put(sum + i, load(x[i]), flags);
}

// ---- loss, and the end of a step ----

// cross_entropy computes loss = scale * the sum over all rows of the cross-entropy of the
// logits z and the next token. It overwrites z with the gradient of the loss. Each thread has
// a row; the last block adds the sums of all blocks.
extern "C" __global__ void cross_entropy(T* z, const int* tokens, float* loss, float* parts, unsigned* count,
		float scale, int rows, int flags) {
	__shared__ float sums[WARPS];
	const int row = blockIdx.x * THREADS + threadIdx.x;
	float mine = 0;
	if (row < rows) {
		T* at = z + row * VOCAB;
		const int want = tokens[line(row) + 1];
		float x[VOCAB], top = LOWEST, sum = 0;
		for (int c = 0; c < VOCAB; c++) x[c] = load(at[c]), top = fmaxf(top, x[c]);
		mine = top - load(at[want]);
		for (int c = 0; c < VOCAB; c++) sum += x[c] = expf(x[c] - top);
		mine += logf(sum);
		for (int c = 0; c < VOCAB; c++) at[c] = store<T>(scale * (x[c] / sum - (c == want)));
	}
	mine = warp_sum(mine);
	if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
	__syncthreads();
	if (threadIdx.x == 0) {
		mine = 0;
		for (int k = 0; k < WARPS; k++) mine += sums[k];
		parts[blockIdx.x] = mine;
	}
	if (!last_block(count) || threadIdx.x > 0) return;
	mine = 0;
	for (int k = 0; k < gridDim.x; k++) mine += __ldcg(parts + k);
	put(loss, scale * mine, flags);
}

// end_step writes the loss and the norm of the gradients to the log, which has room for n
// steps, and counts the step. It sets the learning rate of the next step, which grows to peak
// in warmup steps. One thread runs it.
extern "C" __global__ void end_step(const float* loss, const float* norm, int* step, float* log, int n,
		double* rate, double peak, int warmup) {
	const int s = *step;
	if (s < n) log[2 * s] = *loss, log[2 * s + 1] = *norm;
	*step = s + 1;
	*rate = s + 2 < warmup ? peak * ((double)(s + 2) / warmup) : peak;
}
