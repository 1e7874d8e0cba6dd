
// ---- the kernels on the host ----

static const u64 WHOLE = 65536, SLOT = 65536;

// A Host is what a rank has.
struct Host {
	std::vector<u64> memory;
	char* scratch;
	Control control;
	u32 host[2];
};

// An Order is one operation of all ranks.
struct Order {
	int kind;
	u64 n; // elements of a part
	unsigned grid;
	bool inPlace;
	int skip, root;
	u32 share = 0; // cells of a part of a chunk
};

#ifdef CHORUS_TYPE
enum { REDUCE_SCATTER, ALL_REDUCE, TWO_SHOT_PACKETS, TWO_SHOT, TWO_SHOT_LINES, PIPELINED, PIPELINED_SCATTER, KINDS };
static bool scatters(int kind) { return kind == REDUCE_SCATTER || kind == PIPELINED_SCATTER; }
#else
enum { ALL_GATHER, ALL_TO_ALL, BROADCAST, PIPELINED_GATHER, PIPELINED_EXCHANGE, KINDS };
static bool exchanges(int kind) { return kind == ALL_TO_ALL || kind == PIPELINED_EXCHANGE; }
typedef u8 T;
#endif

static std::vector<Host> hosts;
static std::atomic<int> wrong;

static int number(int rank, u64 i, size_t order) { return 1 + (i * 7 + rank * 5 + i / 64 + order) % 3; }

#define ARGS p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], (u32)rank, (u32)hosts.size(), SLOT, WHOLE, &hosts[rank].control, hosts[rank].host, 0x123456789abcdefull * (order % 2 + 1), (char*)in, (char*)out, bytes, aligned

static void kernel(const Order& o, size_t order, int rank, char** p, T* in, T* out, u64 bytes) {
	const u64 bits = (u64)in | (u64)out;
	u32 aligned = bits % 8 == 0;
#ifdef CHORUS_TYPE
	switch (o.kind) {
	case REDUCE_SCATTER: aligned = (bits | bytes) % 8 == 0; return reduce_scatter(ARGS);
	case ALL_REDUCE: return all_reduce_1(ARGS);
	case TWO_SHOT_PACKETS: return all_reduce_2(ARGS);
	case TWO_SHOT: aligned = bits % 16 == 0; return all_reduce_3(ARGS);
	case TWO_SHOT_LINES: return all_reduce_4(ARGS);
	case PIPELINED: aligned = bits % 16 == 0; return all_reduce_5(ARGS, o.share);
	case PIPELINED_SCATTER: aligned = (bits | bytes) % 16 == 0; return reduce_scatter_2(ARGS, o.share);
	}
#else
	switch (o.kind) {
	case ALL_GATHER: aligned = (bits | bytes) % 8 == 0; return all_gather(ARGS);
	case ALL_TO_ALL: aligned = (bits | bytes) % 8 == 0; return all_to_all(ARGS);
	case BROADCAST: return broadcast(ARGS, o.root);
	case PIPELINED_GATHER: aligned = (bits | bytes) % 16 == 0; return all_gather_2(ARGS, o.share);
	case PIPELINED_EXCHANGE: aligned = (bits | bytes) % 16 == 0; return all_to_all_2(ARGS, o.share);
	}
#endif
}

// launch runs a thread for each of the grid.
static void launch(const Order& o, size_t order, int rank, T* in, T* out) {
	char* p[8] = {};
	for (size_t k = 0; k < hosts.size(); k++) p[k] = hosts[(rank + k) % hosts.size()].scratch;
	std::vector<std::thread> threads;
	std::vector<Block> blocks(o.grid);
	for (unsigned b = 0; b < o.grid; b++)
		for (unsigned t = 0; t < 8; t++)
			threads.emplace_back([&, b, t] {
				blockIdx.x = b, threadIdx.x = t, gridDim.x = o.grid, blockDim.x = 8, block = &blocks[b];
				kernel(o, order, rank, p, in, out, o.n * sizeof(T));
			});
	for (auto& t : threads) t.join();
}

// input and want are elements of a rank, by their place in the source and destination.
#ifdef CHORUS_TYPE
static T input(int rank, u64 i, size_t order) { return Element<T>::narrow((Acc)number(rank, i, order)); }
static T want(const Order& o, int rank, u64 i, size_t order) {
	if (scatters(o.kind)) i += rank * o.n;
	Acc a = (Acc)number(0, i, order);
	for (size_t r = 1; r < hosts.size(); r++) a = Reduction::join(a, (Acc)number(r, i, order));
	return Element<T>::narrow(Reduction::finish(a, hosts.size()));
}
#else
static T input(int rank, u64 i, size_t order) { return number(rank, i, order) * 16 + rank; }
static T want(const Order& o, int rank, u64 i, size_t order) {
	if (o.kind == BROADCAST) return input(o.root, i, order);
	return input(i / o.n, i % o.n + (exchanges(o.kind) ? rank * o.n : 0), order);
}
#endif

// An Input is aligned memory that ends at a page which cannot be read, so that a kernel
// dies that reads 16 bytes too far.
struct Input {
	const u64 page = sysconf(_SC_PAGESIZE), readable;
	char *const map, *const data;
	explicit Input(u64 bytes)
		: readable((bytes + page) / page * page),
		  map((char*)mmap(nullptr, readable + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
		  data(map + (readable - bytes) / 16 * 16) {
		if (map == MAP_FAILED || mprotect(map + readable, page, PROT_NONE) != 0) abort();
	}
	~Input() { munmap(map, readable + page); }
};

// carryOut runs one operation of a rank on fresh memory, and checks it.
static void carryOut(Order o, int rank, size_t order) {
	const u64 ranks = hosts.size();
	u64 outs = o.n, ins = o.n;
#ifdef CHORUS_TYPE
	if (scatters(o.kind)) ins *= ranks;
#else
	if (o.kind != BROADCAST) outs *= ranks;
	if (exchanges(o.kind)) ins *= ranks, o.inPlace = false;
#endif
	const size_t room = (std::max(ins, outs) + 64) * sizeof(T) / 16 + 1;
	std::vector<Cell> a(room);
	Input b((o.skip + ins) * sizeof(T));
	memset(a.data(), 0xa5, room * 16);
	T *out = (T*)a.data() + o.skip, *in = o.inPlace ? out : (T*)b.data + o.skip;
#ifdef CHORUS_TYPE
	if (o.inPlace && scatters(o.kind)) out = in + rank * o.n;
#else
	if (o.inPlace && !exchanges(o.kind) && o.kind != BROADCAST) in = out + rank * o.n;
	if (o.kind == BROADCAST && rank != o.root) in = out, ins = 0;
#endif
	for (u64 i = 0; i < ins; i++) in[i] = input(rank, i, order);
	std::vector<T> expected((T*)a.data(), (T*)a.data() + room * 16 / sizeof(T));
	for (u64 i = 0; i < outs; i++) expected[out - (T*)a.data() + i] = want(o, rank, i, order);
	launch(o, order, rank, in, out);
	if (memcmp(expected.data(), a.data(), expected.size() * sizeof(T)) != 0 && wrong++ == 0)
		printf("rank %d of %d: order %d, kind %d of %d elements from %d, %u blocks, in place %d\n",
			rank, (int)ranks, (int)order, o.kind, (int)o.n, o.skip, o.grid, o.inPlace);
}

// open makes the ranks, with scratch memory that is aligned.
static void open(int ranks, u64 epoch) {
	const u64 words = (signals + SETS * (ranks * SLOT + WHOLE)) / 8;
	hosts = std::vector<Host>(ranks);
	for (auto& h : hosts) {
		h.memory.resize(words + 2);
		h.scratch = (char*)h.memory.data() + ((u64)h.memory.data() % 16);
		h.control.ticks = EPOCH * epoch;
	}
}

// sets returns what a rank's scratch memory has behind the signals.
static const char* sets(int rank) { return hosts[rank].scratch + signals; }

static bool any(const char* p, u64 bytes) {
	return std::any_of(p, p + bytes, [](char c) { return c != 0; });
}

// gaveUp reports whether rank 1 gives up where rank 0 has sent all that it sends at once,
// for an operation of another signature or of the same.
static bool gaveUp(int kind, bool same) {
	open(2, 1000);
	std::vector<Cell> in(64), out(64);
	for (int r = 0; r < 2; r++) {
		hosts[r].host[0] = 1;
		launch({kind, 16, 1}, same ? 0 : r, r, (T*)in.data(), (T*)out.data());
		if (hosts[r].control.gaveUp != (hosts[r].host[1] == 0 ? 0 : 1001) || hosts[r].control.ticks != 1001 * EPOCH) wrong++;
	}
	return hosts[1].host[1] != 0;
}

#ifdef CHORUS_TYPE
// taken reports whether rank 1 takes what rank 0 has sent first, and so sends the sum of a
// share, for an operation of another signature or of the same.
static bool taken(int kind, bool same) {
	const u64 n = 240;
	open(2, 1000);
	std::vector<Cell> in(n), out(n);
	for (int r = 0; r < 2; r++) {
		hosts[r].host[0] = 1;
		launch({kind, n, 1}, same ? 0 : r, r, (T*)in.data(), (T*)out.data());
	}
	const char* whole = sets(0) + (kind == TWO_SHOT_LINES ? 3 : 1) * (2 * SLOT + WHOLE) + 2 * SLOT; // of odd epochs
	return any(whole, WHOLE);
}

// spills reports whether a rank sends lines beyond its share, here six with four at once
// where there are that many, or to who has the share itself.
static bool spills() {
	const u64 share = 6, lines = 128, n = 2 * share * 120 / sizeof(T);
	open(2, 1000);
	std::vector<std::thread> all;
	for (int r = 0; r < 2; r++)
		all.emplace_back([=] { carryOut({TWO_SHOT_LINES, n, 1}, r, 0); });
	for (auto& t : all) t.join();
	bool is = false;
	for (u64 r = 0; r < 2; r++) {
		const char *set = sets(r) + 3 * (2 * SLOT + WHOLE), *whole = set + 2 * SLOT; // of odd epochs
		is |= any(whole + r * share * lines, share * lines);
		is |= any(whole + 2 * share * lines, WHOLE - 2 * share * lines);
		is |= any(set + (1 - r) * SLOT + share * lines, SLOT - share * lines);
	}
	return is;
}

// strays reports whether an operation stores where only lines belong, or one by lines
// anywhere else.
static bool strays(int kind) {
	open(2, 1000);
	std::vector<std::thread> all;
	for (int r = 0; r < 2; r++)
		all.emplace_back([=] { for (int i = 0; i < 2; i++) carryOut({kind, 300, 1, false, 0, 0, 5}, r, i); });
	for (auto& t : all) t.join();
	const u64 half = 2 * (2 * SLOT + WHOLE);
	const bool lines = any(sets(0) + half, half), rest = any(sets(0) - signals, signals + half);
	return kind == TWO_SHOT_LINES ? rest || !lines : lines || !rest;
}
#endif

int main() {
	alarm(120); // threads must not poll forever if the test was killed
#ifdef CHORUS_TYPE
	const int oneWay = TWO_SHOT_PACKETS; // the kinds before it
#else
	const int oneWay = PIPELINED_GATHER;
#endif
#if !defined(CHORUS_RANKS) || CHORUS_RANKS == 2
	for (int kind = 0; kind < oneWay; kind++)
		if (gaveUp(kind, true) || !gaveUp(kind, false)) wrong++, printf("kind %d: a signature is not seen, or a wrong one\n", kind);
#ifdef CHORUS_TYPE
	for (int kind : {TWO_SHOT_PACKETS, TWO_SHOT_LINES})
		if (!taken(kind, true) || taken(kind, false)) wrong++, printf("kind %d: a signature is not seen, or a wrong one\n", kind);
	for (int kind = 0; kind < KINDS; kind++)
		if (strays(kind)) wrong++, printf("kind %d stores among others' lines, or no line\n", kind);
	if (spills()) wrong++, printf("lines beyond a share are sent\n");
#endif
#endif
	int operations = 0;
	for (int ranks : {2, 3, 5, 8}) {
#ifdef CHORUS_RANKS
		if (ranks != CHORUS_RANKS) continue;
#endif
		open(ranks, ranks == 3 ? (1ull << 32) - 6 : ranks == 5 ? (7ull << 32) - 2 : 0);
		std::mt19937 random(ranks);
		std::vector<Order> orders;
		for (int i = 0; i < 40; i++)
			orders.push_back({(int)(random() % KINDS), 1 + random() % (random() % 5 == 0 ? 700 : 60), 1 + (unsigned)(random() % 3),
				random() % 2 == 0, (int)(random() % 3), (int)(random() % ranks), 1 + (u32)(random() % 30)});
		std::vector<std::thread> all;
		for (int r = 0; r < ranks; r++)
			all.emplace_back([&, r] { for (size_t i = 0; i < orders.size(); i++) carryOut(orders[i], r, i); });
		for (auto& t : all) t.join();
		operations += orders.size();
	}
	printf("%d operations\n", operations);
	return wrong != 0;
}
