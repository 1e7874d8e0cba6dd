
// ---- permutations ----
// The lines above are rng.cu. NVRTC compiles both at run time: a stable sort of 64-bit keys with
// 32-bit values, and torch's permutations, which are sorted random keys.

#define EACH(i, n) for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

// The sort is a radix sort with digits of 8 bits, the lowest first. Each pass has three
// kernels: sort_count counts the digits in each block's part of the keys, sort_scan computes
// prefix sums over the blocks, and sort_scatter moves the keys. Blocks process their part in
// tiles, and each warp processes a contiguous part of the tile, so that the order of equal
// keys is kept.
enum { THREADS = 256, WARPS = THREADS / 32, DIGITS = 256, TILE = 4096, PART = TILE / WARPS };

static __device__ __forceinline__ u32 digit_of(u64 key, u32 shift) { return (u32)(key >> shift) % DIGITS; }

// sort_count counts the digits of each block's keys: counts[digit][block].
extern "C" __global__ void __launch_bounds__(256) sort_count(const u64* keys, u32* counts, u64 n, u64 part, u32 shift) {
    __shared__ u32 count[DIGITS];
    count[threadIdx.x] = 0;
    __syncthreads();
    const u64 begin = blockIdx.x * part, end = begin + part < n ? begin + part : n;
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) atomicAdd(&count[digit_of(keys[i], shift)], 1);
    __syncthreads();
    counts[threadIdx.x * gridDim.x + blockIdx.x] = count[threadIdx.x];
}

// scanned replaces own by the sum over all lower threads of the block, an exclusive prefix
// sum, and returns the sum over all threads. All threads of the block call it.
static __device__ __forceinline__ u32 scanned(u32* x, u32& own) {
    x[threadIdx.x] = own;
    __syncthreads();
    for (u32 d = 1; d < blockDim.x; d *= 2) {
        const u32 lower = threadIdx.x >= d ? x[threadIdx.x - d] : 0;
        __syncthreads();
        x[threadIdx.x] += lower;
        __syncthreads();
    }
    own = x[threadIdx.x] - own;
    const u32 all = x[blockDim.x - 1];
    __syncthreads();
    return all;
}

// sort_scan replaces the counts of one digit by their exclusive prefix sums over the blocks,
// and stores the total. A launch has one block for each digit.
extern "C" __global__ void __launch_bounds__(256) sort_scan(u32* counts, u32* totals, u32 blocks) {
    __shared__ u32 x[THREADS];
    u32* const row = counts + blockIdx.x * blocks;
    u32 sum = 0;
    for (u32 at = 0; at < blocks; at += THREADS) {
        const u32 i = at + threadIdx.x;
        u32 count = i < blocks ? row[i] : 0;
        const u32 all = scanned(x, count);
        if (i < blocks) row[i] = sum + count;
        sum += all;
    }
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

// peers returns the mask of the lanes whose keys have the same digit. All lanes of the warp
// call it; lanes without a key pass DIGITS.
static __device__ __forceinline__ u32 peers(u32 digit) { return __match_any_sync(0xffffffffu, digit); }

// sort_scatter moves keys and values to their positions. If values is null, the value of a
// key is its index. base is the next position of each digit in this block, and at is the next
// position of each digit in each warp.
extern "C" __global__ void __launch_bounds__(256) sort_scatter(const u64* keys, const u32* values, u64* keys_out,
        u32* values_out, const u32* counts, const u32* totals, u64 n, u64 part, u32 shift) {
    __shared__ u32 base[DIGITS], x[THREADS], at[WARPS][DIGITS + 1];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first = totals[threadIdx.x];
    scanned(x, first);
    base[threadIdx.x] = first + counts[threadIdx.x * gridDim.x + blockIdx.x];
    const u64 begin = blockIdx.x * part, end = begin + part < n ? begin + part : n;
    for (u64 tile = begin; tile < end; tile += TILE) {
        for (u32 w = 0; w < WARPS; w++) at[w][threadIdx.x] = 0;
        __syncthreads();
        for (u32 step = 0; step < PART; step += 32) { // count the digits of each warp
            const u64 i = tile + warp * PART + step + lane;
            const u32 digit = i < end ? digit_of(keys[i], shift) : (u32)DIGITS, mask = peers(digit);
            if (digit < DIGITS && (mask & ((1u << lane) - 1)) == 0) at[warp][digit] += __popc(mask);
            __syncwarp();
        }
        __syncthreads();
        for (u32 w = 0; w < WARPS; w++) { // compute the first position of each warp
            const u32 count = at[w][threadIdx.x];
            at[w][threadIdx.x] = base[threadIdx.x];
            base[threadIdx.x] += count;
        }
        __syncthreads();
        for (u32 step = 0; step < PART; step += 32) {
            const u64 i = tile + warp * PART + step + lane;
            const u64 key = i < end ? keys[i] : 0;
            const u32 digit = i < end ? digit_of(key, shift) : (u32)DIGITS, mask = peers(digit);
            const u32 lower = mask & ((1u << lane) - 1);
            u32 to = 0;
            if (digit < DIGITS) to = at[warp][digit] + __popc(lower);
            __syncwarp();
            if (digit < DIGITS) {
                if (lower == 0) at[warp][digit] += __popc(mask);
                keys_out[to] = key;
                values_out[to] = values ? values[i] : (u32)i;
            }
            __syncwarp();
        }
        __syncthreads();
    }
}

// permutation_keys converts random integers to sort keys: it widens them, and keeps the bits
// of the mask. torch sorts signed integers, so the kernel inverts the sign bit.
extern "C" __global__ void __launch_bounds__(256) permutation_keys(u64* keys, const i32* narrow, u64 n, u64 mask) {
    EACH(i, n) keys[i] = (narrow ? (u64)((u32)narrow[i] ^ 0x80000000u) : keys[i] ^ 0x8000000000000000ull) & mask;
}

// permutation_ties shuffles the values of equal keys by the algorithm of Fisher and Yates,
// because the stable sort keeps them in their order. The thread of the first of several equal
// keys shuffles all their values. It draws from the Philox subsequence of the key's index.
extern "C" __global__ void __launch_bounds__(256) permutation_ties(const u64* keys, u32* values, u64 n, u64 seed, u64 offset, const u64* place) {
    if (place) {
        seed = place[0];
        offset += place[1];
    }
    EACH(i, n - 1) {
        if (keys[i] != keys[i + 1] || (i != 0 && keys[i] == keys[i - 1])) continue;
        u32 size = 2;
        while (i + size < n && keys[i + size] == keys[i]) size++;
        for (u32 k = size - 1, drawn = 0; k > 0; k--, drawn++) {
            const Words w = philox((u32)seed, (u32)(seed >> 32), offset / 4 + drawn / 4, (u32)i);
            const u32 word[4] = {w.x, w.y, w.z, w.w};
            const u32 other = word[drawn % 4] % (k + 1), value = values[i + k];
            values[i + k] = values[i + other];
            values[i + other] = value;
        }
    }
}

#ifdef CHORUS_ELEMENT
// permutation_store converts the values to the element type.
extern "C" __global__ void __launch_bounds__(256) permutation_store(CHORUS_ELEMENT* out, const u32* values, u64 n) {
    EACH(i, n) out[i] = Element<CHORUS_ELEMENT>::of((i64)values[i]);
}
#endif
