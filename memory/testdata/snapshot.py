"""Snapshots as Python and the viewers of PyTorch see them, for the tests.

  snapshot.py check FILE         load a pickle, or JSON, and go through it as torch/cuda/_memory_viz.py
                                 and the viewer of pytorch.org/memory_viz do; print what it has
  snapshot.py write FILE PROTO   write a pickle as torch does, with shared frames
"""
import json
import pickle
import sys


def check(s):
    spans, reserved, allocated, external, internal = [], 0, 0, 0, 0
    previous = 0
    for seg in s["segments"]:
        assert seg["address"] >= previous, "segments are not in order"
        previous = seg["address"] + seg["total_size"]
        assert seg["segment_type"] in ("small", "large") and isinstance(seg["is_expandable"], bool)
        assert len(seg["segment_pool_id"]) == 2 and isinstance(seg["frames"], list)
        assert s["device_traces"][seg["device"]] is not None, "no trace for the device"
        offset, used = 0, 0
        for b in seg["blocks"]:
            assert b["address"] == seg["address"] + offset, "blocks do not lie side by side"
            if b["state"] == "active_allocated":
                used += b["requested_size"]
                internal += b["size"] - b["requested_size"]
            else:
                assert b["state"] in ("active_pending_free", "inactive")
                external += b["size"]
            offset += b["size"]
            for f in b["frames"]:
                assert f["line"] >= 0 and f["filename"].split("/")[-1] and f["name"]
        assert offset == seg["total_size"], "blocks do not fill the segment"
        spans.append([seg["device"], seg["address"], seg["total_size"]])
        reserved, allocated = reserved + seg["total_size"], allocated + used
    assert internal + external + allocated == reserved
    for device, trace in enumerate(s["device_traces"]):
        backwards(device, trace, s["segments"])
    settings = s["allocator_settings"]
    assert set(settings["roundup_power2_divisions"]) == {str(2**i) for i in range(16)}
    assert isinstance(settings["PYTORCH_CUDA_ALLOC_CONF"], str) and isinstance(settings["garbage_collection_threshold"], float)
    return {"segments": spans, "reserved": reserved, "allocated": allocated, "settings": settings,
            "traces": [[e["action"] for e in t] for t in s["device_traces"]]}


def backwards(device, trace, segments):
    """What the viewer draws at each event: from the end back, every block lies in memory that is there."""
    there = [(g["address"], g["address"] + g["total_size"]) for g in segments if g["device"] == device]
    live = {b["address"] for g in segments if g["device"] == device for b in g["blocks"] if b["state"] != "inactive"}
    for e in reversed(trace):
        assert e["time_us"] > 0 and e["stream"] >= 0
        action = e["action"]
        if action == "oom":
            assert "addr" not in e and e["device_free"] >= 0
            continue
        assert "device_free" not in e
        start, end = e["addr"], e["addr"] + e["size"]
        if action == "free_completed":
            assert start not in live
            live.add(start)
        elif action == "alloc":
            live.remove(start)
        elif action == "free_requested":
            assert start in live
        elif action in ("segment_free", "segment_unmap"):
            assert all(b <= start or end <= a for a, b in there), "memory comes where some is"
            there.append((start, end))
        elif action in ("segment_alloc", "segment_map"):
            there = without(joined(there), start, end)
        else:
            assert action == "snapshot", action
        for block in live:
            assert any(a <= block < b for a, b in there), f"at {e}: {block:#x} is in no segment"


def joined(ranges):
    out = []
    for a, b in sorted(ranges):
        if out and out[-1][1] == a:
            a = out.pop()[0]
        out.append((a, b))
    return out


def without(ranges, start, end):
    """The ranges without a part of one."""
    (hit,) = [r for r in ranges if r[0] <= start and end <= r[1]]
    rest = [(hit[0], start), (end, hit[1])]
    return [r for r in ranges if r != hit] + [r for r in rest if r[0] < r[1]]


def torch():
    frames = [{"name": "forward", "filename": "/x/train.py", "line": 12}]
    block = lambda a, n, r, state: {"address": a, "size": n, "requested_size": r, "state": state, "frames": frames}
    return {
        "segments": [{
            "device": 0, "address": 0x7f0000000000, "total_size": 2097152, "allocated_size": 512, "active_size": 512,
            "requested_size": 12, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False,
            "frames": [], "blocks": [block(0x7f0000000000, 512, 12, "active_allocated"),
                                     block(0x7f0000000200, 2096640, 0, "inactive")]}],
        "device_traces": [[
            {"action": "segment_alloc", "addr": 0x7f0000000000, "size": 2097152, "stream": 0, "time_us": 1700000000000000},
            {"action": "alloc", "addr": 0x7f0000000000, "size": 12, "stream": 0, "time_us": 1700000000000001, "frames": frames,
             "compile_context": "N/A", "user_metadata": ""},
            {"action": "oom", "device_free": 4096, "size": 1 << 40, "stream": 0, "time_us": 1700000000000002}], []],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
                               "expandable_segments": False, "roundup_power2_divisions": {str(2**i): 0 for i in range(16)}},
        "external_annotations": [],
    }


if sys.argv[1] == "write":
    with open(sys.argv[2], "wb") as f:
        pickle.dump(torch(), f, protocol=int(sys.argv[3]))
else:
    with open(sys.argv[2], "rb") as f:
        s = pickle.load(f) if sys.argv[2].endswith(".pickle") else json.load(f)
    print(json.dumps(check(s)))
