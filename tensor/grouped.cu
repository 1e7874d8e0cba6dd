// Matrix products of groups whose sizes are on the device. A group is a range of the rows of a and c,
// or of the inner dimension; ends has the ends of the ranges. Each block computes one tile of c after
// the other and finds its tiles by reading ends, so that the grid does not depend on the sizes.
//
// ELEMENT is the type of a and b: 16 (float16), 17 (bfloat16) or 32 (float32). A_INNER says that the
// elements of a are adjacent along the inner dimension, and B_INNER the same of b. TILE_M is the number
// of rows of a tile.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define TILE_N 128

// The flags of a launch.
enum {
	INNER = 1,     // groups are ranges of the inner dimension, otherwise of rows
	SEPARATE = 2,  // each group has its own matrices and begins at 0, otherwise where the one before ends
	FLOATS = 4,    // c is float32 in any case
	ALIGNED_A = 8, // elements of a that are adjacent are aligned, as pieces of 16 bytes
	ALIGNED_B = 16,
	ALIGNED_C = 32,
};

// A Matrix is a, or b transposed, so that both have a row for each row or column of c, and a column for
// each element of the inner dimension. Elements are adjacent along x: the inner dimension or the rows.
struct Matrix {
	const char* at;
	i64 ld, step; // elements between lines of adjacent elements, and between the matrices of groups
	bool aligned;
};

// A Range is the part [lo, hi) of a dimension.
struct Range {
	int lo, hi;
};

// A Work is a tile that a block computes: rows and columns of c, and the inner dimension.
struct Work {
	u32 group;
	bool found;
	int row, column; // first ones of the tile; a row before rows.lo does not belong to the group
	Range rows, inner;
};

// ---- the walk over the tiles ----

template <class T> static __device__ __forceinline__ T scan_sum(T x) {
	for (int o = 1; o < 32; o *= 2) {
		const T y = __shfl_up_sync(0xffffffff, x, o);
		if (threadIdx.x % 32 >= o) x += y;
	}
	return x;
}
static __device__ __forceinline__ int scan_max(int x) {
	for (int o = 1; o < 32; o *= 2) {
		const int y = __shfl_up_sync(0xffffffff, x, o);
		if (threadIdx.x % 32 >= o) x = max(x, y);
	}
	return x;
}

// A Walk finds tiles in ascending order. The lanes of a warp have 32 groups at a time.
struct Walk {
	const int* ends;
	u32 groups, flags;
	int m, n, k;
	u32 first;  // group of lane 0
	u64 before; // tiles of the groups before first
	int end;    // of these groups

	// origin is the first row of the first tile of a group. Pieces of a must be aligned.
	static __device__ __forceinline__ int origin(int begin) { return A_INNER ? begin : begin & ~7; }

	// find finds tile t, which is not before the tile of the last call. Ends are limited to the dimension,
	// and an end before that of an earlier group counts as that one: the groups are never out of bounds and
	// do not overlap, whatever ends has.
	__device__ __forceinline__ Work find(u64 t) {
		const u32 lane = threadIdx.x % 32, wide = (u32)(((u64)n + TILE_N - 1) / TILE_N);
		const int limit = flags & INNER ? k : m;
		for (;; first += 32) {
			Work w;
			w.found = false;
			if (first >= groups) return w;
			int e = first + lane < groups ? ends[first + lane] : 0;
			e = min(max(e, 0), limit);
			int begin = 0;
			if (!(flags & SEPARATE)) {
				e = max(scan_max(e), end);
				begin = __shfl_up_sync(0xffffffff, e, 1);
				if (lane == 0) begin = end;
			}
			const Range part = {begin, e};
			w.rows = flags & INNER ? Range{0, m} : part;
			w.inner = flags & INNER ? part : Range{0, k};
			const u32 high = w.rows.hi > w.rows.lo ? (u32)(w.rows.hi - origin(w.rows.lo) + TILE_M - 1) / TILE_M : 0;
			const u64 tiles = first + lane < groups ? (u64)high * wide : 0, sum = before + scan_sum(tiles);
			const u32 has = __ballot_sync(0xffffffff, t < sum);
			if (has == 0) {
				before = __shfl_sync(0xffffffff, sum, 31);
				end = __shfl_sync(0xffffffff, e, 31);
				continue;
			}
			// Blocks that run at the same time use the same rows and columns: 8 rows of tiles, column by column.
			const u64 i = t - (sum - tiles), panel = (u64)8 * wide;
			const u32 top = (u32)(i / (high ? panel : 1)) * 8, rest = (u32)(i % panel), in = max(min(8u, high - top), 1u);
			w.row = origin(w.rows.lo) + (int)(top + rest % in) * TILE_M;
			w.column = (int)(rest / in) * TILE_N;
			const int from = __ffs((int)has) - 1;
			w.group = first + from;
			w.found = true;
			w.row = __shfl_sync(0xffffffff, w.row, from), w.column = __shfl_sync(0xffffffff, w.column, from);
			w.rows.lo = __shfl_sync(0xffffffff, w.rows.lo, from), w.rows.hi = __shfl_sync(0xffffffff, w.rows.hi, from);
			w.inner.lo = __shfl_sync(0xffffffff, w.inner.lo, from), w.inner.hi = __shfl_sync(0xffffffff, w.inner.hi, from);
			return w;
		}
	}
};

// ---- tensor cores ----

#if ELEMENT != 32
typedef unsigned short Element;
#define THREADS 128
#define TILE_K 32
#define STAGES 4
#define WARP_M 64 // rows of a warp
#define WARP_N (TILE_N / (4 / (TILE_M / WARP_M)))
#define PIECE 8 // elements in 16 bytes

#ifdef __CUDACC__
static __device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// copy_async begins to copy 16 bytes, or writes zeros if bytes is 0.
static __device__ __forceinline__ void copy_async(void* to, const void* from, u32 bytes) {
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> static __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
static __device__ __forceinline__ void load_matrices(u32 (&x)[4], const void* row) {
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
		: "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
static __device__ __forceinline__ void load_transposed(u32 (&x)[4], const void* row) {
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
		: "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
#if ELEMENT == 16
static __device__ __forceinline__ void multiply_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
	asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		: "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ float half_value(unsigned short bits) {
	float x;
	asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
	return x;
}
static __device__ __forceinline__ unsigned short half_bits(float x) {
	unsigned short bits;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
	return bits;
}
#else
static __device__ __forceinline__ void multiply_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
	asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		: "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
#endif

#if ELEMENT == 16
#define multiply multiply_f16
static __device__ __forceinline__ float value(Element x) { return half_value(x); }
static __device__ __forceinline__ Element rounded(float x) { return half_bits(x); }
#else
#define multiply multiply_bf16
static __device__ __forceinline__ float value(Element x) { return __uint_as_float((u32)x << 16); }
static __device__ __forceinline__ Element rounded(float x) {
	const u32 u = __float_as_uint(x);
	return x != x ? 0x7fff : (Element)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
#endif

// load_part copies elements lo to hi of a piece, and zeros for the others.
static __device__ __noinline__ void load_part(uint4* to, const Element* from, int lo, int hi) {
	u32 words[4];
#pragma unroll
	for (int i = 0; i < 8; i++) {
		const u32 x = i >= lo && i < hi ? from[i] : 0;
		words[i / 2] = i % 2 ? words[i / 2] | x << 16 : x;
	}
	*to = make_uint4(words[0], words[1], words[2], words[3]);
}

// A Tile has ROWS rows and TILE_K columns of a Matrix in shared memory, in lines as the matrix has them.
// The pieces of a line are permuted, so that 8 lines of one piece are in different banks.
template <int ROWS, bool INNER_LINES> struct Tile {
	static const int pieces = (INNER_LINES ? TILE_K : ROWS) / PIECE, lines = INNER_LINES ? ROWS : TILE_K;
	uint4 all[lines * pieces];

	__device__ __forceinline__ uint4* at(int line, int piece) {
		return all + line * pieces + (piece ^ (pieces == 4 ? line >> 1 & 3 : line & 7));
	}

	// load begins to copy the tile at a row and a column. What is not in the ranges becomes zeros.
	__device__ __forceinline__ void load(const Matrix& m, int row, Range rows, int column, Range columns) {
		const int across = THREADS / pieces; // lines that the threads have at a time
		const int line = threadIdx.x / pieces, piece = threadIdx.x % pieces;
		const int x = (INNER_LINES ? column : row) + piece * PIECE, y = (INNER_LINES ? row : column) + line;
		const Range xs = INNER_LINES ? columns : rows, ys = INNER_LINES ? rows : columns;
		const Element* const from = (const Element*)m.at + y * m.ld + x;
		const bool whole = m.aligned && x >= xs.lo && x + PIECE <= xs.hi;
#pragma unroll
		for (int i = 0; i < lines / across; i++) {
			const bool in = y + i * across >= ys.lo && y + i * across < ys.hi;
			if (whole || !in) copy_async(at(line + i * across, piece), in ? from + i * across * m.ld : (const Element*)m.at, in ? 16 : 0);
			else load_part(at(line + i * across, piece), from + i * across * m.ld, xs.lo - x, xs.hi - x);
		}
	}

	// fragment loads 16 rows and 16 columns: x[0] and x[1] are the 8 first columns of both halves of the rows.
	__device__ __forceinline__ void fragment(u32 (&x)[4], int row, int column) {
		const int l = threadIdx.x % 32;
		if (INNER_LINES) load_matrices(x, at(row + l % 16, column / PIECE + l / 16));
		else load_transposed(x, at(column + l % 8 + l / 16 * 8, row / PIECE + l / 8 % 2));
	}
};

struct Stage {
	Tile<TILE_M, A_INNER> a;
	Tile<TILE_N, B_INNER> b;
};

static_assert(sizeof(Stage) * STAGES >= TILE_M * TILE_N * sizeof(float), "the sums of a tile do not fit in the memory of the stages");

// place returns where the sums of a tile have a pair of elements, so that 8 rows are in different banks.
static __device__ __forceinline__ int place(int row, int column) { return row * TILE_N + (column ^ (row & 7) * 8); }

// store_piece stores the first of 8 elements of a row of c.
static __device__ __forceinline__ void store_piece(void* c, i64 at, i64 step, int count, const float* sums, u32 flags, float alpha, float beta) {
	const float4 low = *(const float4*)sums, high = *(const float4*)(sums + 4);
	float x[PIECE] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
	const bool whole = flags & ALIGNED_C && count == PIECE;
#pragma unroll
	for (int i = 0; i < PIECE; i++) x[i] = __fmul_rn(alpha, x[i]);
	if (flags & FLOATS) {
		float* const to = (float*)c + at;
#pragma unroll
		for (int i = 0; i < PIECE; i++)
			if (beta != 0 && i < count) x[i] = __fmaf_rn(beta, to[i * step], x[i]);
		if (whole) {
			((float4*)to)[0] = make_float4(x[0], x[1], x[2], x[3]), ((float4*)to)[1] = make_float4(x[4], x[5], x[6], x[7]);
			return;
		}
#pragma unroll
		for (int i = 0; i < PIECE; i++)
			if (i < count) to[i * step] = x[i];
		return;
	}
	Element* const to = (Element*)c + at;
#pragma unroll
	for (int i = 0; i < PIECE; i++)
		if (beta != 0 && i < count) x[i] = __fmaf_rn(beta, value(to[i * step]), x[i]);
	if (whole) {
		auto pair = [&](int i) { return rounded(x[i]) | (u32)rounded(x[i + 1]) << 16; };
		*(uint4*)to = make_uint4(pair(0), pair(2), pair(4), pair(6));
		return;
	}
#pragma unroll
	for (int i = 0; i < PIECE; i++)
		if (i < count) to[i * step] = rounded(x[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped(void* c, const void* a, const void* b, const int* ends, u32 groups, u32 flags, int m, int n, int k,
	i64 ald, i64 astep, i64 bld, i64 bstep, i64 crow, i64 ccolumn, i64 cstep, float alpha, float beta) {
	extern __shared__ __align__(16) unsigned char room[];
	__shared__ Work found[2];
	Stage* const stages = (Stage*)room;
	const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	const int warp_row = warp % (TILE_M / WARP_M) * WARP_M, warp_column = warp / (TILE_M / WARP_M) * WARP_N;
	const Matrix all_a = {(const char*)a, ald, astep, (flags & ALIGNED_A) != 0}, all_b = {(const char*)b, bld, bstep, (flags & ALIGNED_B) != 0};
	Walk walk = {ends, groups, flags, m, n, k, 0, 0, 0};
	u32 turn = 0;
	for (u64 t = blockIdx.x;; t += gridDim.x, turn ^= 1) {
		if (warp == 0) {
			const Work w = walk.find(t);
			if (lane == 0) found[turn] = w;
		}
		__syncthreads(); // also until all warps have read the last tile
		const Work w = found[turn];
		if (!w.found) return;
		Matrix ma = all_a, mb = all_b;
		ma.at += w.group * astep * (i64)sizeof(Element), mb.at += w.group * bstep * (i64)sizeof(Element);
		const Range columns = {0, n};
		const int begin = w.inner.lo & ~(PIECE - 1); // so that pieces are aligned
		const int steps = w.inner.hi > w.inner.lo ? (int)(((u32)(w.inner.hi - begin) + TILE_K - 1) / TILE_K) : 0;
		auto load = [&](int step) {
			if (step < steps) {
				Stage& s = stages[step % STAGES];
				s.a.load(ma, w.row, w.rows, begin + step * TILE_K, w.inner);
				s.b.load(mb, w.column, columns, begin + step * TILE_K, w.inner);
			}
			commit_copies();
		};
		float sums[WARP_M / 16][WARP_N / 8][4];
#pragma unroll
		for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
			for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
				for (int e = 0; e < 4; e++) sums[i][j][e] = 0;
		const bool needed = w.row + warp_row < w.rows.hi && w.column + warp_column < n; // of the warp
#pragma unroll
		for (int step = 0; step < STAGES - 1; step++) load(step);
#pragma unroll 1
		for (int step = 0; step < steps; step++) {
			await_copies<STAGES - 2>();
			__syncthreads();
			load(step + STAGES - 1);
			if (!needed) continue;
			Stage& s = stages[step % STAGES];
#pragma unroll
			for (int x = 0; x < TILE_K; x += 16) {
				u32 fa[WARP_M / 16][4], fb[WARP_N / 16][4];
#pragma unroll
				for (int i = 0; i < WARP_M / 16; i++) s.a.fragment(fa[i], warp_row + i * 16, x);
#pragma unroll
				for (int j = 0; j < WARP_N / 16; j++) s.b.fragment(fb[j], warp_column + j * 16, x);
#pragma unroll
				for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
					for (int j = 0; j < WARP_N / 16; j++) {
						multiply(sums[i][2 * j], fa[i], fb[j][0], fb[j][2]);
						multiply(sums[i][2 * j + 1], fa[i], fb[j][1], fb[j][3]);
					}
			}
		}
		await_copies<0>();
		__syncthreads();
		float* const out = (float*)room; // the sums of the tile, in the memory of the stages
		if (needed) {
#pragma unroll
			for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
				for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
					for (int half = 0; half < 2; half++)
						*(float2*)(out + place(warp_row + i * 16 + lane / 4 + half * 8, warp_column + j * 8 + lane % 4 * 2)) = make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
		}
		__syncthreads();
		for (int i = threadIdx.x; i < TILE_M * TILE_N / PIECE; i += THREADS) {
			// Neighboring threads have neighbors in c.
			const int row = ccolumn == 1 ? i / (TILE_N / PIECE) : i % TILE_M, column = (ccolumn == 1 ? i % (TILE_N / PIECE) : i / TILE_M) * PIECE;
			if (w.row + row < w.rows.lo || w.row + row >= w.rows.hi || w.column + column >= n) continue;
			store_piece(c, w.group * cstep + (w.row + row) * crow + (w.column + column) * ccolumn, ccolumn, min(n - w.column - column, PIECE),
				out + place(row, column), flags, alpha, beta);
		}
	}
}

// ---- float32 ----

#else
#define THREADS 256
#define TILE_K 8
#define PIECE 4 // elements in 16 bytes

// A Tile has 128 rows and TILE_K columns of a Matrix in shared memory, by columns. A thread loads one piece.
template <bool INNER_LINES> struct Tile {
	float all[TILE_K][TILE_N];

	static __device__ __forceinline__ int line() { return INNER_LINES ? threadIdx.x / 2 : threadIdx.x / 32; }
	static __device__ __forceinline__ int piece() { return (INNER_LINES ? threadIdx.x % 2 : threadIdx.x % 32) * PIECE; }

	static __device__ __forceinline__ float4 load(const Matrix& m, int row, Range rows, int column, Range columns) {
		const int x = (INNER_LINES ? column : row) + piece(), y = (INNER_LINES ? row : column) + line();
		const Range xs = INNER_LINES ? columns : rows, ys = INNER_LINES ? rows : columns;
		const float* const from = (const float*)m.at + y * m.ld + x;
		if (y < ys.lo || y >= ys.hi) return make_float4(0, 0, 0, 0);
		if (m.aligned && x >= xs.lo && x + PIECE <= xs.hi) return *(const float4*)from;
		auto one = [&](int i) { return x + i >= xs.lo && x + i < xs.hi ? from[i] : 0.f; };
		return make_float4(one(0), one(1), one(2), one(3));
	}

	__device__ __forceinline__ void store(float4 v) {
		if (INNER_LINES) {
			all[piece()][line()] = v.x, all[piece() + 1][line()] = v.y;
			all[piece() + 2][line()] = v.z, all[piece() + 3][line()] = v.w;
		} else *(float4*)&all[line()][piece()] = v;
	}
};

struct __align__(16) Stage {
	Tile<A_INNER> a;
	Tile<B_INNER> b;
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped(void* c, const void* a, const void* b, const int* ends, u32 groups, u32 flags, int m, int n, int k,
	i64 ald, i64 astep, i64 bld, i64 bstep, i64 crow, i64 ccolumn, i64 cstep, float alpha, float beta) {
	__shared__ Stage stages[2];
	__shared__ Work found[2];
	const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
	const Matrix all_a = {(const char*)a, ald, astep, (flags & ALIGNED_A) != 0}, all_b = {(const char*)b, bld, bstep, (flags & ALIGNED_B) != 0};
	Walk walk = {ends, groups, flags, m, n, k, 0, 0, 0};
	u32 turn = 0;
	for (u64 t = blockIdx.x;; t += gridDim.x, turn ^= 1) {
		if (threadIdx.x < 32) {
			const Work w = walk.find(t);
			if (threadIdx.x == 0) found[turn] = w;
		}
		__syncthreads();
		const Work w = found[turn];
		if (!w.found) return;
		Matrix ma = all_a, mb = all_b;
		ma.at += w.group * astep * (i64)sizeof(float), mb.at += w.group * bstep * (i64)sizeof(float);
		const Range columns = {0, n};
		const int begin = w.inner.lo & ~(PIECE - 1);
		const int steps = w.inner.hi > w.inner.lo ? (int)(((u32)(w.inner.hi - begin) + TILE_K - 1) / TILE_K) : 0;
		float sums[8][8];
#pragma unroll
		for (int i = 0; i < 8; i++)
#pragma unroll
			for (int j = 0; j < 8; j++) sums[i][j] = 0;
		float4 va = {}, vb = {};
		auto load = [&](int step) {
			va = Tile<A_INNER>::load(ma, w.row, w.rows, begin + step * TILE_K, w.inner);
			vb = Tile<B_INNER>::load(mb, w.column, columns, begin + step * TILE_K, w.inner);
		};
		auto store = [&](int step) { stages[step % 2].a.store(va), stages[step % 2].b.store(vb); };
		if (steps > 0) load(0), store(0);
#pragma unroll 1
		for (int step = 0; step < steps; step++) {
			__syncthreads();
			if (step + 1 < steps) load(step + 1);
			Stage& s = stages[step % 2];
#pragma unroll
			for (int x = 0; x < TILE_K; x++) {
				const float4 a0 = *(const float4*)&s.a.all[x][ty * 4], a1 = *(const float4*)&s.a.all[x][64 + ty * 4];
				const float4 b0 = *(const float4*)&s.b.all[x][tx * 4], b1 = *(const float4*)&s.b.all[x][64 + tx * 4];
				const float fa[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w}, fb[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
				for (int i = 0; i < 8; i++)
#pragma unroll
					for (int j = 0; j < 8; j++) sums[i][j] = __fmaf_rn(fa[i], fb[j], sums[i][j]);
			}
			if (step + 1 < steps) store(step + 1);
		}
#pragma unroll
		for (int i = 0; i < 8; i++)
#pragma unroll
			for (int j = 0; j < 8; j++) {
				const int row = w.row + i / 4 * 64 + ty * 4 + i % 4, column = w.column + j / 4 * 64 + tx * 4 + j % 4;
				if (row < w.rows.lo || row >= w.rows.hi || column >= n) continue;
				float* const to = (float*)c + w.group * cstep + row * crow + column * ccolumn;
				float x = __fmul_rn(alpha, sums[i][j]);
				if (beta != 0) x = __fmaf_rn(beta, *to, x);
				*to = x;
			}
	}
}
#endif
