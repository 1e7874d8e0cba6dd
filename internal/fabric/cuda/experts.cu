// Dispatch and combine for layers of experts. The experts are divided among the ranks in order, and a token has topK
// choices: the ids of experts, or other numbers that name none. A block has every gridDim-th token of each rank.
//
// Dispatch: a block stores its tokens in the slots of those ranks whose experts they name, once for each rank, and in the slots of all ranks
// the ids of these tokens. It also stores where their rows are among those that this rank has for an expert, and how many
// rows that are. Behind a barrier it adds the numbers of rows of the ranks before, which gives the places of the rows that have come, and copies
// them there: the rows of an expert are in the order of their ranks and tokens.
//
// Combine: a block stores the rows of its tokens in the slots of the tokens' ranks, in the places that the tokens' choices give them. Behind a
// barrier it adds the rows of each token in the order of its choices, in float.
//
// A block needs only what the blocks of the same index on the other ranks send, so the barrier is between these. It is on the path of
// every token: the copies of a block to the other ranks precede the work that they do not need.
//
// If the GPUs do not map each other's memory, pack kernels store the same in memory that NCCL moves, and receive kernels do what is behind
// the barrier. They know the places of rows from the ids of all ranks.

#define ALL_LANES 0xffffffffu
#define LANES 32
#define PIECE (LANES * UNIT) // elements of a row that a warp handles together
#define PART (2 * PIECE)     // elements of a row that a warp copies together
#define COPIES 4             // cells of a lane in flight
#define COUNTED 1024         // experts whose rows a block counts together
#define AHEAD (16 / sizeof(T)) // rows whose loads are in flight together when a warp adds rows: a power of two, at most LANES

// A Shape describes a layer. Its methods give the places in what a rank sends to another one: for a dispatch the rows,
// the ids, the weights and whether there are weights, and in slots also the places of the rows and the numbers of rows of the
// receiver's experts. For a combine they are those of the rows of a token's choices whose experts are on the sender.
struct Shape {
	u32 rank, ranks;
	u32 experts, topK, hidden;
	u32 most;  // tokens of a rank
	u32 small; // 1: dispatched rows are blocks of 8-bit numbers

	__device__ u32 own() const { return experts / ranks; } // experts of a rank
	__device__ u32 first() const { return rank * own(); }  // own expert
	__device__ u32 seats() const { return own() < topK ? own() : topK; }
	__device__ u32 ids() const { return most * topK; } // of a rank
	__device__ u64 elementBytes() const { return (u64)hidden * sizeof(T); }
	__device__ u64 cells() const { return elementBytes() / 16; }
	__device__ u64 rowBytes() const { return small ? (chunkBytes(hidden) + 15) / 16 * 16 : elementBytes(); }
	__device__ u64 idsAt() const { return most * rowBytes(); }
	__device__ u64 weightsAt() const { return idsAt() + ids() * 4ull; }
	__device__ u64 weightedAt() const { return weightsAt() + ids() * 4ull; }
	__device__ u64 placesAt() const { return weightedAt() + 4; }
	__device__ u64 totalsAt() const { return placesAt() + ids() * 4ull; }
	__device__ u64 seatAt(u32 t, u32 seat) const { return ((u64)t * seats() + seat) * elementBytes(); }
	__device__ bool names(i32 id) const { return (u32)id < experts; }
	__device__ u32 parts() const { return (hidden + PART - 1) / PART; }
	__device__ u32 pieces() const { return (hidden + PIECE - 1) / PIECE; }
	// row returns the row at a place of own expert e.
	template <class X> __device__ X* row(X* rows, u32 e, u32 place) const { return rows + ((u64)e * (ranks * most) + place) * hidden; }
};
#define SHAPE u32 rank, u32 ranks, u32 experts, u32 topK, u32 hidden, u32 most, u32 small
#define LAYER u32 experts, u32 topK, u32 hidden, u32 most, u32 small // after LINKS
#define SHAPED {rank, ranks, experts, topK, hidden, most, small}

static __device__ __forceinline__ u32 lane() { return threadIdx.x % LANES; }
static __device__ __forceinline__ u32 warp() { return threadIdx.x / LANES; }
static __device__ __forceinline__ u32 warps() { return blockDim.x / LANES; }

// blockTokens returns how many of a rank's tokens the block has, and tokenAt the i-th one.
static __device__ __forceinline__ u32 blockTokens(u32 tokens) { return tokens > blockIdx.x ? (tokens - blockIdx.x - 1) / gridDim.x + 1 : 0; }
static __device__ __forceinline__ u32 tokenAt(u32 i) { return blockIdx.x + i * gridDim.x; }

// eachPart calls fn(i, part) for those parts of n rows that the warp has. The warps of the block take the parts of all rows in turn.
template <class Fn> static __device__ __forceinline__ void eachPart(u32 n, u32 parts, Fn fn) {
	u32 part = warp();
	for (u32 i = 0; i < n; i++, part -= parts)
		for (; part < parts; part += warps()) fn(i, part);
}

// ---- where data goes ----

// Peers are the destinations of a rank that maps the memory of the others. wanted chooses the other ranks that have experts of a
// token, and this one if it does not read the token itself. all chooses all ranks, and only one rank. put stores in this rank's slot of each chosen rank.
struct Peers {
	const Rank& me;
	u32 chosen; // bits of ranks

	__device__ void wanted(const Shape& of, const i32* ids) {
		chosen = 0;
		for (u32 k = 0; k < of.topK; k++)
			if (of.names(ids[k])) chosen |= 1u << ids[k] / of.own();
		if (!of.small) chosen &= others(me);
	}
	__device__ void all() { chosen = (1u << count(me)) - 1; }
	__device__ void only(u32 r) { chosen = 1u << r; }
	template <class Store> __device__ void put(Store store) const {
		if (me.over) return;
#pragma unroll
		for (u32 k = 0; k < MOST; k++)
			if (k < count(me) && (chosen >> after(me, k) & 1)) store(from(me, me.peer[k], me.rank));
	}
	// kept returns where the places of the rows for a rank's tokens are, if the rows need not be sent because it is this rank.
	__device__ u32* kept(u32 r) const { return r == me.rank ? (u32*)from(me, me.peer[0], r) : nullptr; }
};

// Packed is memory that NCCL moves. A dispatch has one for all ranks, and a combine one for each rank.
struct Packed {
	char *const base, *to;
	const u64 pitch;

	__device__ void wanted(const Shape&, const i32*) {}
	__device__ void all() {}
	__device__ void only(u32 r) { to = base + r * pitch; }
	template <class Store> __device__ void put(Store store) const { store(to); }
	__device__ u32* kept(u32) const { return nullptr; }
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

// ---- places of rows ----

// clearRows begins a count. rows is shared memory. All threads of the block call it.
static __device__ __forceinline__ void clearRows(u32* rows, u32 n) {
	__syncthreads();
	for (u32 e = threadIdx.x; e < n; e += blockDim.x) rows[e] = 0;
	__syncthreads();
}

// countRows adds the rows of a rank's tokens from begin to end to those of the n experts from first on. A token is one row of an expert, also
// if it names the expert twice.
static __device__ __forceinline__ void countRows(const Shape& of, const i32* ids, u32 begin, u32 end, u32 first, u32 n, u32* rows) {
	for (u32 at = begin * of.topK + threadIdx.x; at < end * of.topK; at += COPIES * blockDim.x) {
		i32 id[COPIES];
#pragma unroll
		for (u32 b = 0; b < COPIES; b++) {
			const u32 i = at + b * blockDim.x;
			id[b] = i < end * of.topK ? ids[i] : -1;
		}
#pragma unroll
		for (u32 b = 0; b < COPIES; b++) {
			if ((u32)id[b] - first >= n) continue;
			const u32 i = at + b * blockDim.x;
			bool again = false;
			for (u32 j = i - i % of.topK; j < i; j++) again |= ids[j] == id[b];
			if (!again) atomicAdd(rows + ((u32)id[b] - first), 1u);
		}
	}
}

// eachToken calls fn(t) for those of a rank's tokens that the block has. rows then has the number of rows of the n experts from first on
// before that token: what it had before, and those of the rank's earlier tokens. At the end it has those of all. All threads of the block call it.
template <class Fn> static __device__ __forceinline__ void eachToken(const Shape& of, const i32* ids, u32 tokens, u32 first, u32 n, u32* rows, Fn fn) {
	for (u32 begin = 0; begin < tokens; begin += gridDim.x) {
		const u32 end = begin + gridDim.x < tokens ? begin + gridDim.x : tokens, t = begin + blockIdx.x < end ? begin + blockIdx.x : end;
		countRows(of, ids, begin, t, first, n, rows);
		__syncthreads();
		if (t < end) fn(t);
		__syncthreads();
		countRows(of, ids, t, end, first, n, rows);
	}
	__syncthreads();
}

// A Choice is what lane k knows of choice k of a token.
struct Choice {
	i32 id;    // or -1
	u32 seat;  // its row is the seat-th one that the token gets from the expert's rank
	u32 again; // 1: an earlier choice has the same id, and so the same row
};

// firstChoices returns the choices of a token without their seats. All lanes call it.
static __device__ __forceinline__ Choice firstChoices(const Shape& of, const i32* ids) {
	Choice c = {lane() < of.topK ? ids[lane()] : -1, 0, 0};
	if (!of.names(c.id)) c.id = -1;
	for (u32 k = 0; k < of.topK; k++) {
		const i32 id = __shfl_sync(ALL_LANES, c.id, k);
		if (k < lane() && id == c.id) c.again = 1;
	}
	return c;
}

// choicesOf returns the choices of a token. All lanes call it. A choice that repeats an earlier one has its seat.
static __device__ __forceinline__ Choice choicesOf(const Shape& of, const i32* ids) {
	Choice c = firstChoices(of, ids);
	bool before = true; // the first choice with this id
	for (u32 k = 0; k < of.topK; k++) {
		const i32 id = __shfl_sync(ALL_LANES, c.id, k);
		const u32 again = __shfl_sync(ALL_LANES, c.again, k);
		before &= id != c.id && k < lane();
		if (before && !again && id >= 0 && c.id >= 0 && id / of.own() == c.id / of.own()) c.seat++;
	}
	return c;
}

// ---- dispatch ----

// sendTokens stores tokens, ids, and weights unless they are null. Ids that name no expert, and those of tokens that do not exist, become -1.
template <class To> static __device__ __forceinline__ void sendTokens(const Shape& of, To to, const T* x, const i32* ids, const float* weights, u32 tokens) {
	eachPart(blockTokens(tokens), of.pieces(), [&](u32 n, u32 piece) {
		const u32 t = tokenAt(n);
		const u64 begin = (u64)piece * PIECE, end = begin + PIECE < of.hidden ? begin + PIECE : of.hidden, row = t * of.rowBytes();
		to.wanted(of, ids + (u64)t * of.topK);
		if (!of.small) {
			copyCells((const Cell*)(x + (u64)t * of.hidden), begin * sizeof(T) / 16, end * sizeof(T) / 16,
				[&](u64 c, const Cell& v) { to.put([&](char* p) { putCell((Cell*)(p + row) + c, v); }); });
			return;
		}
		const u64 i = begin + lane() * UNIT;
		u32 exponent;
		const Words q = unitToBlock(unitAt(x + (u64)t * of.hidden, i, of.hidden, 1), nullptr, i, of.hidden, 1, exponent); // by all lanes
		if (i >= end) return;
		to.put([&](char* p) {
			put(p + row + i, q.w[0], q.w[1], q.w[2], q.w[3]);
			if (i % BLOCK == 0) *(volatile u8*)(p + row + of.hidden + i / BLOCK) = (u8)exponent;
		});
	});
	to.all();
	for (u32 j = threadIdx.x; j < blockTokens(of.most) * of.topK; j += blockDim.x) {
		const u32 t = tokenAt(j / of.topK), i = t * of.topK + j % of.topK;
		const bool is = t < tokens && of.names(ids[i]);
		const i32 id = is ? ids[i] : -1;
		const float w = is && weights ? weights[i] : 0;
		to.put([&](char* p) {
			*(volatile i32*)(p + of.idsAt() + i * 4ull) = id;
			if (weights) *(volatile float*)(p + of.weightsAt() + i * 4ull) = w;
		});
	}
	if (threadIdx.x == 0) to.put([&](char* p) { *(volatile u32*)(p + of.weightedAt()) = weights ? 1 : 0; });
}

// sendPlaces stores the places of the rows of the block's tokens among the rows of this rank, and how many rows this rank has for each
// expert. All blocks store the same numbers, so that each can wait for one block of each rank.
static __device__ __forceinline__ void sendPlaces(const Shape& of, Peers to, const i32* ids, u32 tokens, u32* rows) {
	for (u32 first = 0; first < of.experts; first += COUNTED) {
		const u32 n = of.experts - first < COUNTED ? of.experts - first : COUNTED;
		clearRows(rows, n);
		eachToken(of, ids, tokens, first, n, rows, [&](u32 t) {
			const u32 i = t * of.topK + threadIdx.x;
			if (threadIdx.x >= of.topK || (u32)ids[i] - first >= n) return;
			to.only((u32)ids[i] / of.own());
			to.put([&](char* p) { *(volatile u32*)(p + of.placesAt() + i * 4ull) = rows[(u32)ids[i] - first]; });
		});
		for (u32 e = threadIdx.x; e < n; e += blockDim.x) {
			to.only((first + e) / of.own());
			to.put([&](char* p) { *(volatile u32*)(p + of.totalsAt() + (first + e) % of.own() * 4ull) = rows[e]; });
		}
	}
}

// Arrived is what a rank has got of all ranks: rank r's begins r * pitch bytes after in.
struct Arrived {
	const char* in;
	u64 pitch;

	__device__ const char* of(u32 r) const { return in + r * pitch; }
	__device__ const i32* ids(const Shape& s, u32 r) const { return (const i32*)(of(r) + s.idsAt()); }
	__device__ bool weighted(const Shape& s, u32 r) const { return *(const u32*)(of(r) + s.weightedAt()) != 0; }
	__device__ u32 total(const Shape& s, u32 r, u32 e) const { return ((const u32*)(of(r) + s.totalsAt()))[e]; }
};

// deliver stores a part of a token's row as rows of own experts. For each bit k of to, lane k has an expert, and the place of the row, which
// place returns: it is called once by all lanes, when loads are in flight. If the token is weighted, weights has the weights of its choices.
template <class Place> static __device__ __forceinline__ void deliver(const Shape& of, const char* row, u32 part, const Choice& c, u32 to, const float* weights, T* out, Place place) {
	if (to == 0) return;
	const u32 e = (u32)c.id - of.first();
	const u64 begin = (u64)part * PART, end = begin + PART < of.hidden ? begin + PART : of.hidden;
	u32 at = 0;
	if (!of.small && !weights) {
		const u64 first = begin * sizeof(T) / 16, last = end * sizeof(T) / 16;
		for (u64 from = first; from < last; from += COPIES * LANES) {
			const u64 i = from + lane();
			Cell v[COPIES];
#pragma unroll
			for (u32 b = 0; b < COPIES; b++)
				if (i + b * LANES < last) v[b] = ((const Cell*)row)[i + b * LANES];
			if (from == first) at = place();
			for (u32 left = to; left != 0; left &= left - 1) {
				const u32 k = __ffs(left) - 1;
				Cell* const y = (Cell*)of.row(out, __shfl_sync(ALL_LANES, e, k), __shfl_sync(ALL_LANES, at, k));
#pragma unroll
				for (u32 b = 0; b < COPIES; b++)
					if (i + b * LANES < last) y[i + b * LANES] = v[b];
			}
		}
		return;
	}
	float factor = 0; // the sum of the token's weights for the expert
	if (weights) {
		const float w = lane() < of.topK ? weights[lane()] : 0;
		for (u32 k = 0; k < of.topK; k++) {
			const i32 id = __shfl_sync(ALL_LANES, c.id, k);
			const float x = __shfl_sync(ALL_LANES, w, k);
			if (id == c.id) factor += x;
		}
	}
	for (u64 from = begin; from < end; from += PIECE) {
		const u64 i = from + lane() * UNIT;
		float v[UNIT] = {};
		if (i < end) {
			if (of.small) decode(*(const Words*)(row + i), (u8)row[of.hidden + i / BLOCK], Element<T>::largest, v);
			else load((const T*)row, i, of.hidden, 1, v);
		}
		if (from == begin) at = place();
		for (u32 left = to; left != 0; left &= left - 1) {
			const u32 k = __ffs(left) - 1;
			T* const y = of.row(out, __shfl_sync(ALL_LANES, e, k), __shfl_sync(ALL_LANES, at, k));
			const float by = __shfl_sync(ALL_LANES, factor, k);
			float z[UNIT];
#pragma unroll
			for (u32 j = 0; j < UNIT; j++) z[j] = weights ? __fmul_rn(v[j], by) : v[j];
			if (i < end) store(y, i, of.hidden, 1, z);
		}
	}
}

// takeRoutes stores the ids of the block's tokens of all ranks.
static __device__ __forceinline__ void takeRoutes(const Shape& of, const Arrived& from, i32* routes) {
	const u32 n = blockTokens(of.most) * of.topK;
	for (u32 j = threadIdx.x; j < of.ranks * n; j += blockDim.x) {
		const u32 r = j / n, i = tokenAt(j % n / of.topK) * of.topK + j % of.topK;
		routes[(u64)r * of.ids() + i] = from.ids(of, r)[i];
	}
}

// receiveSlots stores the rows of the own experts, their numbers, and the ids of all ranks. x are this rank's tokens, which are in no slot unless they are
// blocks of 8-bit numbers. It multiplies each row of a rank that has sent weights by the sum of its token's weights for the expert.
static __device__ __forceinline__ void receiveSlots(const Shape& of, const Arrived& from, const T* x, T* out, i32* counts, i32* routes) {
	const u32 n = blockTokens(of.most);
	eachPart(of.ranks * n, of.parts(), [&](u32 j, u32 part) {
		const u32 r = j / n, t = tokenAt(j % n);
		const u64 at = (u64)t * of.topK;
		const Choice c = firstChoices(of, from.ids(of, r) + at);
		const bool weighted = from.weighted(of, r), is = (u32)c.id - of.first() < of.own() && !c.again;
		const char* row = r == of.rank && !of.small ? (const char*)(x + (u64)t * of.hidden) : from.of(r) + t * of.rowBytes();
		deliver(of, row, part, c, __ballot_sync(ALL_LANES, is), weighted ? (const float*)(from.of(r) + of.weightsAt()) + at : nullptr, out, [&] {
			u32 place = is ? ((const u32*)(from.of(r) + of.placesAt()))[at + lane()] : 0;
#pragma unroll
			for (u32 q = 0; q < MOST; q++)
				if (q < r && is) place += from.total(of, q, (u32)c.id - of.first());
			return place;
		});
	});
	takeRoutes(of, from, routes);
	for (u32 e = blockIdx.x * blockDim.x + threadIdx.x; e < of.own(); e += gridDim.x * blockDim.x) {
		u32 rows = 0;
		for (u32 r = 0; r < of.ranks; r++) rows += from.total(of, r, e);
		counts[e] = rows;
	}
}

// receivePacked is receiveSlots for what NCCL has moved.
static __device__ __forceinline__ void receivePacked(const Shape& of, const Arrived& from, u32* rows, T* out, i32* counts, i32* routes) {
	takeRoutes(of, from, routes);
	for (u32 first = 0; first < of.own(); first += COUNTED) {
		const u32 n = of.own() - first < COUNTED ? of.own() - first : COUNTED, id = of.first() + first;
		clearRows(rows, n);
		for (u32 r = 0; r < of.ranks; r++)
			eachToken(of, from.ids(of, r), of.most, id, n, rows, [&](u32 t) {
				const u64 at = (u64)t * of.topK;
				const Choice c = firstChoices(of, from.ids(of, r) + at);
				const bool is = (u32)c.id - id < n && !c.again;
				const u32 to = __ballot_sync(ALL_LANES, is);
				const float* const weights = from.weighted(of, r) ? (const float*)(from.of(r) + of.weightsAt()) + at : nullptr;
				for (u32 part = warp(); part < of.parts(); part += warps())
					deliver(of, from.of(r) + t * of.rowBytes(), part, c, to, weights, out, [&] { return is ? rows[(u32)c.id - id] : 0; });
			});
		if (blockIdx.x == 0)
			for (u32 e = threadIdx.x; e < n; e += blockDim.x) counts[first + e] = rows[e];
	}
}

// ---- combine ----

// sendRows stores the rows of the own experts for their tokens.
template <class To> static __device__ __forceinline__ void sendRows(const Shape& of, To to, const T* y, const i32* routes, u32* rows) {
	for (u32 first = 0; first < of.own(); first += COUNTED) {
		const u32 n = of.own() - first < COUNTED ? of.own() - first : COUNTED, own = of.first() + first;
		clearRows(rows, n);
		for (u32 r = 0; r < of.ranks; r++) {
			const i32* const ids = routes + (u64)r * of.ids();
			u32* const kept = to.kept(r);
			to.only(r);
			eachToken(of, ids, of.most, own, n, rows, [&](u32 t) {
				const Choice c = choicesOf(of, ids + (u64)t * of.topK);
				const u32 e = (u32)c.id - own, place = e < n ? rows[e] : 0;
				if (kept) {
					if (warp() == 0 && e < n) kept[t * of.topK + lane()] = place;
					return;
				}
				u32 part = warp();
				for (u32 left = __ballot_sync(ALL_LANES, e < n && !c.again); left != 0; left &= left - 1, part -= of.parts()) {
					const u32 k = __ffs(left) - 1;
					const u64 at = of.seatAt(t, __shfl_sync(ALL_LANES, c.seat, k));
					const Cell* const row = (const Cell*)of.row(y, first + __shfl_sync(ALL_LANES, e, k), __shfl_sync(ALL_LANES, place, k));
					for (; part < of.parts(); part += warps()) {
						const u64 begin = (u64)part * PART, end = begin + PART < of.hidden ? begin + PART : of.hidden;
						copyCells(row, begin * sizeof(T) / 16, end * sizeof(T) / 16, [&](u64 i, const Cell& v) { to.put([&](char* p) { putCell((Cell*)(p + at) + i, v); }); });
					}
				}
			});
		}
	}
}

// lanesAddress returns the address that lane k has.
static __device__ __forceinline__ const char* lanesAddress(const char* p, u32 k) {
	return (const char*)((u64)__shfl_sync(ALL_LANES, (u32)((u64)p >> 32), k) << 32 | __shfl_sync(ALL_LANES, (u32)(u64)p, k));
}

// receiveRows adds the rows of each token, times its weights. Without weights it adds each row once. choices gets the row of each choice,
// unless it is null. If kept has the places of rows that are not sent, they are those of y.
static __device__ __forceinline__ void receiveRows(const Shape& of, const Arrived& from, const T* y, const u32* kept, const i32* routes, const float* weights, T* out, T* choices, u32 tokens) {
	const i32* const ids = routes + (u64)of.rank * of.ids();
	eachPart(blockTokens(tokens), of.pieces(), [&](u32 n, u32 piece) {
		const u32 t = tokenAt(n);
		const u64 at = (u64)t * of.topK, i = (u64)piece * PIECE + lane() * UNIT, cell = i * sizeof(T) / 16;
		const Choice c = choicesOf(of, ids + at);
		const float factor = weights && lane() < of.topK ? weights[at + lane()] : 1;
		const char* row = nullptr; // of this lane's choice
		if (c.id >= 0 && kept && (u32)c.id - of.first() < of.own()) row = (const char*)of.row(y, (u32)c.id - of.first(), kept[at + lane()]);
		else if (c.id >= 0) row = from.of((u32)c.id / of.own()) + of.seatAt(t, c.seat);
		float sum[UNIT] = {};
		for (u32 first = 0; first < of.topK; first += AHEAD) {
			Unit u[AHEAD];
#pragma unroll
			for (u32 b = 0; b < AHEAD; b++) {
				const Words* const p = (const Words*)lanesAddress(row, first + b);
#pragma unroll
				for (u32 w = 0; w < sizeof(Unit) / 16; w++) {
					u[b].w[w] = Words{};
					if (p && cell + w < of.cells()) u[b].w[w] = p[cell + w];
				}
			}
#pragma unroll
			for (u32 b = 0; b < AHEAD; b++) {
				const u32 k = first + b;
				if (k >= of.topK) break;
				const bool none = __shfl_sync(ALL_LANES, c.id, k) < 0 || (__shfl_sync(ALL_LANES, c.again, k) && !weights);
				const float w = __shfl_sync(ALL_LANES, factor, k);
				if (i >= of.hidden || (none && !choices)) continue;
				float v[UNIT];
				widen(u[b], v);
				if (choices) store(choices + (at + k) * of.hidden, i, of.hidden, 1, v);
				if (none) continue;
#pragma unroll
				for (u32 j = 0; j < UNIT; j++) sum[j] = __fmaf_rn(w, v[j], sum[j]);
			}
		}
		if (i < of.hidden) store(out + (u64)t * of.hidden, i, of.hidden, 1, sum);
	});
}

// ---- kernels ----

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch(LINKS, const T* x, const i32* ids, const float* weights, u32 tokens, T* out, i32* counts, i32* routes, LAYER) {
	__shared__ u32 rows[COUNTED];
	Rank me = RANK;
	const Shape of = SHAPED;
	enter(me);
	sendTokens(of, Peers{me, 0}, x, ids, weights, tokens);
	sendPlaces(of, Peers{me, 0}, ids, tokens, rows);
	barrier(me, 0);
	if (!me.over) receiveSlots(of, Arrived{from(me, me.peer[0], 0), me.slot}, x, out, counts, routes);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine(LINKS, const T* y, const i32* routes, const float* weights, T* out, T* choices, u32 tokens, LAYER) {
	__shared__ u32 rows[COUNTED];
	Rank me = RANK;
	const Shape of = SHAPED;
	enter(me);
	const Peers to = {me, 0};
	sendRows(of, to, y, routes, rows);
	barrier(me, 0);
	if (!me.over) receiveRows(of, Arrived{from(me, me.peer[0], 0), me.slot}, y, to.kept(me.rank), routes, weights, out, choices, tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS) dispatch_pack(const T* x, const i32* ids, const float* weights, char* out, u32 tokens, SHAPE) {
	const Shape of = SHAPED;
	sendTokens(of, Packed{out, out, 0}, x, ids, weights, tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_pack(const T* y, const i32* routes, char* out, u64 pitch, SHAPE) {
	__shared__ u32 rows[COUNTED];
	const Shape of = SHAPED;
	sendRows(of, Packed{out, out, pitch}, y, routes, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS) dispatch_receive(const char* in, u64 pitch, T* out, i32* counts, i32* routes, SHAPE) {
	__shared__ u32 rows[COUNTED];
	const Shape of = SHAPED;
	receivePacked(of, Arrived{in, pitch}, rows, out, counts, routes);
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_receive(const char* in, u64 pitch, const i32* routes, const float* weights, T* out, T* choices, u32 tokens, SHAPE) {
	const Shape of = SHAPED;
	receiveRows(of, Arrived{in, pitch}, nullptr, nullptr, routes, weights, out, choices, tokens);
}
