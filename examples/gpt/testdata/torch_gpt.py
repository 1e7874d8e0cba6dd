"""The peer of examples/gpt: milliseconds per training step of the same model with PyTorch.

    python3 torch_gpt.py; bin/gpt -steps 200; bin/gpt -steps 200 -graph=false

Prints the median of 9 rounds of 50 steps: eager, with a CUDA graph of the whole step, and each
in bfloat16 (torch.autocast). Batches are on the GPU before the measurement.
"""
import math
import time

import torch
import torch.nn.functional as F

torch.backends.cuda.matmul.allow_tf32 = False
VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 13, 64, 4, 2, 39, 32
MASK = torch.full((LENGTH, LENGTH), float("-inf"), device="cuda").triu(1)


def parameters():
    shapes = [(VOCAB, WIDTH), (LENGTH, WIDTH)]
    for _ in range(LAYERS):
        shapes += [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (WIDTH, WIDTH)]
        shapes += [(WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    shapes += [(WIDTH,), (WIDTH,), (VOCAB, WIDTH)]
    torch.manual_seed(1)
    return [(torch.randn(s, device="cuda") * 0.02 + (len(s) == 1)).requires_grad_() for s in shapes]


def norm(h, weight, bias):
    return F.layer_norm(h, (WIDTH,), weight, bias, 1e-5)


def forward(params, x):
    it = iter(params)
    h = next(it)[x] + next(it)
    for _ in range(LAYERS):
        qkv = F.linear(norm(h, next(it), next(it)), next(it))
        q, k, v = (t.view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for t in qkv.split(WIDTH, 2))
        p = ((q @ k.transpose(2, 3)) / math.sqrt(WIDTH // HEADS) + MASK).softmax(-1)
        h = h + F.linear((p @ v).transpose(1, 2).reshape(-1, LENGTH, WIDTH), next(it))
        up = F.linear(norm(h, next(it), next(it)), next(it))
        h = h + F.linear(F.gelu(up, approximate="tanh"), next(it))
    return F.linear(norm(h, next(it), next(it)), next(it))


def stepper(bf16, graph):
    params = parameters()
    opt = torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=graph)
    x = torch.randint(VOCAB, (BATCH, LENGTH), device="cuda")
    y = torch.randint(VOCAB, (BATCH, LENGTH), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16, cache_enabled=not graph):
            logits = forward(params, x)
        loss = F.cross_entropy(logits.float().reshape(-1, VOCAB), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()

    if not graph:
        return step
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        step()
    return g.replay


for bf16 in (False, True):
    for graph in (False, True):
        run = stepper(bf16, graph)
        for _ in range(50):
            run()
        rounds = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                run()
            torch.cuda.synchronize()
            rounds.append((time.perf_counter() - start) / 50 * 1e3)
        print(f"torch {'bf16' if bf16 else 'fp32'} {'graph' if graph else 'eager'} {sorted(rounds)[4]:.4f} ms a step")
