#ifdef CHORUS_TYPE

// Reductions of pieces that are in the memory of one device, for ranks whose data NCCL has
// moved. They compute the same bits as the kernels that move the data themselves.

typedef CHORUS_TYPE T;
typedef Element<T>::Acc Acc;
typedef CHORUS_OP<Acc> Op;

// FOLDERS is the number of threads in a block.
#define FOLDERS 256

// Pieces are elements of all ranks: of rank r at base + r * stride, but of rank mine at own.
struct Pieces {
	const char* base;
	u64 stride;
	const char* own;
	u32 mine, count, block;
	__device__ __forceinline__ const char* of(u32 r) const { return r == mine ? own : base + r * stride; }
};

// A Side converts the elements of a kernel's input or output: elements of T, or results of a block
// of ranks, which are not rounded.
template <bool block> struct Side {
	typedef T Element_;
	static __device__ __forceinline__ Acc get(T x) { return Element<T>::wide(x); }
	static __device__ __forceinline__ T put(Acc a, u32 ranks) { return Element<T>::narrow(Op::finish(a, ranks)); }
};
template <> struct Side<true> {
	typedef Acc Element_;
	static __device__ __forceinline__ Acc get(Acc x) { return x; }
	static __device__ __forceinline__ Acc put(Acc a, u32) { return a; }
};

// A Pack has V elements, which a thread accesses 16 bytes at a time if possible.
template <class E, int V> struct alignas(sizeof(E) * V < 16 ? sizeof(E) * V : 16) Pack { E x[V]; };

// foldPack reduces the i-th pack of V elements. It joins the elements of each block of ranks
// by rank, and then the results of the blocks. It rounds to the element type once, at the end.
template <class In, class Out, int V> static __device__ __forceinline__ void foldPack(const Pieces& p, char* out, u64 i, u32 ranks) {
	typedef Pack<typename In::Element_, V> Source;
	Acc sum[V], total[V];
	u32 left = 0; // ranks of the block that follow
#pragma unroll 4
	for (u32 r = 0; r < p.count; r++) {
		const Source x = ((const Source*)p.of(r))[i];
		if (left == 0 && r > 0) {
#pragma unroll
			for (int v = 0; v < V; v++) total[v] = r == p.block ? sum[v] : Op::join(total[v], sum[v]);
		}
#pragma unroll
		for (int v = 0; v < V; v++) sum[v] = left == 0 ? In::get(x.x[v]) : Op::join(sum[v], In::get(x.x[v]));
		left = (left == 0 ? p.block : left) - 1;
	}
	Pack<typename Out::Element_, V> y;
#pragma unroll
	for (int v = 0; v < V; v++) y.x[v] = Out::put(p.count <= p.block ? sum[v] : Op::join(total[v], sum[v]), ranks);
	((Pack<typename Out::Element_, V>*)out)[i] = y;
}

// PACK is the number of elements in 16 bytes.
#define PACK (16 / (int)sizeof(T))

// MANY is the number of packs that a thread reduces together.
#define MANY (PACK > 8 ? 2 : 4)

// foldMany reduces MANY packs, which are step apart, of pieces that are one block of ranks. The loads of a rank's packs do not wait
// for each other.
template <class In, class Out> static __device__ __forceinline__ void foldMany(const Pieces& p, char* out, u64 i, u64 step, u64 packs, u32 ranks) {
	typedef Pack<typename In::Element_, PACK> Source;
	Acc sum[MANY][PACK];
#pragma unroll 2
	for (u32 r = 0; r < p.count; r++) {
		const Source* from = (const Source*)p.of(r);
		Source x[MANY];
#pragma unroll
		for (int k = 0; k < MANY; k++)
			if (i + k * step < packs) x[k] = from[i + k * step];
#pragma unroll
		for (int k = 0; k < MANY; k++)
#pragma unroll
			for (int v = 0; v < PACK; v++) sum[k][v] = r == 0 ? In::get(x[k].x[v]) : Op::join(sum[k][v], In::get(x[k].x[v]));
	}
#pragma unroll
	for (int k = 0; k < MANY; k++) {
		Pack<typename Out::Element_, PACK> y;
#pragma unroll
		for (int v = 0; v < PACK; v++) y.x[v] = Out::put(sum[k][v], ranks);
		if (i + k * step < packs) ((Pack<typename Out::Element_, PACK>*)out)[i + k * step] = y;
	}
}

template <class In, class Out> static __device__ __forceinline__ void foldAll(const Pieces& p, char* out, u64 n, u32 aligned, u32 ranks) {
	const u64 packs = aligned ? n / PACK : 0, first = (u64)blockIdx.x * FOLDERS + threadIdx.x, step = (u64)gridDim.x * FOLDERS;
	if (p.count <= p.block)
		for (u64 i = first; i < packs; i += MANY * step) foldMany<In, Out>(p, out, i, step, packs, ranks);
	else
		for (u64 i = first; i < packs; i += step) foldPack<In, Out, PACK>(p, out, i, ranks);
	for (u64 i = packs * PACK + first; i < n; i += step) foldPack<In, Out, 1>(p, out, i, ranks);
}

// fold reduces n elements of count pieces, which belong to so many ranks. If the pieces and the
// output are aligned, a thread reduces the elements of 16 bytes at once. fold_block writes
// results that are not rounded, and fold_blocks reduces these.
#define FOLD(name, in, out) \
	extern "C" __global__ void __launch_bounds__(FOLDERS) name(const char* base, u64 stride, const char* own, u32 mine, u32 count, u32 block, char* to, u64 n, u32 aligned, u32 ranks) { \
		const Pieces p = {base, stride, own, mine, count, block}; \
		foldAll<Side<in>, Side<out> >(p, to, n, aligned, ranks); \
	}
FOLD(fold, false, false)
FOLD(fold_block, false, true)
FOLD(fold_blocks, true, false)

// scale multiplies n elements by a factor, which is at an address or the given bits, and rounds
// the products to the element type.
extern "C" __global__ void __launch_bounds__(FOLDERS) scale(const T* in, T* out, u64 n, u64 bits, const T* at) {
	union Factor {
		u64 bits;
		T x;
		__device__ Factor() {}
	} f;
	f.bits = bits;
	const Acc by = Element<T>::wide(at ? *at : f.x);
	for (u64 i = (u64)blockIdx.x * FOLDERS + threadIdx.x; i < n; i += (u64)gridDim.x * FOLDERS)
		out[i] = Element<T>::narrow(Element<T>::wide(in[i]) * by);
}

#endif
