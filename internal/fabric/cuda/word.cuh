// Words of operands: the user's input and output, of any length and alignment.

// load and store access the i-th word of 8 bytes of an operand with the given number of
// bytes. If the operand is aligned, they access a complete word at once. Otherwise loadBytes
// and storeBytes access the bytes one by one. Bytes beyond the end are loaded as 0 and not
// stored.
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

// loadEach loads, for each rank, the i-th word of the chunk that the rank receives: word[k]
// is for the k-th rank after this one. The chunk of rank r begins at r * step. If step is 0,
// all ranks receive the same chunk, and it is loaded once.
static __device__ __forceinline__ void loadEach(const Rank& me, const char* in, u64 step, u64 i, u64 bytes, bool aligned, u64 (&word)[MOST]) {
#pragma unroll
	for (u32 k = 0; k < MOST; k++)
		if (k < count(me)) word[k] = k > 0 && step == 0 ? word[0] : load(in + after(me, k) * step, i, bytes, aligned);
}

// words is the number of words of an operand. The threads of a grid share the words: a thread
// begins with word first() and continues in steps of stride().
static __device__ __forceinline__ u64 words(u64 bytes) { return (bytes + 7) / 8; }
static __device__ __forceinline__ u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 stride() { return (u64)gridDim.x * blockDim.x; }
