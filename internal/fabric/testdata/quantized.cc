
// ---- the kernel on the host: the operands come on stdin, and the results go to stdout ----

static const u64 WHOLE = 1 << 20, SLOT = 1 << 20;

struct Head { u32 ranks, n, share, length, blocks, threads, mean, feedback, skip; };

static void read(void* to, size_t bytes) {
	if (fread(to, 1, bytes, stdin) != bytes) abort();
}

// A Host is what a rank has. Its elements begin skip elements after a multiple of 16 bytes.
struct Host {
	std::vector<Cell> memory, x, errors;
	Control control = {};
	u32 host[2] = {};
};
static std::vector<Host> hosts;
static Head head;

static T* elements(Host& h) { return (T*)h.x.data() + head.skip; }
static float* errors(Host& h) { return head.feedback ? (float*)h.errors.data() + head.skip : nullptr; }

static void kernel(int rank) {
	Host& h = hosts[rank];
	char* p[8] = {};
	for (u32 k = 0; k < head.ranks; k++) p[k] = (char*)hosts[(rank + k) % head.ranks].memory.data();
	all_reduce_quantized(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], (u32)rank, head.ranks, SLOT, WHOLE, &h.control, h.host, 0x123456789abcdefull,
		elements(h), errors(h), head.n, head.share, head.length, head.mean, head.skip == 0);
}

int main() {
	alarm(120); // threads must not poll forever if the test was killed
	for (u64 epoch = 1000; fread(&head, sizeof head, 1, stdin) == 1; epoch++) {
		hosts.resize(head.ranks);
		for (auto& h : hosts) {
			h.memory.resize((signals + 2 * (head.ranks * SLOT + WHOLE)) / 16);
			if (h.control.ticks == 0) h.control.ticks = EPOCH * epoch;
			h.x.resize((head.n + head.skip) * sizeof(T) / 16 + 1), h.errors.resize((head.n + head.skip) / 4 + 1);
			read(elements(h), head.n * sizeof(T));
			if (head.feedback) read(errors(h), head.n * 4);
		}
		std::vector<std::thread> threads;
		std::vector<std::unique_ptr<Block>> blocks;
		for (u32 b = 0; b < head.ranks * head.blocks; b++) blocks.push_back(std::make_unique<Block>(head.threads, nullptr, nullptr));
		for (u32 b = 0; b < blocks.size(); b++)
			for (u32 t = 0; t < head.threads; t++)
				threads.emplace_back([=, &blocks] {
					blockIdx.x = b % head.blocks, threadIdx.x = t, gridDim.x = head.blocks, blockDim.x = head.threads, block = blocks[b].get();
					// The data of one rank is later than its signals, so that the others see what they do not wait for.
					if (b / head.blocks == epoch % head.ranks && t >= SENTRIES) lateness = 1000;
					kernel(b / head.blocks);
				});
		for (auto& t : threads) t.join();
		for (auto& h : hosts) {
			if (h.control.ticks != EPOCH * (epoch + 1)) abort();
			fwrite(elements(h), sizeof(T), head.n, stdout);
			if (head.feedback) fwrite(errors(h), 4, head.n, stdout);
		}
	}
}
