
// ---- the kernels of norms on the host: the operands come on stdin, and the results go to stdout ----

static const u64 WHOLE = 1 << 20, SLOT = 1 << 20;

struct Head { u32 kind, ranks, rows, words, blocks, threads, team, small; float eps, scale; };

static void read(void* to, size_t bytes) {
	if (fread(to, 1, bytes, stdin) != bytes) abort();
}

// A Host is what a rank has.
struct Host {
	std::vector<u64> memory, in, residual, out;
	char* scratch;
	Control control = {};
	u32 host[2] = {};
};
static std::vector<Host> hosts;
static std::vector<u64> weight;
static Head head;

static void kernel(int rank) {
	Host& h = hosts[rank];
	char* p[8] = {};
	for (u32 k = 0; k < head.ranks; k++) p[k] = hosts[(rank + k) % head.ranks].scratch;
	const float* scale = head.small ? &head.scale : nullptr;
#define LINKED p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], (u32)rank, head.ranks, SLOT, WHOLE, &h.control, h.host, 0x123456789abcdefull
#define GIVEN h.in.data(), h.residual.data(), weight.data(), (char*)h.out.data(), scale, head.rows, head.words, head.eps
	switch (head.kind * 10 + head.team) {
	case 1: return add_norm(GIVEN);
	case 11: return all_reduce_norm_1(LINKED, GIVEN);
	case 12: return all_reduce_norm_1x2(LINKED, GIVEN);
	case 14: return all_reduce_norm_1x4(LINKED, GIVEN);
	case 18: return all_reduce_norm_1x8(LINKED, GIVEN);
	case 21: return all_reduce_norm_2(LINKED, GIVEN);
	case 22: return all_reduce_norm_2x2(LINKED, GIVEN);
	case 24: return all_reduce_norm_2x4(LINKED, GIVEN);
	case 28: return all_reduce_norm_2x8(LINKED, GIVEN);
	}
	abort();
}

int main() {
	alarm(120); // threads must not poll forever if the test was killed
	while (fread(&head, sizeof head, 1, stdin) == 1) {
		const u64 n = (u64)head.rows * head.words;
		weight.resize(head.words);
		read(weight.data(), head.words * 8);
		hosts = std::vector<Host>(head.ranks);
		for (auto& h : hosts) {
			h.memory.resize((signals + 2 * (head.ranks * SLOT + WHOLE)) / 8 + 2);
			h.scratch = (char*)h.memory.data() + ((u64)h.memory.data() % 16);
			h.control.ticks = EPOCH * 1000;
			h.in.resize(n), h.residual.resize(n), h.out.resize(n, 0x5555555555555555ull);
			read(h.in.data(), n * 8);
			read(h.residual.data(), n * 8);
		}
		std::vector<std::thread> threads;
		std::vector<std::unique_ptr<Barrier>> clusters;
		std::vector<Block*> blocks(head.ranks * head.blocks);
		for (u32 b = 0; b < blocks.size(); b++) {
			if (b % head.team == 0) clusters.push_back(std::make_unique<Barrier>(head.team * head.threads));
			blocks[b] = new Block(head.threads, clusters.back().get(), &blocks[b / head.team * head.team]);
		}
		for (u32 b = 0; b < blocks.size(); b++)
			for (u32 t = 0; t < head.threads; t++)
				threads.emplace_back([=, &blocks] {
					blockIdx.x = b % head.blocks, threadIdx.x = t, gridDim.x = head.blocks, blockDim.x = head.threads, block = blocks[b];
					kernel(b / head.blocks);
				});
		for (auto& t : threads) t.join();
		for (Block* b : blocks) delete b;
		for (auto& h : hosts) {
			if (head.kind != 0 && h.control.ticks != EPOCH * 1001) abort();
			fwrite(h.residual.data(), 8, n, stdout);
			fwrite(h.out.data(), 8, n, stdout);
		}
	}
}
