
// Runs the kernel that standard input names, and writes the memory at its pointers. Sources may have functions of
// the same names.
namespace chorus_host {
template <class X> static X number() {
	X x;
	if (fread(&x, sizeof x, 1, stdin) != 1) exit(2);
	return x;
}

// guarded returns memory between addresses that fault: what a kernel accesses far outside of its
// arguments. It begins at a multiple of 256.
static char* guarded(size_t size) {
	const size_t page = 4096, guard = 1 << 30, inside = (size + 255) / 256 * 256, mapped = (inside + page - 1) / page * page;
	char* all = (char*)mmap(nullptr, mapped + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (all == MAP_FAILED || mprotect(all + guard, mapped, PROT_READ | PROT_WRITE) != 0) return (char*)aligned_alloc(256, inside + 256);
	return all + guard + mapped - inside;
}

template <class P> struct Arg { // a number or a struct
	P x = number<P>();
	P get() { return x; }
	void put() {}
};
static std::vector<char*> memories; // of the pointers so far; nullptr for a null pointer

template <class E> struct Arg<E*> {
	unsigned long long size = number<unsigned long long>(), before = number<unsigned long long>(), owner = number<unsigned long long>();
	char* bytes = nullptr;
	Arg() {
		if (size > 0) {
			bytes = guarded(size);
			if (fread(bytes, 1, size, stdin) != size) exit(2);
		} else if (owner > 0) { // in the memory of another pointer
			bytes = memories.at(owner - 1);
		}
		memories.push_back(bytes);
	}
	E* get() { return bytes == nullptr ? nullptr : (E*)(bytes + before); }
	void put() { fwrite(bytes, 1, size, stdout); }
};

static void (*work)(void*);
static void* works;
static void body() {
	for (;;) { // a thread of each block
		work(works);
		fibers[current].done = progress = true;
		finished++;
		yield();
	}
}

static void start() {
	memset(__start_shared, 0xff, __stop_shared - __start_shared); // NaN
	memset(dynamicShared.data(), 0xff, dynamicShared.size());
	memset(arrived, 0, sizeof arrived);
	forget_copies();
	waiting = finished = 0;
	for (unsigned t = 0; t < fibers.size(); t++) {
		Fiber& f = fibers[t];
		f.done = f.atBarrier = f.released = false;
		if (f.entered) continue;
		f.stack.reset(new char[1 << 16]);
		f.thread = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
		getcontext(&f.context);
		f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = 1 << 16, f.context.uc_link = nullptr;
		makecontext(&f.context, body, 0);
	}
}

static void block() {
	start();
	for (unsigned left = fibers.size(); left > 0;) {
		left = 0, progress = false;
		for (current = 0; current < fibers.size(); current++) {
			if (fibers[current].done) continue;
			threadIdx = fibers[current].thread;
			resume();
			left += !fibers[current].done;
		}
		if (left == 0 || progress) continue;
		fprintf(stderr, "%u threads of block (%u, %u, %u) wait for threads that do not come to the same barrier or warp exchange",
			left, blockIdx.x, blockIdx.y, blockIdx.z);
		exit(3);
	}
}

template <class... P> static void run(void (*kernel)(P...)) {
	std::tuple<Arg<P>...> args{Arg<P>()...}; // braces read them in order
	auto call = [&] { std::apply([&](auto&... a) { kernel(a.get()...); }, args); };
	work = [](void* p) { (*(decltype(call)*)p)(); };
	works = &call;
	fibers.resize(blockDim.x * blockDim.y * blockDim.z);
	for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
		for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
			for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) block();
	std::apply([](auto&... a) { (a.put(), ...); }, args);
}

// A kernel may spin for ever, and nobody else ends the program when its parent was killed.
static pid_t parent;

static void checkParent(int) {
	if (getppid() != parent) _exit(9);
}

static void watchParent() {
	static char room[1 << 16];
	stack_t stack = {};
	stack.ss_sp = room, stack.ss_size = sizeof room;
	struct sigaction action = {};
	action.sa_handler = checkParent, action.sa_flags = SA_RESTART | SA_ONSTACK;
	struct itimerval every = {{0, 200000}, {0, 200000}};
	sigaltstack(&stack, nullptr);
	sigaction(SIGALRM, &action, nullptr);
	setitimer(ITIMER_REAL, &every, nullptr);
}

// The argument is the parent's process identifier: getppid is another process's if the parent was killed before main.
static int runNamed(char** args) {
	parent = atoi(args[1]);
	watchParent();
	std::string name(number<unsigned>(), 0);
	if (fread(&name[0], 1, name.size(), stdin) != name.size()) return 2;
	gridDim = number<Dim>(), blockDim = number<Dim>();
	dynamicShared.resize(number<unsigned>() + 16);
#define KERNEL(k) if (name == #k) return run(::k), 0;
	KERNELS
	fprintf(stderr, "the program has no kernel %s", name.c_str());
	return 4;
}
}

int main(int, char** args) { return chorus_host::runNamed(args); }
