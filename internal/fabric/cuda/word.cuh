// load and store move the i-th word of bytes bytes, of which the last word may have
// fewer than 8, and what lies beyond none: it is 0. Where p is said to be aligned, whole
// words go as one, and others by their bytes, as those of loadBytes and storeBytes.
static __device__ __forceinline__ u64 loadBytes(const char* p, u64 i, u64 bytes) {
	u64 word = 0;
	for (u32 j = 0; j < 8 && i * 8 + j < bytes; j++) word |= (u64)(u8)p[i * 8 + j] << 8 * j;
	return word;
}
static __device__ __forceinline__ void storeBytes(char* p, u64 i, u64 bytes, u64 word) {
	for (u32 j = 0; j < 8 && i * 8 + j < bytes; j++) p[i * 8 + j] = (char)(word >> 8 * j);
}
static __device__ __forceinline__ u64 load(const char* p, u64 i, u64 bytes, bool aligned) {
	if (aligned && i * 8 + 8 <= bytes) return ((const u64*)p)[i];
	return loadBytes(p, i, bytes);
}
static __device__ __forceinline__ void store(char* p, u64 i, u64 bytes, bool aligned, u64 word) {
	if (aligned && i * 8 + 8 <= bytes) ((u64*)p)[i] = word;
	else storeBytes(p, i, bytes, word);
}

// loadEach loads the i-th words of what the k-th rank after this one gets, which begins
// at its number times step.
static __device__ __forceinline__ void loadEach(const Rank& me, const char* in, u64 step, u64 i, u64 bytes, bool aligned, u64 (&word)[MOST]) {
#pragma unroll
	for (u32 k = 0; k < MOST; k++)
		if (k < count(me)) word[k] = k > 0 && step == 0 ? word[0] : load(in + after(me, k) * step, i, bytes, aligned);
}

static __device__ __forceinline__ u64 words(u64 bytes) { return (bytes + 7) / 8; }
static __device__ __forceinline__ u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 stride() { return (u64)gridDim.x * blockDim.x; }
