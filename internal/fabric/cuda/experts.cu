// Dispatch and combine for layers of experts. The experts are divided among the ranks in order, and a token has topK
// choices: the ids of experts, or other numbers that name none.
//
// Dispatch: the send kernel stores the tokens of a rank in the slots of those ranks whose experts they name, once for each rank, and the
// ids of all tokens in the slots of all ranks. The receive kernel, a launch of its own, knows from all ids which place each row has, and
// copies it there: the rows of an expert are in the order of their ranks and tokens.
//
// Combine: the send kernel stores the row of each expert in the slot of its token's rank, in the place that the token's choices give it.
// The receive kernel adds the rows of each token in the order of its choices, in float.
//
// If the GPUs do not map each other's memory, pack kernels store the same in memory that NCCL moves.

#define ALL_LANES 0xffffffffu
#define LANES 32
#define PIECE (LANES * UNIT) // elements of a row that a warp handles together
#define COPIES 4             // cells of a lane in flight

// A Shape describes a layer. Its methods give the places in what a rank sends to another one: for a dispatch the rows,
// the ids, the weights and whether there are weights, and for a combine the rows of a token's choices whose experts are on the sender.
struct Shape {
	u32 rank, ranks;
	u32 experts, topK, hidden;
	u32 most;  // tokens of a rank
	u32 small; // 1: dispatched rows are blocks of 8-bit numbers

	__device__ u32 own() const { return experts / ranks; } // experts of a rank
	__device__ u32 seats() const { return own() < topK ? own() : topK; }
	__device__ u32 ids() const { return most * topK; } // of a rank
	__device__ u64 elementBytes() const { return (u64)hidden * sizeof(T); }
	__device__ u64 rowBytes() const { return small ? (chunkBytes(hidden) + 15) / 16 * 16 : elementBytes(); }
	__device__ u64 idsAt() const { return most * rowBytes(); }
	__device__ u64 weightsAt() const { return idsAt() + ids() * 4ull; }
	__device__ u64 weightedAt() const { return weightsAt() + ids() * 4ull; }
	__device__ u64 seatAt(u32 t, u32 seat) const { return ((u64)t * seats() + seat) * elementBytes(); }
	__device__ bool names(i32 id) const { return (u32)id < experts; }
};
#define SHAPE u32 rank, u32 ranks, u32 experts, u32 topK, u32 hidden, u32 most, u32 small
#define LAYER u32 experts, u32 topK, u32 hidden, u32 most, u32 small // after LINKS
#define SHAPED {rank, ranks, experts, topK, hidden, most, small}

static __device__ __forceinline__ u32 lane() { return threadIdx.x % LANES; }
static __device__ __forceinline__ u32 warp() { return (blockIdx.x * blockDim.x + threadIdx.x) / LANES; }
static __device__ __forceinline__ u32 warps() { return gridDim.x * blockDim.x / LANES; }

// Peers are the destinations of a rank that maps the memory of the others. wanted chooses the ranks that have experts of a
// token, all the ranks, and only one rank. put stores in this rank's slot of each chosen rank.
struct Peers {
	const Rank& me;
	u32 chosen; // bits of ranks

	__device__ void wanted(const Shape& of, const i32* ids) {
		chosen = 0;
		for (u32 k = 0; k < of.topK; k++)
			if (of.names(ids[k])) chosen |= 1u << ids[k] / of.own();
	}
	__device__ void all() { chosen = (1u << count(me)) - 1; }
	__device__ void only(u32 r) { chosen = 1u << r; }
	template <class Store> __device__ void put(Store store) const {
		if (me.over) return;
#pragma unroll
		for (u32 k = 0; k < MOST; k++)
			if (k < count(me) && (chosen >> after(me, k) & 1)) store(from(me, me.peer[k], me.rank));
	}
};

// Packed is memory that NCCL moves. A dispatch has one for all ranks, and a combine one for each rank.
struct Packed {
	char *const base, *to;
	const u64 pitch;

	__device__ void wanted(const Shape&, const i32*) {}
	__device__ void all() {}
	__device__ void only(u32 r) { to = base + r * pitch; }
	template <class Store> __device__ void put(Store store) const { store(to); }
};

// copyCells copies the cells of a warp, some at a time: put(c, v) stores cell c.
template <class Put> static __device__ __forceinline__ void copyCells(const Cell* in, u64 begin, u64 end, Put put) {
	for (u64 c = begin + lane(); c < end; c += COPIES * LANES) {
		Cell v[COPIES];
#pragma unroll
		for (u32 b = 0; b < COPIES; b++)
			if (c + b * LANES < end) v[b] = in[c + b * LANES];
#pragma unroll
		for (u32 b = 0; b < COPIES; b++)
			if (c + b * LANES < end) put(c + b * LANES, v[b]);
	}
}

// sendTokens stores tokens, ids, and weights unless they are null. Ids that name no expert, and those of tokens that do not exist, become -1.
template <class To> static __device__ __forceinline__ void sendTokens(const Shape& of, To to, const T* x, const i32* ids, const float* weights, u32 tokens) {
	to.all();
	for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < of.ids(); i += gridDim.x * blockDim.x) {
		const bool is = i / of.topK < tokens && of.names(ids[i]);
		const i32 id = is ? ids[i] : -1;
		const float w = is && weights ? weights[i] : 0;
		to.put([&](char* p) {
			*(volatile i32*)(p + of.idsAt() + i * 4ull) = id;
			if (weights) *(volatile float*)(p + of.weightsAt() + i * 4ull) = w;
			if (i == 0) *(volatile u32*)(p + of.weightedAt()) = weights ? 1 : 0;
		});
	}
	const u32 pieces = (of.hidden + PIECE - 1) / PIECE;
	for (u64 item = warp(); item < (u64)tokens * pieces; item += warps()) {
		const u32 t = item / pieces;
		const u64 begin = item % pieces * PIECE, end = begin + PIECE < of.hidden ? begin + PIECE : of.hidden, row = t * of.rowBytes();
		to.wanted(of, ids + (u64)t * of.topK);
		if (!of.small) {
			copyCells((const Cell*)(x + (u64)t * of.hidden), begin * sizeof(T) / 16, end * sizeof(T) / 16,
				[&](u64 c, const Cell& v) { to.put([&](char* p) { putCell((Cell*)(p + row) + c, v); }); });
			continue;
		}
		const u64 i = begin + lane() * UNIT;
		u32 exponent;
		const Words q = unitToBlock(unitAt(x + (u64)t * of.hidden, i, of.hidden, 1), nullptr, i, of.hidden, 1, exponent); // by all lanes
		if (i >= end) continue;
		to.put([&](char* p) {
			put(p + row + i, q.w[0], q.w[1], q.w[2], q.w[3]);
			if (i % BLOCK == 0) *(volatile u8*)(p + row + of.hidden + i / BLOCK) = (u8)exponent;
		});
	}
}

// eachRow calls row(e, place, r, t) for the rows of own experts that this warp handles: token t of rank r is the row at a place of
// own expert e. idsOf(r) returns the ids of a rank. done(e, rows) gets the number of rows of each own expert, in one warp.
template <class IDs, class Row, class Done> static __device__ __forceinline__ void eachRow(const Shape& of, IDs idsOf, Row row, Done done) {
	const u32 own = of.own(), parts = warps() > own ? warps() / own : 1, all = of.ranks * of.most;
	for (u32 item = warp(); item < own * parts; item += warps()) {
		const u32 e = item % own, part = item / own;
		const i32 id = of.rank * own + e;
		u32 place = 0;
		for (u32 begin = 0; begin < all; begin += LANES) {
			const u32 i = begin + lane();
			bool is = false;
			if (i < all) {
				const i32* ids = idsOf(i / of.most) + (u64)(i % of.most) * of.topK;
				for (u32 k = 0; k < of.topK; k++) is |= ids[k] == id;
			}
			for (u32 left = __ballot_sync(ALL_LANES, is); left != 0; left &= left - 1, place++)
				if (place % parts == part) {
					const u32 at = begin + __ffs(left) - 1;
					row(e, place, at / of.most, at % of.most);
				}
		}
		if (part == 0 && lane() == 0) done(e, place);
	}
}

// arrived returns where the data of the latest operation is. control is null if NCCL has moved it. The kernel that
// received it has ended, so the number of that operation is the epoch.
static __device__ __forceinline__ const char* arrived(const Shape& of, const char* in, u64 pitch, const Control* control) {
	return control && (control->ticks / EPOCH & 1) != 0 ? in + of.ranks * pitch : in;
}

// receiveTokens stores the rows of the own experts, their numbers, and the ids of all ranks. It multiplies each row of a rank that has sent
// weights by the sum of its token's weights for the expert.
static __device__ __forceinline__ void receiveTokens(const Shape& of, const char* in, u64 pitch, T* out, i32* counts, i32* routes) {
	const auto weightedBy = [&](u32 r) { return *(const u32*)(in + r * pitch + of.weightedAt()) != 0; };
	const u32 weightedByFirst = __ballot_sync(ALL_LANES, lane() < of.ranks && weightedBy(lane())); // of the first ranks, so that rows need not wait for it
	const auto idsOf = [&](u32 r) { return (const i32*)(in + r * pitch + of.idsAt()); };
	for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < of.ranks * of.ids(); i += gridDim.x * blockDim.x) routes[i] = idsOf(i / of.ids())[i % of.ids()];
	eachRow(of, idsOf, [&](u32 e, u32 place, u32 r, u32 t) {
		const char* row = in + r * pitch + t * of.rowBytes();
		const bool weighted = r < LANES ? weightedByFirst >> r & 1 : weightedBy(r);
		T* const to = out + ((u64)e * of.ranks * of.most + place) * of.hidden;
		if (!of.small && !weighted) {
			copyCells((const Cell*)row, 0, of.elementBytes() / 16, [&](u64 c, const Cell& v) { ((Cell*)to)[c] = v; });
			return;
		}
		float factor = 0;
		for (u32 k = 0; k < of.topK && weighted; k++) {
			const u64 i = (u64)t * of.topK + k;
			if (idsOf(r)[i] == (i32)(of.rank * of.own() + e)) factor += ((const float*)(in + r * pitch + of.weightsAt()))[i];
		}
		for (u64 i = lane() * UNIT; i < of.hidden; i += PIECE) {
			float v[UNIT];
			if (of.small) decode(*(const Words*)(row + i), (u8)row[of.hidden + i / BLOCK], Element<T>::largest, v);
			else load((const T*)row, i, of.hidden, 1, v);
#pragma unroll
			for (u32 j = 0; j < UNIT; j++) v[j] = weighted ? __fmul_rn(v[j], factor) : v[j];
			store(to, i, of.hidden, 1, v);
		}
	}, [&](u32 e, u32 rows) { counts[e] = rows; });
}

// A Choice is what lane k knows of choice k of a token.
struct Choice {
	i32 id;    // or -1
	u32 seat;  // its row is the seat-th one that the token gets from the expert's rank
	u32 again; // 1: an earlier choice has the same id, and so the same row
};

// choicesOf returns the choices of a token. All lanes call it.
static __device__ __forceinline__ Choice choicesOf(const Shape& of, const i32* ids) {
	Choice c = {lane() < of.topK ? ids[lane()] : -1, 0, 0};
	if (!of.names(c.id)) c.id = -1;
	u32 first = lane();
	for (u32 k = 0; k < of.topK; k++) {
		const i32 id = __shfl_sync(ALL_LANES, c.id, k);
		if (k < first && id == c.id) first = k;
	}
	c.again = first != lane();
	for (u32 k = 0; k < of.topK; k++) {
		const i32 id = __shfl_sync(ALL_LANES, c.id, k);
		const u32 again = __shfl_sync(ALL_LANES, c.again, k);
		if (k < first && !again && id >= 0 && c.id >= 0 && id / of.own() == c.id / of.own()) c.seat++;
	}
	return c;
}

// sendRows stores the rows of the own experts for their tokens.
template <class To> static __device__ __forceinline__ void sendRows(const Shape& of, To to, const T* y, const i32* routes) {
	eachRow(of, [&](u32 r) { return routes + (u64)r * of.ids(); }, [&](u32 e, u32 place, u32 r, u32 t) {
		const Choice c = choicesOf(of, routes + (u64)r * of.ids() + (u64)t * of.topK);
		const u32 is = __ballot_sync(ALL_LANES, c.id == (i32)(of.rank * of.own() + e) && !c.again);
		const u64 at = of.seatAt(t, __shfl_sync(ALL_LANES, c.seat, __ffs(is) - 1));
		to.only(r);
		copyCells((const Cell*)(y + ((u64)e * of.ranks * of.most + place) * of.hidden), 0, of.elementBytes() / 16,
			[&](u64 i, const Cell& v) { to.put([&](char* p) { putCell((Cell*)(p + at) + i, v); }); });
	}, [](u32, u32) {});
}

// receiveRows adds the rows of each token, times its weights. Without weights it adds each row once. rows gets the row of each choice,
// unless it is null.
static __device__ __forceinline__ void receiveRows(const Shape& of, const char* in, u64 pitch, const i32* routes, const float* weights, T* out, T* rows, u32 tokens) {
	const i32* const ids = routes + (u64)of.rank * of.ids();
	const u32 pieces = (of.hidden + PIECE - 1) / PIECE;
	for (u64 item = warp(); item < (u64)tokens * pieces; item += warps()) {
		const u32 t = item / pieces;
		const u64 i = item % pieces * PIECE + lane() * UNIT;
		const Choice c = choicesOf(of, ids + (u64)t * of.topK);
		float sum[UNIT] = {};
		for (u32 k = 0; k < of.topK; k++) {
			const i32 id = __shfl_sync(ALL_LANES, c.id, k);
			const u32 seat = __shfl_sync(ALL_LANES, c.seat, k), again = __shfl_sync(ALL_LANES, c.again, k);
			if (i >= of.hidden) continue;
			float v[UNIT] = {};
			if (id >= 0) load((const T*)(in + id / of.own() * pitch + of.seatAt(t, seat)), i, of.hidden, 1, v);
			if (rows) store(rows + ((u64)t * of.topK + k) * of.hidden, i, of.hidden, 1, v);
			if (id < 0 || (!weights && again)) continue;
			const float w = weights ? weights[(u64)t * of.topK + k] : 1;
#pragma unroll
			for (u32 j = 0; j < UNIT; j++) sum[j] = __fmaf_rn(w, v[j], sum[j]);
		}
		if (i < of.hidden) store(out + (u64)t * of.hidden, i, of.hidden, 1, sum);
	}
}

// ---- kernels ----

// The send kernels end when all ranks have sent to this one: a block waits for the block of the same index on each rank.
extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_send(LINKS, const T* x, const i32* ids, const float* weights, u32 tokens, LAYER) {
	Rank me = RANK;
	const Shape of = SHAPED;
	enter(me);
	sendTokens(of, Peers{me, 0}, x, ids, weights, tokens);
	barrier(me, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine_send(LINKS, const T* y, const i32* routes, LAYER) {
	Rank me = RANK;
	const Shape of = SHAPED;
	enter(me);
	sendRows(of, Peers{me, 0}, y, routes);
	barrier(me, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) dispatch_pack(const T* x, const i32* ids, const float* weights, char* out, u32 tokens, SHAPE) {
	const Shape of = SHAPED;
	sendTokens(of, Packed{out, out, 0}, x, ids, weights, tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_pack(const T* y, const i32* routes, char* out, u64 pitch, SHAPE) {
	const Shape of = SHAPED;
	sendRows(of, Packed{out, out, pitch}, y, routes);
}

extern "C" __global__ void __launch_bounds__(THREADS) dispatch_receive(const char* in, u64 pitch, const Control* control, T* out, i32* counts, i32* routes, SHAPE) {
	const Shape of = SHAPED;
	receiveTokens(of, arrived(of, in, pitch, control), pitch, out, counts, routes);
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_receive(const char* in, u64 pitch, const Control* control, const i32* routes, const float* weights, T* out, T* rows, u32 tokens, SHAPE) {
	const Shape of = SHAPED;
	receiveRows(of, arrived(of, in, pitch, control), pitch, routes, weights, out, rows, tokens);
}
