// How much products of bfloat16 matrices slow down beside other work of two GPUs: kernels that only occupy multiprocessors, kernels
// that move data, and copies between the GPUs. A line has the kind of work, its thread blocks, and how many multiprocessors the
// products leave (cublasSetSmCountTarget). Of each product it has the microseconds and the ratio to the product alone, medians of
// three, and the GB/s of the other work.
//
//   nvcc -O3 -arch=sm_90 -std=c++17 -o beside beside.cu -lcublas && CUDA_MODULE_LOADING=EAGER ./beside
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>
#include <cublas_v2.h>
#include <cuda_bf16.h>

#define CHECK(x) do { auto e_ = (x); if (e_) { printf("%s, line %d: %d\n", #x, __LINE__, (int)e_); exit(1); } } while (0)
typedef __nv_bfloat16 bf;

// hold returns when the host asks for it. It reads host memory rarely: loads from there would slow down the launches of other kernels.
__device__ void hold(volatile int* stop) {
	if (threadIdx.x == 0) while (!*stop) for (int i = 0; i < 40; i++) __nanosleep(500);
	__syncthreads();
}
__global__ void spin(volatile int* stop) { hold(stop); }
__global__ void __cluster_dims__(2, 1, 1) spinPairs(volatile int* stop) { hold(stop); }

__device__ __forceinline__ uint4 add(uint4 a, uint4 b) {
	__nv_bfloat162 *x = (__nv_bfloat162*)&a, *y = (__nv_bfloat162*)&b;
	for (int i = 0; i < 4; i++) x[i] = __hadd2(x[i], y[i]);
	return a;
}

// work stores b in dst, or if a is not null their sums, until the host stops it.
__global__ void __launch_bounds__(512) work(volatile int* stop, const uint4* a, const uint4* b, uint4* dst, size_t n, unsigned long long* moved) {
	const int U = 8;
	const size_t begin = (size_t)blockIdx.x * blockDim.x * U;
	size_t at = begin;
	unsigned long long rounds = 0;
	while (true) {
		const size_t i = at + threadIdx.x;
		uint4 v[U], w[U];
#pragma unroll
		for (int k = 0; k < U; k++) v[k] = b[i + k * blockDim.x];
		if (a) {
#pragma unroll
			for (int k = 0; k < U; k++) w[k] = a[i + k * blockDim.x];
#pragma unroll
			for (int k = 0; k < U; k++) v[k] = add(v[k], w[k]);
		}
#pragma unroll
		for (int k = 0; k < U; k++) dst[i + k * blockDim.x] = v[k];
		at += (size_t)gridDim.x * blockDim.x * U;
		if (at + blockDim.x * U > n) at = begin;
		if ((++rounds & 31) == 0 && __syncthreads_or(threadIdx.x == 0 && *stop)) break;
	}
	if (threadIdx.x == 0) atomicAdd(moved, rounds * blockDim.x * U * 16);
}

struct Gpu {
	cublasHandle_t handle;
	cudaStream_t products, other, copies;
	bf *a, *b, *c;
	char *x, *y, *z;
	unsigned long long* moved;
	cudaEvent_t begun, ended;
};
struct Shape { const char* name; int m, n, k; cublasOperation_t ta, tb; int count; };
enum Kind { none, spins, pairs, push, pushAndCopy, store, sum };
struct Work { const char* name; Kind kind; int blocks, leave; };

static const size_t bytes = 256u << 20, part = 32u << 20;

static void product(Gpu& g, const Shape& s) {
	const float one = 1, zero = 0;
	CHECK(cublasGemmEx(g.handle, s.ta, s.tb, s.m, s.n, s.k, &one, g.a, CUDA_R_16BF, s.ta == CUBLAS_OP_N ? s.m : s.k, g.b, CUDA_R_16BF,
		s.tb == CUBLAS_OP_N ? s.k : s.n, &zero, g.c, CUDA_R_16BF, s.m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

int main() {
	Gpu gpus[2];
	volatile int* stop;
	CHECK(cudaHostAlloc((void**)&stop, 4, cudaHostAllocPortable | cudaHostAllocMapped));
	const size_t elements = 4096 * 4096;
	std::vector<bf> numbers(elements);
	unsigned seed = 1;
	for (auto& x : numbers) x = __float2bfloat16(((int)((seed = seed * 1664525u + 1013904223u) >> 8) % 2001 - 1000) / 1000.f);
	for (int d = 0; d < 2; d++) {
		Gpu& g = gpus[d];
		int low, high;
		CHECK(cudaSetDevice(d));
		CHECK(cudaDeviceEnablePeerAccess(1 - d, 0));
		CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
		CHECK(cudaStreamCreateWithPriority(&g.products, cudaStreamNonBlocking, low));
		for (auto s : {&g.other, &g.copies}) CHECK(cudaStreamCreateWithPriority(s, cudaStreamNonBlocking, high));
		CHECK(cublasCreate(&g.handle));
		CHECK(cublasSetStream(g.handle, g.products));
		void* workspace;
		CHECK(cudaMalloc(&workspace, 32 << 20));
		CHECK(cublasSetWorkspace(g.handle, workspace, 32 << 20));
		for (auto p : {&g.a, &g.b, &g.c}) {
			CHECK(cudaMalloc(p, elements * sizeof(bf)));
			CHECK(cudaMemcpy(*p, numbers.data(), elements * sizeof(bf), cudaMemcpyHostToDevice));
		}
		for (auto p : {&g.x, &g.y, &g.z}) {
			CHECK(cudaMalloc(p, bytes));
			CHECK(cudaMemset(*p, 0, bytes));
		}
		CHECK(cudaMalloc(&g.moved, 8));
		CHECK(cudaEventCreate(&g.begun));
		CHECK(cudaEventCreate(&g.ended));
	}
	const Shape shapes[] = {
		{"4096x4096x4096", 4096, 4096, 4096, CUBLAS_OP_T, CUBLAS_OP_N, 200},
		{"4096x1024x4096", 4096, 1024, 4096, CUBLAS_OP_N, CUBLAS_OP_N, 600},
		{"4096x4096x1024", 4096, 4096, 1024, CUBLAS_OP_N, CUBLAS_OP_T, 600},
	};
	std::vector<Work> all = {{"nothing", none, 0, 0}, {"nothing", none, 0, 4}, {"nothing", none, 0, 8}, {"nothing", none, 0, 24}};
	for (int k : {1, 4, 8, 24}) all.push_back({"waits", spins, k, 0}), all.push_back({"waits", spins, k, k});
	for (int k : {4, 8}) all.push_back({"waits, pairs of blocks", pairs, k, k});
	all.push_back({"copies to the other GPU", push, 0, 0});
	all.push_back({"and copies on each GPU", pushAndCopy, 0, 0});
	for (int k : {4, 8}) all.push_back({"stores to the other GPU", store, k, k}), all.push_back({"sums on each GPU", sum, k, k});
	double alone[3] = {};
	for (const Work& w : all) {
		printf("%-24s %2d blocks, %2d left:", w.name, w.blocks, w.leave);
		for (int i = 0; i < 3; i++) {
			const Shape& s = shapes[i];
			std::vector<double> us;
			double rate = 0;
			for (int repeat = 0; repeat < 3; repeat++) {
				*stop = 0;
				std::vector<cudaEvent_t> copied;
				for (int d = 0; d < 2; d++) {
					Gpu& g = gpus[d];
					CHECK(cudaSetDevice(d));
					CHECK(cublasSetSmCountTarget(g.handle, w.leave ? 132 - w.leave : 0));
					CHECK(cudaMemset(g.moved, 0, 8));
					CHECK(cudaDeviceSynchronize());
				}
				for (int d = 0; d < 2; d++) {
					Gpu &g = gpus[d], &peer = gpus[1 - d];
					CHECK(cudaSetDevice(d));
					if (w.kind == spins) spin<<<w.blocks, 512, 0, g.other>>>(stop);
					if (w.kind == pairs) spinPairs<<<w.blocks, 512, 0, g.other>>>(stop);
					if (w.kind == store) work<<<w.blocks, 512, 0, g.other>>>(stop, 0, (uint4*)g.x, (uint4*)peer.y, bytes / 16, g.moved);
					if (w.kind == sum) work<<<w.blocks, 512, 0, g.other>>>(stop, (uint4*)g.x, (uint4*)g.y, (uint4*)g.z, bytes / 16, g.moved);
					CHECK(cudaGetLastError());
				}
				for (int k = 0; (w.kind == push || w.kind == pushAndCopy) && k < 700; k++)
					for (int d = 0; d < 2; d++) {
						Gpu &g = gpus[d], &peer = gpus[1 - d];
						const size_t at = k % 8 * part;
						CHECK(cudaSetDevice(d));
						CHECK(cudaMemcpyAsync(peer.y + at, g.x + at, part, cudaMemcpyDeviceToDevice, g.other));
						if (w.kind == pushAndCopy && k % 2) CHECK(cudaMemcpyAsync(g.z + at, g.y + at, part, cudaMemcpyDeviceToDevice, g.copies));
						if (d == 0 && k % 10 == 0) {
							copied.emplace_back();
							CHECK(cudaEventCreateWithFlags(&copied.back(), cudaEventDisableTiming));
							CHECK(cudaEventRecord(copied.back(), g.other));
						}
					}
				std::thread threads[2];
				for (int d = 0; d < 2; d++)
					threads[d] = std::thread([&, d] {
						Gpu& g = gpus[d];
						CHECK(cudaSetDevice(d));
						for (int k = 0; k < 20; k++) product(g, s);
						CHECK(cudaEventRecord(g.begun, g.products));
						for (int k = 0; k < s.count; k++) product(g, s);
						CHECK(cudaEventRecord(g.ended, g.products));
						CHECK(cudaStreamSynchronize(g.products));
					});
				for (auto& t : threads) t.join();
				size_t copies = std::count_if(copied.begin(), copied.end(), [](cudaEvent_t e) { return cudaEventQuery(e) == cudaSuccess; });
				(void)cudaGetLastError();
				*stop = 1;
				float ms[2];
				for (int d = 0; d < 2; d++) {
					CHECK(cudaSetDevice(d));
					CHECK(cudaDeviceSynchronize());
					CHECK(cudaEventElapsedTime(&ms[d], gpus[d].begun, gpus[d].ended));
				}
				for (auto e : copied) CHECK(cudaEventDestroy(e));
				const double slowest = std::max(ms[0], ms[1]), all = slowest * (s.count + 20) / s.count;
				unsigned long long moved;
				CHECK(cudaMemcpy(&moved, gpus[0].moved, 8, cudaMemcpyDeviceToHost));
				us.push_back(slowest * 1000 / s.count);
				rate = (moved + copies * 10.0 * part) / (all * 1e6);
			}
			std::sort(us.begin(), us.end());
			if (alone[i] == 0) alone[i] = us[1];
			printf("  %s %.1f us, %.3f", s.name, us[1], us[1] / alone[i]);
			if (rate > 0) printf(", %.0f GB/s", rate);
		}
		printf("\n");
		fflush(stdout);
	}
}
