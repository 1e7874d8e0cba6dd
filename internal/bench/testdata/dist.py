"""torch.distributed's time for the rows of chorus perf; run by torchrun.

It prints chorus perf's name of a side of a row, a tab, and microseconds.

    torchrun --nproc-per-node N dist.py iterations warm-ups graph-launches smallest largest factor operation...
"""
import os
import sys
import time

import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
n = dist.get_world_size()
iterations, warmups, launches, smallest, largest, factor = map(int, sys.argv[1:7])
ops = sys.argv[7:]
a = torch.zeros(largest // 4, device="cuda")
b = torch.zeros(largest // 4, device="cuda")


def calls(op, count):
    """Returns the row's name, its bytes, whether it is in place, and the call on buffers from an element on."""
    part = count // n // 4 * 4
    whole = part * n

    def exchange(i):
        sent = dist.P2POp(dist.isend, b[i : i + count], (rank + 1) % n)
        got = dist.P2POp(dist.irecv, a[i : i + count], (rank - 1) % n)
        for w in dist.batch_isend_irecv([sent, got]):
            w.wait()

    return {
        "all_reduce": ("AllReduce/type=float/redop=sum/inplace", count, lambda i: dist.all_reduce(a[i : i + count])),
        "all_gather": ("AllGather/type=float", whole, lambda i: dist.all_gather_into_tensor(a[i : i + whole], b[i : i + part])),
        "reduce_scatter": ("ReduceScatter/type=float/redop=sum", whole, lambda i: dist.reduce_scatter_tensor(a[i : i + part], b[i : i + whole])),
        "broadcast": ("Broadcast/type=float/root=0/inplace", count, lambda i: dist.broadcast(a[i : i + count], 0)),
        "reduce": ("Reduce/type=float/redop=sum/root=0/inplace", count, lambda i: dist.reduce(a[i : i + count], 0)),
        "alltoall": ("Alltoall/type=float", whole, lambda i: dist.all_to_all_single(a[i : i + whole], b[i : i + whole])),
        "sendrecv": ("Sendrecv/type=float", count, exchange),
    }.get(op)


def measure(op, count):
    found = calls(op, count)
    if found is None:
        return
    name, elements, call = found
    if elements == 0:
        return
    stride = (elements * 4 + 511) // 512 * 128
    places = max(1, min(64, a.numel() // stride))
    for i in range(max(warmups, 1)):
        call(i % places * stride)
    torch.cuda.synchronize()
    step, times = (lambda: [call(i % places * stride) for i in range(iterations)]), iterations
    if launches:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            step()
        kept.append(g)
        step, times = (lambda: [g.replay() for _ in range(launches)]), iterations * launches
    dist.barrier()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    us = torch.tensor([(time.perf_counter() - begun) / times * 1e6], device="cuda")
    dist.all_reduce(us)
    if rank == 0:
        print(f"{name}/bytes={elements * 4}\t{us.item() / n:.3f}", flush=True)


kept = []
for op in ops:
    size = smallest
    while size <= largest:
        measure(op, size // 4)
        size *= factor
# Ending the process group hangs after NCCL was captured in a graph: leave at once.
torch.cuda.synchronize()
sys.stdout.flush()
os._exit(0)
