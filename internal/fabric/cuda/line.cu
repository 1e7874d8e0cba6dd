#ifdef CHORUS_TYPE

// The all-reduce by lines: as with packets nothing waits for a barrier, and yet all but a
// sixteenth of what goes over the links is data.

// A line is 128 bytes, of which eight lanes of a warp store 16 each by one instruction.
// Over NVLink they are one write, and come together: PTX does not promise it, and Open
// looks whether it may be relied on. Its last word is the mark, the others are data.
#define LANES 8
#define LINE (LANES * (u32)sizeof(Cell))
#define LINE_WORDS 15

static __device__ __forceinline__ u32 lane() { return threadIdx.x % LANES; }
static __device__ __forceinline__ bool marks() { return lane() == LANES - 1; }
static __device__ __forceinline__ u64 lineMark(const Rank& me) { return me.epoch + me.signature; }
static __device__ __forceinline__ u32 firstLine() { return (u32)first() / LANES; }
static __device__ __forceinline__ u32 lineStride() { return (u32)stride() / LANES; }

// team has a bit for each lane of the line within the warp.
static __device__ __forceinline__ u32 team() { return 0xffu << (threadIdx.x & 24); }

// together makes the lanes of a line go on as one: what they load or store next is one
// access.
static __device__ __forceinline__ void together() { __syncwarp(team()); }

// fromLast returns what the last lane of a line has.
static __device__ __forceinline__ u32 fromLast(u32 x) { return __shfl_sync(team(), x, LANES - 1, LANES); }

// A Lined says of an operand how many bytes it has, and how many lines from its first one
// on are whole and aligned, so that they go as words.
struct Lined { u32 bytes, whole; };

// wordOf returns the first of the two words, or one, that this lane has of the i-th line.
static __device__ __forceinline__ u32 wordOf(u32 i) { return i * LINE_WORDS + lane() * 2; }

// loadWhole loads what this lane has of the i-th line of p, which is a whole one, and
// loadLine and storeLine move that of any. As with cells, what goes by bytes is called.
static __device__ __forceinline__ Cell loadWhole(const char* p, u32 i) {
	const u64* w = (const u64*)p + wordOf(i);
	Cell v = {w[0], 0};
	if (!marks()) v.b = w[1];
	return v;
}
static __device__ __noinline__ Cell loadLineBytes(const char* p, u32 word, u32 bytes) {
	const Cell v = {loadBytes(p, word, bytes), marks() ? 0 : loadBytes(p, word + 1, bytes)};
	return v;
}
static __device__ __noinline__ void storeLineBytes(char* p, u32 word, u32 bytes, Cell v) {
	storeBytes(p, word, bytes, v.a);
	if (!marks()) storeBytes(p, word + 1, bytes, v.b);
}
static __device__ __forceinline__ Cell loadLine(const char* p, u32 i, Lined of) {
	if (i < of.whole) return loadWhole(p, i);
	const Cell none = {0, 0};
	return wordOf(i) * 8 < of.bytes ? loadLineBytes(p, wordOf(i), of.bytes) : none;
}
static __device__ __forceinline__ void storeLine(char* p, u32 i, Lined of, Cell v) {
	if (i < of.whole) {
		u64* w = (u64*)p + wordOf(i);
		w[0] = v.a;
		if (!marks()) w[1] = v.b;
	} else if (wordOf(i) * 8 < of.bytes) {
		storeLineBytes(p, wordOf(i), of.bytes, v);
	}
}

// sendLine sends the i-th line of to. The lanes are together.
static __device__ __forceinline__ void sendLine(const Rank& me, char* to, u32 i, Cell v) {
	if (marks()) v.b = lineMark(me);
	if (!me.over) putLine(to + (i * LINE + lane() * (u32)sizeof(Cell)), v);
}

// enterLines is enter for an operation by lines. They have memory of their own, of which
// nobody ever loads less than a line at once. Where packets had been before, each loaded
// by itself, the mark of a line came while its other parts were still those packets.
static __device__ __forceinline__ void enterLines(Rank& me) {
	enter(me);
	me.place += 2 * (count(me) * me.slot + me.whole);
}

// lineBit is that of a line among what is missing.
static __device__ __forceinline__ u32 lineBit(u32 b, u32 r) { return 1u << (b * MOST + r); }

// wanted has a bit for each other rank's lines that lie before share.
template <u32 N> static __device__ __forceinline__ u32 wanted(const Rank& me, u32 share, u32 i) {
	u32 bits = 0;
#pragma unroll
	for (u32 b = 0; b < N; b++)
		if (i + b * lineStride() < share) bits |= others(me) << (b * MOST);
	return bits;
}

// receiveLines waits for the missing lines, of which those of each rank begin pitch bytes
// after each other. The last lane says for all what has come, and whether to give up.
template <u32 N> static __device__ __forceinline__ void receiveLines(Rank& me, u32 missing, const char* in, u64 pitch, u32 i, Cell (&c)[N][MOST]) {
	const u32 giveUp = 1u << 31;
	in += i * LINE + lane() * (u32)sizeof(Cell);
#pragma unroll
	for (u32 b = 0; b < N; b++)
#pragma unroll
		for (u32 r = 0; r < MOST; r++) c[b][r].a = c[b][r].b = 0;
	do {
		together();
#pragma unroll
		for (u32 b = 0; b < N; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++) getLine(in + r * pitch + b * lineStride() * LINE, (missing & lineBit(b, r)) != 0, c[b][r]);
		u32 came = 0;
#pragma unroll
		for (u32 b = 0; b < N; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				if (c[b][r].b == lineMark(me)) came |= lineBit(b, r);
		if (marks() && (missing & ~came) != 0 && stalled(me)) came |= giveUp;
		came = fromLast(came);
		missing &= ~came;
		me.over = me.over || (came & giveUp) != 0;
	} while (missing != 0 && !me.over);
}

// loadLines loads lines of the shares of the k-th ranks after this one: where all of
// them are whole, without a branch between the loads.
template <u32 N> static __device__ __forceinline__ void loadLines(const Rank& me, const char* in, u32 share, u32 i, Lined of, Cell (&c)[N][MOST]) {
	const bool whole = (count(me) - 1) * share + i + (N - 1) * lineStride() < of.whole;
#pragma unroll
	for (u32 b = 0; b < N; b++)
#pragma unroll
		for (u32 k = 1; k < MOST; k++)
			if (k < count(me) && whole) c[b][k] = loadWhole(in, after(me, k) * share + i + b * lineStride());
	if (whole) return;
#pragma unroll
	for (u32 b = 0; b < N; b++)
#pragma unroll
		for (u32 k = 1; k < MOST; k++)
			if (k < count(me)) c[b][k] = loadLine(in, after(me, k) * share + i + b * lineStride(), of);
}

// reduceLines is all_reduce_4 with N lines of each share at once.
template <u32 N> static __device__ __forceinline__ void reduceLines(Rank& me, const char* in, char* out, u32 share, Lined of) {
	const u32 step = N * lineStride(), mine = me.rank * share;
	Cell c[N][MOST], own[N];
	u32 i = firstLine();
	loadLines(me, in, share, i, of, c);
	enterLines(me);
	for (; i < share; i += step) {
		together();
#pragma unroll
		for (u32 b = 0; b < N; b++)
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me) && i + b * lineStride() < share)
					sendLine(me, from(me, me.peer[k], me.rank), i + b * lineStride(), c[b][k]);
		if (i + step < share) loadLines(me, in, share, i + step, of, c);
	}
	entered(me);
	for (i = firstLine(); i < share; i += step) {
#pragma unroll
		for (u32 b = 0; b < N; b++) own[b] = loadLine(in, mine + i + b * lineStride(), of);
		receiveLines(me, wanted<N>(me, share, i), from(me, me.peer[0], 0), me.slot, i, c);
#pragma unroll
		for (u32 b = 0; b < N; b++) {
			const u32 at = i + b * lineStride();
			if (at >= share) continue;
			const Cell sum = reduceCell(me, c[b], own[b]);
			together();
#pragma unroll
			for (u32 k = 1; k < MOST; k++)
				if (k < count(me)) sendLine(me, gathered(me, me.peer[k]), mine + at, sum);
			storeLine(out, mine + at, of, sum);
		}
	}
	for (i = firstLine(); i < share; i += step) {
		receiveLines(me, wanted<N>(me, share, i), gathered(me, me.peer[0]), (u64)share * LINE, i, c);
#pragma unroll
		for (u32 b = 0; b < N; b++)
#pragma unroll
			for (u32 r = 0; r < MOST; r++)
				if (r < count(me) && r != me.rank && i + b * lineStride() < share)
					storeLine(out, r * share + i + b * lineStride(), of, c[b][r]);
	}
}

// all_reduce_4 is all_reduce_2 by lines, as many of a share at once as a thread has or, of
// many, BATCH. The lanes of one have the same way through it.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_4(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	const u32 line = LINE_WORDS * 8, all = ((u32)bytes + line - 1) / line, share = (all + count(me) - 1) / count(me);
	const Lined of = {(u32)bytes, aligned ? (u32)bytes / line : 0};
	if (BATCH == 1 || share <= lineStride()) reduceLines<1>(me, in, out, share, of);
	else if (share <= 2 * lineStride()) reduceLines<2>(me, in, out, share, of);
	else reduceLines<BATCH>(me, in, out, share, of);
}

#endif
