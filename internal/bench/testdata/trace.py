"""Writes a recorded trace of allocations as lines "a BLOCK BYTES" and "f BLOCK"."""
import gzip
import json
import sys

blocks, count = {}, 0
for action, address, size, *_ in json.load(gzip.open(sys.argv[1]))["events"]:
    if action == "alloc":
        blocks[address] = count
        print("a", count, size)
        count += 1
    elif action == "free_completed":
        print("f", blocks.pop(address))
