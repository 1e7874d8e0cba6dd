"""Writes files of torch.save and their expected contents: python3 make.py FOLDER

With PyTorch, torch.save writes the files. Without it, this script pickles objects of the same
modules and names with Python's pickler, and writes the archive like PyTorch's writer: no
compression, data at multiples of 64 bytes. NAME.json has the type, the shape and the SHA-256 of
each tensor.
"""
import collections, hashlib, io, json, os, pickle, random, struct, sys, types, zipfile

try:
    import torch
except ImportError:
    torch = None

SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
         "complex64": 8, "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}
NAMES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
         "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "uint16": "U16", "uint32": "U32", "uint64": "U64",
         "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
STORAGES = {"float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
            "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage",
            "bool": "BoolStorage", "complex64": "ComplexFloatStorage"}
RANDOM = random.Random(7)


def bytes_of(dtype, n):
    if dtype == "bool":
        return bytes(RANDOM.randrange(2) for _ in range(n))
    return RANDOM.randbytes(n * SIZES[dtype])


def named(module, name, value=None):
    """Makes something that the pickler writes as a global."""
    if module not in sys.modules:
        sys.modules[module] = types.ModuleType(module)
    if value is None:
        def value(*args):
            raise NotImplementedError
    value.__module__, value.__name__, value.__qualname__ = module, name, name
    setattr(sys.modules[module], name, value)
    return value


class Storage:
    def __init__(self, dtype, data):
        self.dtype, self.data = dtype, data


class Tensor:
    def __init__(self, dtype, storage, offset, shape, strides):
        self.dtype, self.storage, self.offset, self.shape, self.strides = dtype, storage, offset, tuple(shape), tuple(strides)

    def __reduce_ex__(self, protocol):
        args = (self.storage, self.offset, self.shape, self.strides, False, collections.OrderedDict())
        if self.dtype not in STORAGES:
            return REBUILD3, args + (DTypes[self.dtype],)
        return REBUILD2, args

    def transpose(self, a, b):
        shape, strides = list(self.shape), list(self.strides)
        shape[a], shape[b], strides[a], strides[b] = shape[b], shape[a], strides[b], strides[a]
        return Tensor(self.dtype, self.storage, self.offset, shape, strides)

    def narrow(self, dim, start, length):
        shape = list(self.shape)
        shape[dim] = length
        return Tensor(self.dtype, self.storage, self.offset + start * self.strides[dim], shape, self.strides)

    def __getitem__(self, key):  # x[::n]
        assert key.start is None and key.stop is None
        shape, strides = list(self.shape), list(self.strides)
        shape[0], strides[0] = (shape[0] + key.step - 1) // key.step, strides[0] * key.step
        return Tensor(self.dtype, self.storage, self.offset, shape, strides)

    def expand(self, *shape):
        strides = [0 if have == 1 and want != 1 else stride for have, want, stride in zip(self.shape, shape, self.strides)]
        return Tensor(self.dtype, self.storage, self.offset, shape, strides)

    def raw(self):
        size, out = SIZES[self.dtype], []

        def walk(dim, at):
            if dim == len(self.shape):
                out.append(self.storage.data[at * size:(at + 1) * size])
                return
            for i in range(self.shape[dim]):
                walk(dim + 1, at + i * self.strides[dim])
        walk(0, self.offset)
        return b"".join(out)


class Parameter:
    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return PARAMETER, (self.data, True, collections.OrderedDict())


class DType:
    def __init__(self, name):
        self.name = name

    def __reduce_ex__(self, protocol):
        return self.name


def new(dtype, *shape):
    n = 1
    for d in shape:
        n *= d
    data = bytes_of(dtype, n)
    if torch:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype)) if n else torch.empty(0, dtype=getattr(torch, dtype))
        return flat.clone().view(shape)
    strides, stride = [], 1
    for d in reversed(shape):
        strides.insert(0, stride)
        stride *= max(d, 1)
    return Tensor(dtype, Storage(dtype, data), 0, shape, strides)


def parameter(x):
    return torch.nn.Parameter(x) if torch else Parameter(x)


class Pickler(pickle._Pickler):
    """The pickler in Python, because it can write types by their names alone."""

    def __init__(self, out):
        super().__init__(out, protocol=2)
        self.storages = {}

    def persistent_id(self, x):
        if not isinstance(x, Storage):
            return None
        key = str(self.storages.setdefault(id(x), (len(self.storages), x))[0])
        if x.dtype in STORAGES:
            return ("storage", StorageTypes[x.dtype], key, "cpu", len(x.data) // SIZES[x.dtype])
        return ("storage", Untyped, key, "cpu", len(x.data))

    def save_global(self, x, name=None):
        if isinstance(x, DType):
            self.write(b"ctorch\n" + x.name.encode() + b"\n")
            self.memoize(x)
            return
        super().save_global(x, name)


def save(x, path):
    if torch:
        torch.save(x, path)
        return
    text = io.BytesIO()
    p = Pickler(text)
    p.dump(x)
    root = os.path.splitext(os.path.basename(path))[0]
    with open(path, "wb") as out, zipfile.ZipFile(out, "w") as z:
        entries = [("data.pkl", text.getvalue()), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")]
        entries += [("data/%d" % i, s.data) for i, s in p.storages.values()] + [("version", b"3\n"), (".data/serialization_id", b"0" * 40)]
        for name, data in entries:
            info = zipfile.ZipInfo(root + "/" + name, (1980, 1, 1, 0, 0, 0))
            at = out.tell() + 30 + len(info.filename) + 4  # the padding is an extra field
            pad = -at % 64
            info.extra = b"FB" + struct.pack("<H", pad) + b"Z" * pad
            z.writestr(info, data)


def record(tensors, path):
    def entry(x):
        if torch:
            x = x.detach()
            data = x.contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""
            return {"DType": NAMES[str(x.dtype)[6:]], "Shape": list(x.shape), "SHA256": hashlib.sha256(data).hexdigest()}
        x = getattr(x, "data", x)
        return {"DType": NAMES[x.dtype], "Shape": list(x.shape), "SHA256": hashlib.sha256(x.raw()).hexdigest()}
    with open(path, "w") as f:
        json.dump({name: entry(x) for name, x in tensors.items()}, f, indent=1, sort_keys=True)
        f.write("\n")


if not torch:
    named("torch", "Tensor", Tensor)
    REBUILD2 = named("torch._utils", "_rebuild_tensor_v2")
    REBUILD3 = named("torch._utils", "_rebuild_tensor_v3")
    PARAMETER = named("torch._utils", "_rebuild_parameter")
    StorageTypes = {d: named("torch", s, type(s, (), {})) for d, s in STORAGES.items()}
    Untyped = named("torch.storage", "UntypedStorage", type("UntypedStorage", (), {}))
    DTypes = {d: DType(d) for d in SIZES}


class Metadata:
    """An object of a class of torch.distributed.checkpoint."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Properties(Metadata):
    def __getstate__(self):
        return (DTypes[self.dtype], Layout(), False, Format(), False)


class Size:
    def __init__(self, *n):
        self.n = tuple(n)

    def __reduce_ex__(self, protocol):
        return SIZE, (self.n,)


class Layout:
    def __reduce_ex__(self, protocol):
        return LAYOUT, ("torch.strided",)


class Format:
    def __reduce_ex__(self, protocol):
        return FORMAT, (0,)


class MetadataPickler(Pickler):
    def __init__(self, out):
        pickle._Pickler.__init__(self, out, protocol=4)
        self.storages = {}

    def save_global(self, x, name=None):
        if isinstance(x, DType):
            self.save("torch")
            self.save(x.name)
            self.write(b"\x93")
            self.memoize(x)
            return
        pickle._Pickler.save_global(self, x, name)


def distributed(folder):
    """Writes a checkpoint of two ranks like torch.distributed.checkpoint."""
    os.makedirs(folder, exist_ok=True)
    whole = {"rows": new("float32", 5, 6), "columns": new("bfloat16", 4, 10), "alone": new("int64", 3, 2), "step": new("float32"), "flat": new("float16", 11)}
    chunks = {"rows": [(0, (0, 0), (3, 6)), (1, (3, 0), (2, 6))], "columns": [(0, (0, 0), (4, 4)), (1, (0, 4), (4, 6))],
              "alone": [(1, (0, 0), (3, 2))], "step": [(0, (), ())], "flat": [(1, (0,), (6,)), (0, (6,), (5,))]}
    files, infos, storage = [b"", b""], {}, {}
    for name, x in whole.items():
        for rank, at, n in chunks[name]:
            part = x
            for d in range(len(at)):
                part = part.narrow(d, at[d], n[d])
            strides, k = [], 1
            for d in reversed(n):
                strides.insert(0, k)
                k *= d
            save(Tensor(x.dtype, Storage(x.dtype, part.raw()), 0, n, strides), os.path.join(folder, "archive"))
            with open(os.path.join(folder, "archive"), "rb") as f:
                data = f.read()
            storage[MetadataIndex(fqn=name, offset=Size(*at), index=0)] = StorageInfo(relative_path="__%d_0.distcp" % rank, offset=len(files[rank]), length=len(data))
            files[rank] += data
        infos[name] = TensorStorage(properties=Properties(dtype=x.dtype), size=Size(*x.shape), chunks=[ChunkStorage(offsets=Size(*at), sizes=Size(*n)) for _, at, n in chunks[name]])
    os.remove(os.path.join(folder, "archive"))
    infos["epoch"] = BytesStorage()
    storage[MetadataIndex(fqn="epoch", offset=None, index=None)] = StorageInfo(relative_path="__0_0.distcp", offset=len(files[0]), length=4)
    files[0] += b"\x80\x02N."
    for rank, data in enumerate(files):
        with open(os.path.join(folder, "__%d_0.distcp" % rank), "wb") as f:
            f.write(data)
    text = io.BytesIO()
    MetadataPickler(text).dump(Root(state_dict_metadata=infos, planner_data={name: (name,) for name in infos}, storage_data=storage,
                                    storage_meta=StorageMeta(checkpoint_id=None, save_id="x", load_id=None, modules=[]), version="1.0.0"))
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        f.write(text.getvalue())
    record(whole, os.path.join(folder, "sha256.json"))


def distributed_by_torch(folder):
    """Writes a checkpoint with torch.distributed.checkpoint, in this process."""
    import torch.distributed.checkpoint as dcp
    state = {"a": new("float32", 7, 5), "b": {"c": new("bfloat16", 9)}, "step": new("int64")}
    dcp.save(state, checkpoint_id=folder)
    record({"a": state["a"], "b.c": state["b"]["c"], "step": state["step"]}, os.path.join(folder, "sha256.json"))


if not torch:
    def made(module, name, base=Metadata):
        return named("torch.distributed.checkpoint." + module, name, type(name, (base,), {}))
    Root, TensorStorage, BytesStorage = made("metadata", "Metadata"), made("metadata", "TensorStorageMetadata"), made("metadata", "BytesStorageMetadata")
    ChunkStorage, MetadataIndex, StorageMeta = made("metadata", "ChunkStorageMetadata"), made("metadata", "MetadataIndex"), made("metadata", "StorageMeta")
    StorageInfo = made("filesystem", "_StorageInfo")
    named("torch.distributed.checkpoint.metadata", "TensorProperties", Properties)
    SIZE, LAYOUT = named("torch", "Size"), named("torch.serialization", "_get_layout")
    FORMAT = named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")


def main(folder):
    os.makedirs(folder, exist_ok=True)

    def write(name, x, tensors):
        save(x, os.path.join(folder, name + ".pt"))
        record(tensors, os.path.join(folder, name + ".json"))

    lone = new("float32", 3, 5)
    write("lone", lone, {"tensor": lone})
    all_types = collections.OrderedDict((d, new(d, 2, 3)) for d in SIZES if d != "complex64")
    write("dtypes", all_types, all_types)
    complex64 = {"complex": new("complex64", 2, 3)}
    write("complex", complex64, complex64)
    base = new("bfloat16", 40, 6)
    views = {"base": base, "again": base, "transposed": base.transpose(0, 1), "rows": base.narrow(0, 3, 5), "columns": base.narrow(1, 2, 3),
             "second": base[::2], "expanded": base.narrow(1, 1, 1).expand(40, 4), "empty": new("int32", 0, 4), "scalar": new("float64")}
    write("views", views, views)
    weight, bias, step = parameter(new("float32", 70, 33)), parameter(new("float32", 70)), new("float32")
    nested = {"model": collections.OrderedDict([("layer.weight", weight), ("layer.bias", bias)]),
              "optimizer": {"state": {0: {"step": step, "exp_avg": new("float32", 70, 33)}},
                            "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "amsgrad": False, "params": [0]}]},
              "epoch": 12, "name": "a\nname", "nothing": None}
    write("nested", nested, {"model.layer.weight": weight, "model.layer.bias": bias, "optimizer.state.0.step": step,
                             "optimizer.state.0.exp_avg": nested["optimizer"]["state"][0]["exp_avg"]})
    (distributed_by_torch if torch else distributed)(os.path.join(folder, "distributed"))


main(sys.argv[1])
