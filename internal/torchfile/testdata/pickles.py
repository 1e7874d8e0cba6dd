"""Python's own pickle, for the tests.

  pickles.py load < lines    for each line, a pickle in base64: what it holds
  pickles.py dump SEED       random pickles in base64 and what they hold

What a pickle holds is JSON in which the types that JSON lacks are marked.
"""
import base64
import json
import pickle
import pickletools
import random
import sys

# All that the unpickler of torch's viewer (MemoryViz.js) knows.
KNOWN = set("""PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE
    BINUNICODE EMPTY_LIST APPEND APPENDS LIST EMPTY_DICT SETITEM SETITEMS DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE""".split())


def marked(v):
    if isinstance(v, bool) or v is None or isinstance(v, str):
        return v
    if isinstance(v, int):
        return {"int": str(v)}
    if isinstance(v, float):
        return {"float": v.hex()}
    if isinstance(v, tuple):
        return {"tuple": [marked(x) for x in v]}
    if isinstance(v, list):
        return [marked(x) for x in v]
    return {"dict": [[marked(k), marked(x)] for k, x in v.items()]}


def load():
    for line in sys.stdin:
        data = base64.b64decode(line)
        strange = {op.name for op, _, _ in pickletools.genops(data)} - KNOWN
        assert not strange, strange
        print(json.dumps(marked(pickle.loads(data))))


def value(r, depth, seen):
    kind = r.randrange(12 if depth < 5 else 6)
    if kind < 3:
        n = r.getrandbits(r.randrange(1, 64))
        return r.choice([n, -n, n % 256, True, False, None, 2**64 - 1, -(2**63), 2**63])
    if kind == 3:
        return r.choice([0.0, -0.5, 1e300, 5e-324, r.random()])
    if kind < 6:
        return r.choice(["", "addr", "größe", "\U0001f40d", "x" * 300, str(r.randrange(50))])
    if kind == 6 and seen:
        return r.choice(seen)
    n = r.choice([0, 1, 2, 3, 4, r.randrange(8)])
    if kind < 9:
        v = [value(r, depth + 1, seen) for _ in range(n)]
        seen.append(v)
    elif kind < 11:
        v = {r.choice(["a", "b", "addr", i, (i, "k")]): value(r, depth + 1, seen) for i in range(n)}
        seen.append(v)
    else:
        v = tuple(value(r, depth + 1, seen) for _ in range(n))
    return v


def dump(seed):
    r = random.Random(seed)
    values = [value(r, 0, []) for _ in range(200)]
    values.append([{"addr": 2**40 + i, "frames": ["x"]} for i in range(2500)])
    for v in values:
        protocol = r.randrange(2, 6)
        data = r.choice([pickle.dumps, pickle._dumps])(v, protocol)
        if r.random() < 0.2:
            data = pickletools.optimize(data)
        print(json.dumps({"pickle": base64.b64encode(data).decode(), "value": marked(v)}))


load() if sys.argv[1] == "load" else dump(int(sys.argv[2]))
