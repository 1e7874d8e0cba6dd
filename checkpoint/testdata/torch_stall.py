"""The same as BenchmarkStall with PyTorch: what a save costs a training whose step is one CUDA graph.

    python3 torch_stall.py BYTES FOLDER

Each line is JSON: the way to save, the stall (longest step less the median one), and the time
until the files are on the disk. The second and third save of each way are measured, because the
first one allocates memory.
"""
import json
import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

BYTES, FOLDER = int(sys.argv[1]), sys.argv[2]
TENSORS = 64
os.makedirs(FOLDER, exist_ok=True)
torch.cuda.set_device(0)
state = {f"state.{i}": torch.zeros(BYTES // 4 // TENSORS, device="cuda") for i in range(TENSORS)}
tensors = list(state.values())
side = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    for _ in range(4):
        for x in tensors[1:]:
            x.copy_(tensors[0])


def step(before=None):
    begun = time.perf_counter()
    result = before() if before else None
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - begun, result


def sync_folder(path):
    for root, _, names in os.walk(path):
        for name in names:
            fd = os.open(os.path.join(root, name), os.O_RDWR)
            os.fsync(fd)
            os.close(fd)


def measure(name, save):
    """save(path) returns a future, or None if the files are complete."""
    path = os.path.join(FOLDER, "torch-" + name)
    try:
        for n in range(3):
            shutil.rmtree(path, ignore_errors=True)
            quiet = sorted(step()[0] for _ in range(30))
            begun = time.perf_counter()
            first, future = step(lambda: save(path))
            later = [0.0]
            while future is not None and not future.done():
                later.append(step()[0])
            if future is not None:
                future.result()
            sync_folder(path)
            took = time.perf_counter() - begun
            if n > 0:
                print(json.dumps({"save": name, "step_ms": 1e3 * quiet[15], "stall_ms": 1e3 * (max(first, *later) - quiet[15]),
                                  "first_ms": 1e3 * (first - quiet[15]), "other_ms": 1e3 * (max(later) - quiet[-1]), "durable_s": took}), flush=True)
    except Exception as e:  # another version of torch may lack a way
        print(json.dumps({"save": name, "error": repr(e)}), flush=True)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def future_of(x):
    """newer versions return AsyncSaveResponse"""
    return getattr(x, "upload_completion", x)


def torch_save(path):
    os.makedirs(path)
    torch.save(state, os.path.join(path, "state.pt"))


def dcp_async(path):
    return future_of(dcp.async_save(state, checkpoint_id=path))


def dcp_async_pinned():
    from torch.distributed.checkpoint.staging import BlockingAsyncStager
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    return lambda path: future_of(dcp.async_save(state, checkpoint_id=path, storage_writer=dcp.FileSystemWriter(path), async_stager=stager))


def dcp_async_default_stager():
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    stager = DefaultStager(StagingOptions(use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True))
    return lambda path: future_of(dcp.async_save(state, checkpoint_id=path, async_stager=stager))


dist.init_process_group("cpu:gloo,cuda:nccl", init_method="file://" + os.path.join(FOLDER, f"init-{os.getpid()}"), rank=0, world_size=1)
measure("torch.save", torch_save)
measure("dcp.save", lambda path: dcp.save(state, checkpoint_id=path) and None)
measure("dcp.async_save", dcp_async)
for name, make in (("dcp.async_save-cached-pinned", dcp_async_pinned), ("dcp.async_save-DefaultStager", dcp_async_default_stager)):
    try:
        save = make()
    except Exception as e:
        print(json.dumps({"save": name, "error": repr(e)}), flush=True)
        continue
    measure(name, save)
dist.destroy_process_group()
