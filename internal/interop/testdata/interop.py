"""Checks tensors of PyTorch and CuPy in Chorus, and the other way around.

interop.py LIBRARY [ROUND-TRIPS]      ROUND-TRIPS: 100000
"""
import ctypes
import subprocess
import sys
import time

# The library has functions of newer drivers, which only a lazy dlopen accepts; ctypes binds all of them at once.
libc = ctypes.CDLL(None)
libc.dlopen.restype, libc.dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
libc.dlerror.restype = ctypes.c_char_p
handle = libc.dlopen(sys.argv[1].encode(), 1)  # RTLD_LAZY
if not handle:
    sys.exit(libc.dlerror().decode())
lib = ctypes.CDLL(sys.argv[1], handle=handle)
lib.chorus_stream.restype = lib.chorus_double.restype = ctypes.c_size_t
lib.chorus_make.restype = ctypes.c_void_p
lib.chorus_time_all_reduce.restype = ctypes.c_double
lib.chorus_allocated.restype = lib.chorus_adopted.restype = ctypes.c_int64

if len(sys.argv) > 2 and sys.argv[2] == "ipc":  # the other process: it has no PyTorch
    if lib.chorus_open() < 1:
        sys.exit(2)
    data, offset, elements = bytes.fromhex(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    sys.exit(-lib.chorus_double_ipc(0, data, ctypes.c_int64(offset), elements))

import torch  # noqa: E402

try:
    import cupy
except ImportError:
    cupy = None

get = ctypes.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
rename = ctypes.pythonapi.PyCapsule_SetName
rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
NAMES = {0: b"dltensor_versioned", 1: b"dltensor"}
kept = []


def give(x, gpu, unversioned):
    """The address of a managed tensor that Chorus is to take over; its stream waits for x."""
    stream = lib.chorus_stream(gpu)
    with torch.cuda.device(gpu):  # PyTorch exports only tensors of the current device
        capsule = x.__dlpack__(stream=stream, **({} if unversioned else {"max_version": (1, 0)}))
    name = NAMES[unversioned]
    p = get(capsule, name)
    used = b"used_" + name
    kept.append(used)  # PyCapsule_SetName keeps the pointer
    del kept[:-1000]
    rename(capsule, used)
    return ctypes.c_void_p(p)


class Given:
    """A tensor of Chorus, as a producer of DLPack."""

    def __init__(self, gpu, managed, unversioned):
        self.gpu, self.managed, self.unversioned = gpu, managed, unversioned

    def __dlpack_device__(self):
        return (2, self.gpu)

    def __dlpack__(self, **_):
        return new(self.managed, NAMES[self.unversioned], None)


def check(what, ok):
    print(f"{'ok  ' if ok else 'FAIL'} {what}", flush=True)
    bad.append(what) if not ok else None


bad = []
gpus = lib.chorus_open()
check(f"{gpus} GPUs", gpus >= 1)
streams = [torch.cuda.ExternalStream(lib.chorus_stream(i), device=i) for i in range(gpus)]


def after(gpu):
    torch.cuda.current_stream(gpu).wait_stream(streams[gpu])


def producers():
    yield "torch", lambda gpu, n: torch.arange(n, dtype=torch.float32, device=f"cuda:{gpu}"), lambda x: x.data_ptr(), lambda x: x.cpu()
    if cupy:
        def make(gpu, n):
            with cupy.cuda.Device(gpu):
                return cupy.arange(n, dtype=cupy.float32)

        def host(x):
            with x.device:
                cupy.cuda.Device().synchronize()
                return torch.from_numpy(cupy.asnumpy(x))
        yield "cupy", make, lambda x: x.data.ptr, host


for name, make, address, host in producers():
    for unversioned in (0, 1):
        try:
            x = make(0, 1000)
            p = lib.chorus_double(0, give(x, 0, unversioned), unversioned)
        except (TypeError, ValueError) as e:  # this version has no such struct
            print("skip", name, NAMES[unversioned].decode(), repr(e)[:100])
            continue
        after(0)
        check(f"{name} {NAMES[unversioned].decode()}: the address is the same", p == address(x))
        check(f"{name} {NAMES[unversioned].decode()}: doubled in place", torch.equal(host(x), 2 * torch.arange(1000, dtype=torch.float32)))

# A long kernel of PyTorch comes before, and a view with strides keeps them.
x = torch.zeros(64, 64, device="cuda:0")
torch.cuda._sleep(200_000_000)
x += 3
lib.chorus_double(0, give(x[1:, ::2], 0, 0), 0)
after(0)
want = torch.full((64, 64), 3.0)
want[1:, ::2] = 6
check("order behind a long kernel, and strides", torch.equal(x.cpu(), want))

if gpus > 1:
    xs = [torch.full((1 << 24,), float(i + 1), device=f"cuda:{i}") for i in range(gpus)]
    managed = (ctypes.c_void_p * gpus)(*[give(x, i, 0).value for i, x in enumerate(xs)])
    check("all-reduce was enqueued", lib.chorus_all_reduce(managed, 0) == 0)
    for i in range(gpus):
        after(i)
    total = gpus * (gpus + 1) / 2
    check("all-reduce of tensors of PyTorch in place, 64 MiB", all(bool((x == total).all()) for x in xs))
    times = [[lib.chorus_time_all_reduce(adopt, 1 << 24, 30) for adopt in (0, 1, 2)] for _ in range(9)]
    own, anew, once = (sorted(t)[4] for t in zip(*times))
    print(f"     all-reduce of 64 MiB: own memory {own:.1f} us, taken over once {once:.1f} us ({once / own:.3f}), anew {anew:.1f} us ({anew / own:.3f})")

for unversioned in (0, 1):
    managed = lib.chorus_make(0, 3, 5, unversioned)
    x = torch.from_dlpack(Given(0, managed, unversioned))
    check(f"torch.from_dlpack of {NAMES[unversioned].decode()}", torch.equal(x.cpu(), torch.arange(15, dtype=torch.float32).view(3, 5).T))
    check("its strides are kept", x.stride() == (1, 5))
    del x
    if cupy:
        y = cupy.from_dlpack(Given(0, lib.chorus_make(0, 3, 5, unversioned), unversioned))
        check(f"cupy.from_dlpack of {NAMES[unversioned].decode()}", y.strides == (4, 20) and float(y.sum()) == 105)
        del y

if gpus > 1:
    y = torch.zeros(4, device="cuda:1")
    p = give(y, 1, 1)
    check("a tensor of another GPU is refused", lib.chorus_refuses(0, p, 1) == 1)
y = torch.zeros(4, dtype=torch.complex64, device="cuda:0")
check("complex numbers are refused", lib.chorus_refuses(0, give(y, 0, 1), 1) == 1)
y = torch.zeros(4).share_memory_()
capsule = y.__dlpack__()
check("memory of the host is refused", lib.chorus_refuses(0, ctypes.c_void_p(get(capsule, b"dltensor")), 1) == 1)

# Memory of torch and CuPy in another process.
x = torch.arange(5000, dtype=torch.float32, device="cuda:0")[1000:]
torch.cuda.synchronize()
shared = x.untyped_storage()._share_cuda_()
data, offset = shared[1][-64:], shared[3] + 4 * x.storage_offset()
code = subprocess.run([sys.executable, sys.argv[0], sys.argv[1], "ipc", data.hex(), str(offset), str(x.numel())]).returncode
torch.cuda.synchronize()
check("CUDA IPC handle of PyTorch", code == 0 and torch.equal(x.cpu(), 2 * torch.arange(1000, 5000, dtype=torch.float32)))

# Round trips in both directions leave nothing.
trips = int(sys.argv[2]) if len(sys.argv) > 2 else 100000
x = torch.zeros(1 << 16, device="cuda:0")
lib.chorus_wait()
time.sleep(0.5)
free = torch.cuda.mem_get_info(0)[0]
before = (lib.chorus_allocated(0), lib.chorus_adopted(0), torch.cuda.memory_allocated(0))
begun = time.perf_counter()
for i in range(trips):
    if i % 2:
        lib.chorus_double(0, give(x, 0, i // 2 % 2), i // 2 % 2)
    else:
        y = torch.from_dlpack(Given(0, lib.chorus_make(0, 4, 4, i // 2 % 2), i // 2 % 2))
        del y
took = time.perf_counter() - begun
lib.chorus_wait()
time.sleep(1)
after_ = (lib.chorus_allocated(0), lib.chorus_adopted(0), torch.cuda.memory_allocated(0))
lost = free - torch.cuda.mem_get_info(0)[0]
check(f"{trips} round trips leave nothing: bytes {before} before, {after_} after, {lost} bytes of the GPU, {lib.chorus_goroutines()} goroutines, {1e6 * took / trips:.1f} us each",
      before == after_ and lost <= 64 << 20 and lib.chorus_goroutines() < 50)
check("close", lib.chorus_close() == 0)
print("failed: " + "; ".join(bad) if bad else "all passed")
sys.exit(bool(bad))
