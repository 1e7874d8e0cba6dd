
// Tensor cores and asynchronous copies, for sources that define these functions with PTX if __CUDACC__ is
// defined.
static float bfloat_of(unsigned short b) { return __uint_as_float((unsigned)b << 16); }

// An asynchronous copy may end at any time until it is awaited, so each one is drawn: at once, or as late
// as possible.
struct Copy {
	void* to;
	const void* from;
	unsigned bytes;
	void end() { memset(to, 0, 16), memcpy(to, from, bytes); }
};
static std::vector<std::vector<Copy>> copies[1024]; // groups of each thread that are not awaited; the last one is open
static unsigned drawn = 1;
static void forget_copies() {
	for (auto& groups : copies) groups.clear();
}
static void copy_async(void* to, const void* from, unsigned bytes) {
	if ((uintptr_t)to % 16 != 0 || (uintptr_t)from % 16 != 0 && bytes > 0) __trap();
	auto& groups = copies[current];
	if (groups.empty()) groups.emplace_back();
	Copy c = {to, from, bytes};
	drawn = drawn * 1664525 + 1013904223;
	if (drawn >> 31) c.end();
	else groups.back().push_back(c);
}
static void commit_copies() {
	auto& groups = copies[current];
	if (groups.empty()) groups.emplace_back();
	groups.emplace_back();
}
template <int N> static void await_copies() {
	auto& groups = copies[current];
	while (groups.size() > N + 1) {
		for (Copy& c : groups.front()) c.end();
		groups.erase(groups.begin());
	}
}

// Each lane gives the address of a row of 8 elements of 16 bits: lanes 0 to 7 of the first matrix, and so on.
template <bool transposed> static void matrices(unsigned (&x)[4], const void* row) {
	if ((uintptr_t)row % 16 != 0) __trap();
	fibers[current].exchanged = (uintptr_t)row;
	warp_wait(0xffffffff);
	const unsigned r = lane() / 4, c = lane() % 4 * 2;
	auto element = [&](unsigned matrix, unsigned r, unsigned c) {
		return (unsigned)((const unsigned short*)fibers[current / 32 * 32 + matrix * 8 + r].exchanged)[c];
	};
	for (unsigned i = 0; i < 4; i++)
		x[i] = transposed ? element(i, c, r) | element(i, c + 1, r) << 16 : element(i, r, c) | element(i, r, c + 1) << 16;
	warp_wait(0xffffffff);
}
static void load_matrices(unsigned (&x)[4], const void* row) { matrices<false>(x, row); }
static void load_transposed(unsigned (&x)[4], const void* row) { matrices<true>(x, row); }

// multiply_of computes c += a·b for 16 rows, 8 columns and an inner dimension of 16 (mma.sync m16n8k16). It rounds once;
// tensor cores round otherwise.
template <float (*value)(unsigned short)> static void multiply_of(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
	static unsigned given[32][32][6];
	auto& warp = given[current / 32];
	memcpy(warp[lane()], a, sizeof a);
	warp[lane()][4] = b0, warp[lane()][5] = b1;
	warp_wait(0xffffffff);
	for (unsigned i = 0; i < 4; i++) {
		const unsigned row = lane() / 4, column = lane() % 4 * 2 + i % 2;
		double sum = c[i];
		for (unsigned k = 0; k < 16; k++)
			sum += (double)value(warp[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2] >> k % 2 * 16) * value(warp[column * 4 + k % 8 / 2][4 + k / 8] >> k % 2 * 16);
		c[i] = (float)sum;
	}
	warp_wait(0xffffffff);
}
static void multiply_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { multiply_of<half_value>(c, a, b0, b1); }
static void multiply_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { multiply_of<bfloat_of>(c, a, b0, b1); }
