#!/usr/bin/env bash
# Runs package comm's BenchmarkTorchComm and the same calls in PyTorch in turns, and
# prints for each row the medians over the turns and what Chorus takes of PyTorch's.
#
#   go test -c -o comm.test ./comm
#   torchcomm.sh path/to/comm.test gpus turns
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
test=$1 gpus=$2 turns=$3
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for _ in $(seq "$turns"); do
	"$test" -test.run '^$' -test.bench "TorchComm\$/^gpus=$gpus\$" -test.benchtime 0.05s |
		awk '/^Benchmark/ { sub(/^[^\/]*\/[^\/]*\//, "", $1); sub(/-[0-9]+$/, "", $1); printf "%s\t%.3f\n", $1, $3 / 1000 }' >>"$out/chorus"
	python3 "$here/torchcomm.py" "$gpus" >>"$out/torch"
done
awk -F '\t' -v peer=torch "$(cat "$here/median.awk" "$here/beside.awk")" "$out/chorus" "$out/torch"
