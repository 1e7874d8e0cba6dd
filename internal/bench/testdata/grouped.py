"""Rates of PyTorch's products of groups whose sizes are on the device (grouped_mm with offs).

The peer of BenchmarkGroupedMatMul of package tensor: the same shapes, sizes of groups and types.
    python3 grouped.py; ./tensor.test -test.run '^$' -test.bench GroupedMatMul
"""
import torch

BF16 = torch.bfloat16
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def rand(*shape):
    return (torch.rand(*shape, device="cuda", dtype=torch.float32) * 2 - 1).to(BF16)


def weights(groups, rows, columns):
    """Equal matrices, so that little memory is drawn."""
    return rand(rows, columns).expand(groups, rows, columns).contiguous()


def duration(run, calls=10):
    run()
    rounds = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e-3 / calls)
    return sorted(rounds)[3]


def show(name, flop, run):
    took = duration(run)
    print(f"{name:50} {took * 1e6:8.1f} µs {flop / took / 1e12:8.1f} TFLOP/s", flush=True)


def sizes(groups, rows, ragged):
    list = [0] * groups
    for i in range(rows):
        list[i * i % 8191 * groups // 8191 if ragged else i % groups] += 1
    return list


def product(groups, rows, k, n, ragged, turned):
    name = f"{groups}x{rows}x{k}x{n}, ragged {ragged}, turned {turned}"
    flop = 2 * rows * k * n
    counts = sizes(groups, rows, ragged)
    offs = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    a, dy = rand(rows, k), rand(rows, n)
    w = weights(groups, n, k).mT if turned else weights(groups, k, n)
    show(name, flop, lambda: grouped_mm(a, w, offs=offs))
    try:
        show(name + ", gradient", flop, lambda: grouped_mm(a.T, dy, offs=offs))
    except RuntimeError as e:
        print(name, "gradient:", e)


def main():
    print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
    product(64, 4096, 7168, 2048, False, False)
    product(64, 4096, 7168, 2048, True, False)
    product(64, 4096, 7168, 2048, True, True)
    product(8, 8192, 4096, 4096, False, False)
    product(8, 8192, 4096, 4096, True, True)


main()
