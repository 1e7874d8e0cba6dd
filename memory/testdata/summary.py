"""The layout of torch.cuda.memory_summary, written down a second time.

Writes statistics and their tables for the test of Stats.Summary:

    python3 testdata/summary.py | gzip -9n > testdata/summary.json.gz
"""
import json
import random
import sys
from fractions import Fraction

SIZES, COUNTS = ["B  ", "KiB", "MiB", "GiB", "TiB", "PiB"], [" ", "K", "M"]
POOLED = [("allocated_bytes", "Allocated memory"), ("active_bytes", "Active memory"),
          ("requested_bytes", "Requested memory"), ("reserved_bytes", "GPU reserved memory"),
          ("inactive_split_bytes", "Non-releasable memory"), ("allocation", "Allocations"),
          ("active", "Active allocs"), ("segment", "GPU reserved segments"),
          ("inactive_split", "Non-releasable allocs")]
SINGLE = [("oversize_allocations", "Oversize allocations"), ("oversize_segments", "Oversize GPU segments")]
COLUMNS = ["current", "peak", "allocated", "freed"]


def cell(value, of_all, sizes):
    step, names, most = (1024, SIZES, 768) if sizes else (1000, COUNTS, 750)
    of_all, power = Fraction(of_all), 0
    while power + 1 < len(names) and of_all >= most * step:
        of_all, power = of_all / step, power + 1
    value //= step**power
    return f"{value:6d} {names[power]}" if sizes else f"{value:7d} {names[power]} "


def table(device, abbreviated, stats):
    out = ["=" * 75, "Chorus CUDA memory summary, device ID".rjust(55) + " " + str(device).ljust(18) + " ", "-" * 75]
    out.append(" " * 12 + "CUDA OOMs: " + str(stats["num_ooms"]).ljust(12) + " | " + " " * 7
               + "cudaMalloc retries: " + str(stats["num_alloc_retries"]).ljust(8) + "  ")
    out += ["=" * 75, "        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  "]

    def row(name, key, of_all, sizes):
        cells = [cell(stats[f"{key}.{c}"], stats[f"{of_all}.{c}"], sizes) for c in COLUMNS]
        out.append(" " + " | ".join([name.ljust(21)] + cells) + " ")

    for key, name in POOLED:
        sizes = name.endswith("memory")
        out.append("-" * 75)
        row(name, key + ".all", key + ".all", sizes)
        if not abbreviated:
            row("      from large pool", key + ".large_pool", key + ".all", sizes)
            row("      from small pool", key + ".small_pool", key + ".all", sizes)
    for key, name in SINGLE:
        out.append("-" * 75)
        row(name, key, key, False)
    out.append("=" * 75)
    return "".join(f"|{line}|\n" for line in out)


def number(r, largest):
    """Numbers of every length, and those around the limits of the prefixes."""
    kind = r.randrange(3)
    if kind == 0:
        return r.randrange(2 ** r.randrange(largest))
    limits = [m * s**p for m, s, ps in ((768, 1024, 6), (750, 1000, 4)) for p in range(1, ps)]
    return r.choice([n for n in limits if n < 2**largest]) + r.randrange(-1, 2) if kind == 1 else r.randrange(2000)


def case(r):
    keys = [f"{k}.{p}.{c}" for k, _ in POOLED for p in ("all", "small_pool", "large_pool") for c in COLUMNS]
    keys += [f"{k}.{c}" for k, _ in SINGLE for c in COLUMNS]
    stats = {k: number(r, 61 if "bytes" in k else 40) for k in keys}
    for key in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
        stats[key] = number(r, 30)
    stats["max_split_size"] = -1
    device, abbreviated = r.choice([0, 1, 7, 63]), r.random() < 0.3
    return {"device": device, "abbreviated": abbreviated, "stats": stats, "table": table(device, abbreviated, stats)}


json.dump([case(random.Random(seed)) for seed in range(30)], sys.stdout)
