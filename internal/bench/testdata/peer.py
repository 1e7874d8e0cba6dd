"""The same figures in PyTorch."""
import statistics
import time

import torch

ROUNDS, REPLAYS, FILLS = 9, 500, 20


def median(name, ops, op):
    times = []
    for i in range(ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(ops):
            op()
        torch.cuda.synchronize()
        if i > 0:
            times.append((time.perf_counter() - start) / ops)
    print(f"{name}\t{statistics.median(times) * 1e6:.3f}", flush=True)


x = torch.zeros(100, 1 << 18, device="cuda")
graph = torch.cuda.CUDAGraph()
x.add_(1)
with torch.cuda.graph(graph):
    for i in range(100):
        x[i, :1024].add_(1)
median("launch of a graph of 100 small kernels", REPLAYS, graph.replay)
y = torch.empty(1 << 28, device="cuda")
fills = {"uniform": lambda: y.uniform_(), "normal": lambda: y.normal_()}
for name, fill in fills.items():
    median(name, FILLS, fill)
for name, fill in fills.items():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill()
    median(name + " in a graph", FILLS, graph.replay)
