// Memory that several GPUs use at once.

struct alignas(16) Cell { u64 a, b; };

// put and get move 16 bytes past the caches, in one transaction. Of its four words
// only those of the same 8 bytes are sure to come together.
static __device__ __forceinline__ void put(void* p, u32 a, u32 b, u32 c, u32 d) {
	asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// get does nothing unless on is 1, and that without a branch, behind which the next one
// would have to wait.
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
// putLine and getLine are put and get for what a lane has of a line.
static __device__ __forceinline__ void putLine(void* p, Cell v) {
	asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" :: "l"(p), "l"(v.a), "l"(v.b) : "memory");
}
static __device__ __forceinline__ void getLine(const void* p, u32 on, Cell& v) {
	asm volatile("{.reg .pred on; setp.ne.u32 on, %3, 0; @on ld.volatile.global.v2.u64 {%0, %1}, [%2];}" : "+l"(v.a), "+l"(v.b) : "l"(p), "r"(on) : "memory");
}
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
