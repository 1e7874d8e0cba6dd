#!/usr/bin/env bash
# Runs bench, its peer in C and its peer in PyTorch in turns, and prints for each
# figure the medians over the turns and their ratio.
#
#   compare.sh path/to/bench [turns]
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bench=$1 turns=${2:-3}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cuda=${CUDA_HOME:-/usr/local/cuda}
gcc -O2 -I"$cuda/include" "$here/launch.c" -L"$cuda/lib64/stubs" -lcuda -o "$out/launch"
for _ in $(seq "$turns"); do
	"$bench" >>"$out/chorus"
	"$out/launch" >>"$out/peer"
	python3 "$here/peer.py" >>"$out/peer"
done
awk -F '\t' '
	function median(list,    n, v, i, j, x) {
		n = split(list, v, " ")
		for (i = 2; i <= n; i++) {
			x = v[i] + 0
			for (j = i - 1; j > 0 && v[j] + 0 > x; j--) v[j + 1] = v[j]
			v[j + 1] = x
		}
		return v[int((n + 1) / 2)]
	}
	FNR == 1 { file++ }
	file == 1 { if (!($1 in ours)) order[++count] = $1; ours[$1] = ours[$1] " " $2 }
	file == 2 { peer[$1] = peer[$1] " " $2 }
	END {
		printf "%-40s %12s %12s %7s\n", "", "Chorus", "peer", "ratio"
		for (i = 1; i <= count; i++) {
			a = median(ours[order[i]]); b = median(peer[order[i]])
			printf "%-40s %9.3f us %9.3f us %7.3f\n", order[i], a, b, a / b
		}
	}' "$out/chorus" "$out/peer"
