"""torchrun's time to go on after a rank is killed; compare with `bench recovery`.

    torchrun --nproc-per-node N --max-restarts 1 recovery.py MARK
"""
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

mark = sys.argv[1]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
data = torch.zeros(1 << 18, device="cuda")
dist.all_reduce(data)
torch.cuda.synchronize()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == size - 1:
        with open(mark, "w") as f:
            f.write(str(time.time_ns()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(data)
    torch.cuda.synchronize()
if rank == 0:
    with open(mark) as f:
        print(f"first all-reduce: {(time.time_ns() - int(f.read())) // 1000000} ms", flush=True)
dist.destroy_process_group()
