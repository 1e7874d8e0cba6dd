"""The peer of examples/gpt -model gpt2 -bf16: the same training with PyTorch.

    python3 torch_gpt2.py --data tokens.bin --json torch.json
    torchrun --nproc-per-node 2 torch_gpt2.py --data tokens.bin [--fsdp]

The initial values, the batches, the arithmetic and the learning rates are those of the program:
float32 parameters, matrix products and attention in bfloat16, and the residual stream, layer norms
and the loss in float32. It is compiled. The JSON has the losses, the median time of a step after
20 steps, tokens a second and the peak of allocated memory.
"""
import argparse
import contextlib
import json
import os
import statistics

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 50304, 1024, 768, 12, 12
SEED, PEAK, WARMUP, SKIP = 1234, 6e-4, 100, 20


def matrix(rows, columns, std=0.02):
    return nn.Parameter(torch.empty(rows, columns, device="cuda").normal_(0, std))


def norms():
    return nn.Parameter(torch.ones(WIDTH, device="cuda")), nn.Parameter(torch.zeros(WIDTH, device="cuda"))


def layer_norm(h, w, b):
    return F.layer_norm(h, (WIDTH,), w.float(), b.float(), 1e-5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        small = 0.02 / (2 * LAYERS) ** 0.5
        self.w1, self.b1 = norms()
        self.qkv = matrix(3 * WIDTH, WIDTH)
        self.proj = matrix(WIDTH, WIDTH, small)
        self.w2, self.b2 = norms()
        self.up = matrix(4 * WIDTH, WIDTH)
        self.down = matrix(WIDTH, 4 * WIDTH, small)

    def forward(self, h):
        qkv = F.linear(layer_norm(h, self.w1, self.b1), self.qkv)
        q, k, v = (t.view(*t.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for t in qkv.split(WIDTH, 2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + F.linear(a, self.proj)
        up = F.linear(layer_norm(h, self.w2, self.b2), self.up)
        return h + F.linear(F.gelu(up, approximate="tanh"), self.down)


def tail(h, w, b, tok, targets):
    logits = F.linear(layer_norm(h, w, b), tok)
    return F.cross_entropy(logits.float().view(-1, VOCAB), targets.reshape(-1), reduction="sum")


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tail = tail
        self.tok = matrix(VOCAB, WIDTH)
        self.pos = matrix(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.w, self.b = norms()

    def forward(self, text):
        h = F.embedding(text[:, :-1], self.tok).float() + self.pos.float()
        for block in self.blocks:
            h = block(h)
        return self.tail(h, self.w, self.b, self.tok, text[:, 1:])


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--data", required=True)
    flags.add_argument("--json", default="")
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--batch", type=int, default=32, help="sequences of a step, over all ranks")
    flags.add_argument("--micro", type=int, default=0, help="largest number of sequences of a micro-batch")
    flags.add_argument("--fsdp", action="store_true")
    flags.add_argument("--eager", action="store_true", help="without torch.compile")
    cfg = flags.parse_args()

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ or cfg.fsdp:
        if "RANK" not in os.environ:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
        dist.init_process_group("nccl")

    torch.manual_seed(SEED)
    model = GPT()
    if cfg.fsdp:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            if not cfg.eager:
                block.compile()
            fully_shard(block, mp_policy=policy)
        if not cfg.eager:
            model.tail = torch.compile(tail)
        fully_shard(model, mp_policy=policy)
        run = model
    else:
        run = model if cfg.eager else torch.compile(model)
        if ranks > 1:
            run = nn.parallel.DistributedDataParallel(run, gradient_as_bucket_view=True)
    params = list(model.parameters())
    opt = torch.optim.AdamW(
        [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}],
        lr=PEAK / WARMUP, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

    tokens = np.fromfile(cfg.data, dtype="<u2")
    usable = len(tokens) - CONTEXT
    first, last = cfg.batch * rank // ranks, cfg.batch * (rank + 1) // ranks
    micro = cfg.micro or last - first

    def batch(step):
        places = [(step * cfg.batch + j) * CONTEXT % usable for j in range(first, last)]
        text = np.stack([tokens[at:at + CONTEXT + 1] for at in places]).astype(np.int64)
        return torch.from_numpy(text).pin_memory().to("cuda", non_blocking=True)

    losses, events = [], []
    for step in range(cfg.steps):
        for group in opt.param_groups:
            group["lr"] = PEAK * min(1, (step + 1) / WARMUP)
        opt.zero_grad(set_to_none=True)
        parts = batch(step).split(micro)
        total = 0
        for i, text in enumerate(parts):
            sync = i == len(parts) - 1
            with run.no_sync() if ranks > 1 and not cfg.fsdp and not sync else contextlib.nullcontext():
                with torch.autocast("cuda", torch.bfloat16):
                    loss = run(text)
                # The mean over ranks of these gradients is that of the batch.
                (loss * (ranks / (cfg.batch * CONTEXT))).backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        losses.append(total)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    losses = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(losses)
    losses = (losses / (cfg.batch * CONTEXT)).tolist()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    median = statistics.median(times[min(SKIP, len(times) // 2):]) / 1e3
    result = {
        "losses": losses, "ranks": ranks, "median_seconds": median,
        "tokens_per_second": cfg.batch * CONTEXT / median, "peak_bytes": torch.cuda.max_memory_allocated(),
        "torch": torch.__version__,
    }
    if rank == 0:
        print(f"torch {torch.__version__}: ranks {ranks}, steps {cfg.steps}, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
              f"{median * 1e3:.2f} ms a step, {result['tokens_per_second']:.0f} tokens/s, {result['peak_bytes'] / 1e9:.2f} GB")
        if cfg.json:
            with open(cfg.json, "w") as f:
                json.dump(result, f)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
