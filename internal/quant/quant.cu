// The kernels for an all-reduce whose chunks another library moves:
//   quantize     writes the chunks for the other ranks, which own the shares
//   reduce       adds the chunks of the other ranks to the own share, and writes a chunk of the sums
//   dequantize   reads the chunks of sums of the other ranks
//
// Each chunk is followed by a tag of the operation, in 16 bytes. A chunk with another tag is of a rank that called something else, and its
// elements are NaN.

#define THREADS 256

// All lanes of a warp have units of the share, or none: a share is a multiple of a warp's units.
#define EACH_UNIT(i, share) for (u64 i = ((u64)blockIdx.x * THREADS + threadIdx.x) * UNIT; i < (share); i += (u64)gridDim.x * THREADS * UNIT)

// other returns the rank of the c-th chunk of the other ranks.
static __device__ __forceinline__ u32 other(u32 c, u32 mine) { return c < mine ? c : c + 1; }

static __device__ __forceinline__ u64 taggedBytes(u64 share) { return chunkBytes(share) + 16; }
static __device__ __forceinline__ u64* tagOf(const u8* chunk, u64 share) { return (u64*)(chunk + chunkBytes(share)); }

static __device__ __forceinline__ void writeChunk(u8* chunk, u64 share, u64 i, const Words& q, u32 exponent, u64 tag) {
	*(Words*)(chunk + i) = q;
	if (i % BLOCK == 0) chunk[share + i / BLOCK] = (u8)exponent;
	if (i == 0) tagOf(chunk, share)[0] = tag, tagOf(chunk, share)[1] = 0;
}

static __device__ __forceinline__ u32 exponentAt(const u8* chunk, u64 share, u64 i, u64 tag) {
	return *tagOf(chunk, share) == tag ? chunk[share + i / BLOCK] : NOT_FINITE;
}

// quantize writes the chunks of the other ranks' shares of x, in rank order without the own one.
// gridDim.y is the number of the other ranks.
extern "C" __global__ void __launch_bounds__(THREADS) quantize(const T* x, float* errors, u8* out, u64 n, u64 share, u32 mine, u32 aligned, u64 tag) {
	const u64 begin = other(blockIdx.y, mine) * share;
	u8* const chunk = out + blockIdx.y * taggedBytes(share);
	EACH_UNIT(i, share) {
		u32 exponent;
		const Words q = unitToBlock(unitAt(x, begin + i, n, aligned), errors, begin + i, n, aligned, exponent);
		writeChunk(chunk, share, i, q, exponent, tag);
	}
}

// reduce adds the own share of x and the chunks of the other ranks, which are in rank order. It
// writes the sums to out, and as elements to the own share.
extern "C" __global__ void __launch_bounds__(THREADS) reduce(T* x, float* errors, const u8* in, u8* out, u64 n, u64 share, u32 mine, u32 ranks, u32 mean, u32 aligned, u64 tag) {
	EACH_UNIT(i, share) {
		u32 exponent;
		const u64 at = mine * share + i;
		const Words q = sumToBlock(unitAt(x, at, n, aligned), x, errors, at, n, aligned, mine, ranks, mean, exponent, [=](u32 r, u32& scale) {
			const u8* const chunk = in + (r < mine ? r : r - 1) * taggedBytes(share);
			scale = exponentAt(chunk, share, i, tag);
			return *(const Words*)(chunk + i);
		});
		writeChunk(out, share, i, q, exponent, tag);
	}
}

// dequantize writes the other ranks' shares of x from the chunks of all ranks. gridDim.y is the
// number of the other ranks.
extern "C" __global__ void __launch_bounds__(THREADS) dequantize(T* x, const u8* in, u64 n, u64 share, u32 mine, u32 aligned, u64 tag) {
	const u32 r = other(blockIdx.y, mine);
	const u8* const chunk = in + r * taggedBytes(share);
	EACH_UNIT(i, share) unitFromBlock(x, r * share + i, n, aligned, *(const Words*)(chunk + i), exponentAt(chunk, share, i, tag));
}
