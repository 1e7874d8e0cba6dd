"""Records draws of PyTorch on a GPU for TestRecordings of package rng.

    python3 rng/testdata/torch_draws.py rng/testdata/rng_draws.json.gz

Each sequence is a list of calls on one generator. Tensors of parameters repeat a table, so that
the file holds only the table: element i is table[i % len(table)]. A call that gives different
results in a second run from the same state is marked with "varies".
"""
import ctypes
import gzip
import hashlib
import json
import sys

import torch

INPUTS = {'float32': torch.float32, 'float64': torch.float64, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
TYPES = dict(INPUTS, bool=torch.bool, uint8=torch.uint8, int8=torch.int8, int16=torch.int16, int32=torch.int32, int64=torch.int64)
FLOATS = list(INPUTS)

RATES = [0, 0.5, 1, 3.25, 12, 30, 63, 63.5, 64, 65, 100, 250, 1000, 3999, 4000, 4096, 10000, 60000]
SMALL_RATES = [0, 0.125, 0.5, 1, 2, 5, 9]
PROBABILITIES = [0, 0.25, 0.5, 0.75, 1, 0.125, 0.0625, 0.9375, 0.3125]
MEANS = [0, 1, -2.5, 100, 0.125]
DEVIATIONS = [0, 1, 0.5, 3, 0.25, 10, 7]
WEIGHTS = [3, 1, 0, 7, 0.5, 2, 0, 0.25, 5, 11, 1.5]


def table(values, n, dtype):
    """Returns n elements that repeat the values, rounded to a type."""
    return torch.tensor(values, dtype=torch.float64, device='cuda').repeat((n + len(values) - 1) // len(values))[:n].to(INPUTS[dtype])


def parameter(p, n, dtype):
    """Returns a number, or the tensor of a table, which may have its own type."""
    if isinstance(p, dict):
        return table(p['table'], p.get('n', n), p.get('dtype', dtype))
    return p


def draw(g, call):
    """Makes one call on the generator and returns the tensor."""
    fn, args, n, dtype = call['fn'], call['args'], call['n'], call['dtype']
    if fn == 'randperm':
        return torch.randperm(n, generator=g, device='cuda', dtype=TYPES[dtype])
    if fn == 'multinomial':
        weights, rows, replacement = parameter(args[0], None, None), args[1], args[2]
        weights = weights.reshape(rows, -1) if rows else weights
        return torch.multinomial(weights, n // max(rows, 1), bool(replacement), generator=g)
    ps = [parameter(p, n, dtype) for p in args]
    if fn == 'poisson':
        return torch.poisson(ps[0], generator=g)
    if fn == 'normal' and any(isinstance(p, torch.Tensor) for p in ps):
        return torch.normal(ps[0], ps[1], generator=g)
    x = torch.empty(n, dtype=TYPES[dtype], device='cuda')
    if fn == 'random_from_to':
        return x.random_(args[0], args[1], generator=g)
    return getattr(x, fn + '_')(*ps, generator=g)  # cauchy_, bernoulli_


def raw(x):
    x = x.contiguous().cpu()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())


def record(g, call):
    before = g.get_state()
    data = raw(draw(g, call))
    after = g.get_state()
    g.set_state(before)
    if raw(draw(g, call)) != data:
        call['varies'] = True
    assert bytes(g.get_state().tolist()) == bytes(after.tolist())
    head = 1024 if call['fn'] in ('poisson', 'multinomial', 'randperm') else 256
    call.update(sha256=hashlib.sha256(data).hexdigest(), head_hex=data[:head].hex(), tail_hex=data[-64:].hex(),
                state_after_hex=bytes(after.tolist()).hex())
    return call


def values(p, dtype=None, n=None):
    out = {'table': p}
    if dtype:
        out['dtype'] = dtype
    if n:
        out['n'] = n
    return out


def call(fn, args, dtype, n):
    return {'fn': fn, 'args': args, 'dtype': dtype, 'n': n}


def fills(n):
    """Calls with an element type and n elements."""
    for t in FLOATS:
        yield call('cauchy', [0, 1], t, n)
        yield call('cauchy', [-2, 0.5], t, n)
        yield call('poisson', [values(SMALL_RATES)], t, n)
        yield call('poisson', [values(RATES)], t, n)
        yield call('normal', [values(MEANS), values(DEVIATIONS)], t, n)
        yield call('normal', [values(MEANS), 2.5], t, n)
        yield call('normal', [-1.25, values(DEVIATIONS)], t, n)
        yield call('bernoulli', [values(PROBABILITIES)], t, n)
    for t in ('uint8', 'int32', 'int64', 'bool'):
        yield call('bernoulli', [values(PROBABILITIES, 'float32')], t, n)
    yield call('bernoulli', [values(PROBABILITIES, 'float64')], 'float32', n)
    yield call('bernoulli', [values(PROBABILITIES, 'float16')], 'float64', n)
    yield call('normal', [values(MEANS), values(DEVIATIONS, 'float64')], 'float32', n)
    yield call('random_from_to', [-2**31, 2**31 - 1], 'int32', n)
    yield call('random_from_to', [-2**63, 2**63 - 1], 'int64', n)


def permutations(sizes):
    for n, t in sizes:
        yield call('randperm', [], t, n)


def samples(shapes):
    """Multinomial draws; rows 0 is one distribution without a dimension of rows."""
    for rows, categories, k, replacement, t in shapes:
        w = values(WEIGHTS, t, max(rows, 1) * categories)
        yield call('multinomial', [w, rows, replacement], 'int64', max(rows, 1) * k)


def shapes():
    for t in FLOATS:
        for rows, categories in ((0, 7), (1, 20), (3, 11), (5, 33), (2, 100), (4, 300), (40, 64), (0, 1000), (3, 1500), (2, 5000), (600, 16)):
            yield rows, categories, 1, 0, t
            yield rows, categories, 1, 1, t
            yield rows, categories, 4, 0, t
            yield rows, categories, 4, 1, t
            yield rows, categories, 150, 1, t
    for t in ('float32', 'float64'):
        for rows, categories, k in ((0, 1000, 700), (3, 200, 120), (0, 30000, 100), (7, 40, 25), (0, 30000, 20000)):
            yield rows, categories, k, 0, t
        yield 0, 30000, 1000, 1, t
        yield 2, 30000, 1000, 1, t


def probes():
    """Returns torch's prefix sums of one row, and of several, on a normalised table."""
    out = []
    for t in ('float32', 'float16', 'float64'):
        for rows, n in ((1, 7), (1, 33), (1, 100), (1, 300), (1, 1000), (1, 3000), (3, 11), (5, 33), (4, 300), (2, 1000)):
            x = table(WEIGHTS, rows * n, t).reshape(rows, n)
            x = x / x.sum(1, keepdim=True)
            y = torch.cumsum(x, 1)
            out.append({'dtype': t, 'rows': rows, 'n': n, 'in_hex': raw(x)[:2048].hex(), 'out_hex': raw(y)[:4096].hex(),
                        'sha256': hashlib.sha256(raw(y)).hexdigest()})
    return out


def plans():
    """The calls of each seed."""
    yield 0, 0, list(fills(1)) + list(fills(5)) + list(fills(1000))
    yield 42, 0, list(fills(4099)) + list(samples(shapes()))
    yield 2**53 - 1, 2**33 + 8, list(fills(300_001)) + list(samples(shapes()))
    yield 2**64 - 3, 4, list(fills(1_100_003))
    sizes = [(1, 'int64'), (2, 'int64'), (3, 'int32'), (10, 'int64'), (33, 'float32'), (100, 'int64'), (100, 'uint8'), (100, 'int8'),
             (257, 'int16'), (1000, 'int32'), (2048, 'float16'), (256, 'bfloat16'), (4096, 'int64'), (29_999, 'int64'), (30_000, 'int32'),
             (30_083, 'int32'), (30_084, 'int32'), (30_100, 'int64'), (50_000, 'int64'), (100_003, 'int32'), (1_000_000, 'int32'), (3_000_001, 'float64')]
    yield 7, 0, list(permutations(sizes))
    yield 8, 2**34, list(permutations(sizes))
    for seed in range(100, 130):  # a tenth of all permutations has equal keys
        yield seed, 0, list(permutations([(n, 'uint8') for n in (2, 3, 5, 17, 60, 100, 150, 200)]))
    for seed in range(200, 204):
        yield seed, 0, list(permutations([(n, 'int16') for n in (2000, 5000, 30_000, 32_000)]))


def main(path):
    out = []
    for seed, offset, calls in plans():
        g = torch.Generator('cuda')
        g.manual_seed(seed)
        if offset:
            g.set_offset(offset)
        done = []
        for c in calls:
            try:
                done.append(record(g, c))
            except RuntimeError as e:  # a shape or type that torch refuses; the generator may have moved
                print('refused:', {k: v for k, v in c.items() if k in ('fn', 'dtype', 'n')}, e, file=sys.stderr)
                done.append({'fn': 'set_state', 'args': [], 'dtype': 'uint8', 'n': 0, 'state_after_hex': bytes(g.get_state().tolist()).hex()})
        out.append({'seed': seed, 'offset': offset, 'calls': done})
    p = torch.cuda.get_device_properties(0)
    meta = {'torch': torch.__version__, 'device': p.name, 'sm': p.multi_processor_count, 'max_threads_per_sm': p.max_threads_per_multi_processor}
    with gzip.open(path, 'wt', compresslevel=9) as f:
        json.dump({'meta': meta, 'cases': out, 'probes': probes()}, f, separators=(',', ':'))
    print(path, sum(len(s['calls']) for s in out), 'calls', 'of', torch.__version__, 'on', p.name)


if __name__ == '__main__':
    main(sys.argv[1])
