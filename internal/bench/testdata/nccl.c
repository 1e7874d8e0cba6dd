// The thinnest loop over NCCL: one thread for each GPU of a process, the same
// operations, buffers, places and numbers of repetitions as chorus perf has. It prints
// a line for each side of a row: chorus perf's name for it, a tab, and microseconds.
//
//	nccl gpus iterations warm-ups graph-launches smallest largest factor operation...
//
// As a shared library it has series for a benchmark of package nccl, which calls it from a
// process, a thread and a communicator of Chorus's.
#define _GNU_SOURCE
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CUDA(call) do { cudaError_t e_ = (call); if (e_ != cudaSuccess) die(#call, cudaGetErrorString(e_)); } while (0)
#define NCCL(call) do { ncclResult_t e_ = (call); if (e_ != ncclSuccess) die(#call, ncclGetErrorString(e_)); } while (0)

static void die(const char *call, const char *why) {
	fprintf(stderr, "nccl: %s: %s\n", call, why);
	exit(1);
}

enum { MOST = 16, CALLS = 64 };
static int gpus, iterations, warmups, launches, operations;
static size_t smallest, largest, factor;
static char **names;
static ncclComm_t comms[MOST];
static double times[MOST];
static pthread_barrier_t barrier;

typedef struct {
	const char *name, *title;
	int split;   // a rank's part is the size over the number of ranks
	int inPlace;
} operation;

static const operation known[] = {
	{"all_reduce", "AllReduce/type=float/redop=sum", 0, 1},
	{"all_gather", "AllGather/type=float", 1, 1},
	{"reduce_scatter", "ReduceScatter/type=float/redop=sum", 1, 1},
	{"broadcast", "Broadcast/type=float/root=0", 0, 1},
	{"reduce", "Reduce/type=float/redop=sum/root=0", 0, 1},
	{"alltoall", "Alltoall/type=float", 1, 0},
	{"gather", "Gather/type=float/root=0", 1, 1},
	{"scatter", "Scatter/type=float/root=0", 1, 1},
	{"sendrecv", "Sendrecv/type=float", 0, 0},
};

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void wait(cudaStream_t s) {
	cudaError_t e;
	while ((e = cudaStreamQuery(s)) == cudaErrorNotReady) {
	}
	CUDA(e);
}

static void issue(int k, ncclComm_t c, int rank, int ranks, size_t count, int inPlace, char *recv, char *send, cudaStream_t s) {
	size_t part = count * sizeof(float);
	switch (k) {
	case 0: NCCL(ncclAllReduce(send, recv, count, ncclFloat, ncclSum, c, s)); return;
	case 1: NCCL(ncclAllGather(inPlace ? recv + rank * part : send, recv, count, ncclFloat, c, s)); return;
	case 2: NCCL(ncclReduceScatter(send, inPlace ? send + rank * part : recv, count, ncclFloat, ncclSum, c, s)); return;
	case 3: NCCL(ncclBroadcast(send, recv, count, ncclFloat, 0, c, s)); return;
	case 4: NCCL(ncclReduce(send, recv, count, ncclFloat, ncclSum, 0, c, s)); return;
	case 5: NCCL(ncclAlltoAll(send, recv, count, ncclFloat, c, s)); return;
	case 6: NCCL(ncclGather(inPlace ? recv + rank * part : send, recv, count, ncclFloat, 0, c, s)); return;
	case 7: NCCL(ncclScatter(send, inPlace ? send + rank * part : recv, count, ncclFloat, 0, c, s)); return;
	}
	NCCL(ncclGroupStart());
	NCCL(ncclSend(send, count, ncclFloat, (rank + 1) % ranks, c, s));
	NCCL(ncclRecv(recv, count, ncclFloat, (rank + ranks - 1) % ranks, c, s));
	NCCL(ncclGroupEnd());
}

// series returns in us the microseconds of one of so many operations on the same buffers.
void series(int k, ncclComm_t c, int rank, int ranks, int operations, size_t count, int inPlace, char *recv, char *send, cudaStream_t s, double *us) {
	double begun = now();
	for (int i = 0; i < operations; i++) issue(k, c, rank, ranks, count, inPlace, recv, send, s);
	wait(s);
	*us = (now() - begun) / operations;
}

// captured returns in exec a graph of so many operations on the same buffers.
void captured(int k, ncclComm_t c, int rank, int ranks, int operations, size_t count, int inPlace, char *recv, char *send, cudaStream_t s, cudaGraphExec_t *exec) {
	cudaGraph_t graph;
	CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
	for (int i = 0; i < operations; i++) issue(k, c, rank, ranks, count, inPlace, recv, send, s);
	CUDA(cudaStreamEndCapture(s, &graph));
	CUDA(cudaGraphInstantiate(exec, graph, 0));
	CUDA(cudaGraphDestroy(graph));
}

// replays returns in us the microseconds of one of so many launches of a graph.
void replays(cudaGraphExec_t exec, int launches, cudaStream_t s, double *us) {
	double begun = now();
	for (int i = 0; i < launches; i++) CUDA(cudaGraphLaunch(exec, s));
	wait(s);
	*us = (now() - begun) / launches;
}

void discard(cudaGraphExec_t exec) { CUDA(cudaGraphExecDestroy(exec)); }

// row measures one side of a row and returns the time of an operation.
static double row(int k, int rank, size_t bytes, int inPlace, char *a, char *b, cudaStream_t s) {
	size_t count = bytes / sizeof(float);
	if (known[k].split) {
		count = count / gpus / 4 * 4;
		bytes = count * sizeof(float) * gpus;
	}
	size_t stride = (bytes + 511) / 512 * 512;
	int places = (int)(largest / stride);
	if (places > CALLS) places = CALLS;
	if (places < 1) places = 1;
	char *send = inPlace ? a : b;
#define ISSUE(i) issue(k, comms[rank], rank, gpus, count, inPlace, a + (i) % places * stride, send + (i) % places * stride, s)
	for (int i = 0; i < (warmups > 1 ? warmups : 1); i++) ISSUE(i);
	cudaGraph_t graph;
	cudaGraphExec_t exec = NULL;
	if (launches > 0) {
		wait(s);
		CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
		for (int i = 0; i < iterations; i++) ISSUE(i);
		CUDA(cudaStreamEndCapture(s, &graph));
		CUDA(cudaGraphInstantiate(&exec, graph, 0));
	}
	wait(s);
	pthread_barrier_wait(&barrier);
	double begun = now();
	if (exec) {
		for (int i = 0; i < launches; i++) CUDA(cudaGraphLaunch(exec, s));
	} else {
		for (int i = 0; i < iterations; i++) ISSUE(i);
	}
	wait(s);
	times[rank] = (now() - begun) / (exec ? (double)launches * iterations : iterations);
	pthread_barrier_wait(&barrier);
	double mean = 0;
	for (int r = 0; r < gpus; r++) mean += times[r] / gpus;
	pthread_barrier_wait(&barrier);
	if (exec) {
		CUDA(cudaGraphExecDestroy(exec));
		CUDA(cudaGraphDestroy(graph));
	}
	if (rank == 0) printf("%s%s/bytes=%zu\t%.3f\n", known[k].title, inPlace ? "/inplace" : "", bytes, mean);
	return mean;
}

static ncclUniqueId id;

static void *work(void *arg) {
	int rank = (int)(size_t)arg;
	CUDA(cudaSetDevice(rank));
	NCCL(ncclCommInitRank(&comms[rank], gpus, id, rank));
	cudaStream_t s;
	CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	void *a, *b;
	size_t room = (largest + 511) / 512 * 512;
	CUDA(cudaMalloc(&a, room));
	CUDA(cudaMalloc(&b, room));
	CUDA(cudaMemset(a, 0, room));
	CUDA(cudaMemset(b, 0, room));
	CUDA(cudaDeviceSynchronize());
	for (int o = 0; o < operations; o++) {
		for (int k = 0; k < (int)(sizeof known / sizeof *known); k++) {
			if (strcmp(known[k].name, names[o])) continue;
			for (size_t bytes = smallest; bytes <= largest; bytes *= factor) {
				if (known[k].split && bytes / sizeof(float) / gpus < 4) continue;
				row(k, rank, bytes, 0, a, b, s);
				if (known[k].inPlace) row(k, rank, bytes, 1, a, b, s);
			}
		}
	}
	return NULL;
}

int main(int argc, char **argv) {
	if (argc < 9) {
		fprintf(stderr, "nccl gpus iterations warm-ups graph-launches smallest largest factor operation...\n");
		return 2;
	}
	gpus = atoi(argv[1]), iterations = atoi(argv[2]), warmups = atoi(argv[3]), launches = atoi(argv[4]);
	smallest = strtoull(argv[5], NULL, 10), largest = strtoull(argv[6], NULL, 10), factor = strtoull(argv[7], NULL, 10);
	names = argv + 8, operations = argc - 8;
	if (gpus < 1 || gpus > MOST || iterations < 1 || factor < 2) return 2;
	NCCL(ncclGetUniqueId(&id));
	pthread_barrier_init(&barrier, NULL, gpus);
	pthread_t threads[MOST];
	for (int r = 0; r < gpus; r++) pthread_create(&threads[r], NULL, work, (void *)(size_t)r);
	for (int r = 0; r < gpus; r++) pthread_join(threads[r], NULL);
	fflush(stdout);
	_exit(0); // graphs and communicators end with the process
}
