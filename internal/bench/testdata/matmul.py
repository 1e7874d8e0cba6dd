"""Rates of PyTorch's matrix products and the host's time of a small one.

The peer of TestCUDAProducts of package tensor: the same shapes, types and random data.
    python3 matmul.py; ./tensor.test -test.run TestCUDAProducts -test.v
"""
import time

import torch

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def rand(dtype, *shape):
    return (torch.rand(*shape, device="cuda") * 2 - 1).to(dtype)


def duration(run, calls=20):
    run()
    rounds = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e-3 / calls)
    return sorted(rounds)[2]


def show(name, flop, run):
    took = duration(run)
    print(f"{name:30} {took * 1e6:8.1f} µs {flop / took / 1e12:8.1f} TFLOP/s")


def product(name, m, n, k, dtype, turned=False, batch=0):
    shape = (batch,) if batch else ()
    a = rand(dtype, *shape, m, k)
    b = rand(dtype, *shape, n, k).mT if turned else rand(dtype, *shape, k, n)
    c = torch.empty(*shape, m, n, dtype=dtype, device="cuda")
    multiply = torch.bmm if batch else torch.mm
    show(name, 2 * max(1, batch) * m * n * k, lambda: multiply(a, b, out=c))


def float8(name, n, fast):
    a, b, one = rand(E4M3, n, n), rand(E4M3, n, n).t(), torch.ones((), device="cuda")
    show(name, 2 * n**3, lambda: torch._scaled_mm(a, b, one, one, out_dtype=BF16, use_fast_accum=fast))


def main():
    print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
    product("bfloat16 4096", 4096, 4096, 4096, BF16)
    product("bfloat16 4096, b transposed", 4096, 4096, 4096, BF16, True)
    product("bfloat16 8192", 8192, 8192, 8192, BF16)
    product("bfloat16 16 rows", 16, 4096, 4096, BF16, True)
    product("bfloat16 wide", 4096, 11008, 4096, BF16, True)
    product("bfloat16 batch", 512, 512, 64, BF16, batch=64)
    product("float16 8192", 8192, 8192, 8192, F16)
    product("float32 4096", 4096, 4096, 4096, F32)
    torch.backends.cuda.matmul.allow_tf32 = True
    product("TF32 4096", 4096, 4096, 4096, F32)
    float8("float8 8192, fast", 8192, True)
    float8("float8 8192", 8192, False)
    a, b, c = (rand(BF16, 64, 64) for _ in range(3))
    rounds = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(100):
            torch.mm(a, b, out=c)
        rounds.append((time.perf_counter() - start) / 100)
        torch.cuda.synchronize()
    print(f"host time of a product of 64x64x64: {sorted(rounds)[25] * 1e6:.2f} µs")


main()
