// Loads and stores of scratch memory, which several GPUs access concurrently.

struct alignas(16) Cell { u64 a, b; };

// put stores 16 bytes by one instruction, and get loads them. Both are volatile, so that
// get does not return stale data from a cache. Only the two aligned halves of 8 bytes are
// atomic: a reader may see one half before the other.
static __device__ __forceinline__ void put(void* p, u32 a, u32 b, u32 c, u32 d) {
	asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// get does nothing if on is 0. It uses a predicate instead of a branch, so that the loads of
// consecutive calls are in flight together.
static __device__ __forceinline__ void get(const void* p, u32 on, u32& a, u32& b, u32& c, u32& d) {
	asm volatile("{.reg .pred on; setp.ne.u32 on, %5, 0; @on ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];}" : "+r"(a), "+r"(b), "+r"(c), "+r"(d) : "l"(p), "r"(on) : "memory");
}
static __device__ __forceinline__ void putCell(Cell* p, Cell v) { put(p, (u32)v.a, (u32)(v.a >> 32), (u32)v.b, (u32)(v.b >> 32)); }
static __device__ __forceinline__ Cell getCell(const Cell* p, u32 on) {
	u32 a = 0, b = 0, c = 0, d = 0;
	get(p, on, a, b, c, d);
	Cell v = {a | (u64)b << 32, c | (u64)d << 32};
	return v;
}
// putLine and getLine are put and get for a lane's 16 bytes of a line (see line.cu).
static __device__ __forceinline__ void putLine(void* p, Cell v) {
	asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" :: "l"(p), "l"(v.a), "l"(v.b) : "memory");
}
static __device__ __forceinline__ void getLine(const void* p, u32 on, Cell& v) {
	asm volatile("{.reg .pred on; setp.ne.u32 on, %3, 0; @on ld.volatile.global.v2.u64 {%0, %1}, [%2];}" : "+l"(v.a), "+l"(v.b) : "l"(p), "r"(on) : "memory");
}

// release and acquire order memory between GPUs, for barrier. relaxed does not order
// memory; it reads the abort request of the host.
static __device__ __forceinline__ void release(u64* p, u64 v) {
	asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
static __device__ __forceinline__ u64 acquire(const u64* p) {
	u64 v;
	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	return v;
}
static __device__ __forceinline__ u32 relaxed(const u32* p) {
	u32 v;
	asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}
