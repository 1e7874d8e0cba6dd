"""The peer of the benchmark of package optim: torch's fused AdamW, with and without clip_grad_norm_."""
import time, torch
lengths = [50304 * 768] + [926_016] * 104 + [768] * 103
params = [torch.randn(n, device='cuda', requires_grad=True) for n in lengths]
for p in params: p.grad = torch.randn_like(p)
opt = torch.optim.AdamW(params, lr=1e-3, fused=True)
def clip(): torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
def both():
    clip()
    opt.step()
for name, fn in (('adamw', opt.step), ('clip', clip), ('clipped', both)):
    for _ in range(10): fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(50): fn()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 50 * 1e6)
    print(f'torch {name} {sorted(times)[4]:.1f} us')
