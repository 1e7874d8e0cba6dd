
// ---- the kernels on the host: the operands come on stdin, and the results go to stdout ----

struct Head { u32 ranks, experts, topK, hidden, most, small, each, blocks, threads, packed, slot; };

static void read(void* to, size_t bytes) {
	if (fread(to, 1, bytes, stdin) != bytes) abort();
}

// A Host is what a rank has.
struct Host {
	u32 tokens, weighted;
	std::vector<Cell> memory, sent, x, rows, out, choices;
	std::vector<i32> ids, counts, routes;
	std::vector<float> weights;
	Control control = {};
	u32 host[2] = {};
};
static std::vector<Host> hosts;
static Head head;
static u64 slot, part; // bytes of a slot, and of the parts that are moved if kernels pack them

static std::vector<Cell> cells(u64 bytes) {
	std::vector<Cell> list(bytes / 16 + 1);
	memset(list.data(), 0x55, list.size() * 16);
	return list;
}

// launch runs a kernel of a rank.
template <class Kernel> static void launch(Kernel kernel) {
	std::vector<std::thread> threads;
	std::vector<std::unique_ptr<Block>> blocks;
	for (u32 b = 0; b < head.blocks; b++) blocks.push_back(std::make_unique<Block>(head.threads, nullptr, nullptr));
	for (u32 b = 0; b < head.blocks; b++)
		for (u32 t = 0; t < head.threads; t++)
			threads.emplace_back([=, &blocks] {
				blockIdx.x = b, threadIdx.x = t, gridDim.x = head.blocks, blockDim.x = head.threads, block = blocks[b].get();
				kernel();
			});
	for (auto& t : threads) t.join();
}

#define LINKED(r, h) peer(r, 0), peer(r, 1), peer(r, 2), peer(r, 3), peer(r, 4), peer(r, 5), peer(r, 6), peer(r, 7), r, head.ranks, slot, 0, &h.control, h.host, 0x123456789abcdefull
#define LAYERED head.experts, head.topK, head.hidden, head.most, head.small
static char* peer(u32 r, u32 k) { return k < head.ranks ? (char*)hosts[(r + k) % head.ranks].memory.data() : nullptr; }
static const float* weights(Host& h) { return h.weighted ? h.weights.data() : nullptr; }

#define MOVED(h) (char*)h.memory.data(), part
#define RECEIVED(h) (T*)h.rows.data(), h.counts.data(), h.routes.data()
#define ADDED(h) h.routes.data(), weights(h), (T*)h.out.data(), head.each ? (T*)h.choices.data() : nullptr, h.tokens

static void send(u32 r, Host& h) {
	launch([&] {
		if (head.packed) dispatch_pack((T*)h.x.data(), h.ids.data(), weights(h), (char*)h.sent.data(), h.tokens, r, head.ranks, LAYERED);
		else dispatch(LINKED(r, h), (T*)h.x.data(), h.ids.data(), weights(h), h.tokens, RECEIVED(h), LAYERED);
	});
}
static void receive(u32 r, Host& h) {
	launch([&] { dispatch_receive(MOVED(h), RECEIVED(h), r, head.ranks, LAYERED); });
}
static void sendBack(u32 r, Host& h) {
	launch([&] {
		if (head.packed) combine_pack((T*)h.rows.data(), h.routes.data(), (char*)h.sent.data(), part, r, head.ranks, LAYERED);
		else combine(LINKED(r, h), (T*)h.rows.data(), ADDED(h), LAYERED);
	});
}
static void receiveBack(u32 r, Host& h) {
	launch([&] { combine_receive(MOVED(h), ADDED(h), r, head.ranks, LAYERED); });
}

// run lets each rank do its part, out of step. If kernels pack, it moves what they have packed.
static void run() {
	const Shape of = {0, head.ranks, head.experts, head.topK, head.hidden, head.most, head.small};
	if (!head.packed) {
		std::vector<std::thread> ranks;
		for (u32 r = 0; r < head.ranks; r++)
			ranks.emplace_back([r] {
				usleep(2000 * r); // the first ranks must wait
				Host& h = hosts[r];
				send(r, h);
				usleep(2000 * r);
				sendBack(r, h);
			});
		for (auto& t : ranks) t.join();
		return;
	}
	part = (of.weightedAt() + 4 + 15) / 16 * 16;
	for (u32 r = 0; r < head.ranks; r++) send(r, hosts[r]);
	for (u32 r = 0; r < head.ranks; r++)
		for (auto& h : hosts) memcpy((char*)h.memory.data() + r * part, hosts[r].sent.data(), part);
	for (u32 r = 0; r < head.ranks; r++) receive(r, hosts[r]);
	part = of.seatAt(head.most, 0);
	for (u32 r = 0; r < head.ranks; r++) sendBack(r, hosts[r]);
	for (u32 r = 0; r < head.ranks; r++)
		for (u32 to = 0; to < head.ranks; to++) memcpy((char*)hosts[to].memory.data() + r * part, (char*)hosts[r].sent.data() + to * part, part);
	for (u32 r = 0; r < head.ranks; r++) receiveBack(r, hosts[r]);
}

int main() {
	alarm(120); // threads must not poll forever if the test was killed
	while (fread(&head, sizeof head, 1, stdin) == 1) {
		const Shape of = {0, head.ranks, head.experts, head.topK, head.hidden, head.most, head.small};
		const u64 row = of.elementBytes(), all = (u64)of.own() * head.ranks * head.most * row;
		slot = head.slot;
		if (slot < of.totalsAt() + of.own() * 4 || slot < of.seatAt(head.most, 0) || slot < of.ids() * 4) abort(); // the next slot is of another rank
		hosts = std::vector<Host>(head.ranks);
		for (auto& h : hosts) {
			read(&h.tokens, 4), read(&h.weighted, 4);
			h.memory = cells(signals + 2 * head.ranks * slot), h.sent = cells(head.ranks * slot);
			memset(h.memory.data(), 0, signals);
			h.control.ticks = EPOCH * 1000;
			h.x = cells(h.tokens * row), h.rows = cells(all), h.out = cells(h.tokens * row), h.choices = cells(h.tokens * head.topK * row);
			h.ids.resize(h.tokens * head.topK), h.weights.resize(h.tokens * head.topK), h.counts.resize(of.own()), h.routes.resize(head.ranks * of.ids());
			read(h.x.data(), h.tokens * row);
			read(h.ids.data(), h.ids.size() * 4);
			read(h.weights.data(), h.weights.size() * 4);
		}
		run();
		for (auto& h : hosts) {
			if (!head.packed && h.control.ticks != EPOCH * 1002) abort();
			fwrite(h.rows.data(), 1, all, stdout);
			fwrite(h.counts.data(), 4, h.counts.size(), stdout);
			fwrite(h.routes.data(), 4, h.routes.size(), stdout);
			fwrite(h.out.data(), 1, h.tokens * row, stdout);
			fwrite(h.choices.data(), 1, h.tokens * head.topK * row, stdout);
		}
	}
}
