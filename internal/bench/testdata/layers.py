"""Data-parallel training of linear layers with PyTorch's DistributedDataParallel, for ../layers, or with fully_shard of each layer.

torchrun --nproc-per-node 2 layers.py TOKENS [sharded]
"""
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, ROUNDS, STEPS = 4096, 24, 9, 10


def measure(name, net, x, dy):
    def step():
        for p in net.parameters():
            p.grad = None
        net(x).backward(dy)

    for _ in range(STEPS):
        step()
    ms = []
    for _ in range(ROUNDS):
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        ms.append((time.perf_counter() - begun) * 1e3 / STEPS)
    if dist.get_rank() == 0:
        print(f"torch: {dist.get_world_size()} ranks, {x.shape[0]} tokens, {name}: {sorted(ms)[ROUNDS // 2]:.3f} ms a step", flush=True)


local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)])
tokens = int(sys.argv[1])
x, dy = (torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
if sys.argv[2:] == ["sharded"]:
    from torch.distributed.fsdp import fully_shard

    for i, layer in enumerate(model):
        fully_shard(layer, reshard_after_forward=i < LAYERS - 1)
    fully_shard(model)
    torch.cuda.reset_peak_memory_stats()
    measure("sharded", model, x, dy)
    if dist.get_rank() == 0:
        print(f"largest amount of memory in use: {torch.cuda.max_memory_allocated() / 1e9:.3f} GB", flush=True)
    os._exit(0)
measure("without reduction", model, x, dy)
measure("with reduction", DistributedDataParallel(model, device_ids=[local]), x, dy)
measure("with reduction, views and static graph", DistributedDataParallel(model, device_ids=[local], gradient_as_bucket_view=True, static_graph=True), x, dy)
os._exit(0)
