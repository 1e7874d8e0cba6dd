"""Reads a checkpoint of a Saver with Python's standard library alone.

Usage: read_saved.py FOLDER. Prints the SHA-256 of each whole tensor as JSON. It also compares the
digests of the manifest with the bytes of the files, and ends with an error if one differs.
"""
import hashlib, json, os, struct, sys


def read_file(path):
    """Returns the header and the tensors of a safetensors file."""
    with open(path, "rb") as f:
        size = f.read(8)
        header = f.read(struct.unpack("<Q", size)[0])
        data = f.read()
    tensors = {}
    for name, x in json.loads(header).items():
        if name != "__metadata__":
            begin, end = x["data_offsets"]
            tensors[name] = data[begin:end]
    assert sum(map(len, tensors.values())) == len(data), path
    return size + header, tensors


def sha(data):
    return hashlib.sha256(data).hexdigest()


def check(part, data, block):
    """Compares a part with its digest, or with the digests of its blocks."""
    want = part["sha256"]
    if part.get("blocks"):
        blocks = [sha(data[i:i + block]) for i in range(0, len(data), block)]
        assert blocks == part["blocks"], part["key"]
        assert sha("".join(blocks).encode()) == want, part["key"]
    else:
        assert sha(data) == want, part["key"]


def whole(tensor, parts):
    """Puts the parts together, which have columns of the tensor seen as a matrix."""
    out = b""
    for row in range(tensor["rows"]):
        for part, data in parts:
            n = len(data) // tensor["rows"]
            out += data[row * n:(row + 1) * n]
    return out


folder = sys.argv[1]
sealed = json.load(open(os.path.join(folder, "manifest.json")))
manifest = sealed["manifest"]
files = []
for f in manifest["files"]:
    path = os.path.join(folder, f["name"])
    start, tensors = read_file(path)
    assert sha(start) == f["sha256"] and os.path.getsize(path) == f["bytes"], path
    files.append(tensors)
result = {}
for t in manifest["tensors"]:
    parts = [(p, files[p["file"]][p["key"]]) for p in sorted(t["parts"], key=lambda p: p["start"])]
    for p, data in parts:
        check(p, data, manifest["block"])
    result[t["name"]] = sha(whole(t, parts))
print(json.dumps(result))
