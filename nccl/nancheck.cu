// Looks for elements that are not a number (NaN) in the input of a collective.

typedef unsigned long long u64;

// look reports the first NaN of n elements, whose bits are above those of infinity, the sign
// apart. slot has two words that are 0 between launches: the complement of the index of the first
// NaN so far, and the number of blocks that have ended. The last block claims found, unless an
// earlier operation has: it writes the index and then the operation.
template <typename W> static __device__ void look(const W* x, u64 n, u64 infinity, u64 operation, u64* claimed, u64* slot, u64* found) {
	const W magnitude = (W)~(W)0 >> 1;
	for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
		if ((x[i] & magnitude) > infinity) {
			atomicMax(slot, ~i);
			break;
		}
	__threadfence();
	__syncthreads();
	if (threadIdx.x != blockDim.x - 1 || atomicInc((unsigned*)(slot + 1), gridDim.x - 1) != gridDim.x - 1) return;
	__threadfence();
	const u64 first = atomicExch(slot, 0ull);
	if (!first || atomicCAS(claimed, 0ull, 1ull)) return;
	volatile u64* out = found;
	out[1] = ~first;
	__threadfence_system();
	out[0] = operation;
}

#define LOOK(bytes, W) \
	extern "C" __global__ void look##bytes(const W* x, u64 n, u64 infinity, u64 operation, u64* claimed, u64* slot, u64* found) { \
		look(x, n, infinity, operation, claimed, slot, found); \
	}
LOOK(1, unsigned char)
LOOK(2, unsigned short)
LOOK(4, unsigned)
LOOK(8, u64)
