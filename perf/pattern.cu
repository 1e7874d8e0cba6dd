// Test data with exact reductions in any order of summation. Each element has a code, a small
// number that a hash of its index, rank and seed selects. fill writes the element that a table
// has for the code. check reduces the codes of all ranks and looks up the expected element in
// a second table.

typedef CHORUS_WORD word;
typedef unsigned long long u64;

// code is the code of element i of a rank. Ranks from limit on have only zeros.
__device__ unsigned code(u64 i, unsigned rank, unsigned seed, unsigned codes, unsigned limit) {
	unsigned h = (unsigned)i * 0x9E3779B1u ^ (unsigned)(i >> 32) ^ rank * 0x85EBCA77u ^ seed;
	h ^= h >> 16;
	h *= 0x7FEB352Du;
	h ^= h >> 15;
	h *= 0x846CA68Bu;
	h ^= h >> 16;
	return rank < limit ? h % codes : 0;
}

// fill writes the elements from to from+n-1 of a rank to p.
extern "C" __global__ void fill(word* p, u64 n, u64 from, unsigned rank, unsigned seed,
		unsigned codes, unsigned limit, const word* table) {
	for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
		p[i] = table[code(from + i, rank, seed, codes, limit)];
	}
}

// check adds to *wrong the number of elements that differ by more than tolerance from the
// reduction over the ranks first to first+ranks-1. The difference is between bit patterns. op
// is 0 for sums, 1 for min, 2 for max. If weights is 1, the codes of odd ranks count twice.
extern "C" __global__ void check(const word* p, u64 n, u64 from, unsigned first, unsigned ranks, unsigned seed,
		unsigned codes, unsigned limit, unsigned op, unsigned weights, const word* table, u64 tolerance, u64* wrong) {
	u64 bad = 0;
	for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
		unsigned all = code(from + i, first, seed, codes, limit) << (weights & first & 1);
		for (unsigned r = first + 1; r < first + ranks; r++) {
			unsigned c = code(from + i, r, seed, codes, limit) << (weights & r & 1);
			all = op == 0 ? all + c : op == 1 ? min(all, c) : max(all, c);
		}
		word want = table[all], got = p[i];
		bad += (want > got ? want - got : got - want) > tolerance;
	}
	if (bad) {
		atomicAdd(wrong, bad);
	}
}
