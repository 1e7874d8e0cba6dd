#ifdef CHORUS_TYPE

// The all-reduce by lines: as with packets nothing waits for a barrier, and yet all but a
// sixteenth of what goes over the links is data.

// A line is 128 bytes, of which eight lanes of a warp store 16 each by one instruction.
// Over NVLink they are one write, and come together: PTX does not promise it, and Open
// looks whether it may be relied on. Its last word is the mark, the others are data.
#define LANES 8
#define LINE (LANES * sizeof(Cell))
#define LINE_WORDS 15

static __device__ __forceinline__ u32 lane() { return threadIdx.x % LANES; }
static __device__ __forceinline__ bool marks() { return lane() == LANES - 1; }
static __device__ __forceinline__ u64 lineMark(const Rank& me) { return me.epoch + me.signature; }
static __device__ __forceinline__ u64 firstLine() { return first() / LANES; }
static __device__ __forceinline__ u64 lineStride() { return stride() / LANES; }

// team has a bit for each lane of the line within the warp.
static __device__ __forceinline__ u32 team() { return 0xffu << (threadIdx.x & 24); }

// together makes the lanes of a line go on as one: what they load or store next is one
// access.
static __device__ __forceinline__ void together() { __syncwarp(team()); }

// fromLast returns what the last lane of a line has.
static __device__ __forceinline__ u32 fromLast(u32 x) { return __shfl_sync(team(), x, LANES - 1, LANES); }

// loadLine and storeLine move what this lane has of the i-th line of p.
static __device__ __forceinline__ Cell loadLine(const char* p, u64 i, u64 bytes, bool aligned) {
	const u64 at = i * LINE_WORDS + lane() * 2;
	const Cell v = {load(p, at, bytes, aligned), marks() ? 0 : load(p, at + 1, bytes, aligned)};
	return v;
}
static __device__ __forceinline__ void storeLine(char* p, u64 i, u64 bytes, bool aligned, Cell v) {
	const u64 at = i * LINE_WORDS + lane() * 2;
	store(p, at, bytes, aligned, v.a);
	if (!marks()) store(p, at + 1, bytes, aligned, v.b);
}

// sendLine sends the i-th line of to. The lanes are together.
static __device__ __forceinline__ void sendLine(const Rank& me, char* to, u64 i, Cell v) {
	if (marks()) v.b = lineMark(me);
	if (!me.over) putLine(to + i * LINE + lane() * sizeof(Cell), v);
}

// enterLines is enter for an operation by lines. They have memory of their own, of which
// nobody ever loads less than a line at once. Where packets had been before, each loaded
// by itself, the mark of a line came while its other parts were still those packets.
static __device__ __forceinline__ void enterLines(Rank& me) {
	enter(me);
	me.place += 2 * (count(me) * me.slot + me.whole);
}

// Lines is some lines of each rank.
typedef Cell Lines[BATCH][MOST];

// lineBit is that of a line among what is missing.
static __device__ __forceinline__ u32 lineBit(u32 b, u32 r) { return 1u << (b * MOST + r); }

// wanted has a bit for each other rank's lines that lie before share.
static __device__ __forceinline__ u32 wanted(const Rank& me, u64 share, u64 i) {
	u32 bits = 0;
#pragma unroll
	for (u32 b = 0; b < BATCH; b++)
		if (i + b * lineStride() < share) bits |= others(me) << (b * MOST);
	return bits;
}

// receiveLines waits for the missing lines, of which those of each rank begin pitch bytes
// after each other. The last lane says for all what has come, and whether to give up.
static __device__ __forceinline__ void receiveLines(Rank& me, u32 missing, const char* in, u64 pitch, u64 i, Lines& c) {
	const u32 giveUp = 1u << 31;
	in += i * LINE + lane() * sizeof(Cell);
#pragma unroll
	for (u32 b = 0; b < BATCH; b++)
#pragma unroll
		for (u32 r = 0; r < MOST; r++) c[b][r].a = c[b][r].b = 0;
	do {
		together();
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++) getLine(in + r * pitch + b * lineStride() * LINE, (missing & lineBit(b, r)) != 0, c[b][r]);
		u32 came = 0;
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				if (c[b][r].b == lineMark(me)) came |= lineBit(b, r);
		if (marks() && (missing & ~came) != 0 && stalled(me)) came |= giveUp;
		came = fromLast(came);
		missing &= ~came;
		me.over = me.over || (came & giveUp) != 0;
	} while (missing != 0 && !me.over);
}

// loadLines loads lines of the shares of the k-th ranks after this one.
static __device__ __forceinline__ void loadLines(const Rank& me, const char* in, u64 share, u64 i, u64 bytes, bool aligned, Lines& c) {
#pragma unroll
	for (u32 b = 0; b < BATCH; b++)
#pragma unroll
		for (u32 k = 1; k < MOST; k++)
			if (k < count(me)) c[b][k] = loadLine(in, after(me, k) * share + i + b * lineStride(), bytes, aligned);
}

// all_reduce_4 is all_reduce_2 by lines. The lanes of one have the same way through it.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_4(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	const u64 all = (words(bytes) + LINE_WORDS - 1) / LINE_WORDS, step = BATCH * lineStride();
	const u64 share = (all + count(me) - 1) / count(me), mine = me.rank * share;
	Lines c;
	Cell own[BATCH];
	u64 i = firstLine();
	loadLines(me, in, share, i, bytes, aligned, c);
	enterLines(me);
	for (; i < share; i += step) {
		together();
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me) && i + b * lineStride() < share)
					sendLine(me, from(me, me.peer[k], me.rank), i + b * lineStride(), c[b][k]);
		loadLines(me, in, share, i + step, bytes, aligned, c);
	}
	entered(me);
	for (i = firstLine(); i < share; i += step) {
#pragma unroll
		for (u32 b = 0; b < BATCH; b++) own[b] = loadLine(in, mine + i + b * lineStride(), bytes, aligned);
		receiveLines(me, wanted(me, share, i), from(me, me.peer[0], 0), me.slot, i, c);
#pragma unroll
		for (u32 b = 0; b < BATCH; b++) {
			const u64 at = i + b * lineStride();
			if (at >= share) continue;
			const Cell sum = reduceCell(me, c[b], own[b]);
			together();
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me)) sendLine(me, gathered(me, me.peer[k]), mine + at, sum);
			storeLine(out, mine + at, bytes, aligned, sum);
		}
	}
	for (i = firstLine(); i < share; i += step) {
		receiveLines(me, wanted(me, share, i), gathered(me, me.peer[0]), share * LINE, i, c);
#pragma unroll
		for (u32 b = 0; b < BATCH; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				if (r < count(me) && r != me.rank && i + b * lineStride() < share)
					storeLine(out, r * share + i + b * lineStride(), bytes, aligned, c[b][r]);
	}
}

#endif
