
// ---- the kernels of norms on the host: the operands come on stdin, and the results go to stdout ----

static const u64 WHOLE = 1 << 20, SLOT = 1 << 20;

struct Head { u32 kind, ranks, rows, words, blocks, threads, small; float eps, scale; };

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
	switch (head.kind) {
	case 0: return add_norm(GIVEN);
	case 1: return all_reduce_norm_1(LINKED, GIVEN);
	case 2: return all_reduce_norm_2(LINKED, GIVEN);
	}
	abort();
}

int main() {
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
		std::vector<Block*> blocks;
		for (u32 r = 0; r < head.ranks; r++)
			for (u32 b = 0; b < head.blocks; b++) {
				Block* of = new Block(head.threads);
				blocks.push_back(of);
				for (u32 t = 0; t < head.threads; t++)
					threads.emplace_back([=] {
						blockIdx.x = b, threadIdx.x = t, gridDim.x = head.blocks, blockDim.x = head.threads, block = of;
						kernel(r);
					});
			}
		for (auto& t : threads) t.join();
		for (Block* b : blocks) delete b;
		for (auto& h : hosts) {
			if (head.kind != 0 && h.control.ticks != EPOCH * 1001) abort();
			fwrite(h.residual.data(), 8, n, stdout);
			fwrite(h.out.data(), 8, n, stdout);
		}
	}
}
