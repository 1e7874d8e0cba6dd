"""What PyTorch does with files of tensors, and the rates that the machine allows.

    load.py make FILE BYTES      writes a checkpoint of random bfloat16 matrices
    load.py file FILE TIMES      seconds of safetensors.torch.load_file to the GPU
    load.py save FILE BYTES      writes such a checkpoint with torch.save
    load.py torch FILE TIMES     seconds of torch.load(mmap=True), and .cuda() of each tensor
    load.py h2d BYTES            seconds to copy that many bytes from pinned memory to the GPU
    load.py cold FILE            forgets what the page cache has of a file
"""
import os
import sys
import time

import torch
from safetensors.torch import load_file, save_file


def timed(call):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    kept = call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    del kept
    return seconds


def matrices(size):
    made = {}
    for i in range(size // (64 << 20)):
        block = torch.frombuffer(bytearray(os.urandom(1 << 20)), dtype=torch.uint8).repeat(64)
        made[f"model.layers.{i}.weight"] = (block + i).view(torch.bfloat16).view(4096, 8192)
    return made


what, args = sys.argv[1], sys.argv[2:]
if what == "make":
    save_file(matrices(int(args[1])), args[0])
elif what == "save":
    torch.save(matrices(int(args[1])), args[0])
elif what == "torch":
    torch.zeros(1, device="cuda")

    def load():
        return {name: x.cuda() for name, x in torch.load(args[0], mmap=True, weights_only=True).items()}
    print(min(timed(load) for _ in range(int(args[1]))))
elif what == "file":
    torch.zeros(1, device="cuda")
    print(min(timed(lambda: load_file(args[0], device="cuda")) for _ in range(int(args[1]))))
elif what == "h2d":
    size = int(args[0])
    host, dev = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device="cuda")
    print(min(timed(lambda: dev.copy_(host, non_blocking=True)) for _ in range(5)))
elif what == "cold":
    fd = os.open(args[0], os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
else:
    sys.exit(__doc__)
