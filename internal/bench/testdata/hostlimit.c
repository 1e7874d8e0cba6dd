// The maximum rate of transfers from a file in memory to the GPUs, in GB/s, in plain C:
// gcc -O2 -pthread hostlimit.c -ldl && ./a.out /dev/shm/file
//
// CUDA's header is not needed: the driver's functions are looked up in libcuda.so.1.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int Result;
typedef uint64_t Ptr;
typedef struct handle* Handle; // of a context, a stream or an event
enum { NOT_READY = 600, NON_BLOCKING = 1, DISABLE_TIMING = 2, PORTABLE = 1, READ_ONLY = 8, MAX_GPUS = 16, MAX_THREADS = 64 };

#define DRIVER(X) \
    X(cuInit, "cuInit", unsigned) \
    X(deviceCount, "cuDeviceGetCount", int*) \
    X(deviceGet, "cuDeviceGet", int*, int) \
    X(retain, "cuDevicePrimaryCtxRetain", Handle*, int) \
    X(giveUp, "cuDevicePrimaryCtxRelease_v2", int) \
    X(setCurrent, "cuCtxSetCurrent", Handle) \
    X(memAlloc, "cuMemAlloc_v2", Ptr*, size_t) \
    X(memFree, "cuMemFree_v2", Ptr) \
    X(hostAlloc, "cuMemHostAlloc", void**, size_t, unsigned) \
    X(hostFree, "cuMemFreeHost", void*) \
    X(hostRegister, "cuMemHostRegister_v2", void*, size_t, unsigned) \
    X(hostUnregister, "cuMemHostUnregister", void*) \
    X(upload, "cuMemcpyHtoDAsync_v2", Ptr, const void*, size_t, Handle) \
    X(streamCreate, "cuStreamCreate", Handle*, unsigned) \
    X(streamSync, "cuStreamSynchronize", Handle) \
    X(streamDestroy, "cuStreamDestroy_v2", Handle) \
    X(eventCreate, "cuEventCreate", Handle*, unsigned) \
    X(eventRecord, "cuEventRecord", Handle, Handle) \
    X(eventQuery, "cuEventQuery", Handle) \
    X(eventDestroy, "cuEventDestroy_v2", Handle) \
    X(errorString, "cuGetErrorString", Result, const char**)

#define DECLARE(name, symbol, ...) static Result (*name)(__VA_ARGS__);
DRIVER(DECLARE)

static const char* meaning(Result r) {
    const char* text = NULL;
    return errorString(r, &text) == 0 && text ? text : "an unknown error";
}

#define CHECK(call) \
    do { \
        Result r_ = (call); \
        if (r_ != 0) { \
            fprintf(stderr, "%s: error %d: %s\n", #call, r_, meaning(r_)); \
            exit(1); \
        } \
    } while (0)

#define SYSTEM(ok) \
    do { \
        if (!(ok)) { \
            perror(#ok); \
            exit(1); \
        } \
    } while (0)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static int file, gpus;
static size_t size; // of the file
static Handle contexts[MAX_GPUS];
static Ptr targets[MAX_GPUS];
static const size_t targetBytes = 256 << 20;

// The work of the threads of one measurement.
static struct {
    int threads, gpus;
    size_t bytes, piece; // all that are moved, and those that are moved at once
    unsigned flags;      // of cuMemHostRegister
    char* map;           // of the file
    atomic_size_t next;
    pthread_barrier_t ready;
    double began[MAX_THREADS], ended[MAX_THREADS];
} job;

// claim returns the number of bytes at *at that the calling thread has claimed.
static size_t claim(size_t* at) {
    *at = atomic_fetch_add(&job.next, job.piece);
    if (*at >= job.bytes) return 0;
    return job.bytes - *at < job.piece ? job.bytes - *at : job.piece;
}

static void readAll(char* to, size_t n, size_t at) {
    while (n > 0) {
        ssize_t m = pread(file, to, n, at);
        SYSTEM(m > 0);
        to += m, at += m, n -= m;
    }
}

// begin and end enclose the measured part of a thread.
static void begin(intptr_t t) {
    pthread_barrier_wait(&job.ready);
    job.began[t] = now();
}

static void end(intptr_t t) { job.ended[t] = now(); }

// run returns GB/s from the first thread's begin to the last one's end.
static double run(int threads, int onGPUs, size_t bytes, size_t piece, void* (*work)(void*)) {
    pthread_t all[MAX_THREADS];
    job.threads = threads, job.gpus = onGPUs, job.bytes = bytes, job.piece = piece;
    job.next = 0;
    pthread_barrier_init(&job.ready, NULL, threads);
    for (intptr_t t = 0; t < threads; t++) SYSTEM(pthread_create(&all[t], NULL, work, (void*)t) == 0);
    double first = 0, last = 0;
    for (int t = 0; t < threads; t++) {
        pthread_join(all[t], NULL);
        if (t == 0 || job.began[t] < first) first = job.began[t];
        if (t == 0 || job.ended[t] > last) last = job.ended[t];
    }
    pthread_barrier_destroy(&job.ready);
    return bytes / (last - first) / 1e9;
}

static double best(int threads, int onGPUs, size_t bytes, size_t piece, void* (*work)(void*)) {
    double a = run(threads, onGPUs, bytes, piece, work), b = run(threads, onGPUs, bytes, piece, work);
    return a > b ? a : b;
}

// readPrivate reads a thread's part into private memory.
static void* readPrivate(void* arg) {
    size_t share = job.bytes / job.threads, at = (intptr_t)arg * share, last = at + share;
    char* buf = mmap(NULL, job.piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    SYSTEM(buf != MAP_FAILED);
    memset(buf, 1, job.piece);
    begin((intptr_t)arg);
    for (; at < last; at += job.piece) readAll(buf, last - at < job.piece ? last - at : job.piece, at);
    end((intptr_t)arg);
    SYSTEM(munmap(buf, job.piece) == 0);
    return NULL;
}

// uploadPinned copies one pinned buffer to a GPU again and again.
static void* uploadPinned(void* arg) {
    int gpu = (intptr_t)arg;
    size_t part = job.bytes / job.threads;
    Handle stream;
    void* host;
    CHECK(setCurrent(contexts[gpu]));
    CHECK(streamCreate(&stream, NON_BLOCKING));
    CHECK(hostAlloc(&host, job.piece, PORTABLE));
    memset(host, 1, job.piece);
    begin(gpu);
    for (size_t at = 0; at < part; at += job.piece) CHECK(upload(targets[gpu], host, job.piece, stream));
    CHECK(streamSync(stream));
    end(gpu);
    CHECK(hostFree(host));
    CHECK(streamDestroy(stream));
    return NULL;
}

static void settle(Handle event) {
    Result r;
    while ((r = eventQuery(event)) == NOT_READY);
    CHECK(r);
}

// readAndUpload reads pieces into two pinned slots alternately and copies them to the GPU.
static void* readAndUpload(void* arg) {
    int gpu = (intptr_t)arg % job.gpus;
    Handle stream, events[2];
    void* slots[2];
    CHECK(setCurrent(contexts[gpu]));
    CHECK(streamCreate(&stream, NON_BLOCKING));
    for (int i = 0; i < 2; i++) {
        CHECK(hostAlloc(&slots[i], job.piece, PORTABLE));
        CHECK(eventCreate(&events[i], DISABLE_TIMING));
        memset(slots[i], 1, job.piece);
    }
    begin((intptr_t)arg);
    size_t at, n;
    for (int i = 0; (n = claim(&at)) > 0; i = !i) {
        settle(events[i]);
        readAll(slots[i], n, at);
        CHECK(upload(targets[gpu] + at % targetBytes, slots[i], n, stream));
        CHECK(eventRecord(events[i], stream));
    }
    CHECK(streamSync(stream));
    end((intptr_t)arg);
    for (int i = 0; i < 2; i++) {
        CHECK(hostFree(slots[i]));
        CHECK(eventDestroy(events[i]));
    }
    CHECK(streamDestroy(stream));
    return NULL;
}

// registerAndUpload pins pieces of the mapped file themselves, and copies those.
static void* registerAndUpload(void* arg) {
    int gpu = (intptr_t)arg % job.gpus;
    Handle stream;
    CHECK(setCurrent(contexts[gpu]));
    CHECK(streamCreate(&stream, NON_BLOCKING));
    begin((intptr_t)arg);
    size_t at, n;
    while ((n = claim(&at)) > 0) {
        CHECK(hostRegister(job.map + at, n, job.flags));
        CHECK(upload(targets[gpu] + at % targetBytes, job.map + at, n, stream));
        CHECK(streamSync(stream));
        CHECK(hostUnregister(job.map + at));
    }
    end((intptr_t)arg);
    CHECK(streamDestroy(stream));
    return NULL;
}

// mapFile maps the file so that the driver can register it, and reports errors.
static int mapFile(size_t bytes, size_t piece) {
    for (int i = 0; i < 4; i++) {
        int writable = i / 2, readOnly = !(i % 2);
        job.flags = PORTABLE | (readOnly ? READ_ONLY : 0);
        printf("mapped %s, registered %s: ", writable ? "to read and write" : "to read", readOnly ? "to be read only" : "plainly");
        job.map = mmap(NULL, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, file, 0);
        SYSTEM(job.map != MAP_FAILED);
        CHECK(setCurrent(contexts[0]));
        Result r = hostRegister(job.map, piece, job.flags);
        if (r == 0) {
            CHECK(hostUnregister(job.map));
            printf("accepted\n");
            return 1;
        }
        printf("error %d: %s\n", r, meaning(r));
        SYSTEM(munmap(job.map, bytes) == 0);
    }
    return 0;
}

static double started;

// line prints a measurement, unless the time is over.
static void line(const char* what, int threads, int onGPUs, size_t bytes, size_t piece, void* (*work)(void*)) {
    if (now() - started > 35) {
        printf("%-32s threads %2d  gpus %d  piece %5zu KiB  no time left\n", what, threads, onGPUs, piece >> 10);
        return;
    }
    double rate = best(threads, onGPUs, bytes, piece, work);
    printf("%-32s threads %2d  gpus %d  piece %5zu KiB  %7.2f GB/s\n", what, threads, onGPUs, piece >> 10, rate);
    fflush(stdout);
}

static void openDriver(void) {
    void* lib = dlopen("libcuda.so.1", RTLD_NOW);
    if (!lib) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define FIND(name, symbol, ...) \
    if (!(*(void**)&name = dlsym(lib, symbol))) { \
        fprintf(stderr, "%s\n", dlerror()); \
        exit(1); \
    }
    DRIVER(FIND)
    CHECK(cuInit(0));
    CHECK(deviceCount(&gpus));
    if (gpus > MAX_GPUS) gpus = MAX_GPUS;
    for (int i = 0; i < gpus; i++) {
        int dev;
        CHECK(deviceGet(&dev, i));
        CHECK(retain(&contexts[i], dev));
        CHECK(setCurrent(contexts[i]));
        CHECK(memAlloc(&targets[i], targetBytes));
    }
}

static void closeDriver(void) {
    for (int i = 0; i < gpus; i++) {
        int dev;
        CHECK(setCurrent(contexts[i]));
        CHECK(memFree(targets[i]));
        CHECK(deviceGet(&dev, i));
        CHECK(giveUp(dev));
    }
}

int main(int argc, char** argv) {
    const size_t KiB = 1 << 10, MiB = 1 << 20;
    struct stat info;
    if (argc != 2) {
        fprintf(stderr, "usage: %s FILE\n", argv[0]);
        return 2;
    }
    started = now();
    SYSTEM((file = open(argv[1], O_RDWR)) >= 0);
    SYSTEM(fstat(file, &info) == 0);
    size = info.st_size / (256 * MiB) * (256 * MiB);
    if (size == 0) {
        fprintf(stderr, "%s: want 256 MiB or more\n", argv[1]);
        return 2;
    }
    for (int threads = 8; threads <= 32; threads += 8)
        for (size_t piece = MiB; piece <= 64 * MiB; piece *= 64)
            line("pread to private memory", threads, 0, size, piece, readPrivate);
    openDriver();
    if (gpus == 0) {
        fprintf(stderr, "there is no GPU\n");
        return 1;
    }
    int some[] = {1, gpus}, kinds = gpus > 1 ? 2 : 1;
    for (int k = 0; k < kinds; k++) {
        line("one pinned buffer for each GPU", some[k], some[k], some[k] * (8192 * MiB), 256 * MiB, uploadPinned);
        for (int i = 0; i < some[k]; i++) printf("  GPU %d: %.2f GB/s\n", i, 8192 * MiB / (job.ended[i] - job.began[i]) / 1e9);
    }
    for (int k = 0; k < kinds; k++)
        for (int threads = 16; threads <= 32; threads += 16) {
            size_t pieces[] = {512 * KiB, MiB, 4 * MiB};
            for (int i = 0; i < 3; i++) line("pread to pinned slots, upload", threads, some[k], size, pieces[i], readAndUpload);
        }
    size_t part = size < 4096 * MiB ? size : 4096 * MiB;
    if (mapFile(part, 64 * MiB)) {
        for (int k = 0; k < kinds; k++)
            for (int threads = 1; threads <= 8; threads *= 2)
                if (threads >= some[k]) line("register the file, upload", threads, some[k], part, 64 * MiB, registerAndUpload);
        SYSTEM(munmap(job.map, part) == 0);
    }
    closeDriver();
    printf("%.1f s\n", now() - started);
    return 0;
}
