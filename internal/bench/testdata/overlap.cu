// A prototype of data-parallel training on two GPUs of one process that leaves the multiprocessors to the products: copy engines
// move the gradients, streams wait by memory operations instead of kernels, and a short kernel adds. It trains what bench layers
// trains: 24 linear layers of 4096 in bfloat16, with a reduction for each layer. A line has ms a step, the median of five rounds
// of ten steps. The last line counts the elements of a gradient that differ between the GPUs.
//
//   nvcc -O3 -arch=sm_90 -std=c++17 -o overlap overlap.cu -lcublas -lcuda && CUDA_MODULE_LOADING=EAGER ./overlap
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_bf16.h>

#define CHECK(x) do { auto e_ = (x); if (e_) { printf("%s, line %d: %d\n", #x, __LINE__, (int)e_); exit(1); } } while (0)
typedef __nv_bfloat16 bf;
static const int layers = 24, width = 4096, most = 4096, flags = 64;
static const size_t elements = (size_t)width * width, share = elements; // share is in bytes

__device__ __forceinline__ uint4 add(uint4 a, uint4 b) {
	__nv_bfloat162 *x = (__nv_bfloat162*)&a, *y = (__nv_bfloat162*)&b;
	for (int i = 0; i < 4; i++) x[i] = __hadd2(x[i], y[i]);
	return a;
}
__global__ void __launch_bounds__(512) sum(uint4* out, const uint4* x, const uint4* y, size_t n) {
	const size_t step = (size_t)gridDim.x * blockDim.x;
	for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
		uint4 a[4], b[4];
#pragma unroll
		for (int k = 0; k < 4; k++)
			if (i + k * step < n) a[k] = x[i + k * step], b[k] = y[i + k * step];
#pragma unroll
		for (int k = 0; k < 4; k++)
			if (i + k * step < n) out[i + k * step] = add(a[k], b[k]);
	}
}

struct Gpu {
	cublasHandle_t handle;
	cudaStream_t model, group, copies;
	bf *weights, *grads, *inputs, *dy, *dx;
	char *received, *results; // half a gradient each
	unsigned* arrived;        // 1 for each piece that has arrived, and for each result
	cudaEvent_t event, begun, ended;
} gpus[2];

// A Way is how gradients are reduced: not at all, with the results pushed into scratch memory of the other GPU or directly into its
// gradient, or with the results in scratch memory of the GPU that has them, from where the other one pulls them.
enum Way { none, scratch, direct, pull };
struct Setting { const char* name; Way way; int pieces, blocks; };

static void follow(Gpu& g, cudaStream_t s, cudaStream_t first) {
	CHECK(cudaEventRecord(g.event, first));
	CHECK(cudaStreamWaitEvent(s, g.event, 0));
}
static void arrive(cudaStream_t s, unsigned* flag) { CHECK(cuStreamWriteValue32(s, (CUdeviceptr)flag, 1, 0)); }
static void await(cudaStream_t s, unsigned* flag) {
	CHECK(cuStreamWaitValue32(s, (CUdeviceptr)flag, 1, CU_STREAM_WAIT_VALUE_EQ));
	CHECK(cuStreamWriteValue32(s, (CUdeviceptr)flag, 0, 0));
}

// reduce sums a gradient on both GPUs, each its share. A GPU sends the next data only when it has received all results, so no
// flag is set twice.
static void reduce(int d, int layer, const Setting& how) {
	Gpu &g = gpus[d], &peer = gpus[1 - d];
	char *grad = (char*)(g.grads + layer * elements), *other = (char*)(peer.grads + layer * elements);
	const size_t piece = share / how.pieces;
	follow(g, g.group, g.model);
	follow(g, g.copies, g.group);
	for (int c = 0; c < how.pieces; c++) {
		CHECK(cudaMemcpyAsync(peer.received + c * piece, grad + (1 - d) * share + c * piece, piece, cudaMemcpyDeviceToDevice, g.copies));
		arrive(g.copies, peer.arrived + c);
	}
	for (int c = 0; c < how.pieces; c++) {
		char* mine = grad + d * share + c * piece;
		await(g.group, g.arrived + c);
		char* sums = how.way == pull ? g.results + c * piece : mine;
		sum<<<how.blocks, 512, 0, g.group>>>((uint4*)sums, (const uint4*)mine, (const uint4*)(g.received + c * piece), piece / 16);
		CHECK(cudaGetLastError());
		follow(g, g.copies, g.group);
		if (how.way == pull) {
			CHECK(cudaMemcpyAsync(mine, sums, piece, cudaMemcpyDeviceToDevice, g.copies));
			arrive(g.group, peer.arrived + flags + c);
			continue;
		}
		CHECK(cudaMemcpyAsync(how.way == direct ? other + d * share + c * piece : peer.results + c * piece, mine, piece, cudaMemcpyDeviceToDevice, g.copies));
		arrive(g.copies, peer.arrived + flags + c);
	}
	for (int c = 0; c < how.pieces; c++) {
		await(g.group, g.arrived + flags + c);
		if (how.way == pull) CHECK(cudaMemcpyAsync(grad + (1 - d) * share + c * piece, peer.results + c * piece, piece, cudaMemcpyDeviceToDevice, g.group));
	}
	follow(g, g.group, g.copies);
	if (how.way == scratch) CHECK(cudaMemcpyAsync(grad + (1 - d) * share, g.results, share, cudaMemcpyDeviceToDevice, g.group));
}

static void product(Gpu& g, cublasOperation_t ta, cublasOperation_t tb, int n, int k, const bf* a, const bf* b, bf* c) {
	const float one = 1, zero = 0;
	CHECK(cublasGemmEx(g.handle, ta, tb, width, n, k, &one, a, CUDA_R_16BF, width, b, CUDA_R_16BF, width, &zero, c, CUDA_R_16BF, width, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

static void step(int d, int tokens, const Setting& how) {
	Gpu& g = gpus[d];
	const size_t rows = (size_t)tokens * width;
	for (int i = 0; i < layers; i++) product(g, CUBLAS_OP_T, CUBLAS_OP_N, tokens, width, g.weights + i * elements, g.inputs + i * rows, g.inputs + (i + 1) * rows);
	const bf* dy = g.dy;
	for (int i = layers - 1; i >= 0; i--) {
		bf* dx = g.dx + i % 2 * (size_t)most * width;
		product(g, CUBLAS_OP_N, CUBLAS_OP_T, width, tokens, g.inputs + i * rows, dy, g.grads + i * elements);
		if (i > 0) product(g, CUBLAS_OP_N, CUBLAS_OP_N, tokens, width, g.weights + i * elements, dy, dx);
		dy = dx;
		if (how.way != none) reduce(d, i, how);
	}
	if (how.way != none) follow(g, g.model, g.group);
}

int main() {
	CHECK(cuInit(0));
	std::vector<bf> numbers(elements);
	unsigned seed = 1;
	for (auto& x : numbers) x = __float2bfloat16(((int)((seed = seed * 1664525u + 1013904223u) >> 8) % 2001 - 1000) / 40000.f);
	for (int d = 0; d < 2; d++) {
		Gpu& g = gpus[d];
		int low, high;
		CHECK(cudaSetDevice(d));
		CHECK(cudaDeviceEnablePeerAccess(1 - d, 0));
		CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
		CHECK(cudaStreamCreateWithPriority(&g.model, cudaStreamNonBlocking, low));
		for (auto s : {&g.group, &g.copies}) CHECK(cudaStreamCreateWithPriority(s, cudaStreamNonBlocking, high));
		CHECK(cublasCreate(&g.handle));
		CHECK(cublasSetStream(g.handle, g.model));
		void* workspace;
		CHECK(cudaMalloc(&workspace, 32 << 20));
		CHECK(cublasSetWorkspace(g.handle, workspace, 32 << 20));
		const size_t rows = (size_t)most * width;
		CHECK(cudaMalloc(&g.weights, layers * elements * sizeof(bf)));
		CHECK(cudaMalloc(&g.grads, layers * elements * sizeof(bf)));
		CHECK(cudaMalloc(&g.inputs, (layers + 1) * rows * sizeof(bf)));
		CHECK(cudaMalloc(&g.dy, rows * sizeof(bf)));
		CHECK(cudaMalloc(&g.dx, 2 * rows * sizeof(bf)));
		CHECK(cudaMalloc(&g.received, share));
		CHECK(cudaMalloc(&g.results, share));
		CHECK(cudaMalloc(&g.arrived, 2 * flags * sizeof(unsigned)));
		CHECK(cudaMemset(g.arrived, 0, 2 * flags * sizeof(unsigned)));
		for (int i = 0; i < layers; i++) CHECK(cudaMemcpy(g.weights + i * elements, numbers.data(), elements * sizeof(bf), cudaMemcpyHostToDevice));
		for (auto p : {g.inputs, g.dy}) CHECK(cudaMemcpy(p, numbers.data(), elements * sizeof(bf), cudaMemcpyHostToDevice));
		CHECK(cudaEventCreateWithFlags(&g.event, cudaEventDisableTiming));
		CHECK(cudaEventCreate(&g.begun));
		CHECK(cudaEventCreate(&g.ended));
	}
	const Setting settings[] = {
		{"no reduction", none, 1, 0}, {"scratch memory", scratch, 1, 264}, {"scratch memory", scratch, 2, 264}, {"scratch memory", scratch, 4, 264},
		{"direct", direct, 1, 264}, {"direct", direct, 2, 264}, {"direct", direct, 2, 64}, {"direct", direct, 2, 16},
		{"pull", pull, 1, 264}, {"pull", pull, 2, 264}, {"pull", pull, 2, 64}, {"pull", pull, 2, 16},
	};
	for (int tokens : {1024, 4096}) {
		double alone = 0;
		for (const Setting& how : settings) {
			std::vector<double> ms;
			for (int round = 0; round < 6; round++) {
				float took[2];
				std::thread threads[2];
				for (int d = 0; d < 2; d++)
					threads[d] = std::thread([&, d] {
						Gpu& g = gpus[d];
						CHECK(cudaSetDevice(d));
						CHECK(cudaEventRecord(g.begun, g.model));
						for (int k = 0; k < 10; k++) step(d, tokens, how);
						CHECK(cudaEventRecord(g.ended, g.model));
						for (auto s : {g.model, g.group, g.copies}) CHECK(cudaStreamSynchronize(s));
						CHECK(cudaEventElapsedTime(&took[d], g.begun, g.ended));
					});
				for (auto& t : threads) t.join();
				if (round > 0) ms.push_back(std::max(took[0], took[1]) / 10);
			}
			std::sort(ms.begin(), ms.end());
			if (how.way == none) alone = ms[2];
			printf("%d tokens, %s, %d pieces, %d blocks: %.3f ms, exposed %.3f\n", tokens, how.name, how.pieces, how.blocks, ms[2], ms[2] - alone);
			fflush(stdout);
		}
	}
	std::vector<bf> a(elements), b(elements);
	CHECK(cudaMemcpy(a.data(), gpus[0].grads, elements * sizeof(bf), cudaMemcpyDeviceToHost));
	CHECK(cudaMemcpy(b.data(), gpus[1].grads, elements * sizeof(bf), cudaMemcpyDeviceToHost));
	size_t differ = 0;
	for (size_t i = 0; i < elements; i++) differ += __bfloat162float(a[i]) != __bfloat162float(b[i]);
	printf("%zu elements differ\n", differ);
}
