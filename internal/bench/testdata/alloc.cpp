// The peer of bench's figures of the allocator: PyTorch's caching allocator by its
// C++ entry points. Prints "name<TAB>microseconds", medians of 9 rounds.
//
//   alloc [trace.txt name]   each line of the trace is "a BLOCK BYTES" or "f BLOCK"
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace torch_alloc = c10::cuda::CUDACachingAllocator;
using Clock = std::chrono::steady_clock;

static void figure(const std::string& name, double ops, const std::function<void()>& round) {
    std::vector<double> us;
    for (int i = 0; i < 10; i++) {
        auto start = Clock::now();
        round();
        double t = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
        if (i > 0) us.push_back(t / ops);
    }
    std::sort(us.begin(), us.end());
    printf("%s\t%.4f\n", name.c_str(), us[us.size() / 2]);
    torch_alloc::emptyCache();
}

// The current stream is what most callers of PyTorch use.
static void hit(size_t bytes, int n) {
    for (int i = 0; i < n; i++) torch_alloc::raw_delete(torch_alloc::raw_alloc(bytes));
}

static void hit_on(cudaStream_t stream, size_t bytes, int n) {
    for (int i = 0; i < n; i++) torch_alloc::raw_delete(torch_alloc::raw_alloc_with_stream(bytes, stream));
}

int main(int argc, char** argv) {
    const int pairs = 200000;
    cudaSetDevice(0);
    cudaFree(nullptr);
    torch_alloc::init(1);
    for (size_t bytes : {size_t(512), size_t(64) << 10, size_t(1) << 20, size_t(64) << 20})
        figure("hit of " + std::to_string(bytes) + " B", pairs, [&] { hit(bytes, pairs); });
    for (int live : {1000, 100000}) {
        std::mt19937_64 r(1);
        std::uniform_real_distribution<double> u(0, 16);
        auto size = [&] { return size_t(std::exp2(u(r))); };
        std::vector<std::pair<int, size_t>> ops(pairs);
        for (auto& o : ops) o = {int(r() % live), size()};
        std::vector<void*> blocks(live);
        for (auto& b : blocks) b = torch_alloc::raw_alloc(size());
        figure("1 B to 64 KiB, " + std::to_string(live) + " live", pairs, [&] {
            for (auto& o : ops) {
                torch_alloc::raw_delete(blocks[o.first]);
                blocks[o.first] = torch_alloc::raw_alloc(o.second);
            }
        });
        for (auto b : blocks) torch_alloc::raw_delete(b);
        torch_alloc::emptyCache();
    }
    for (int n : {1, 4, 16}) {
        std::vector<cudaStream_t> streams(n);
        for (auto& s : streams) cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
        figure("4 KiB on " + std::to_string(n) + " streams", double(n) * (pairs / 8), [&] {
            std::vector<std::thread> threads;
            for (auto s : streams) threads.emplace_back([=] { cudaSetDevice(0); hit_on(s, 4096, pairs / 8); });
            for (auto& t : threads) t.join();
        });
    }
    if (argc > 2) {
        struct Op { int block; size_t bytes; };
        std::vector<Op> ops;
        int most = 0;
        std::ifstream file(argv[1]);
        for (std::string kind; file >> kind;) {
            Op o{0, 0};
            file >> o.block;
            if (kind == "a") file >> o.bytes;
            most = std::max(most, o.block);
            ops.push_back(o);
        }
        std::vector<void*> blocks(most + 1);
        figure(std::string("operation of ") + argv[2], double(ops.size()), [&] {
            for (auto& o : ops) {
                if (o.bytes) {
                    blocks[o.block] = torch_alloc::raw_alloc(o.bytes);
                } else {
                    torch_alloc::raw_delete(blocks[o.block]);
                    blocks[o.block] = nullptr;
                }
            }
            for (auto& b : blocks)
                if (b) { torch_alloc::raw_delete(b); b = nullptr; }
        });
        auto stats = torch_alloc::getDeviceStats(0);
        fprintf(stderr, "peak reserved %ld, peak allocated %ld\n", long(stats.reserved_bytes[0].peak), long(stats.allocated_bytes[0].peak));
    }
}
