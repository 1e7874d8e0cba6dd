// The same launches in C: gcc -O2 launch.c -lcuda
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(call) \
    do { \
        CUresult r = (call); \
        if (r != CUDA_SUCCESS) { \
            fprintf(stderr, "%s: %d\n", #call, r); \
            exit(1); \
        } \
    } while (0)

static const char ptx[] =
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    ".visible .entry empty() { ret; }\n";

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int ascending(const void* a, const void* b) { return *(const double*)a < *(const double*)b ? -1 : 1; }

int main(void) {
    enum { ROUNDS = 9, LAUNCHES = 20000 };
    CUdevice dev;
    CUcontext ctx;
    CUmodule module;
    CUfunction empty;
    CUstream stream;
    double us[ROUNDS];
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&dev, 0));
    CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
    CHECK(cuCtxSetCurrent(ctx));
    CHECK(cuModuleLoadData(&module, ptx));
    CHECK(cuModuleGetFunction(&empty, module, "empty"));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int r = -1; r < ROUNDS; r++) {
        double start = now();
        for (int i = 0; i < LAUNCHES; i++) CHECK(cuLaunchKernel(empty, 1, 1, 1, 256, 1, 1, 0, stream, NULL, NULL));
        CHECK(cuStreamSynchronize(stream));
        if (r >= 0) us[r] = (now() - start) / LAUNCHES;
    }
    qsort(us, ROUNDS, sizeof us[0], ascending);
    printf("launch of an empty kernel\t%.3f\n", us[ROUNDS / 2]);
    return 0;
}
