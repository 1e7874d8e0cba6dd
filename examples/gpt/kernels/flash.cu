// Causal attention of bfloat16 on tensor cores: flash attention for heads of 64 columns. A row of
// qkv has the queries of all heads, then the keys, then the values. Weights are computed tile by
// tile and never stored. The backward pass computes them again from lse, the logarithm of each
// row's sum: one kernel for the gradients of the queries, and one for those of keys and values, so
// that every sum has a fixed order and runs repeat exactly.
//
// A block has 4 warps and the 64 rows of a tile; a warp has 16 of these rows. The other side of
// the product passes through shared memory: a tile is copied while the one before is used. The
// parts of a tile and the limits of registers are those that were fastest on an H200.

typedef unsigned int u32;
struct bf16 { unsigned short bits; };

#define HEAD 64          // columns of a head
#define TILE 64          // rows of a tile
#define STEPS (HEAD / 16) // of the tensor cores along a row
#define FLASH_THREADS 128
#define LOWEST -3.402823466e38f
#define SCALE 0.125f // 1 / sqrt(HEAD): a product with it is exact
#define LOG2E 1.4426950408889634f

// A fragment of A has 16 rows and 16 columns, in a warp: lane l has columns 2*(l%4) and the next,
// and those + 8, of rows l/4 and l/4+8. A fragment of C has 8 columns: 2*(l%4) and the next.
typedef u32 FragA[4];
typedef float FragC[4];

// multiply computes c += a·b, where b has 16 rows and 8 columns.
__device__ __forceinline__ void multiply(FragC& c, const FragA& a, u32 b0, u32 b1) {
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		: "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// pack rounds two floats to bfloat16; x is in the lower half.
__device__ __forceinline__ u32 pack(float x, float y) {
	u32 r;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
	return r;
}

__device__ __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

__device__ __forceinline__ float power2(float x) {
	float y;
	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

// A Tile is 64 rows of 64 columns in shared memory. The pieces of 16 bytes of a row are permuted, so
// that 8 rows of a column of pieces are in different banks.
struct Tile {
	uint4 pieces[TILE * 8];

	__device__ __forceinline__ u32 at(int row, int piece) const {
		return (u32)__cvta_generic_to_shared(pieces + row * 8 + (piece ^ (row & 7)));
	}

	// load begins to copy 64 rows from src. All threads of the block call it.
	__device__ __forceinline__ void load(const bf16* src, size_t stride) {
#pragma unroll
		for (int i = threadIdx.x; i < TILE * 8; i += FLASH_THREADS) {
			const int row = i / 8, piece = i % 8;
			asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(row, piece)), "l"(src + row * stride + piece * 8) : "memory");
		}
	}

	// rows loads the fragments of b for a product with the transposed tile: 16 rows of the tile are
	// 16 columns of b, b[0] and b[1] the first 8 of them. Step is the 16 columns of the tile.
	__device__ __forceinline__ void rows(u32 (&b)[4], int row, int step) const {
		const int l = threadIdx.x % 32;
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
			: "r"(at(row + l % 8 + l / 16 * 8, step * 2 + l / 8 % 2)) : "memory");
	}

	// columns loads the fragments of b for a product with the tile itself: 16 rows from row on, and 16
	// columns, b[0] and b[1] the first 8 of them.
	__device__ __forceinline__ void columns(u32 (&b)[4], int row, int step) const {
		const int l = threadIdx.x % 32;
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
			: "r"(at(row + l % 16, step * 2 + l / 16)) : "memory");
	}
};

// commit ends a group of copies, and await waits until at most n groups have not ended. A barrier
// must follow, because other threads have made a part of the copies.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void await() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// A Place is where a block and a lane work.
struct Place {
	size_t stride; // of qkv, in elements
	size_t first;  // row of the sequence in the matrices
	int column;    // of the head
	int tile;      // of the block
	int row;       // of the lane, in the sequence: this one and the one + 8
	int pair;      // of columns of the lane
	size_t stats;  // first element of the sequence and head in lse

	// Blocks with more work begin first: the greatest tile for a loop over the keys before it, and
	// the smallest for a loop over the queries behind it.
	__device__ __forceinline__ Place(int context, int heads, bool down) {
		const int width = heads * HEAD, sequence = blockIdx.y / heads, head = blockIdx.y % heads;
		stride = 3 * (size_t)width;
		first = (size_t)sequence * context;
		column = head * HEAD;
		tile = down ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
		row = tile * TILE + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
		pair = threadIdx.x % 4 * 2;
		stats = (size_t)blockIdx.y * context;
	}

	// read loads the rows of the warp from a matrix whose column begins at base.
	__device__ __forceinline__ void read(FragA (&to)[STEPS], const bf16* base, size_t stride) const {
		const bf16* at = base + row * stride + pair;
		for (int k = 0; k < STEPS; k++) {
			to[k][0] = *(const u32*)(at + k * 16), to[k][1] = *(const u32*)(at + 8 * stride + k * 16);
			to[k][2] = *(const u32*)(at + k * 16 + 8), to[k][3] = *(const u32*)(at + 8 * stride + k * 16 + 8);
		}
	}

	// write stores the rows of the warp, each scaled.
	__device__ __forceinline__ void write(bf16* base, size_t stride, const FragC (&from)[HEAD / 8], float scale0, float scale1) const {
		bf16* at = base + row * stride + pair;
		for (int j = 0; j < HEAD / 8; j++) {
			*(u32*)(at + j * 8) = pack(from[j][0] * scale0, from[j][1] * scale0);
			*(u32*)(at + 8 * stride + j * 8) = pack(from[j][2] * scale1, from[j][3] * scale1);
		}
	}
};

// scores computes c = a·tileᵀ for N rows of the tile from row on.
template <int N> __device__ __forceinline__ void scores(FragC (&c)[N / 8], const FragA (&a)[STEPS], const Tile& tile, int row) {
	for (int j = 0; j < N / 8; j++)
		for (int i = 0; i < 4; i++) c[j][i] = 0;
#pragma unroll
	for (int k = 0; k < STEPS; k++)
#pragma unroll
		for (int j = 0; j < N / 16; j++) {
			u32 b[4];
			tile.rows(b, row + j * 16, k);
			multiply(c[2 * j], a[k], b[0], b[1]);
			multiply(c[2 * j + 1], a[k], b[2], b[3]);
		}
}

// add computes sum += weights·tile, with the N rows of the tile from row on. Weights are rounded.
template <int N> __device__ __forceinline__ void add(FragC (&sum)[HEAD / 8], const FragC (&weights)[N / 8], const Tile& tile, int row) {
#pragma unroll
	for (int k = 0; k < N / 16; k++) {
		const FragC &x = weights[2 * k], &y = weights[2 * k + 1];
		const FragA a = {pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3])};
#pragma unroll
		for (int j = 0; j < HEAD / 16; j++) {
			u32 b[4];
			tile.columns(b, row + k * 16, j);
			multiply(sum[2 * j], a, b[0], b[1]);
			multiply(sum[2 * j + 1], a, b[2], b[3]);
		}
	}
}

// row_max and row_sum combine the values of the 4 lanes that have a row.
__device__ __forceinline__ float row_max(float x) {
	x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
	return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
	x += __shfl_xor_sync(0xffffffff, x, 1);
	return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// flash computes o and lse. The grid has a column of tiles for each sequence and head.
extern "C" __global__ void __launch_bounds__(FLASH_THREADS, 4) flash(const bf16* qkv, bf16* o, float* lse, int context, int heads) {
	__shared__ Tile keys[2], values[2];
	const Place at(context, heads, true);
	const bf16* in = qkv + at.first * at.stride + at.column;
	const bf16 *k = in + heads * HEAD, *v = k + heads * HEAD;
	keys[0].load(k, at.stride), values[0].load(v, at.stride), commit();
	FragA q[STEPS];
	at.read(q, in, at.stride);
	const float scale = SCALE * LOG2E;
	float top[2] = {LOWEST, LOWEST}, sum[2] = {0, 0};
	FragC out[HEAD / 8] = {};
	for (int t = 0; t <= at.tile; t++) {
		if (t < at.tile) {
			const size_t next = (size_t)(t + 1) * TILE * at.stride;
			keys[(t + 1) & 1].load(k + next, at.stride), values[(t + 1) & 1].load(v + next, at.stride);
		}
		commit(), await<1>();
		__syncthreads();
		FragC s[TILE / 8];
		scores<TILE>(s, q, keys[t & 1], 0);
		if (t == at.tile)
			for (int j = 0; j < TILE / 8; j++)
				for (int i = 0; i < 4; i++)
					if (t * TILE + j * 8 + at.pair + i % 2 > at.row + i / 2 * 8) s[j][i] = LOWEST;
		for (int half = 0; half < 2; half++) {
			float most = top[half];
			for (int j = 0; j < TILE / 8; j++) most = fmaxf(most, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
			most = row_max(most);
			const float shrink = power2((top[half] - most) * scale), bias = most * scale;
			top[half] = most;
			float mine = 0;
			for (int j = 0; j < TILE / 8; j++)
				for (int i = 2 * half; i < 2 * half + 2; i++) mine += s[j][i] = power2(s[j][i] * scale - bias);
			sum[half] = sum[half] * shrink + mine;
			for (int j = 0; j < HEAD / 8; j++) out[j][2 * half] *= shrink, out[j][2 * half + 1] *= shrink;
		}
		add<TILE>(out, s, values[t & 1], 0);
		__syncthreads();
	}
	for (int half = 0; half < 2; half++) {
		sum[half] = row_sum(sum[half]);
		if (at.pair == 0) lse[at.stats + at.row + half * 8] = top[half] * SCALE + logf(sum[half]);
	}
	const size_t width = heads * HEAD;
	at.write(o + at.first * width + at.column, width, out, 1 / sum[0], 1 / sum[1]);
}

// flash_queries computes the gradients of the queries, and along, the products of each row of o
// with its gradient.
extern "C" __global__ void __launch_bounds__(FLASH_THREADS, 3) flash_queries(
		const bf16* qkv, const bf16* o, const bf16* dout, const float* lse, float* along, bf16* dqkv, int context, int heads) {
	__shared__ Tile keys[2], values[2];
	const Place at(context, heads, true);
	const size_t width = heads * HEAD, out = at.first * width + at.column;
	const bf16* in = qkv + at.first * at.stride + at.column;
	const bf16 *k = in + width, *v = k + width;
	keys[0].load(k, at.stride), values[0].load(v, at.stride), commit();
	FragA q[STEPS], g[STEPS];
	float delta[2] = {0, 0}, bias[2];
	at.read(q, o + out, width);
	at.read(g, dout + out, width);
	for (int step = 0; step < STEPS; step++)
		for (int i = 0; i < 4; i++) delta[i % 2] += low(q[step][i]) * low(g[step][i]) + high(q[step][i]) * high(g[step][i]);
	for (int half = 0; half < 2; half++) {
		delta[half] = row_sum(delta[half]);
		bias[half] = lse[at.stats + at.row + half * 8] * LOG2E;
		if (at.pair == 0) along[at.stats + at.row + half * 8] = delta[half];
	}
	at.read(q, in, at.stride);
	const float scale = SCALE * LOG2E;
	FragC dq[HEAD / 8] = {};
	for (int t = 0; t <= at.tile; t++) {
		if (t < at.tile) {
			const size_t next = (size_t)(t + 1) * TILE * at.stride;
			keys[(t + 1) & 1].load(k + next, at.stride), values[(t + 1) & 1].load(v + next, at.stride);
		}
		commit(), await<1>();
		__syncthreads();
#pragma unroll
		for (int part = 0; part < TILE; part += 32) {
			FragC s[4], ds[4];
			scores<32>(s, q, keys[t & 1], part);
			scores<32>(ds, g, values[t & 1], part);
			for (int j = 0; j < 4; j++)
				for (int i = 0; i < 4; i++) {
					const bool seen = t < at.tile || t * TILE + part + j * 8 + at.pair + i % 2 <= at.row + i / 2 * 8;
					ds[j][i] = seen ? power2(s[j][i] * scale - bias[i / 2]) * (ds[j][i] - delta[i / 2]) : 0;
				}
			add<32>(dq, ds, keys[t & 1], part);
		}
		__syncthreads();
	}
	at.write(dqkv + at.first * at.stride + at.column, at.stride, dq, SCALE, SCALE);
}

// flash_keys computes the gradients of keys and values, after flash_queries.
extern "C" __global__ void __launch_bounds__(FLASH_THREADS, 3) flash_keys(
		const bf16* qkv, const bf16* dout, const float* lse, const float* along, bf16* dqkv, int context, int heads) {
	__shared__ Tile queries[2], gradients[2];
	__shared__ float biases[2][TILE], deltas[2][TILE];
	const Place at(context, heads, false);
	const size_t width = heads * HEAD;
	const bf16 *q = qkv + at.first * at.stride + at.column, *g = dout + at.first * width + at.column;
	FragA k[STEPS], v[STEPS];
	const int tiles = context / TILE;
	auto load = [&](int t) {
		const int slot = t & 1, i = threadIdx.x;
		queries[slot].load(q + (size_t)t * TILE * at.stride, at.stride);
		gradients[slot].load(g + (size_t)t * TILE * width, width);
		if (i < TILE) biases[slot][i] = lse[at.stats + t * TILE + i] * LOG2E;
		else deltas[slot][i - TILE] = along[at.stats + t * TILE + i - TILE];
	};
	load(at.tile), commit();
	at.read(k, q + width, at.stride);
	at.read(v, q + 2 * width, at.stride);
	const float scale = SCALE * LOG2E;
	FragC dk[HEAD / 8] = {}, dv[HEAD / 8] = {};
	for (int t = at.tile; t < tiles; t++) {
		if (t + 1 < tiles) load(t + 1);
		commit(), await<1>();
		__syncthreads();
		const int slot = t & 1;
#pragma unroll
		for (int part = 0; part < TILE; part += 16) {
			FragC p[2], ds[2];
			scores<16>(p, k, queries[slot], part);
			scores<16>(ds, v, gradients[slot], part);
			for (int j = 0; j < 2; j++)
				for (int i = 0; i < 4; i++) {
					const int c = part + j * 8 + at.pair + i % 2;
					const bool seen = t > at.tile || t * TILE + c >= at.row + i / 2 * 8;
					p[j][i] = seen ? power2(p[j][i] * scale - biases[slot][c]) : 0;
					ds[j][i] = p[j][i] * (ds[j][i] - deltas[slot][c]);
				}
			add<16>(dv, p, gradients[slot], part);
			add<16>(dk, ds, queries[slot], part);
		}
		__syncthreads();
	}
	bf16* to = dqkv + at.first * at.stride + at.column + width;
	at.write(to, at.stride, dk, SCALE, SCALE);
	at.write(to + width, at.stride, dv, 1, 1);
}
