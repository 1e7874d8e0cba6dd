#!/usr/bin/env bash
# Runs bench, its peer in C and its peer in PyTorch in turns, and prints for each
# figure the medians over the turns and their ratio. With a trace of allocations
# that is timed too; "allocator" keeps to the figures of the allocator.
#
#   compare.sh path/to/bench [turns [trace.json.gz [allocator]]]
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bench=$1 turns=${2:-3} trace=${3:-} only=${4:-}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cuda=${CUDA_HOME:-/usr/local/cuda}
gcc -O2 -I"$cuda/include" "$here/launch.c" -L"$cuda/lib64/stubs" -lcuda -o "$out/launch"
torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')
g++ -O2 -std=c++20 -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -I"$cuda/include" "$here/alloc.cpp" \
	-L"$torch/lib" -L"$cuda/lib64" -lc10_cuda -lc10 -ltorch_cuda -ltorch_cpu -ltorch -lcudart -Wl,-rpath,"$torch/lib" -o "$out/alloc"
args=() peer=()
if [ -n "$trace" ]; then
	args=(-trace "$trace") peer=("$out/trace.txt" "$(basename "$trace")")
	python3 "$here/trace.py" "$trace" >"$out/trace.txt"
fi
[ -z "$only" ] || args+=(-allocator)
for _ in $(seq "$turns"); do
	"$bench" "${args[@]}" >>"$out/chorus"
	"$out/alloc" "${peer[@]}" >>"$out/peer"
	[ -n "$only" ] && continue
	"$out/launch" >>"$out/peer"
	python3 "$here/peer.py" >>"$out/peer"
done
awk -F '\t' -v peer=peer "$(cat "$here/median.awk" "$here/beside.awk")" "$out/chorus" "$out/peer"
