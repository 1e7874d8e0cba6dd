"""torch.cuda.comm's and torch.cuda.nccl's time for the rows of package comm's BenchmarkTorchComm.

It prints the name of a row, a tab, and microseconds of a call in a long series.

    torchcomm.py gpus
"""
import sys
import time

import torch
import torch.cuda.comm as comm
import torch.cuda.nccl as nccl

devices = list(range(int(sys.argv[1])))


def sync():
    for d in devices:
        torch.cuda.synchronize(d)


def timed(name, call):
    for _ in range(5):
        call()
    sync()
    begun = time.perf_counter()
    call()
    sync()
    times = max(10, min(2000, int(0.05 / (time.perf_counter() - begun))))
    begun = time.perf_counter()
    for _ in range(times):
        call()
    sync()
    print(f"{name}\t{(time.perf_counter() - begun) / times * 1e6:.3f}", flush=True)


for size in (4096, 1 << 20, 64 << 20, 512 << 20):
    x = torch.zeros(size // 4, device="cuda:0")
    xs = [torch.zeros(size // 4, device=f"cuda:{d}") for d in devices]
    parts = comm.scatter(x, devices)
    timed(f"broadcast/bytes={size}", lambda: comm.broadcast(x, devices))
    timed(f"scatter/bytes={size}", lambda: comm.scatter(x, devices))
    timed(f"gather/bytes={size}", lambda: comm.gather(parts, destination=0))
    timed(f"reduce_add/bytes={size}", lambda: comm.reduce_add(xs, 0))
    timed(f"nccl.all_reduce/bytes={size}", lambda: nccl.all_reduce(xs))
    del x, xs, parts
for rows, columns in ((16, 64), (4096, 8192)):
    x = torch.zeros(rows, columns, device="cuda:0")
    parts = comm.scatter(x, devices, dim=1)
    timed(f"scatter_dim1/bytes={4 * rows * columns}", lambda: comm.scatter(x, devices, dim=1))
    timed(f"gather_dim1/bytes={4 * rows * columns}", lambda: comm.gather(parts, dim=1, destination=0))
small = [[torch.zeros(1000 + k, device=f"cuda:{d}") for k in range(300)] for d in devices]
timed("broadcast_coalesced", lambda: comm.broadcast_coalesced(small[0], devices))
timed("reduce_add_coalesced", lambda: comm.reduce_add_coalesced(small, 0))
