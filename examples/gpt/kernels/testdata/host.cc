// Runs the kernels that standard input names, and writes the memory at their pointers.
template <class X> static X number() {
	X x;
	if (fread(&x, sizeof x, 1, stdin) != 1) exit(1);
	return x;
}

template <class P> struct Arg { // a number
	P x = number<P>();
	P get() { return x; }
	void put() {}
};
template <class E> struct Arg<E*> {
	std::vector<char> bytes = std::vector<char>(number<unsigned>());
	Arg() {
		if (fread(bytes.data(), 1, bytes.size(), stdin) != bytes.size()) exit(1);
	}
	E* get() { return (E*)bytes.data(); }
	void put() { fwrite(bytes.data(), 1, bytes.size(), stdout); }
};

static void (*work)(void*);
static void* works;
static void body() {
	work(works);
	fibers[current].done = true;
	yield();
}

static void block() {
	memset(__start_shared, 0xff, __stop_shared - __start_shared); // NaN
	arrived = 0;
	for (unsigned t = 0; t < blockDim.x; t++) {
		Fiber& f = fibers[t];
		f.done = false, f.thread.x = t, f.stack.resize(1 << 16), phases[t] = 0;
		getcontext(&f.context);
		f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size(), f.context.uc_link = nullptr;
		makecontext(&f.context, body, 0);
	}
	for (unsigned left = blockDim.x; left > 0;) {
		left = 0;
		for (current = 0; current < blockDim.x; current++) {
			if (fibers[current].done) continue;
			threadIdx = fibers[current].thread;
			swapcontext(&scheduler, &fibers[current].context);
			left += !fibers[current].done;
		}
	}
}

template <class... P> static void run(void (*kernel)(P...)) {
	std::tuple<Arg<P>...> args{Arg<P>()...}; // braces read them in order
	auto call = [&] { std::apply([&](auto&... a) { kernel(a.get()...); }, args); };
	work = [](void* p) { (*(decltype(call)*)p)(); };
	works = &call;
	fibers.resize(blockDim.x);
	for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) block();
	std::apply([](auto&... a) { (a.put(), ...); }, args);
}

int main() {
	unsigned length;
	while (fread(&length, sizeof length, 1, stdin) == 1) {
		std::string name(length, 0);
		if (fread(&name[0], 1, length, stdin) != length) return 1;
		gridDim.x = number<unsigned>(), blockDim.x = number<unsigned>();
#define KERNEL(k) if (name == #k) run(k);
		KERNELS
	}
}
