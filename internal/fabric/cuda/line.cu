#ifdef CHORUS_TYPE

// The two-shot all-reduce of lines. As with packets, the receiver polls marks in the data
// and no barrier is necessary, but marks are only a sixteenth of the bytes.

// A line has 128 bytes: 15 words of data and a mark. Eight lanes of a warp store 16 bytes
// each by one instruction. Over NVLink, the store arrives as a whole, so a valid mark
// proves that the data has arrived. PTX does not guarantee this; Open tests whether the
// links do.
#define LANES 8
#define LINE (LANES * (u32)sizeof(Cell))
#define LINE_WORDS 15

// marks reports whether the lane has the mark of its line. firstLine and lineStride are first
// and stride for lines.
static __device__ __forceinline__ u32 lane() { return threadIdx.x % LANES; }
static __device__ __forceinline__ bool marks() { return lane() == LANES - 1; }
static __device__ __forceinline__ u64 lineMark(const Rank& me) { return me.epoch + me.signature; }
static __device__ __forceinline__ u32 firstLine() { return (u32)first() / LANES; }
static __device__ __forceinline__ u32 lineStride() { return (u32)stride() / LANES; }

// team is the mask of the warp's lanes that share this lane's line.
static __device__ __forceinline__ u32 team() { return 0xffu << (threadIdx.x & 24); }

// together synchronizes the lanes of a line, so that their next load or store is one access
// of 128 bytes.
static __device__ __forceinline__ void together() { __syncwarp(team()); }

// fromLast returns the value of x in the last lane of the line, by a shuffle.
static __device__ __forceinline__ u32 fromLast(u32 x) { return __shfl_sync(team(), x, LANES - 1, LANES); }

// A Lined describes an operand: its size in bytes, and the number of lines at its beginning
// that are accessed by words. whole is 0 if the operand is not aligned.
struct Lined { u32 bytes, whole; };

// wordOf returns the index of this lane's first word of the i-th line. The last lane has one
// word of data, the other lanes have two.
static __device__ __forceinline__ u32 wordOf(u32 i) { return i * LINE_WORDS + lane() * 2; }

// loadWhole loads this lane's words of the i-th line, which must be below of.whole. loadLine
// and storeLine accept any line. As with cells, the accesses by bytes are not inlined.
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

// sendLine stores the i-th line of a buffer and adds the mark. All lanes of the line call it
// after together.
static __device__ __forceinline__ void sendLine(const Rank& me, char* to, u32 i, Cell v) {
	if (marks()) v.b = lineMark(me);
	if (!me.over) putLine(to + (i * LINE + lane() * (u32)sizeof(Cell)), v);
}

// enterLines is enter for lines. Lines have separate buffers, which are always loaded in
// complete lines. In buffers that packets had used before, a receiver saw the mark of a line
// together with stale packets in the rest of the line.
static __device__ __forceinline__ void enterLines(Rank& me) {
	enter(me);
	me.place += 2 * (count(me) * me.slot + me.whole);
}

// lineBit is the bit of line b of rank r in a set of missing lines.
static __device__ __forceinline__ u32 lineBit(u32 b, u32 r) { return 1u << (b * MOST + r); }

// wanted returns the set of the N lines from line i on, of each other rank, that are
// within the share.
template <u32 N> static __device__ __forceinline__ u32 wanted(const Rank& me, u32 share, u32 i) {
	u32 bits = 0;
#pragma unroll
	for (u32 b = 0; b < N; b++)
		if (i + b * lineStride() < share) bits |= others(me) << (b * MOST);
	return bits;
}

// receiveLines polls for up to N lines of each rank together, and stores this lane's 16 bytes
// of each in c. missing is the set of expected lines. The lines of rank r begin at
// in + r * pitch. All lanes of a line call it. Only the last lane sees the marks, so it
// distributes the set of arrived lines and the abort flag to the other lanes by a shuffle.
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

// loadLines loads N lines of each other rank's share: c[b][k] is for the k-th rank after this
// one. If all these lines are complete, there is no branch between the loads.
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

// reduceLines is the algorithm of all_reduce_4. A thread processes N lines of a share
// together. Its phases are the phases of all_reduce_2.
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

// all_reduce_4 is the two-shot all-reduce in lines. It processes as many lines together as a
// thread has of each share, at most BATCH. All lanes of a line take the same branches.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_4(LINKS, const char* in, char* out, u64 bytes, u32 aligned) {
	Rank me = RANK;
	const u32 line = LINE_WORDS * 8, all = ((u32)bytes + line - 1) / line, share = (all + count(me) - 1) / count(me);
	const Lined of = {(u32)bytes, aligned ? (u32)bytes / line : 0};
	if (BATCH == 1 || share <= lineStride()) reduceLines<1>(me, in, out, share, of);
	else if (share <= 2 * lineStride()) reduceLines<2>(me, in, out, share, of);
	else reduceLines<BATCH>(me, in, out, share, of);
}

#endif
