#!/usr/bin/env bash
# Runs chorus perf, the thinnest loop over NCCL in C, and torch.distributed in turns
# and prints for each row the medians over the turns and what Chorus takes of them.
# CHORUS_LIBNCCL names the NCCL of both Chorus and the loop in C, whose header may lie
# in ../include; without it each takes what it finds. With STRATEGIES=1 there is a row for
# each strategy of package comm, beside the same operation of the others; NO_TORCH=1 leaves
# torch.distributed out. CHORUS_TUNING_FILE is what chorus tune has written, if it is there.
#
#   collectives.sh path/to/chorus gpus turns smallest largest factor graph-launches operation...
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
chorus=$1 gpus=$2 turns=$3 smallest=$4 largest=$5 factor=$6 launches=$7
shift 7
iterations=${ITERATIONS:-20} warmups=${WARMUPS:-5}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cuda=${CUDA_HOME:-/usr/local/cuda}
nccl=(-lnccl)
if [ -n "${CHORUS_LIBNCCL:-}" ]; then
	folder=$(dirname "$CHORUS_LIBNCCL")
	nccl=(-I"$folder/../include" "$CHORUS_LIBNCCL" -Wl,-rpath,"$folder")
fi
gcc -O2 -I"$cuda/include" "$here/nccl.c" "${nccl[@]}" -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcudart -lpthread -o "$out/nccl"
touch "$out/threads" "$out/processes" "$out/nccl.txt" "$out/torch.txt"
figures() { awk '/^Benchmark/ { sub(/^Benchmark/, "", $1); sub(/-[0-9]+$/, "", $1); printf "%s\t%.3f\n", $1, $3 / 1000 }'; }
export CHORUS_TUNING_FILE=${CHORUS_TUNING_FILE:-$out/tuning.json}
flags=(-b "$smallest" -e "$largest" -f "$factor" -n "$iterations" -w "$warmups" -G "$launches" -c 1 --format bench ${STRATEGIES:+--strategies})
for _ in $(seq "$turns"); do
	"$chorus" perf "$@" -g "$gpus" "${flags[@]}" | figures >>"$out/threads"
	"$out/nccl" "$gpus" "$iterations" "$warmups" "$launches" "$smallest" "$largest" "$factor" "$@" >>"$out/nccl.txt"
	"$chorus" run --nproc-per-node "$gpus" --no-prefix -- "$chorus" perf "$@" "${flags[@]}" | figures >>"$out/processes"
	[ -n "${NO_TORCH:-}" ] || torchrun --nproc-per-node "$gpus" "$here/dist.py" "$iterations" "$warmups" "$launches" \
		"$smallest" "$largest" "$factor" "$@" >>"$out/torch.txt"
done
awk -F '\t' "$(cat "$here/median.awk")"'
	function ratio(a, b) { return b > 0 ? sprintf("%7.3f", a / b) : sprintf("%7s", "-") }
	FNR == 1 { for (file = 1; ARGV[file] != FILENAME; file++); } # one may be empty
	{ all[file, $1] = all[file, $1] " " $2 }
	file == 1 && !($1 in seen) { seen[$1] = 1; order[++count] = $1 }
	END {
		printf "%-72s %10s %10s %10s %10s %7s %7s %7s %7s\n", "us", "threads", "processes", "C", "torch", "thr/C", "proc/C", "thr/to", "proc/to"
		for (i = 1; i <= count; i++) {
			same = k = order[i]
			sub("strategy=[^/]*/", "", same)
			t = median(all[1, k]); p = median(all[2, k]); c = median(all[3, same]); o = median(all[4, same])
			printf "%-72s %10.2f %10.2f %10.2f %10.2f %s %s %s %s\n", k, t, p, c, o, ratio(t, c), ratio(p, c), ratio(t, o), ratio(p, o)
		}
	}' "$out/threads" "$out/processes" "$out/nccl.txt" "$out/torch.txt"
