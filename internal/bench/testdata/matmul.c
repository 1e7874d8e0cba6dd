// The host's time of a small product with cuBLASLt in C: the floor for
// BenchmarkMatMulEnqueue of package tensor and for matmul.py.
//
//	gcc -O2 -I$CUDA_HOME/include matmul.c -L$CUDA_HOME/lib64 -lcublasLt -lcudart -o matmul && ./matmul
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(x)                                                        \
	do {                                                                \
		int r = (x);                                                    \
		if (r) {                                                        \
			fprintf(stderr, "%s: status %d\n", #x, r);                  \
			exit(1);                                                    \
		}                                                               \
	} while (0)

enum { N = 64, CALLS = 100, ROUNDS = 50, WORKSPACE = 32 << 20 };

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static int compare(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int main(void) {
	void *p, *workspace;
	CHECK(cudaMalloc(&p, 3 * N * N * 2));
	CHECK(cudaMemset(p, 0, 3 * N * N * 2));
	CHECK(cudaMalloc(&workspace, WORKSPACE));
	char *a = p, *b = a + N * N * 2, *c = b + N * N * 2;
	cudaStream_t s;
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	cublasLtHandle_t lt;
	CHECK(cublasLtCreate(&lt));
	cublasLtMatmulDesc_t op;
	CHECK(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
	cublasLtMatrixLayout_t l;
	CHECK(cublasLtMatrixLayoutCreate(&l, CUDA_R_16BF, N, N, N));
	cublasLtMatmulPreference_t pref;
	CHECK(cublasLtMatmulPreferenceCreate(&pref));
	size_t room = WORKSPACE;
	CHECK(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room));
	cublasLtMatmulHeuristicResult_t h;
	int found;
	CHECK(cublasLtMatmulAlgoGetHeuristic(lt, op, l, l, l, l, pref, 1, &h, &found));
	float alpha = 1, beta = 0;
	double rounds[ROUNDS];
	for (int r = -1; r < ROUNDS; r++) {
		double begin = now();
		for (int i = 0; i < CALLS; i++)
			CHECK(cublasLtMatmul(lt, op, &alpha, a, l, b, l, &beta, c, l, c, l, &h.algo, workspace, room, s));
		if (r >= 0)
			rounds[r] = (now() - begin) / CALLS;
		CHECK(cudaStreamSynchronize(s));
	}
	qsort(rounds, ROUNDS, sizeof *rounds, compare);
	printf("C, cublasLtMatmul: host time of a product of 64x64x64: %.2f µs\n", rounds[ROUNDS / 2]);
}
